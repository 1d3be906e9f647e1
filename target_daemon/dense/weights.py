"""Weights of a dense decoder, fused and packed tensor by tensor from the mapped checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.checkpoints.target_config import ModelConfig
from protocol.config import Weights
from protocol.errors import UnsupportedModel
from protocol.kernels.blocked import blocked
from protocol.kernels.linear import TRANSPOSED, Head, Linear, Product, adopt, fuse
from protocol.kernels.norm import RmsNorm, fold, pack_norm
from protocol.kernels.quantised import BITS, quantise
from protocol.kernels.rope import interleave, interleaves
from protocol.transports.base import FeatureHost, WeightSpec
from target_daemon.checkpoint import Checkpoint
from target_daemon.dense.layout import Layout

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: RmsNorm  # [hidden]
    qkv: Product  # hidden -> (heads + 2 * kv_heads) * head_dim
    q_norm: RmsNorm | None  # [head_dim]
    k_norm: RmsNorm | None  # [head_dim]
    output: Product  # heads * head_dim -> hidden
    post_norm: RmsNorm  # [hidden]
    gate_up: Product  # hidden -> 2 * intermediate
    down: Product  # intermediate -> hidden
    window: int | None

    def products(self) -> tuple[Product, ...]:
        """The layer's products, in the order in which they run."""
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """All weights; `embed` and the head are lent to the draft, and the head may be a copy."""

    embed: Tensor  # [vocab, hidden], storage dtype
    layers: tuple[LayerWeights, ...]
    norm: RmsNorm  # [hidden]
    head: Head  # hidden -> vocab
    bytes: int


class DenseLoader:
    """Reads one checkpoint; used once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        layout: Layout,
        dtype: torch.dtype,
        weights: Weights = "dtype",
    ) -> None:
        """`weights` are those of the layers: embedding and head are lent in `dtype`."""
        self._checkpoint = checkpoint
        self._model = model
        self._layout = layout
        self._dtype = dtype
        self._bits = BITS.get(weights)

    def load(self, host: FeatureHost) -> DenseWeights:
        """Load everything; raises CheckpointError for a missing, misshapen or unknown tensor.

        UnsupportedModel for products that cannot be held in as few bits as was asked for.
        """
        embed, lent = share_ends(self._checkpoint, self._model, self._dtype, host)
        head = blocked(lent)
        layers = tuple(self._layer(index) for index in range(self._model.num_layers))
        norm = self._norm("model.norm.weight", self._model.hidden_size)
        # A tied checkpoint may store its embedding twice; the config says which one counts.
        self._checkpoint.finish(ignore=(HEAD,) if self._model.tied else ())
        ends = (embed, lent.weight, head.weight, norm.weight)
        tensors = {id(item): item for item in (*ends, *_tensors(layers))}
        size = sum(item.numel() * item.element_size() for item in tensors.values())
        return DenseWeights(embed, layers, norm, head, size)

    def _layer(self, index: int) -> LayerWeights:
        model, layout, name = self._model, self._layout, f"model.layers.{index}"
        hidden, dim, inner = model.hidden_size, model.head_dim, model.intermediate_size
        heads, kv = model.num_heads * dim, model.num_kv_heads * dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = self._linear(
            attention,
            [("q_proj", heads), ("k_proj", kv), ("v_proj", kv)],
            hidden,
            biased=layout.qkv_bias,
        )
        gate_up = self._linear(
            mlp, [("gate_proj", inner), ("up_proj", inner)], hidden, biased=layout.mlp_bias
        )
        return LayerWeights(
            input_norm=fold(self._norm(f"{name}.input_layernorm.weight", hidden), qkv),
            qkv=qkv,
            q_norm=self._head_norm(f"{attention}.q_norm.weight"),
            k_norm=self._head_norm(f"{attention}.k_norm.weight"),
            output=self._linear(attention, [("o_proj", hidden)], heads, biased=layout.output_bias),
            post_norm=fold(self._norm(f"{name}.post_attention_layernorm.weight", hidden), gate_up),
            gate_up=gate_up,
            down=self._linear(mlp, [("down_proj", hidden)], inner, biased=layout.mlp_bias),
            window=layout.windows[index],
        )

    def _norm(self, name: str, size: int) -> RmsNorm:
        weight = self._checkpoint.get(name, (size,))
        return pack_norm(weight, self._model.rms_norm_eps, self._dtype)

    def _head_norm(self, name: str) -> RmsNorm | None:
        if not self._layout.qk_norm:
            return None
        weight = self._turned(name, self._checkpoint.get(name, (self._model.head_dim,)))
        return pack_norm(weight, self._model.rms_norm_eps, self._dtype)

    def _linear(
        self, prefix: str, parts: list[tuple[str, int]], width: int, *, biased: bool
    ) -> Product:
        """Fuse the named projections, in order, into one product of `width` inputs."""
        weights = (
            self._turned(part, self._checkpoint.get(f"{prefix}.{part}.weight", (rows, width)))
            for part, rows in parts
        )
        shape = (sum(rows for _, rows in parts), width)
        bias = self._bias(prefix, parts) if biased else None
        if self._bits is None:
            return blocked(fuse(weights, shape, self._dtype, bias))
        try:
            return quantise(weights, shape, self._bits, bias)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{prefix}: {error}") from error

    def _bias(self, prefix: str, parts: list[tuple[str, int]]) -> Tensor:
        return torch.cat(
            [
                self._turned(part, self._checkpoint.get(f"{prefix}.{part}.bias", (rows,)))
                for part, rows in parts
            ]
        )

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of query and key in the order in which they are rotated."""
        rotated = "q_proj" in name or "k_proj" in name or "_norm" in name
        if rotated and interleaves(self._dtype):
            return interleave(tensor, self._model.head_dim)
        return tensor


def share_ends(
    checkpoint: Checkpoint,
    model: ModelConfig,
    dtype: torch.dtype,
    host: FeatureHost,
    embedding: str = EMBED,
) -> tuple[Tensor, Linear]:
    """Embedding and head, in memory that the draft will map."""
    shape = (model.vocab_size, model.hidden_size)
    stored = checkpoint.get(embedding, shape)
    transposed = TRANSPOSED[dtype]
    specs = {"embed": WeightSpec(shape, _name(stored.dtype))}
    own = not model.tied or transposed or stored.dtype != dtype
    key = "head_t" if transposed else "head"
    if own:
        specs[key] = WeightSpec(shape[::-1] if transposed else shape, _name(dtype))
    shared = host.create_weights(specs)
    shared["embed"].copy_(stored)
    if not own:
        return shared["embed"], adopt(shared["embed"], transposed=False)
    source = stored if model.tied else checkpoint.get(HEAD, shape)
    shared[key].copy_(source.t() if transposed else source)
    return shared["embed"], adopt(shared[key], transposed=transposed)


def _tensors(layers: tuple[LayerWeights, ...]) -> Iterator[Tensor]:
    for layer in layers:
        yield from (layer.input_norm.weight, layer.post_norm.weight)
        yield from (norm.weight for norm in (layer.q_norm, layer.k_norm) if norm is not None)
        for product in layer.products():
            yield from product.tensors()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
