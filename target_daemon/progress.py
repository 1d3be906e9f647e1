"""Progress of a load, counted in tensors read."""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from protocol.checkpoints.tensors import TensorSource

Progress = Callable[[int, int], None]  # (done, total)

STEPS: Final = 100  # reports of one load, at most


def unreported(done: int, total: int) -> None:
    """Tell nobody."""


class ReportingSource(TensorSource):
    """Passes everything on to `source`, and reports how many of its tensors were read.

    What `progress` raises ends the load: a daemon is told to end there.
    """

    def __init__(self, source: TensorSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress
        self._read: set[str] = set()
        self._total = len(source.names())
        self._told = -1

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def get(self, name: str) -> Tensor:
        self._tell()
        tensor = self._source.get(name)
        self._read.add(name)
        if len(self._read) == self._total:
            self._tell()
        return tensor

    def close(self) -> None:
        self._source.close()

    def _tell(self) -> None:
        step = len(self._read) * STEPS // self._total
        if step > self._told:
            self._told = step
            self._progress(len(self._read), self._total)
