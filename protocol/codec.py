"""Messages to bytes and back: MessagePack on the wire, every defect a ProtocolError."""

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgpack
import msgspec

from protocol.errors import ProtocolError
from protocol.messages import MAX_TOKEN_BYTES, Message

MAX_MESSAGE_BYTES: Final = 8 << 20
TOKEN_SIZE: Final = 4

# Containers are allocated from their stated length before their content is read, and they nest:
# without these bounds a few kilobytes can ask for gigabytes.
_MAX_ARRAY: Final = 4096
_MAX_MAP: Final = 128
_MAX_TEXT_BYTES: Final = 4 * 16384

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """One frame; ProtocolError when the message is larger than a peer would take."""
    try:
        data = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    except (ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return _bounded(data)


def decode(data: bytes, types: tuple[type[M], ...]) -> M:
    """Read one message of `types`, or raise ProtocolError; no other exception leaves here."""
    try:
        tree = msgpack.unpackb(
            _bounded(data),
            object_pairs_hook=_checked_map,
            ext_hook=_refuse_extension,
            strict_map_key=True,
            max_array_len=_MAX_ARRAY,
            max_map_len=_MAX_MAP,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=MAX_TOKEN_BYTES,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        # Some of msgpack's errors carry no text, and ExtraData carries the whole rest.
        reason = type(error).__name__ if isinstance(error, msgpack.ExtraData) else repr(error)
        raise ProtocolError(f"malformed MessagePack of {len(data)} bytes: {reason}") from error
    kind = _kind(tree, types)
    try:
        return msgspec.convert(tree, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error


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


def _checked_map(pairs: list[tuple[str | bytes, Any]]) -> dict[str | bytes, Any]:
    """Refuse what the types cannot express: repeated keys, NaN and infinity, torn token ids."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ProtocolError("a key is repeated")
    for value in tree.values():
        if type(value) is float and not math.isfinite(value):
            raise ProtocolError("a number is not finite")
        if type(value) is bytes:  # every field of bytes holds token ids
            _checked_tokens(value)
    return tree


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"MessagePack extension {code} of {len(data)} bytes")


@functools.cache
def _by_name(types: tuple[type[M], ...]) -> Mapping[str, type[M]]:
    return {kind.__name__: kind for kind in types}


def _kind(tree: object, types: tuple[type[M], ...]) -> type[M]:
    name = tree.get("type") if isinstance(tree, dict) else None
    kind = _by_name(types).get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"{str(name)[:64]!r} is no message of this link")
    return kind
