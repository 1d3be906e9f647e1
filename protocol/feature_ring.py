"""Geometry of the feature ring: slots, rows, guard, and what is valid. No I/O, no tensors.

The target owns the ring, ``[slots, capacity, taps * hidden]``. Row ``i`` of a forward based at
``base`` lies at ring row ``(base + i) % capacity``. The slot's header holds ``written_high``, the
highest position ever written plus one, advanced *before* a forward writes, so that a reader that
copies first and looks second can tell what may have been overwritten (a seqlock without locks).
"""

from dataclasses import dataclass

from protocol.errors import ConfigError


@dataclass(frozen=True)
class RingShape:
    """A ring of `slots` times `window + guard` rows of `row_width` elements of `dtype`."""

    slots: int
    window: int
    guard: int
    row_width: int
    dtype: str  # "float32" | "bfloat16" | "float16"

    @property
    def capacity(self) -> int:
        return self.window + self.guard


@dataclass(frozen=True)
class Span:
    """Positions ``start .. stop-1`` that lie at consecutive ring rows from `row` on."""

    start: int
    stop: int
    row: int


def plan(*, slots: int, window: int, widest_forward: int, row_width: int, dtype: str) -> RingShape:
    """Choose the guard so that no forward can overwrite the window it belongs to.

    `widest_forward` is max(prefill chunk, widest block, tree budget + 1) rows.
    """
    if min(slots, window, widest_forward) < 1 or row_width < 0:
        raise ConfigError(
            f"feature ring: slots {slots}, window {window}, widest forward {widest_forward}, "
            f"row width {row_width}: none may be below 1"
        )
    return RingShape(slots, window, widest_forward, row_width, dtype)


def spans(start: int, stop: int, capacity: int) -> tuple[Span, ...]:
    """Split positions ``start .. stop-1`` (at most `capacity`) where the ring wraps."""
    if not 0 <= start <= stop or stop - start > capacity:
        raise ConfigError(f"rows {start}..{stop} do not fit a ring of {capacity}")
    if start == stop:
        return ()
    row = start % capacity
    first = min(stop - start, capacity - row)
    head = Span(start, start + first, row)
    return (head,) if head.stop == stop else (head, Span(head.stop, stop, 0))


def oldest_valid(written_high: int, capacity: int) -> int:
    """The lowest position whose row cannot have been overwritten."""
    return max(0, written_high - capacity)
