"""``local``: both halves in one process, over plain tensors; never chosen for two daemons.

For `launch.inprocess` and for tests of the engines. An offer is found by its address within this
process; there is nothing to serve, and nothing stops the guest from writing.
"""

from pathlib import Path
from typing import ClassVar, Final

from protocol.config import RING_SOCKET, HandOver
from protocol.errors import StaleMessage, TransportRefused
from protocol.feature_ring import RingShape
from protocol.gpu import CPU
from protocol.transports.base import (
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    check_cpu,
)
from protocol.transports.plain import PlainHost, measures
from protocol.transports.view_guest import ViewGuest

_OFFERS: Final[dict[str, "LocalHost"]] = {}


class LocalHost(PlainHost):
    """The target's half."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._address = str(run_dir / RING_SOCKET)

    def offer(self, nonce: int, life: int) -> None:
        other = _OFFERS.setdefault(self._address, self)
        if other is not self:
            raise TransportRefused(f"another target offers at {self._address}; end it first")
        super().offer(nonce, life)

    def close(self) -> None:
        if _OFFERS.get(self._address) is self:
            del _OFFERS[self._address]
        super().close()


class Local(FeatureTransport):
    """Target and draft are objects of one process."""

    name: ClassVar[str] = "local"

    @classmethod
    def host(
        cls, run_dir: Path, device: str = CPU, hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        del hand_over  # a CPU's rows are there when the reply is sent
        check_cpu(cls.name, device)
        return LocalHost(run_dir)

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        nonce: int,
        life: int,
        shape: RingShape,
        timeout: float,
        device: str = CPU,
    ) -> FeatureGuest:
        del timeout, device  # nothing to wait for; the reader moves its copies itself
        host = _OFFERS.get(address)
        if host is None or host.ring is None:
            raise TransportRefused(f"no target of this process offers a ring at {address}")
        if (nonce, life) != host.offered:
            raise StaleMessage(f"life {life} was asked for; this is life {host.offered[1]}")
        have, want = host.ring.shape, shape
        if measures(have) != measures(want):
            raise TransportRefused(f"ring: expected {measures(want)}, found {measures(have)}")
        ring = host.ring
        seen = (ring.owner, ring.written_high, ring.rows, *host.shared.values())
        return ViewGuest(ring, host.shared, sum(tensor.nbytes for tensor in seen))


TRANSPORT: Final[type[FeatureTransport]] = Local
