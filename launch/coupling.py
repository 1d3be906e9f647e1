"""At which temperature the draft proposes at each slot: whichever is measured to be accepted more.

The target's choice at a temperature is the best of its logits with noise that both sides know. A
draft that adds the same noise to its own logits is right wherever the two distributions are close,
and its best id without noise is right wherever the target is sure of itself. Pure.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

PARTS: Final = (0.0, 0.5, 1.0)  # of the request's temperature; 0: the best id
FIRST: Final = 2  # the part to begin with: on the default pair the one that is right most
PROBE: Final = 12  # every so many times another part is tried
KEPT: Final = 0.99  # of what is known, for each new observation at the same slot and part
PRIOR: Final = 1.0  # right in so many of twice as many observations, before there are any
SURE: Final = 1.5  # standard errors by which another part must be better to be used


class _Slot:
    """What is known of one slot of a block."""

    def __init__(self) -> None:
        self.right = [PRIOR] * len(PARTS)
        self.seen = [2 * PRIOR] * len(PARTS)
        self.used = FIRST
        self.reached = 0

    def part(self) -> int:
        """Which of `PARTS` to propose at next; the same answer until something is noted."""
        turn, probes = self.reached % PROBE, self.reached // PROBE
        if turn < PROBE - 1:
            return self.used
        others = [part for part in range(len(PARTS)) if part != self.used]
        return others[probes % len(others)]

    def note(self, part: int, *, right: bool) -> None:
        self.reached += 1
        self.right[part] = self.right[part] * KEPT + right
        self.seen[part] = self.seen[part] * KEPT + 1.0
        rates = [self.right[part] / self.seen[part] for part in range(len(PARTS))]
        best = max(range(len(PARTS)), key=rates.__getitem__)
        variance = sum(rates[at] * (1 - rates[at]) / self.seen[at] for at in (best, self.used))
        if rates[best] - rates[self.used] > SURE * sqrt(variance):
            self.used = best


class Coupling:
    """Learns from rounds at like temperatures; it may serve several requests at once."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def parts(self, slots: int) -> tuple[int, ...]:
        """Indices of `PARTS` for the slots of the next block."""
        while len(self._slots) < slots:
            self._slots.append(_Slot())
        return tuple(slot.part() for slot in self._slots[:slots])

    def note(self, parts: Sequence[int], offered: Sequence[int], chosen: Sequence[int]) -> None:
        """A round is over: `chosen` are the target's choices at slots that were reached."""
        for slot, part, ours, theirs in zip(self._slots, parts, offered, chosen, strict=False):
            slot.note(part, right=ours == theirs)


class Couplings:
    """What is known at every temperature that was asked for; near ones share."""

    def __init__(self) -> None:
        self._known: dict[int, Coupling] = {}

    def at(self, temperature: float) -> Coupling | None:
        """None at temperature 0, where there is nothing to choose."""
        if temperature == 0.0:
            return None
        return self._known.setdefault(round(temperature * 10), Coupling())


def temperatures(parts: Sequence[int], temperature: float) -> tuple[float, ...]:
    """What the draft is told; nothing where every slot proposes its best id."""
    if temperature == 0.0:
        return ()
    found = tuple(temperature * PARTS[part] for part in parts)
    return found if any(found) else ()
