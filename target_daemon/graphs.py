"""Forwards of fixed shape, recorded once and run again: a bounded pool of CUDA graphs.

A graph replays the kernels that were submitted while it was recorded, over the same memory. So one
exists for each (slot, rows, K length), which come from few classes, and what differs from round to
round (tokens, position) lies in device memory that the kernels read. Where nothing is recorded, on
the CPU, the same work is simply done again; the tests hold it to what `verify_batch` gives.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

MOST: Final = 48  # graphs at a time; the least recently used makes room
WARM_UP: Final = 3  # runs before a recording: libraries allocate and choose kernels in them

Work = Callable[[], Tensor]
Record = Callable[[Work], Work]
Key = TypeVar("Key")
Made = TypeVar("Made")


def eager(work: Work) -> Work:
    """Nothing is recorded: running again is doing it again."""
    return work


def captured(work: Work) -> Work:  # pragma: no cover  # needs a GPU: tests/gpu
    """Record `work`, which allocates nothing that outlives it, on the current CUDA device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def again() -> Tensor:
        graph.replay()
        return result

    return again


def recorder(device: torch.device) -> Record:
    """How forwards are made repeatable on `device`."""
    return captured if device.type == "cuda" else eager


class Pool(Generic[Key, Made]):
    """What `make` returns for each key, at most `most` of them."""

    def __init__(self, make: Callable[[Key], Made], most: int = MOST) -> None:
        self._make = make
        self._most = most
        self._held: OrderedDict[Key, Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Made:
        """Made on first use."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        while len(self._held) >= self._most:
            self._held.popitem(last=False)
        self._held[key] = made = self._make(key)
        return made

    def clear(self) -> None:
        """Forget all: what they were recorded over has changed."""
        self._held.clear()


def width_class(rows: int, widest: int) -> int:
    """The next of 1, 2, 4, ... and `widest`."""
    size = 1
    while size < rows:
        size *= 2
    return min(size, widest)


def length_class(reach: int, capacity: int, least: int) -> int:
    """The next of `least`, twice that, ... and `capacity`: log2 many, however long a context."""
    length = least
    while length < reach:
        length *= 2
    return min(length, capacity)
