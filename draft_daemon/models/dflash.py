"""DFlash (arXiv 2602.06036): a block of masks denoised in one pass over the target's features.

Context rows are ``c = hidden_norm(fc(features))``; every layer takes its keys and values of them
with the weights it uses for its own rows. They depend on the row and its position alone, so one
product over all layers' weights makes them once per row. Block rows are an ordinary pre-norm
transformer with q/k norm whose attention mask comes from the view.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from draft_daemon.context import BlockView
from draft_daemon.models.base import DraftNetwork
from protocol.checkpoints.draft_facts import DraftCheckpointConfig, LayerRule
from protocol.errors import UnsupportedModel
from protocol.kernels.attention import attend
from protocol.kernels.blocked import blocked
from protocol.kernels.linear import Product, fuse, pack
from protocol.kernels.norm import RmsNorm, fold, pack_norm
from protocol.kernels.rope import Turner, interleave, interleaves, table

PUBLISHED: Final = {"names": ("DFlashDraftModel", "DFlashSpeculator", "dflash")}
FIRST_POSITIONS: Final = 4096
Get = Callable[[str], Tensor]
Angles = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of every head, with a weight of its own each: q_norm and k_norm in one pass."""

    unit: RmsNorm  # the norm alone
    weight: Tensor  # [heads, head_dim], with what `unit` left out

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., heads, head_dim] -> the same shape, in new memory."""
        return self.unit(x).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's packed weights; norms whose weight could be folded are folded."""

    rule: LayerRule
    input_norm: RmsNorm
    qkv: Product
    head_norm: HeadNorm  # of query heads, then of key heads
    output: Product
    post_norm: RmsNorm
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Front:
    """What makes context rows, and the last norm."""

    fuse: Product  # taps * hidden -> hidden
    norm: RmsNorm
    keys_values: Product  # hidden -> layers * 2 * kv_heads * head_dim
    key_norm: HeadNorm  # of [layers * kv_heads] heads
    final_norm: RmsNorm


@dataclass(frozen=True, slots=True)
class Seen:
    """One block's view, with what its layers share."""

    view: BlockView
    masks: Mapping[LayerRule, Tensor]
    angles: Angles


class DFlash(DraftNetwork):
    """The network of the published DFlash checkpoints, full and sliding layers."""

    def __init__(
        self,
        config: DraftCheckpointConfig,
        dtype: torch.dtype,
        front: Front,
        layers: tuple[Layer, ...],
    ) -> None:
        self.dtype = dtype
        self.device = front.norm.weight.device
        self._config = config
        self._front = front
        self._layers = layers
        self._positions = 0
        self._turner = self._table(FIRST_POSITIONS)

    @classmethod
    def shapes(cls, config: DraftCheckpointConfig) -> Mapping[str, tuple[int, ...]]:
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        rows = {
            "q_proj": config.num_heads * dim,
            "k_proj": config.num_kv_heads * dim,
            "v_proj": config.num_kv_heads * dim,
        }
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, config.feature_width),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for number in range(len(config.layers)):
            layer, attention = f"layers.{number}", f"layers.{number}.self_attn"
            found[f"{layer}.input_layernorm.weight"] = (hidden,)
            found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            for name, out in rows.items():
                found[f"{attention}.{name}.weight"] = (out, hidden)
            found[f"{attention}.o_proj.weight"] = (hidden, rows["q_proj"])
            found[f"{attention}.q_norm.weight"] = (dim,)
            found[f"{attention}.k_norm.weight"] = (dim,)
            found[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
            found[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
            found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
            if config.attention_bias:
                for name, out in {**rows, "o_proj": hidden}.items():
                    found[f"{attention}.{name}.bias"] = (out,)
        return found

    @classmethod
    def build(cls, config: DraftCheckpointConfig, get: Get, dtype: torch.dtype) -> Self:
        builder = Builder(config, get, dtype)
        numbers = range(len(config.layers))
        return cls(config, dtype, builder.front(), tuple(map(builder.layer, numbers)))

    def project_context(self, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        config, front, rows = self._config, self._front, features.shape[0]
        context = front.norm(front.fuse(features.to(self.device, self.dtype)))
        shape = (rows, len(self._layers), config.num_kv_heads, config.head_dim)
        both = front.keys_values(context).view(rows, 2, -1, config.head_dim)
        keys = front.key_norm(both[:, 0])
        self._turner_for(start + rows).turn_(keys, self._turner.at(start, start + rows))
        return keys.view(shape), both[:, 1].reshape(shape)

    def block(self, embedded: Tensor, view: BlockView) -> Tensor:
        seen = self._seen(view)
        hidden = embedded.clone()
        for number, layer in enumerate(self._layers):
            layer.output.add_to(hidden, self._mixed(number, layer.input_norm(hidden), seen))
            layer.down.add_to(hidden, gated(layer, layer.post_norm(hidden)))
        return self._front.final_norm(hidden)

    def _seen(self, view: BlockView) -> Seen:
        stop = view.base + view.width
        angles = self._turner_for(stop).at(view.base, stop)
        group = self._config.num_heads // self._config.num_kv_heads
        masks = {rule: _folded(mask, group, view.width) for rule, mask in view.masks.items()}
        return Seen(view, masks, angles)

    def _mixed(self, number: int, normed: Tensor, seen: Seen) -> Tensor:
        """What attention makes of the rows, before its output product."""
        view, angles = seen.view, seen.angles
        mask = seen.masks[self._layers[number].rule]
        config, layer, rows = self._config, self._layers[number], normed.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        every = layer.qkv(normed).view(rows, heads + 2 * kv_heads, dim)
        headed = layer.head_norm(every[:, : heads + kv_heads])
        self._turner.turn_(headed, angles)
        query = headed[:, :heads].view(rows, kv_heads, heads // kv_heads, dim)
        keys, values = view.write(number, headed[:, heads:], every[:, heads + kv_heads :])
        out = attend(query.permute(1, 2, 0, 3), keys, values, mask, dim**-0.5)
        return out.permute(2, 0, 1, 3).reshape(rows, heads * dim)

    def _turner_for(self, stop: int) -> Turner:
        """Rotations up to `stop`; the table doubles when outgrown, up to the config's positions."""
        if stop > self._config.max_positions:
            raise UnsupportedModel(
                f"position {stop - 1} is past the draft's {self._config.max_positions} positions"
            )
        if stop > self._positions:
            self._turner = self._table(2 * stop)
        return self._turner

    def _table(self, positions: int) -> Turner:
        config = self._config
        self._positions = min(positions, config.max_positions)
        angles = table(
            config.head_dim,
            config.rope_theta,
            self._positions,
            self.dtype,
            config.rope_scaling,
            self.device,
        )
        return Turner(angles, self.dtype)


class Builder:
    """Packs a checkpoint's tensors, one at a time."""

    def __init__(self, config: DraftCheckpointConfig, get: Get, dtype: torch.dtype) -> None:
        self._config = config
        self._get = get
        self._dtype = dtype

    def front(self) -> Front:
        config, numbers = self._config, range(len(self._config.layers))
        names = [
            f"layers.{number}.self_attn.{part}_proj" for part in ("k", "v") for number in numbers
        ]
        keys_values = self._fused(names, config.hidden_size, bias=config.attention_bias)
        norms = [f"layers.{number}.self_attn.k_norm" for number in numbers]
        return Front(
            fuse=blocked(pack(self._get("fc.weight"), self._dtype)),
            norm=fold(self._norm("hidden_norm"), keys_values),
            keys_values=keys_values,
            key_norm=self._head_norm([(norm, config.num_kv_heads) for norm in norms]),
            final_norm=self._norm("norm"),
        )

    def layer(self, number: int, *, folds: bool = True) -> Layer:
        """`folds`: whether products follow the norms at once, and can take their weights."""
        config, name = self._config, f"layers.{number}"
        attention, bias = f"{name}.self_attn", config.attention_bias
        hidden, heads = config.hidden_size, config.num_heads
        qkv = self._fused([f"{attention}.{part}_proj" for part in "qkv"], hidden, bias=bias)
        gate_up = self._fused([f"{name}.mlp.{part}_proj" for part in ("gate", "up")], hidden)
        norms = [(f"{attention}.q_norm", heads), (f"{attention}.k_norm", config.num_kv_heads)]
        before = fold if folds else _kept
        return Layer(
            rule=config.layers[number],
            input_norm=before(self._norm(f"{name}.input_layernorm"), qkv),
            qkv=qkv,
            head_norm=self._head_norm(norms),
            output=self._fused([f"{attention}.o_proj"], heads * config.head_dim, bias=bias),
            post_norm=before(self._norm(f"{name}.post_attention_layernorm"), gate_up),
            gate_up=gate_up,
            down=self._fused([f"{name}.mlp.down_proj"], config.intermediate_size),
        )

    def _norm(self, name: str) -> RmsNorm:
        return pack_norm(self._get(f"{name}.weight"), self._config.rms_norm_eps, self._dtype)

    def _head_norm(self, names: list[tuple[str, int]]) -> HeadNorm:
        """Norms of `names`, each over that many heads in a row."""
        config = self._config
        rows = [
            self._turned(f"{name}.weight", self._get(f"{name}.weight")).expand(heads, -1)
            for name, heads in names
        ]
        weight = torch.cat(rows).to(self._dtype)
        ones = torch.ones(config.head_dim, device=weight.device)
        unit = pack_norm(ones, config.rms_norm_eps, self._dtype)
        if self._dtype == torch.float32:
            # The norm's own scale, sqrt(head_dim) in fp32, is taken along with the weights.
            unit, weight = replace(unit, scaled=None), weight * config.head_dim**0.5
        return HeadNorm(unit, weight)

    def _fused(self, names: list[str], width: int, *, bias: bool = False) -> Product:
        """One product in place of several over the same rows; outputs in the order of `names`."""

        def weights() -> Iterator[Tensor]:
            for name in names:
                yield self._turned(name, self._get(f"{name}.weight"))

        biases = [self._turned(name, self._get(f"{name}.bias")) for name in names if bias]
        rows = sum(DFlash.shapes(self._config)[f"{name}.weight"][0] for name in names)
        joined = torch.cat(biases) if biases else None
        return blocked(fuse(weights(), (rows, width), self._dtype, joined))

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        """Query and key parts in the order of elements that rotation wants."""
        rotated = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
        if rotated and interleaves(self._dtype):
            return interleave(tensor, self._config.head_dim)
        return tensor


def gated(layer: Layer, normed: Tensor) -> Tensor:
    """What the MLP makes of the rows, before its last product."""
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _kept(norm: RmsNorm, product: Product) -> RmsNorm:
    del product
    return norm


def _folded(mask: Tensor, group: int, width: int) -> Tensor:
    """`mask` [1 or width, keys] for `group` query heads folded into rows, group-major."""
    if mask.shape[0] == 1:
        return mask.expand(group * width, -1)
    return mask.repeat(group, 1)


NETWORK: Final[type[DraftNetwork]] = DFlash
