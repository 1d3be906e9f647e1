"""The DFlash network (arXiv 2602.06036) as a module that can be trained, many blocks at a time.

Its parameters bear the published names, and it computes what `draft_daemon.models.dflash` does.
Rows of several sequences lie behind each other, without padding: products see all of them at once,
and only attention looks at one sequence after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_daemon.training.attention import Span, attend_jointly
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.errors import UnsupportedModel
from protocol.kernels.rope import table


@dataclass(frozen=True, slots=True)
class Blocks:
    """`m` blocks of `width` rows, of several sequences behind each other."""

    embedded: Tensor  # [m, width, hidden]
    anchors: Tensor  # [m] int64: position of each block's first row
    spans: Sequence[Span]


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Attention(nn.Module):
    """Projections and head norms of one layer."""

    def __init__(self, config: DraftCheckpointConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=bias)
        self.q_norm = Norm(dim, config.rms_norm_eps)
        self.k_norm = Norm(dim, config.rms_norm_eps)
        self._dim = dim

    def query(self, x: Tensor) -> Tensor:
        """Normed heads [..., heads, dim]."""
        heads = self.q_proj(x)
        return cast("Tensor", self.q_norm(heads.view(*x.shape[:-1], -1, self._dim)))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed keys, and values, [..., kv_heads, dim]."""
        shape = (*x.shape[:-1], -1, self._dim)
        return self.k_norm(self.k_proj(x).view(shape)), self.v_proj(x).view(shape)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return cast("Tensor", self.down_proj(mixed))


class Layer(nn.Module):
    """One pre-norm layer over block rows."""

    def __init__(self, config: DraftCheckpointConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)


class Network(nn.Module):
    """All that a checkpoint holds; `max_positions` bounds the positions of a blocks."""

    def __init__(self, config: DraftCheckpointConfig, max_positions: int) -> None:
        super().__init__()
        if any(rule.causal or rule.window for rule in config.layers):
            raise UnsupportedModel("layers that are causal or have a window are not trained")
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        theta, scaling = config.rope_theta, config.rope_scaling
        angles = table(config.head_dim, theta, max_positions, torch.float32, scaling)
        self.register_buffer("cos", angles.cos, persistent=False)
        self.register_buffer("sin", angles.sin, persistent=False)

    def forward(self, features: Tensor, positions: Tensor, blocks: Blocks) -> Tensor:
        """Normed rows [m, width, hidden] of all blocks.

        `features` [n, taps * hidden] and `positions` [n] int64 are those of the context rows.
        """
        return self.blocks(blocks, self.context(features, positions))

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's keys and values [n, kv_heads, dim] of context rows."""
        context = self.hidden_norm(self.fc(features))
        angles = self._angles(positions)
        found = []
        for layer in self._each():
            keys, values = layer.self_attn.keys_values(context)
            found.append((_turn(keys, angles), values))
        return found

    def blocks(self, blocks: Blocks, context: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The same as `forward`, of a `context` that is there already."""
        width = blocks.embedded.shape[1]
        places = blocks.anchors[:, None] + torch.arange(width, device=blocks.anchors.device)
        angles = self._angles(places)
        hidden = blocks.embedded
        for layer, seen in zip(self._each(), context, strict=True):
            normed = layer.input_layernorm(hidden)
            attention = layer.self_attn
            query = _turn(attention.query(normed), angles)
            keys, values = attention.keys_values(normed)
            own = (_turn(keys, angles), values)
            mixed = _mixed(query, seen, own, blocks.spans)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return cast("Tensor", self.norm(hidden))

    def _each(self) -> Sequence[Layer]:
        return cast("Sequence[Layer]", self.layers)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cast("Tensor", self.cos), cast("Tensor", self.sin)
        return cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)


def _turn(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [..., heads, dim], half-split; the first half of the sines is negated already."""
    cos, sin = (angle.to(heads.dtype) for angle in angles)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((second, first), dim=-1) * sin


def _mixed(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], spans: Sequence[Span]
) -> Tensor:
    """Attention of all sequences, each over its own rows."""
    rows, blocks = [part.rows for part in spans], [part.blocks for part in spans]
    seen = zip(*(_parts(each, rows) for each in context), strict=True)
    among = zip(*(_parts(each, blocks) for each in own), strict=True)
    each = zip(_parts(query, blocks), seen, among, spans, strict=True)
    return torch.cat([attend_jointly(*sequence) for sequence in each])


def _parts(tensor: Tensor, slices: Sequence[slice]) -> Sequence[Tensor]:
    """`tensor` by `slices` of its first dimension.

    Where they lie one behind the other to its end they are split off: each slice by itself would
    have a gradient of the whole tensor's size.
    """
    edges = [0, *(part.stop for part in slices)]
    if edges[:-1] == [part.start for part in slices] and edges[-1] == len(tensor):
        sizes = [part.stop - part.start for part in slices]
        return cast("Sequence[Tensor]", tensor.split(sizes))
    return [tensor[part] for part in slices]
