"""Decode forwards of a dense decoder in fixed shapes, so that they can be recorded and run again.

Position and tokens lie in device memory. Rows beyond the block are padding: their K/V and feature
rows stand behind the block's own and are written again before anybody reads them.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from protocol.kernels.rope import Turner
from target_daemon.capture import Capture
from target_daemon.dense.places import Places
from target_daemon.dense.stack import Stack
from target_daemon.graphs import Pool, Work, length_class, recorder, width_class

LEAST_LENGTH: Final = 512  # of K, masked behind the block

Key = tuple[int, int, int]  # slot, rows, K length


class Static(Places):
    """`rows` consecutive positions from one that is read on the device; K of a fixed length."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.first, self.count, self.rows, self.reach = 0, rows, rows, length
        self.base = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(rows, device=device)
        self._keys = torch.arange(length, device=device)

    @property
    def columns(self) -> Tensor:
        """[rows]: K/V row and position are one."""
        return self._offsets + self.base

    def begin(self, capture: Capture, slot: int) -> None:
        capture.aim(slot, self.columns)

    def angles(self, turner: Turner) -> tuple[Tensor, ...]:
        return turner.gather(self.columns)

    def mask(self, length: int, window: int | None, group: int, like: Tensor) -> Tensor:
        position = self.columns[:, None]
        closed = self._keys > position
        if window is not None:
            closed |= self._keys <= position - window
        mask = torch.zeros(self.rows, length, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(closed, -torch.inf).repeat(group, 1)


class StaticForward:
    """One recorded forward: logits of all rows, at any base below its K length."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.places = Static(rows, length, device)
        self.again: Work = lambda: self.tokens

    def run(self, tokens: Tensor, base: int) -> Tensor:
        """Logits [n, vocab] of `tokens` [n] at ``base ..``; read before the next run."""
        count = tokens.shape[0]
        self.tokens[:count].copy_(tokens)
        self.tokens[count:].fill_(tokens[-1])
        self.places.base.fill_(base)
        return self.again()[:count]


class StaticForwards:
    """The recorded forwards of one target, made on first use."""

    def __init__(
        self,
        stack: Stack,
        capture: Capture,
        logits: Callable[[Tensor], Tensor],
        device: torch.device,
        capacity: int,
        widest: int,
    ) -> None:
        self._stack, self._capture, self._logits = stack, capture, logits
        self._device, self._record = device, recorder(device)
        self._capacity, self._widest = capacity, widest
        self.pool: Pool[Key, StaticForward] = Pool(self._make)

    def run(self, slot: int, tokens: Tensor, base: int, least: int) -> Tensor:
        """Logits [n, vocab] of a decode forward, as `verify_batch` gives them for all rows."""
        rows = width_class(max(tokens.shape[0], least), self._widest)
        length = length_class(base + rows, self._capacity, LEAST_LENGTH)
        # Here, since a host's store is not part of a recording.
        self._capture.announce(slot, base + rows)
        return self.pool.get((slot, rows, length)).run(tokens, base).clone()

    def _make(self, key: Key) -> StaticForward:
        slot, rows, length = key
        forward = StaticForward(rows, length, self._device)

        def work() -> Tensor:
            places = forward.places
            return self._logits(self._stack.run(slot, forward.tokens, places, places.reach))

        forward.again = self._record(work)
        return forward
