"""Weights of a dense decoder, fused and packed tensor by tensor from the mapped checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.checkpoints.target_config import ModelConfig
from protocol.kernels.linear import TRANSPOSED, Linear, adopt, fuse
from protocol.transports.base import FeatureHost, WeightSpec
from target_daemon.checkpoint import Checkpoint
from target_daemon.dense.layout import Layout

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # heads * head_dim -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden
    window: int | None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """All weights; `embed` and the head's memory are shared with the draft."""

    embed: Tensor  # [vocab, hidden], storage dtype
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Linear  # hidden -> vocab
    bytes: int


class DenseLoader:
    """Reads one checkpoint; used once."""

    def __init__(
        self, checkpoint: Checkpoint, model: ModelConfig, layout: Layout, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._layout = layout
        self._dtype = dtype

    def load(self, host: FeatureHost) -> DenseWeights:
        """Load everything; raises CheckpointError for a missing, misshapen or unknown tensor."""
        embed, head = self._shared(host)
        layers = tuple(self._layer(index) for index in range(self._model.num_layers))
        norm = self._norm("model.norm.weight", self._model.hidden_size)
        # A tied checkpoint may store its embedding twice; the config says which one counts.
        self._checkpoint.finish(ignore=(HEAD,) if self._model.tied else ())
        tensors = {id(item): item for item in (embed, head.weight, norm, *_tensors(layers))}
        size = sum(item.numel() * item.element_size() for item in tensors.values())
        return DenseWeights(embed, layers, norm, head, size)

    def _shared(self, host: FeatureHost) -> tuple[Tensor, Linear]:
        """Embedding and head, in memory that the draft will map."""
        shape = (self._model.vocab_size, self._model.hidden_size)
        stored = self._checkpoint.get(EMBED, shape)
        transposed = TRANSPOSED[self._dtype]
        specs = {"embed": WeightSpec(shape, _name(stored.dtype))}
        own = not self._model.tied or transposed or stored.dtype != self._dtype
        key = "head_t" if transposed else "head"
        if own:
            specs[key] = WeightSpec(shape[::-1] if transposed else shape, _name(self._dtype))
        shared = host.create_weights(specs)
        shared["embed"].copy_(stored)
        if not own:
            return shared["embed"], adopt(shared["embed"], transposed=False)
        source = stored if self._model.tied else self._checkpoint.get(HEAD, shape)
        shared[key].copy_(source.t() if transposed else source)
        return shared["embed"], adopt(shared[key], transposed=transposed)

    def _layer(self, index: int) -> LayerWeights:
        model, layout, name = self._model, self._layout, f"model.layers.{index}"
        hidden, dim, inner = model.hidden_size, model.head_dim, model.intermediate_size
        heads, kv = model.num_heads * dim, model.num_kv_heads * dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        query_key_value = [("q_proj", heads), ("k_proj", kv), ("v_proj", kv)]
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        q_norm, k_norm = (
            self._norm(f"{attention}.{which}.weight", dim) if layout.qk_norm else None
            for which in ("q_norm", "k_norm")
        )
        return LayerWeights(
            input_norm=self._norm(f"{name}.input_layernorm.weight", hidden),
            qkv=self._linear(attention, query_key_value, hidden, biased=layout.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._linear(attention, [("o_proj", hidden)], heads, biased=layout.output_bias),
            post_norm=self._norm(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(mlp, gate_up, hidden, biased=layout.mlp_bias),
            down=self._linear(mlp, [("down_proj", hidden)], inner, biased=layout.mlp_bias),
            window=layout.windows[index],
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self._checkpoint.get(name, (size,)).to(self._dtype, copy=True)

    def _linear(
        self, prefix: str, parts: list[tuple[str, int]], width: int, *, biased: bool
    ) -> Linear:
        """Fuse the named projections, in order, into one product of `width` inputs."""
        get = self._checkpoint.get
        weights = (get(f"{prefix}.{part}.weight", (rows, width)) for part, rows in parts)
        bias = None
        if biased:
            bias = torch.cat([get(f"{prefix}.{part}.bias", (rows,)) for part, rows in parts])
        return fuse(weights, (sum(rows for _, rows in parts), width), self._dtype, bias)


def _tensors(layers: tuple[LayerWeights, ...]) -> Iterator[Tensor]:
    for layer in layers:
        yield from (layer.input_norm, layer.post_norm)
        yield from (norm for norm in (layer.q_norm, layer.k_norm) if norm is not None)
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield linear.weight
            if linear.bias is not None:
                yield linear.bias


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
