"""The draft's context: K and V of committed rows, kept in one ring per slot.

A position lies at ring row ``position % capacity``, with ``capacity = window + widest block``, so
that a block's own rows can lie in the same ring, behind the context, without destroying a row that
is still attended to. `positions` says what each ring row holds; a row that was never written, or
belongs to no committed token, is -1 and masked, which is all that a gap needs.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.checkpoints.draft_facts import DraftCheckpointConfig, LayerRule
from protocol.feature_ring import spans

NOTHING: Final = -1
HOST: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of one block attend to: K/V ring rows ``low .. high-1`` of a slot."""

    keys: Tensor  # [layers, kv_heads, capacity, head_dim]: the whole slot, to write block rows to
    values: Tensor
    low: int
    high: int
    base: int
    width: int
    context_rows: int  # how many rows before the block it sees
    masks: dict[LayerRule, Tensor]  # additive, [1 or width, high - low]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the block's rows [width, kv_heads, head_dim] in place.

        Returns K and V [kv_heads, high - low, head_dim] of context and block.
        """
        keys, values = self.keys[layer], self.values[layer]
        for span in spans(self.base, self.base + self.width, keys.shape[1]):
            rows = slice(span.row, span.row + span.stop - span.start)
            part = slice(span.start - self.base, span.stop - self.base)
            keys[:, rows] = key[part].transpose(0, 1)
            values[:, rows] = value[part].transpose(0, 1)
        return keys[:, self.low : self.high], values[:, self.low : self.high]


class DraftContext:
    """K/V rings of all slots, allocated once; pages are touched as rows are written.

    What lies at which ring row is known on the host, and masks are made there.
    """

    def __init__(
        self,
        config: DraftCheckpointConfig,
        slots: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device = HOST,
    ) -> None:
        self.window = window
        self.slots = slots
        self._capacity = window + config.max_proposals + 1
        self._rules = tuple(dict.fromkeys(config.layers))
        shape = (slots, len(config.layers), config.num_kv_heads, self._capacity, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._positions = torch.full((slots, self._capacity), NOTHING, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        """Forget every row of `slot`."""
        self._positions[slot] = NOTHING

    def cut(self, slot: int, stop: int) -> None:
        """Forget the rows of `slot` from position `stop` on."""
        held = self._positions[slot]
        held[held >= stop] = NOTHING

    def holds(self, slot: int, start: int, stop: int) -> bool:
        """Whether every position ``start .. stop-1``, at most `window` of them, is held."""
        places = torch.arange(start, stop)
        return bool((self._positions[slot, places % self._capacity] == places).all())

    def write(self, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep rows ``start ..``; `keys`, `values` [n, layers, kv_heads, head_dim], n <= window."""
        stop = start + keys.shape[0]
        for span in spans(start, stop, self._capacity):
            rows = slice(span.row, span.row + span.stop - span.start)
            part = slice(span.start - start, span.stop - start)
            self._keys[slot, :, :, rows] = keys[part].permute(1, 2, 0, 3)
            self._values[slot, :, :, rows] = values[part].permute(1, 2, 0, 3)
            self._positions[slot, rows] = torch.arange(span.start, span.stop)

    def view(self, slot: int, base: int, width: int, window: int) -> BlockView:
        """What a block of `width` rows at `base` sees: `window` positions before it, and itself.

        Its rows replace whatever lay at their ring rows, and are context to nobody.
        """
        floor, stop = max(0, base - window), base + width
        wraps = stop > self._capacity
        low, high = (0, self._capacity) if wraps else (floor, stop)
        held = self._positions[slot]
        seen = held[low:high].clone()
        seen[(seen < floor) | (seen >= base)] = NOTHING
        context_rows = int((seen != NOTHING).sum())
        for span in spans(base, stop, self._capacity):
            rows = slice(span.row, span.row + span.stop - span.start)
            held[rows] = NOTHING
            seen[rows.start - low : rows.stop - low] = torch.arange(span.start, span.stop)
        queries = torch.arange(base, stop)
        masks = {rule: _mask(seen, queries, rule).to(self._keys) for rule in self._rules}
        return BlockView(
            keys=self._keys[slot],
            values=self._values[slot],
            low=low,
            high=high,
            base=base,
            width=width,
            context_rows=context_rows,
            masks=masks,
        )


def _mask(keys: Tensor, queries: Tensor, rule: LayerRule) -> Tensor:
    """Additive mask of `rule` for absolute positions; one row where all queries see the same."""
    visible = (keys != NOTHING)[None, :]
    distance = queries[:, None] - keys[None, :]
    if rule.causal:
        visible = visible & (distance >= 0)
    if rule.window:
        # A window counts the row itself; without causality it reaches as far ahead as back.
        visible = visible & (distance.abs() < rule.window)
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
