"""What lies where in shared memory: the messages of the ring socket, bounded and checked.

A guest sends `Ask`; the host answers `Layout`, with one descriptor per arena, or `Refusal`.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.errors import ProtocolError, TransportRefused, map_exceptions
from protocol.feature_ring import RingShape
from protocol.messages import Id, Name, Text

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector load
MAX_ARENAS: Final = 4
MAX_TENSORS: Final = 64
MAX_EVENTS: Final = 64
HANDLE_BYTES: Final = 64  # cudaIpcMemHandle_t and cudaIpcEventHandle_t
MAX_ASK_BYTES: Final = 256
MAX_ANSWER_BYTES: Final = 64 << 10
ITEM_BYTES: Final[Mapping[str, int]] = {"int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

Dimension = Annotated[int, Meta(ge=0, le=1 << 40)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]
Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base: the field ``type`` on the wire is the class's name."""


class Ask(_Part, frozen=True, kw_only=True):
    """guest -> host: the memory of this life, please."""

    nonce: Id
    life: Id


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: row-major, at byte `offset` of arena number `arena`."""

    name: Name
    dtype: Name
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=4)]
    arena: Annotated[int, Meta(ge=0, lt=MAX_ARENAS)]
    offset: Bytes

    @property
    def size(self) -> int:
        """Bytes; a dtype that is not known raises TransportRefused."""
        if self.dtype not in ITEM_BYTES:
            raise TransportRefused(
                f"tensor {self.name}: dtype {self.dtype}, expected one of {', '.join(ITEM_BYTES)}"
            )
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class DeviceArena(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory on the host's GPU: an IPC handle names the base of one allocation, and no more.

    `places` count their bytes from `offset` on; their `arena` is 0.
    """

    handle: Handle
    size: Bytes  # of the whole allocation
    offset: Bytes = 0
    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_TENSORS)]


class Layout(_Part, frozen=True, kw_only=True):
    """host -> guest: sizes of the arenas whose descriptors come along, and what is in them.

    `devices` and `events` are opened by their handles; `uuid` names the GPU that they are on.
    """

    arenas: Annotated[tuple[Bytes, ...], Meta(max_length=MAX_ARENAS)]
    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_TENSORS)]
    uuid: Name = ""
    devices: Annotated[tuple[DeviceArena, ...], Meta(max_length=MAX_ARENAS)] = ()
    events: Annotated[tuple[Handle, ...], Meta(max_length=MAX_EVENTS)] = ()


class Probed(_Part, frozen=True, kw_only=True):
    """guest -> host: the host's pattern was read, and this one written; the host repeats it."""

    seed: Id


class Refusal(_Part, frozen=True, kw_only=True):
    """host -> guest: no descriptor comes along; `code` is that of a DaemonError."""

    code: Name
    detail: Text


_DEFECTS: Final[Mapping[type[BaseException], type[ProtocolError]]] = {
    msgspec.MsgspecError: ProtocolError,
    RecursionError: ProtocolError,
}


def encode(part: Ask | Layout | Refusal | Probed) -> bytes:
    return msgspec.msgpack.encode(part)


def decode_ask(data: bytes) -> Ask:
    """Whatever is not exactly an Ask raises ProtocolError."""
    with map_exceptions(_DEFECTS):
        return msgspec.msgpack.decode(data, type=Ask)


def decode_answer(data: bytes) -> Layout | Refusal:
    """Whatever is neither raises ProtocolError; the numbers still need `check_places`."""
    with map_exceptions(_DEFECTS):
        return msgspec.msgpack.decode(data, type=Layout | Refusal)


def decode_probed(data: bytes) -> Probed:
    """Whatever is not exactly a Probed raises ProtocolError."""
    with map_exceptions(_DEFECTS):
        return msgspec.msgpack.decode(data, type=Probed)


def decode_judgement(data: bytes) -> Probed | Refusal:
    """What the host says of a probe; whatever is neither raises ProtocolError."""
    with map_exceptions(_DEFECTS):
        return msgspec.msgpack.decode(data, type=Probed | Refusal)


def ring_tensors(shape: RingShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of the ring's arena."""
    return {
        "ring.owner": ("int64", (shape.slots,)),
        "ring.written_high": ("int64", (shape.slots,)),
        "ring.rows": (shape.dtype, (shape.slots, shape.capacity, shape.row_width)),
    }


def arrange(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], arena: int
) -> tuple[list[Place], int]:
    """Lay `tensors` (name: dtype, shape) one behind the other; return places and total bytes."""
    places: list[Place] = []
    end = 0
    for name, (dtype, shape) in tensors.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        place = Place(name=name, dtype=dtype, shape=shape, arena=arena, offset=offset)
        places.append(place)
        end = offset + place.size
    return places, max(end, ALIGNMENT)


def check_places(layout: Layout, shape: RingShape) -> dict[str, Place]:
    """Return the places by name, all inside their arenas, the ring's as `shape` says.

    Raises TransportRefused with the tensor and the numbers.
    """
    found: dict[str, Place] = {}
    inside = [(place, layout.arenas) for place in layout.places]
    inside += [
        (place, (device.size - device.offset,))
        for device in layout.devices
        for place in device.places
    ]
    for place, arenas in inside:
        _check_inside(place, arenas)
        if place.name in found:
            raise TransportRefused(f"tensor {place.name} is announced twice")
        found[place.name] = place
    for name, expected in ring_tensors(shape).items():
        got = (found[name].dtype, found[name].shape) if name in found else "nothing"
        if got != expected:
            raise TransportRefused(f"ring tensor {name}: expected {expected}, found {got}")
    return found


def _check_inside(place: Place, arenas: Sequence[int]) -> None:
    if place.arena >= len(arenas):
        raise TransportRefused(f"tensor {place.name} is in arena {place.arena} of {len(arenas)}")
    end = place.offset + place.size
    if place.offset % ALIGNMENT or end > arenas[place.arena]:
        raise TransportRefused(
            f"tensor {place.name}: bytes {place.offset}..{end} of {arenas[place.arena]}, "
            f"aligned to {ALIGNMENT}, are not possible"
        )
