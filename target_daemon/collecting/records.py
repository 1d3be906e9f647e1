"""What is noted of the sequences in the slots while they grow: likeliest tokens and features."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.checkpoints.shards import Array

LEAST: Final = torch.finfo(torch.float16).min


class Records:
    """Rows of `slots` slots, one for each position of a text; it takes the taps of a forward."""

    def __init__(
        self,
        *,
        slots: int,
        positions: int,
        likeliest: int,
        taps: Sequence[int],
        hidden_size: int,
        device: torch.device,
    ) -> None:
        """`taps` may be empty: there are no features then."""
        self.positions, self.taps, self.hidden_size = positions, tuple(taps), hidden_size
        rows = slots * positions
        self._ids = torch.empty(rows, likeliest, dtype=torch.int32)
        self._logprobs = torch.empty(rows, likeliest, dtype=torch.float16)
        width = len(self.taps) * hidden_size
        # Not zeroed: a page costs memory once a text is so long.
        self._features = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        self._columns = {layer: at * hidden_size for at, layer in enumerate(self.taps)}
        self._rows = torch.empty(0, dtype=torch.int64)

    def without_features(self) -> None:
        """From now on none are taken."""
        self._columns = {}

    @property
    def columns(self) -> Mapping[int, int]:
        """The layers that are tapped, by where their outputs begin in a row."""
        return self._columns

    def begin(self, slots: Tensor, positions: Tensor) -> None:
        """Say where the rows of the next forward go, [rows] each."""
        self._rows = (slots * self.positions + positions).to(self._features.device)

    def take(self, layer: int, hidden: Tensor) -> None:
        """The output [rows, hidden] of a tapped layer."""
        part = self._features.narrow(1, self._columns[layer], self.hidden_size)
        part.index_copy_(0, self._rows, hidden.to(part.device, part.dtype))

    def take_rows(self, slot: int, first: int, features: Tensor) -> None:
        """Whole rows [n, taps * hidden] of a slot, from position `first` on."""
        at = slot * self.positions + first
        self._features[at : at + len(features)].copy_(features)

    def note(self, slots: Tensor, positions: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        """The likeliest tokens after some rows: [n], [n], [n, k], [n, k]."""
        rows = slots * self.positions + positions
        self._ids.index_copy_(0, rows, ids.to("cpu", torch.int32))
        # What is as good as impossible stays a number: a shard holds finite ones alone.
        bounded = logprobs.clamp(LEAST, 0.0)
        self._logprobs.index_copy_(0, rows, bounded.to("cpu", torch.float16))

    def move(self, source: int, goal: int, rows: int) -> None:
        """Give a slot the first `rows` rows of another."""
        tensors = (self._ids, self._logprobs, *((self._features,) if self._columns else ()))
        for tensor in tensors:
            slots = tensor.view(-1, self.positions, tensor.shape[1])
            slots[goal, :rows].copy_(slots[source, :rows])

    def top(self, slot: int, prompt: int, count: int) -> tuple[Array, Array]:
        """Likeliest tokens [count, k] of a text; rows before its prompt's last, and the last: 0."""
        first, stop = slot * self.positions + prompt - 1, slot * self.positions + count - 1
        found = []
        for tensor in (self._ids, self._logprobs):
            rows = np.zeros((count, tensor.shape[1]), tensor.numpy().dtype)
            rows[prompt - 1 : count - 1] = tensor[first:stop].numpy()
            found.append(rows)
        return found[0], found[1]

    def features(self, slot: int, count: int) -> Array | None:
        """Bits of the features [count, taps * hidden] of a text, its last row 0; None: none."""
        if not self._columns:
            return None
        at = slot * self.positions
        made = self._features[at : at + count - 1].to("cpu").view(torch.int16).numpy()
        rows = np.zeros((count, made.shape[1]), np.uint16)
        rows[:-1] = made.view(np.uint16)
        return rows
