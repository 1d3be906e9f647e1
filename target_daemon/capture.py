"""Taps to ring rows: the outputs of chosen layers are written in place during the forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from protocol.errors import ConfigError
from protocol.feature_ring import Span, plan, spans
from protocol.transports.base import FeatureHost, RingView


class Capture:
    """Writes feature rows of one forward at a time.

    The forward calls `begin` before its first layer and `take` after each captured one.
    """

    def __init__(self, ring: RingView, taps: tuple[int, ...], hidden_size: int) -> None:
        self._ring = ring
        self._hidden = hidden_size
        self.columns = {layer: index * hidden_size for index, layer in enumerate(taps)}
        self._rows = ring.rows[0]
        self._spans: tuple[Span, ...] = ()
        self._base = 0
        self._index: Tensor | None = None
        self._paused = False

    def begin(self, slot: int, base: int, rows: int) -> None:
        """Announce rows ``base .. base + rows - 1`` of `slot`, which a reader must now distrust."""
        if self._paused:
            return
        stop = base + rows
        self._ring.announce(slot, stop)
        self._rows = self._ring.rows[slot]
        self._spans = spans(base, stop, self._ring.shape.capacity) if self.columns else ()
        self._base, self._index = base, None

    def announce(self, slot: int, stop: int) -> None:
        """The part of `begin` that is done on the host in each round, before recorded work."""
        if not self._paused:
            self._ring.announce(slot, stop)

    def aim(self, slot: int, positions: Tensor) -> None:
        """The rest, for work that is recorded: `positions` [rows] are read when it runs."""
        self._rows = self._ring.rows[slot]
        self._index = positions % self._ring.shape.capacity

    def take(self, layer: int, hidden: Tensor) -> None:
        """Store the residual stream `hidden` [>= rows, hidden_size] after `layer`."""
        column = self.columns[layer]
        if self._index is not None:
            self._rows[:, column : column + self._hidden].index_copy_(0, self._index, hidden)
            return
        for span in self._spans:
            first, count = span.start - self._base, span.stop - span.start
            target = self._rows[span.row : span.row + count, column : column + self._hidden]
            target.copy_(hidden[first : first + count])

    def compact(self, slot: int, base: int, path: Sequence[int]) -> None:
        """Move the rows that stand at ``base + path``, ascending, to ``base ..``."""
        first = next((at for at, row in enumerate(path) if row != at), len(path))
        if first == len(path) or not self.columns or self._paused:
            return
        rows, capacity = self._ring.rows[slot], self._ring.shape.capacity
        moved = rows[[(base + row) % capacity for row in path[first:]]]
        rows[[(base + at) % capacity for at in range(first, len(path))]] = moved

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside leave no trace in the ring (a probe, before anybody owns a slot)."""
        columns, self.columns, self._paused = self.columns, {}, True
        try:
            yield
        finally:
            self.columns, self._paused = columns, False


def publish(ring: RingView | None, slot: int, start: int, stop: int) -> None:
    """Rows ``start .. stop - 1`` may be read by whoever gets the reply that follows."""
    if ring is not None:
        ring.publish(slot, start, stop)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ConfigError where a tap is no layer of the model or stands twice."""
    wrong = [tap for tap in taps if not 0 <= tap < num_layers]
    if wrong or len(set(taps)) != len(taps):
        raise ConfigError(f"taps {list(taps)}: distinct layers in 0..{num_layers - 1} are needed")


def open_capture(
    host: FeatureHost,
    *,
    taps: tuple[int, ...],
    num_layers: int,
    hidden_size: int,
    slots: int,
    window: int,
    widest_forward: int,
    dtype: torch.dtype,
) -> tuple[Capture, RingView]:
    """Have `host` allocate the ring for `taps`, and return its writer.

    Raises ConfigError where a tap is no layer of the model or stands twice.
    """
    check_taps(taps, num_layers)
    shape = plan(
        slots=slots,
        window=window,
        widest_forward=widest_forward,
        row_width=len(taps) * hidden_size,
        dtype=str(dtype).removeprefix("torch."),
    )
    ring = host.create_ring(shape)
    return Capture(ring, taps, hidden_size), ring
