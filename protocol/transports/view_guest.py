"""The draft's half of every transport that shows it the ring itself."""

from collections.abc import Mapping

from torch import Tensor

from protocol.errors import InternalError
from protocol.transports.base import FeatureGuest, RingView, Rows, gather, read_whole


class ViewGuest(FeatureGuest):
    """Reads a ring that it sees; what it maps ends when the last tensor over it does."""

    def __init__(self, view: RingView, weights: Mapping[str, Tensor], mapped: int) -> None:
        """`mapped`: bytes that are shared with the target."""
        self._view: RingView | None = view
        self._weights = dict(weights)
        self._mapped = mapped

    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        if self._view is None:
            raise InternalError("the ring has been unmapped")
        return read_whole(self._view, slot, sequence, start, stop, self._gather)

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def mapped_bytes(self) -> int:
        return self._mapped

    def close(self) -> None:
        self._view = None
        self._weights = {}
        self._mapped = 0

    def _gather(self, view: RingView, slot: int, first: int, stop: int) -> Tensor:
        """A copy of rows ``first .. stop-1``, complete."""
        return gather(view, slot, first, stop)
