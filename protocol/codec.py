"""Messages to bytes and back: MessagePack on the wire, every defect a ProtocolError."""

import functools
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeVar, Union, get_type_hints

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import Message, TokenBytes

MAX_MESSAGE_BYTES: Final = 8 << 20
TOKEN_SIZE: Final = 4

M = TypeVar("M", bound=Message)

_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame; ProtocolError when the message is larger than a peer would take."""
    try:
        data = _ENCODER.encode(message)
    except (ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return data if len(data) <= MAX_MESSAGE_BYTES else _bounded(data)


def decode(data: bytes, types: tuple[type[M], ...]) -> M:
    """Read one message of `types`, or raise ProtocolError; no other exception leaves here.

    Bounds of numbers and lengths are those of `protocol.messages`: a list is refused by its stated
    length before anything is allocated for it, and nothing nests deeper than the types do.
    """
    try:
        whole = data if len(data) <= MAX_MESSAGE_BYTES else _bounded(data)
        message: M = _decoder(types).decode(whole)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(data)} bytes: {error}") from error
    field = _lists(type(message))
    parts: tuple[msgspec.Struct, ...] = getattr(message, field) if field else (message,)
    for part in parts:
        for name in _token_fields(type(part)):
            ids = getattr(part, name)
            # Written out, since a call costs as much as all of it where the caches are cold.
            if ids and (len(ids) % TOKEN_SIZE or not ids[TOKEN_SIZE - 1 :: TOKEN_SIZE].isascii()):
                _checked_tokens(ids)
    return message


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian; ProtocolError for an id below 0 or above 2^31 - 1."""
    try:
        data = struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ProtocolError(f"token ids do not fit 31 bits: {error}") from error
    return _checked_tokens(data)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The ids that `pack_tokens` packed; ProtocolError for a torn or negative one."""
    _checked_tokens(data)
    return struct.unpack(f"<{len(data) // TOKEN_SIZE}i", data)


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} may pass")
    return data


def _checked_tokens(data: bytes) -> bytes:
    if len(data) % TOKEN_SIZE:
        raise ProtocolError(f"{len(data)} bytes of token ids are not a multiple of {TOKEN_SIZE}")
    # The highest byte of a little-endian int32 holds its sign; `isascii` scans in C.
    if not data[TOKEN_SIZE - 1 :: TOKEN_SIZE].isascii():
        raise ProtocolError("a token id is negative or above 31 bits")
    return data


@functools.cache
def _decoder(types: tuple[type[M], ...]) -> "msgspec.msgpack.Decoder[M]":
    return msgspec.msgpack.Decoder(Union[types])  # noqa: UP007 -- of a tuple that is given


@functools.cache
def _lists(kind: type[msgspec.Struct]) -> str:
    """The field that holds one part per sequence; "" where there is none."""
    return next((name for name in ("items", "results") if name in kind.__struct_fields__), "")


@functools.cache
def _token_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if hint == TokenBytes)
