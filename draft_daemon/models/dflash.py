"""DFlash (arXiv 2602.06036): a block of masks denoised in one pass over the target's features.

Context rows are ``c = hidden_norm(fc(features))``; every layer takes its keys and values of them
with the weights it uses for its own rows. They depend on the row and its position alone, so one
product over all layers' weights makes them once per row. Block rows are an ordinary pre-norm
transformer with q/k norm whose attention mask comes from the view.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from draft_daemon.context import BlockView
from draft_daemon.models.base import DraftNetwork
from protocol.checkpoints.draft_facts import DraftCheckpointConfig, LayerRule
from protocol.errors import UnsupportedModel
from protocol.kernels.attention import attend
from protocol.kernels.linear import Linear, pack
from protocol.kernels.norm import rms_norm
from protocol.kernels.rope import RopeTable, table

FIRST_POSITIONS: Final = 4096
Get = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's packed weights; `head_norm` holds q_norm per query head, k_norm per key head."""

    rule: LayerRule
    input_norm: Tensor  # [hidden]
    qkv: Linear
    head_norm: Tensor  # [heads + kv_heads, head_dim]
    output: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class DFlash(DraftNetwork):
    """The network of the published DFlash checkpoints, full and sliding layers."""

    def __init__(
        self,
        config: DraftCheckpointConfig,
        fuse: Linear,
        context_kv: Linear,
        norms: tuple[Tensor, Tensor, Tensor],
        layers: tuple[Layer, ...],
    ) -> None:
        self.dtype = norms[0].dtype
        self._config = config
        self._fuse = fuse  # taps * hidden -> hidden
        self._context_kv = context_kv  # hidden -> layers * 2 * kv_heads * head_dim
        self._context_norm, self._key_norms, self._final_norm = norms
        self._layers = layers
        self._rope = self._table(FIRST_POSITIONS)

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
        numbers = range(len(config.layers))
        kv = [f"layers.{number}.self_attn.{name}_proj" for number in numbers for name in ("k", "v")]
        keys = [get(f"layers.{number}.self_attn.k_norm.weight") for number in numbers]
        return cls(
            config,
            pack(get("fc.weight"), dtype),
            _joined(get, kv, dtype, bias=config.attention_bias),
            (
                get("hidden_norm.weight").to(dtype),
                torch.stack(keys).to(dtype)[:, None, :],
                get("norm.weight").to(dtype),
            ),
            tuple(_layer(config, get, number, dtype) for number in numbers),
        )

    def project_context(self, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        config, rows = self._config, features.shape[0]
        fused = self._fuse(features.to(self.dtype))
        context = rms_norm(fused, self._context_norm, config.rms_norm_eps)
        both = self._context_kv(context).view(
            rows, len(self._layers), 2, config.num_kv_heads, config.head_dim
        )
        cos, sin = self._angles(start, start + rows)
        keys = functional.rms_norm(both[:, :, 0], (config.head_dim,), None, config.rms_norm_eps)
        keys = self._rope.rotate(keys * self._key_norms, cos[:, None, None], sin[:, None, None])
        return keys, both[:, :, 1]

    def block(self, embedded: Tensor, view: BlockView) -> Tensor:
        cos, sin = self._angles(view.base, view.base + view.width)
        angles = cos[:, None], sin[:, None]
        group = self._config.num_heads // self._config.num_kv_heads
        masks = {rule: _folded(mask, group, view.width) for rule, mask in view.masks.items()}
        hidden = embedded
        eps = self._config.rms_norm_eps
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attention(number, normed, view, masks[layer.rule], angles)
            normed = rms_norm(hidden, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return rms_norm(hidden, self._final_norm, eps)

    def _attention(
        self,
        number: int,
        normed: Tensor,
        view: BlockView,
        mask: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        config, layer, rows = self._config, self._layers[number], normed.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        every = layer.qkv(normed).view(rows, heads + 2 * kv_heads, dim)
        turned = functional.rms_norm(
            every[:, : heads + kv_heads], (dim,), None, config.rms_norm_eps
        )
        turned = self._rope.rotate(turned * layer.head_norm, *angles)
        query = turned[:, :heads].view(rows, kv_heads, heads // kv_heads, dim)
        keys, values = view.write(number, turned[:, heads:], every[:, heads + kv_heads :])
        out = attend(query.permute(1, 2, 0, 3), keys, values, mask, dim**-0.5)
        return layer.output(out.permute(2, 0, 1, 3).reshape(rows, heads * dim))

    def _angles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines; the table doubles when a sequence outgrows it, up to the config."""
        if stop > self._config.max_positions:
            raise UnsupportedModel(
                f"position {stop - 1} is past the draft's {self._config.max_positions} positions"
            )
        if stop > self._rope.cos.shape[0]:
            self._rope = self._table(2 * stop)
        return self._rope.at(start, stop)

    def _table(self, positions: int) -> RopeTable:
        config = self._config
        return table(
            config.head_dim,
            config.rope_theta,
            min(positions, config.max_positions),
            self.dtype,
            config.rope_scaling,
        )


def _layer(config: DraftCheckpointConfig, get: Get, number: int, dtype: torch.dtype) -> Layer:
    name, attention, bias = (
        f"layers.{number}",
        f"layers.{number}.self_attn",
        config.attention_bias,
    )
    head_norm = torch.cat(
        (
            get(f"{attention}.q_norm.weight").expand(config.num_heads, -1),
            get(f"{attention}.k_norm.weight").expand(config.num_kv_heads, -1),
        )
    )
    qkv = [f"{attention}.{part}_proj" for part in "qkv"]
    gate_up = [f"{name}.mlp.{part}_proj" for part in ("gate", "up")]
    return Layer(
        rule=config.layers[number],
        input_norm=get(f"{name}.input_layernorm.weight").to(dtype),
        qkv=_joined(get, qkv, dtype, bias=bias),
        head_norm=head_norm.to(dtype),
        output=_joined(get, [f"{attention}.o_proj"], dtype, bias=bias),
        post_norm=get(f"{name}.post_attention_layernorm.weight").to(dtype),
        gate_up=_joined(get, gate_up, dtype, bias=False),
        down=pack(get(f"{name}.mlp.down_proj.weight"), dtype),
    )


def _joined(get: Get, names: list[str], dtype: torch.dtype, *, bias: bool) -> Linear:
    """One product in place of several over the same rows; outputs in the order of `names`."""
    weight = torch.cat([get(f"{name}.weight") for name in names])
    return pack(weight, dtype, torch.cat([get(f"{name}.bias") for name in names]) if bias else None)


def _folded(mask: Tensor, group: int, width: int) -> Tensor:
    """`mask` [1 or width, keys] for `group` query heads folded into rows, group-major."""
    if mask.shape[0] == 1:
        return mask.expand(group * width, -1)
    return mask.repeat(group, 1)


NETWORK: Final[type[DraftNetwork]] = DFlash
