"""Recurrent and convolution state of every slot, and those of each row of the last forward.

A slot's tensors are replaced, never written into, so that a snapshot is a list of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from protocol.errors import InternalError
from target_daemon.hybrid.config import LINEAR, HybridConfig

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Held:
    """What one slot holds: `length` positions, and a state and a tail for each linear layer."""

    length: int
    states: tuple[Tensor, ...]  # [value_heads, key_dim, value_dim] float32
    tails: tuple[Tensor, ...]  # [kernel - 1, mixed]: the convolution's last inputs


@dataclass(slots=True)
class Forward:
    """One forward as it runs, and after it, if each row's state was kept: the way back into it."""

    slot: int
    before: Held
    recorded: bool
    count: int = 0  # rows so far
    states: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # [kernel - 1 + count, mixed]


class DeltaStates:
    """The state of `slots` sequences; layers are counted among the linear ones."""

    def __init__(
        self,
        config: HybridConfig,
        slots: int,
        widest: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self._config, self.widest = config, widest
        self._layers = config.layer_types.count(LINEAR)
        shape = (config.value_heads, config.key_dim, config.value_dim)
        state = torch.zeros(shape, dtype=torch.float32, device=device)
        tail = torch.zeros((config.kernel - 1, config.mixed), dtype=dtype, device=device)
        self._empty = Held(0, (state,) * self._layers, (tail,) * self._layers)
        self.slots = [self._empty] * slots
        self._steps: tuple[Tensor, ...] = ()
        self._last: Forward | None = None

    @property
    def bytes(self) -> int:
        """What one slot takes."""
        held = (*self._empty.states, *self._empty.tails)
        return sum(each.numel() * each.element_size() for each in held)

    @property
    def step_bytes(self) -> int:
        """What the states of each row of the widest forward take."""
        return self.widest * sum(each.numel() * 4 for each in self._empty.states)

    def record(self, on: bool) -> None:
        """From now on keep the states of each row of a forward, or no longer."""
        self._last = None
        self._steps = tuple(
            torch.empty((self.widest, *each.shape), dtype=each.dtype, device=each.device)
            for each in (self._empty.states if on else ())
        )

    def begin(self, slot: int, base: int, rows: int) -> Forward:
        """A forward of `rows` rows that starts at `base`; InternalError where that is impossible.

        Position 0 starts anew; another one is where the slot ends, or lies in its last forward.
        """
        if base == 0:
            self.slots[slot] = self._empty
        elif base != self.slots[slot].length and not self.go_back(slot, base):
            held = self.slots[slot].length
            raise InternalError(f"no state at position {base}; {held} rows were run")
        before = self.slots[slot]
        recorded = bool(self._steps) and rows <= self.widest
        self._last = None
        return Forward(slot, before, recorded, 0, [*before.states], [*before.tails])

    def steps(self, forward: Forward, layer: int, count: int) -> Tensor | None:
        """Where the states of the next `count` rows go, [count, ...]; None: nowhere."""
        if not forward.recorded:
            return None
        return self._steps[layer][forward.count : forward.count + count]

    def end_pass(self, forward: Forward, count: int) -> None:
        """`count` more rows have run through every layer."""
        forward.count += count
        keep = self._config.kernel - 1
        tails = tuple(rows[-keep:].clone() for rows in forward.inputs)
        length = forward.before.length + forward.count
        self.slots[forward.slot] = Held(length, tuple(forward.states), tails)
        if forward.recorded:
            self._last = forward
        else:
            forward.inputs = [*tails]

    def go_back(self, slot: int, length: int) -> bool:
        """Hold the first `length` positions, if the last forward ran over them in this slot."""
        last = self._last
        if last is None or last.slot != slot:
            return False
        rows = length - last.before.length
        if rows == 0:
            self.slots[slot] = last.before
            return True
        if not 0 < rows <= last.count:
            return False
        keep = self._config.kernel - 1
        states = tuple(each[rows - 1].clone() for each in self._steps)
        tails = tuple(each[rows : rows + keep].clone() for each in last.inputs)
        self.slots[slot] = Held(length, states, tails)
        return True

    def copies(self, slot: int) -> Sequence[Tensor]:
        """Every tensor of the slot, states then tails."""
        held = self.slots[slot]
        return [*held.states, *held.tails]

    def put(self, slot: int, tensors: Sequence[Tensor], length: int) -> None:
        """Give the slot what `copies` returned; ValueError where the shapes are not ours."""
        own = (*self._empty.states, *self._empty.tails)
        if [each.shape for each in tensors] != [each.shape for each in own] or any(
            each.dtype != mine.dtype for each, mine in zip(tensors, own, strict=True)
        ):
            raise ValueError("no recurrent state of this model")
        placed = [each.to(mine.device) for each, mine in zip(tensors, own, strict=True)]
        states, tails = tuple(placed[: self._layers]), tuple(placed[self._layers :])
        self.slots[slot] = replace(self._empty, length=length, states=states, tails=tails)
        self._last = None
