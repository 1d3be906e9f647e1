"""``tcp``: a draft on another host pulls feature rows from the target, in frames of 512 KiB.

The guest asks at the target's own address, with its own key, and is answered between two rounds
by the target's loop (`RowsDesk`); the supervisor never relays rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from protocol.codec import pack_tokens, unpack_tokens
from protocol.config import HandOver
from protocol.errors import (
    ProtocolError,
    StaleMessage,
    TransportRefused,
)
from protocol.feature_ring import RingShape
from protocol.gpu import CPU
from protocol.messages import (
    MAX_RAW_BYTES,
    WIRE_VERSION,
    Attach,
    Attached,
    Embed,
    Embedded,
    Project,
    Projected,
    RowsSent,
)
from protocol.messages import Rows as RowsWanted
from protocol.transports.base import (
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    RemoteTarget,
    RingView,
    Rows,
    Terms,
    check_cpu,
    read_whole,
)
from protocol.transports.connection import Connection
from protocol.transports.plain import PlainHost, measures

MAX_ROWS: Final = 1 << 20  # of rows without a width, which need no bytes
FLOAT_BYTES: Final = 4


def rows_per_frame(width_bytes: int) -> int:
    """How many rows one message carries; TransportRefused where not even one fits."""
    if width_bytes > MAX_RAW_BYTES:
        raise TransportRefused(
            f"a row has {width_bytes} bytes; over a network {MAX_RAW_BYTES} may pass at once"
        )
    return MAX_RAW_BYTES // width_bytes if width_bytes else MAX_ROWS


def row_bytes(shape: RingShape) -> int:
    """Bytes of one feature row."""
    return shape.row_width * int(getattr(torch, shape.dtype).itemsize)


class RowsDesk:
    """The target's half of a pull: answers from the ring, wherever that was allocated."""

    def __init__(self, view: RingView) -> None:
        self._view = view

    def check(self, ask: Attach, offered: tuple[int, int]) -> None:
        """Refuse a draft of another ring; `offered` are nonce and life of this one."""
        if (ask.nonce, ask.target_life) != offered:
            raise StaleMessage(
                f"life {ask.target_life} of the target was asked for, or its nonce is another; "
                f"this is life {offered[1]}"
            )
        wanted = RingShape(ask.slots, ask.ring_capacity, 0, ask.row_width, ask.dtype)
        have, want = measures(self._view.shape), measures(wanted)
        if have != want:
            raise TransportRefused(f"ring: expected {want}, found {have}")

    def rows(self, asked: RowsWanted) -> RowsSent:
        """Copy what is whole; raises what `read_whole` raises, and ProtocolError for too many."""
        most = rows_per_frame(row_bytes(self._view.shape))
        if asked.count > most:
            raise ProtocolError(f"{asked.count} rows were asked for at once; {most} fit a message")
        stop = asked.start + asked.count
        found = read_whole(self._view, asked.slot, asked.sequence, asked.start, stop)
        return RowsSent(
            target_life=asked.target_life,
            draft_life=asked.draft_life,
            pull=asked.pull,
            start=found.start,
            raw=found.rows.view(torch.uint8).numpy().tobytes() if found.rows.numel() else b"",
        )


class TcpGuest(FeatureGuest, RemoteTarget):
    """The draft's half: one connection of its own to the target."""

    def __init__(self, connection: Connection, shape: RingShape) -> None:
        self._connection = connection
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._per_frame = rows_per_frame(row_bytes(shape))

    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        if not 0 <= start <= stop:
            raise ProtocolError(f"rows {start}..{stop} of slot {slot} cannot be")
        first = max(start, stop - self._shape.capacity)  # what is older is overwritten
        copy = torch.empty(stop - first, self._shape.row_width, dtype=self._dtype)
        whole = first
        asks = [
            RowsWanted(
                **self._connection.stamp(),
                slot=slot,
                sequence=sequence,
                start=at,
                count=min(self._per_frame, stop - at),
            )
            for at in range(first, max(stop, first + 1), self._per_frame)
        ]
        with self._connection.guarded():
            for asked, sent in zip(asks, self._connection.answers(asks, RowsSent), strict=True):
                end = asked.start + asked.count
                if not asked.start <= sent.start <= end:
                    raise ProtocolError(f"rows from {sent.start} on, of {asked.start}..{end}")
                _fill(copy[sent.start - first : end - first], sent.raw)
                if sent.start > asked.start:
                    whole = sent.start
        return Rows(start=whole, rows=copy[whole - first :])

    def weights(self) -> Mapping[str, Tensor]:
        return {}

    def mapped_bytes(self) -> int:
        return 0

    @property
    def moved_bytes(self) -> int:
        return self._connection.moved_bytes

    @property
    def remote(self) -> RemoteTarget | None:
        return self

    @property
    def facts(self) -> Attached:
        return self._connection.facts

    def embed(self, tokens: tuple[int, ...]) -> Tensor:
        """One message: as many ids as a block has."""
        ask = Embed(**self._connection.stamp(), tokens=pack_tokens(tokens))
        with self._connection.guarded():
            (sent,) = self._connection.answers([ask], Embedded)
            width = len(sent.raw) // (FLOAT_BYTES * max(1, len(tokens)))
            rows = torch.empty(len(tokens), width)
            _fill(rows, sent.raw)
        return rows

    def project(self, hidden: Tensor) -> tuple[int, ...]:
        """As many messages as the rows need, asked for together."""
        wide = hidden.to("cpu", torch.float32).contiguous()
        parts = wide.split(rows_per_frame(FLOAT_BYTES * wide.shape[1]))
        asks = [
            Project(
                **self._connection.stamp(),
                raw=part.numpy().tobytes(),
            )
            for part in parts
        ]
        ids: list[int] = []
        with self._connection.guarded():
            for part, sent in zip(parts, self._connection.answers(asks, Projected), strict=True):
                found = unpack_tokens(sent.tokens)
                if len(found) != len(part):
                    raise ProtocolError(f"{len(found)} ids for {len(part)} hidden rows")
                ids += found
        return tuple(ids)

    def close(self) -> None:
        self._connection.close()


def _fill(rows: Tensor, raw: bytes) -> None:
    """Write `raw` over all of `rows`, or raise ProtocolError where it is not as long."""
    if len(raw) != rows.nbytes:
        raise ProtocolError(f"{len(raw)} bytes for rows of {rows.nbytes}")
    if raw:
        rows.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(raw, np.uint8)


class Tcp(FeatureTransport):
    """Any two hosts that reach each other; on one host `shm` is faster by far."""

    name: ClassVar[str] = "tcp"
    maps: ClassVar[bool] = False

    @classmethod
    def host(
        cls, run_dir: Path, device: str = CPU, hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        del run_dir, hand_over  # nothing of it lies in a file, or is handed over
        check_cpu(cls.name, device)
        return PlainHost()

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
        return cls.reach(
            address, Terms(), nonce=nonce, life=life, shape=shape, timeout=timeout, device=device
        )

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
        del device  # the reader moves its copies itself
        ask = Attach(
            target_life=life,
            wire_version=WIRE_VERSION,
            nonce=nonce,
            slots=shape.slots,
            ring_capacity=shape.capacity,
            row_width=shape.row_width,
            dtype=shape.dtype,
        )
        guest = TcpGuest(connection := Connection(address, ask, terms), shape)
        try:
            connection.attach(timeout)
        except BaseException:
            connection.close()
            raise
        return guest


TRANSPORT: Final[type[FeatureTransport]] = Tcp
