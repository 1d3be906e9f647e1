"""Token ids as they travel: raw little-endian int32 bytes."""

import struct
from collections.abc import Sequence
from typing import Final

WIDTH: Final = 4  # bytes of one id


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids to bytes; ``struct.error`` when one does not fit 32 bits."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Bytes to ids; ``struct.error`` when the length is no multiple of four."""
    return struct.unpack(f"<{len(data) // WIDTH}i", data)


def one_id(token: int) -> bytes:
    """The bytes of one id."""
    return token.to_bytes(WIDTH, "little", signed=True)


def last_id(data: bytes | bytearray) -> int:
    """The last id of a non-empty byte string."""
    return int.from_bytes(data[-WIDTH:], "little", signed=True)
