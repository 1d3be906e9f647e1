"""Weights of a decoder of Gated DeltaNet and attention layers, fused from the mapped checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.checkpoints.target_config import ModelConfig
from protocol.checkpoints.tensors import TensorSource
from protocol.kernels.blocked import blocked
from protocol.kernels.linear import Head, Product, fuse
from protocol.kernels.norm import RmsNorm, pack_norm
from protocol.transports.base import FeatureHost
from target_daemon.checkpoint import Checkpoint
from target_daemon.dense.weights import HEAD, share_ends
from target_daemon.hybrid.config import LINEAR, HybridConfig

TEXT: Final = "model."
TEXT_OF_SEVERAL: Final = "model.language_model."  # where the checkpoint also sees
# Parts of a published checkpoint that make no text: vision, and the draft that it comes with.
OTHER_PARTS: Final = ("model.visual.", "visual.", "mtp.")


@dataclass(frozen=True, slots=True)
class CentredNorm:
    """RMSNorm by ``1 + weight``, computed in float32 whatever the rows are."""

    norm: RmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A Gated DeltaNet layer's mixer."""

    fused: Product  # hidden -> query, key, value, gate, write strength, decay
    taps: Tensor  # [kernel, mixed] float32
    rate: Tensor  # [value_heads] float32, negative
    shift: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]
    output: Product


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """An attention layer's mixer."""

    fused: Product  # hidden -> query heads, key heads, value heads, gates of the query heads
    q_norm: CentredNorm
    k_norm: CentredNorm
    output: Product


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: CentredNorm
    mixer: DeltaWeights | AttentionWeights
    post_norm: CentredNorm
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class HybridWeights:
    """All weights; `embed` and the head's memory are shared with the draft."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: CentredNorm
    head: Head
    bytes: int


class HybridLoader:
    """Reads one checkpoint; used once."""

    def __init__(
        self, source: TensorSource, model: ModelConfig, config: HybridConfig, dtype: torch.dtype
    ) -> None:
        names = source.names()
        self._ignored = {name for name in names if name.startswith(OTHER_PARTS)}
        several = any(name.startswith(TEXT_OF_SEVERAL) for name in names)
        self._prefix = TEXT_OF_SEVERAL if several else TEXT
        self._checkpoint = Checkpoint(source)
        self._model, self._config, self._dtype = model, config, dtype
        self._bytes = 0

    def load(self, host: FeatureHost) -> HybridWeights:
        """Load everything; raises CheckpointError for a missing, misshapen or unknown tensor."""
        model = self._model
        embedding = f"{self._prefix}embed_tokens.weight"
        embed, lent = share_ends(self._checkpoint, model, self._dtype, host, embedding)
        head = blocked(lent)
        layers = tuple(self._layer(index) for index in range(model.num_layers))
        norm = self._norm(f"{self._prefix}norm.weight", model.hidden_size)
        self._checkpoint.finish({*self._ignored, *({HEAD} if model.tied else ())})
        ends = {id(each): each for each in (embed, lent.weight, head.weight)}.values()
        self._bytes += sum(each.numel() * each.element_size() for each in ends)
        return HybridWeights(embed, layers, norm, head, self._bytes)

    def _layer(self, index: int) -> LayerWeights:
        name, hidden = f"{self._prefix}layers.{index}", self._model.hidden_size
        inner = self._model.intermediate_size
        linear = self._config.layer_types[index] == LINEAR
        gates = [(f"{name}.mlp.{part}_proj.weight", inner) for part in ("gate", "up")]
        return LayerWeights(
            input_norm=self._norm(f"{name}.input_layernorm.weight", hidden),
            mixer=self._delta(f"{name}.linear_attn") if linear else self._attention(name),
            post_norm=self._norm(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gates, hidden),
            down=self._linear([(f"{name}.mlp.down_proj.weight", hidden)], inner),
        )

    def _delta(self, name: str) -> DeltaWeights:
        c, hidden = self._config, self._model.hidden_size
        parts = {"qkv": c.mixed, "z": c.values, "b": c.value_heads, "a": c.value_heads}
        fused = [(f"{name}.in_proj_{part}.weight", rows) for part, rows in parts.items()]
        taps = self._get(f"{name}.conv1d.weight", c.mixed, 1, c.kernel)
        return DeltaWeights(
            fused=self._linear(fused, hidden),
            taps=self._own(taps.squeeze(1).t().float()),
            rate=self._own(-self._get(f"{name}.A_log", c.value_heads).float().exp()),
            shift=self._own(self._get(f"{name}.dt_bias", c.value_heads).float()),
            norm=self._own(self._get(f"{name}.norm.weight", c.value_dim).to(self._dtype)),
            output=self._linear([(f"{name}.out_proj.weight", hidden)], c.values),
        )

    def _attention(self, layer: str) -> AttentionWeights:
        c, hidden, name = self._config, self._model.hidden_size, f"{layer}.self_attn"
        return AttentionWeights(
            fused=self._packed(self._heads(name), self._attention_rows, hidden),
            q_norm=self._norm(f"{name}.q_norm.weight", c.head_dim),
            k_norm=self._norm(f"{name}.k_norm.weight", c.head_dim),
            output=self._linear([(f"{name}.o_proj.weight", hidden)], c.heads * c.head_dim),
        )

    @property
    def _attention_rows(self) -> int:
        return 2 * (self._config.heads + self._config.kv_heads) * self._config.head_dim

    def _heads(self, name: str) -> Iterator[Tensor]:
        """Query, key, value and gates; the checkpoint has each query head beside its gate."""
        c, hidden = self._config, self._model.hidden_size
        own, shared = c.heads * c.head_dim, c.kv_heads * c.head_dim
        pairs = self._get(f"{name}.q_proj.weight", 2 * own, hidden)
        pairs = pairs.view(c.heads, 2, c.head_dim, hidden)
        yield pairs[:, 0].reshape(own, hidden)
        yield self._get(f"{name}.k_proj.weight", shared, hidden)
        yield self._get(f"{name}.v_proj.weight", shared, hidden)
        yield pairs[:, 1].reshape(own, hidden)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.get(name, shape)

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, counted: the file's memory is given back."""
        self._bytes += tensor.numel() * tensor.element_size()
        return tensor.clone(memory_format=torch.contiguous_format)

    def _norm(self, name: str, size: int) -> CentredNorm:
        weight = 1.0 + self._get(name, size).float()
        self._bytes += size * weight.element_size()
        return CentredNorm(pack_norm(weight, self._config.eps, torch.float32))

    def _linear(self, parts: list[tuple[str, int]], width: int) -> Product:
        weights = (self._get(name, rows, width) for name, rows in parts)
        return self._packed(weights, sum(rows for _, rows in parts), width)

    def _packed(self, weights: Iterator[Tensor], rows: int, width: int) -> Product:
        packed = blocked(fuse(weights, (rows, width), self._dtype))
        self._bytes += sum(part.numel() * part.element_size() for part in packed.tensors())
        return packed
