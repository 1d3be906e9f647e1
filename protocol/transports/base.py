"""The seam between the target's feature rows and the draft: two halves per transport.

A transport is one file that ends in ``TRANSPORT: Final[type[FeatureTransport]]``. The host half
lives in the target daemon and owns all memory; the guest half lives in the draft daemon and can
only read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from protocol.config import HandOver
from protocol.errors import FeatureExpired, ProtocolError, TransportRefused
from protocol.feature_ring import RingShape, oldest_valid, spans
from protocol.gpu import CPU
from protocol.keyring import Keyring
from protocol.messages import Attached

NO_OWNER: Final = -1
# Shared beside the weights: a fixed prompt's ids over the choices at each [2, n], and its rows.
GOLDEN_IDS: Final = "golden_ids"
GOLDEN_ROWS: Final = "golden_rows"


def _nothing(slot: int, start: int, stop: int) -> None:
    """On a CPU a store is done when the next line runs, and the reply orders memory."""


@dataclass(frozen=True)
class RingView:
    """A view of the ring; writable on the target's side, read-only on the draft's.

    The three methods are the writer's half of the seqlock. Their order of stores matters: a reader
    takes rows only when, after its copy, the owner is still the one it asked for and the rows lie
    in the valid part of what was announced.
    """

    shape: RingShape
    owner: Tensor  # [slots], int64: the sequence each slot's rows belong to; -1: none
    written_high: Tensor  # [slots], int64: highest position ever written + 1
    rows: Tensor  # [slots, capacity, row_width]
    # Called as (slot, start, stop) after the forward that wrote rows start..stop-1 was submitted
    # and before its reply is sent: after it, whoever has the reply may read them.
    publish: Callable[[int, int, int], None] = _nothing

    def claim(self, slot: int, sequence: int, high: int = 0) -> None:
        """Give a free `slot` to `sequence`, which must never have owned one before.

        It begins with the slot's rows as they are where it states that they reach up to `high`.
        """
        # Nobody owns the slot while its height is reset, so that no reader pairs the new owner
        # with the old owner's rows.
        self.owner[slot] = NO_OWNER
        self.written_high[slot] = high
        self.owner[slot] = sequence

    def announce(self, slot: int, stop: int) -> None:
        """State, *before* writing them, that rows below position `stop` will be written."""
        if stop > int(self.written_high[slot]):
            self.written_high[slot] = stop

    def release(self, slot: int) -> None:
        """Take the slot from its sequence; its rows cannot be read any more."""
        self.owner[slot] = NO_OWNER


@dataclass(frozen=True)
class Rows:
    """A copy of feature rows ``start .. start + rows.shape[0] - 1``, known to be whole."""

    start: int
    rows: Tensor  # [n, row_width]


def gather(view: RingView, slot: int, first: int, stop: int) -> Tensor:
    """Copy positions ``first .. stop-1`` of a ring in this process's own address space."""
    copy = torch.empty(stop - first, view.shape.row_width, dtype=view.rows.dtype)
    for span in spans(first, stop, view.shape.capacity):
        source = view.rows[slot, span.row : span.row + span.stop - span.start]
        copy[span.start - first : span.stop - first].copy_(source)
    return copy


Gather = Callable[[RingView, int, int, int], Tensor]


def read_whole(
    view: RingView, slot: int, sequence: int, start: int, stop: int, gather: Gather = gather
) -> Rows:
    """Copy positions ``start .. stop-1`` of `sequence`, less what may have been overwritten.

    The reader's half of the seqlock: copy, then look again. Never waits for the writer; `gather`
    returns when its copy is complete. Raises FeatureExpired when the slot is another sequence's,
    before or after the copy, and ProtocolError when the rows were never written or `slot` does
    not exist.
    """
    capacity = view.shape.capacity
    if not 0 <= slot < view.shape.slots or not 0 <= start <= stop:
        raise ProtocolError(f"rows {start}..{stop} of slot {slot}: there are {view.shape.slots}")
    high = _height(view, slot, sequence)
    if stop > high:
        raise ProtocolError(f"rows up to {stop} were asked for, {high} of slot {slot} are written")
    first = min(stop, max(start, oldest_valid(high, capacity)))
    copy = gather(view, slot, first, stop)
    # x86 keeps loads in program order; elsewhere the interpreter between the copy and these loads
    # is far longer than any processor reorders across.
    whole = min(stop, max(first, oldest_valid(_height(view, slot, sequence), capacity)))
    return Rows(start=whole, rows=copy[whole - first :])


def _height(view: RingView, slot: int, sequence: int) -> int:
    """Read `written_high`, then check the owner: owners never return, so the height is its own."""
    high = int(view.written_high[slot])
    owner = int(view.owner[slot])
    if owner != sequence:
        raise FeatureExpired(f"slot {slot} belongs to sequence {owner}, not to {sequence}")
    return high


def check_cpu(transport: str, device: str) -> None:
    """Raise TransportRefused where a host's memory cannot be that of `device`."""
    if device != CPU:
        raise TransportRefused(f"transport {transport} has no memory on {device}")


@dataclass(frozen=True)
class Terms:
    """How a guest reaches another host; what stays on one host has no use for them."""

    keyring: Keyring | None = None  # None: the loopback interface, or a socket file
    pull: float = 2.0  # seconds that one answer may take


class RemoteTarget(ABC):
    """A target whose embedding and head cannot be mapped: it is asked, or they are copied."""

    @property
    @abstractmethod
    def facts(self) -> Attached:
        """What a copy of its checkpoint must agree with."""

    @abstractmethod
    def embed(self, tokens: tuple[int, ...]) -> Tensor:
        """Rows [n, hidden] float32 of its embedding table, without its input scale."""

    @abstractmethod
    def project(self, hidden: Tensor) -> tuple[int, ...]:
        """The best id of each row of `hidden` [n, hidden] by its head, scale and soft-cap."""


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of one of the target's tensors that the draft borrows."""

    shape: tuple[int, ...]
    dtype: str


class FeatureHost(ABC):
    """The target's half: allocates the ring and the shared weights, and offers them."""

    @abstractmethod
    def create_ring(self, shape: RingShape) -> RingView:
        """Allocate the ring, zeroed, with no owner in any slot. Called once."""

    @abstractmethod
    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        """Allocate uninitialised tensors that the target fills before it offers them."""

    @abstractmethod
    def offer(self, nonce: int, life: int) -> None:
        """Seal what was created and listen for a guest that states this nonce and life."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `serve` has something to do."""

    @abstractmethod
    def serve(self) -> None:
        """Answer waiting guests; never blocks; a bad or foreign guest is refused and dropped."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the tensors handed out must not be used afterwards."""


class FeatureGuest(ABC):
    """The draft's half."""

    @abstractmethod
    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        """Copy what is still whole of positions ``start .. stop-1``; may be empty.

        The result ends at `stop`, or is empty; it starts later than `start` where older rows may
        have been overwritten. Raises FeatureExpired when the slot belongs to another sequence.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The target's shared tensors, read-only: `embed` [V, H]; `head` [V, H] or `head_t`."""

    @abstractmethod
    def mapped_bytes(self) -> int:
        """Bytes that are shared with the target."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that have crossed a network so far, both ways, before encryption."""
        return 0

    @property
    def remote(self) -> RemoteTarget | None:
        """The target itself, where `weights` has nothing because nothing can be mapped."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Unmap; the tensors handed out must not be used afterwards."""


class FeatureTransport(ABC):
    """One way of sharing features; `name` is what status and results show."""

    name: ClassVar[str]
    maps: ClassVar[bool] = True  # whether the guest sees the target's memory itself

    @classmethod
    @abstractmethod
    def host(
        cls, run_dir: Path, device: str = CPU, hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        """The half that the target daemon runs, whose rows are made on `device`.

        `hand_over` says how a GPU's rows are handed over: the reply waits for them, or follows
        the record of an event that the reader polls.
        """

    @classmethod
    @abstractmethod
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
        """Map what the host at `address` offers, or raise TransportRefused/DeadlineExceeded.

        `device` is where the draft computes.

        Another nonce or life than the host's is StaleMessage; `shape.capacity` counts, not how it
        splits into window and guard.
        """

    @classmethod
    def reach(
        cls,
        address: str,
        terms: Terms,
        *,
        nonce: int,
        life: int,
        shape: RingShape,
        timeout: float,
        device: str = CPU,
    ) -> FeatureGuest:
        """`attach` under the terms of a network; a transport of one host has no use for them."""
        del terms
        return cls.attach(
            address, nonce=nonce, life=life, shape=shape, timeout=timeout, device=device
        )
