import math
import struct
import time
import tracemalloc
import typing

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import messages as generated

from protocol import messages
from protocol.codec import MAX_MESSAGE_BYTES, decode, encode, pack_tokens, unpack_tokens
from protocol.errors import ProtocolError
from protocol.messages import (
    MAX_RAW_BYTES,
    MAX_SEQUENCES,
    MAX_TOKEN_BYTES,
    Close,
    CloseItem,
    Failed,
    Hello,
    Prefill,
    PrefillItem,
    RowsSent,
    Verdict,
    Verified,
)

ALL = tuple(generated.message_classes())
EVERY_STRUCT = tuple(
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
)
HELLO = Hello(target_life=3, draft_life=4, wire_version=1, nonce=99)
PREFILL = Prefill(
    target_life=3,
    items=(PrefillItem(sequence=7, start=0, tokens=pack_tokens([1, 2, 3]), last=False),),
)


def changed(message, path, value):
    """The bytes of `message` with the field at `path` replaced."""
    tree = generated.tree(message)
    here = tree
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    return msgpack.packb(tree)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind):
    @settings(max_examples=15, deadline=None)
    @given(generated.message(kind))
    def round_trip(message):
        assert decode(encode(message), ALL) == message

    round_trip()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_a_protocol_error(data):
    try:
        message = decode(data, ALL)
    except ProtocolError:
        return
    assert isinstance(message, ALL)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_message_decodes_or_is_a_protocol_error(data):
    kind = data.draw(st.sampled_from(ALL))
    wire = bytearray(encode(data.draw(generated.message(kind))))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    del wire[data.draw(st.integers(1, len(wire))) :]
    try:
        message = decode(bytes(wire), ALL)
    except ProtocolError:
        return
    # What passed is within every bound: it is itself a message that can be sent.
    assert decode(encode(message), ALL) == message


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_field_decodes_or_is_a_protocol_error(data):
    kind = data.draw(st.sampled_from(ALL))
    tree = generated.tree(data.draw(generated.message(kind)))
    name = data.draw(st.sampled_from(sorted(tree)) | st.text(max_size=5))
    tree[name] = data.draw(anything)
    try:
        message = decode(msgpack.packb(tree), ALL)
    except ProtocolError:
        return
    assert decode(encode(message), ALL) == message


DEFECTS = {
    "nothing": b"",
    "trailing bytes": encode(HELLO) + b"\x00",
    "truncated": encode(HELLO)[:-1],
    "no map": msgpack.packb([1, 2]),
    "unknown type": changed(HELLO, ["type"], "Nonsense"),
    "type that is no text": changed(HELLO, ["type"], 5),
    "message of another link": encode(
        Failed(target_life=0, draft_life=0, code="internal", detail="")
    ),
    "unknown field": changed(HELLO, ["colour"], "blue"),
    "negative number": changed(HELLO, ["nonce"], -1),
    "number above 63 bits": changed(HELLO, ["nonce"], 2**63),
    "bool for a number": changed(HELLO, ["nonce"], True),
    "float for a number": changed(HELLO, ["nonce"], 1.0),
    "text for a number": changed(HELLO, ["nonce"], "1"),
    "number for a bool": changed(PREFILL, ["items", 0, "last"], 1),
    "text for token ids": changed(PREFILL, ["items", 0, "tokens"], "AQAAAA=="),
    "torn token ids": changed(PREFILL, ["items", 0, "tokens"], b"\x01\x00\x00"),
    "negative token id": changed(PREFILL, ["items", 0, "tokens"], b"\xff\xff\xff\xff"),
    "too many token ids": changed(PREFILL, ["items", 0, "tokens"], bytes(MAX_TOKEN_BYTES + 4)),
    "no items": changed(PREFILL, ["items"], []),
    "too many items": changed(
        Close(target_life=0, items=(CloseItem(sequence=1),)),
        ["items"],
        [generated.tree(CloseItem(sequence=1))] * (MAX_SEQUENCES + 1),
    ),
    "repeated key": b"\x82\xa4type\xa5Hello\xa4type\xa5Hello",
    "key that is a number": b"\x81\x01\x02",
    "extension": changed(HELLO, ["nonce"], msgpack.ExtType(5, b"x")),
    "timestamp": changed(HELLO, ["nonce"], msgpack.Timestamp(1)),
    "text that is not UTF-8": b"\x81\xa4type\xa2\xff\xff",
    "reserved byte": b"\xc1",
    "deep nesting": b"\x91" * 100_000 + b"\x00",
    "deep maps": b"\x81\xa1a" * 100_000 + b"\x00",
    "array of 2^32 entries": b"\xdd\xff\xff\xff\xff",
    "map of 2^32 entries": b"\xdf\xff\xff\xff\xff",
    "text of 2^32 bytes": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "extension of 2^32 bytes": b"\xc9\xff\xff\xff\xff\x05",
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_a_protocol_error(name):
    with pytest.raises(ProtocolError):
        decode(DEFECTS[name], (Hello, Prefill, Close))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, 2e9])
def test_a_time_that_is_no_time_is_a_protocol_error(value):
    verdict = Verdict(
        sequence=1, accepted=0, tokens=b"", chosen=b"", committed=1, finish="", seconds=0.5
    )
    wire = changed(Verified(target_life=1, results=(verdict,)), ["results", 0, "seconds"], value)
    with pytest.raises(ProtocolError):
        decode(wire, (Verified,))


def test_nested_arrays_cannot_ask_for_memory_that_the_message_does_not_have():
    bomb = b"\xdd\x00\x00\x10\x00" * 1500 + bytes(5000)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(bomb, ALL)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_message_above_the_limit_is_refused_both_ways_with_both_numbers():
    huge = PrefillItem(sequence=1, start=0, tokens=bytes(MAX_TOKEN_BYTES), last=True)
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        encode(Prefill(target_life=1, items=(huge, huge)))
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES + 1)):
        decode(bytes(MAX_MESSAGE_BYTES + 1), ALL)


def test_what_cannot_be_encoded_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="Hello"):
        encode(msgspec.structs.replace(HELLO, nonce=2**70))
    with pytest.raises(ProtocolError, match="Failed"):
        encode(Failed(target_life=0, code="\ud800", detail=""))


def test_an_error_names_the_field_and_does_not_repeat_the_bytes():
    with pytest.raises(ProtocolError, match=r"nonce"):
        decode(changed(HELLO, ["nonce"], -1), ALL)
    with pytest.raises(ProtocolError) as caught:
        decode(encode(HELLO) + b"secret" * 100, ALL)
    assert "secret" not in str(caught.value)


def test_every_field_of_bytes_is_bounded_and_holds_token_ids_unless_it_is_named_raw():
    limits = {}
    for _, name, info in generated.fields_of_bytes():
        limits.setdefault("raw" if name == "raw" else "ids", set()).add(info.max_length)
    assert limits == {"ids": {MAX_TOKEN_BYTES}, "raw": {MAX_RAW_BYTES}}


def test_the_largest_raw_message_fits_512_kib():
    most = (1 << 63) - 1
    message = RowsSent(
        target_life=most, draft_life=most, pull=most, start=(1 << 31) - 1, raw=bytes(MAX_RAW_BYTES)
    )
    assert len(encode(message)) <= 512 << 10
    assert decode(encode(message), ALL) == message
    too_long = msgspec.structs.replace(message, raw=bytes(MAX_RAW_BYTES + 1))
    with pytest.raises(ProtocolError, match="raw"):
        decode(encode(too_long), ALL)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_ids_survive_packing(ids):
    assert unpack_tokens(pack_tokens(ids)) == tuple(ids)


def test_token_ids_are_little_endian_int32():
    assert pack_tokens([1, 256]) == struct.pack("<ii", 1, 256) == b"\x01\0\0\0\0\x01\0\0"


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], ["1"], [None]])
def test_an_id_that_is_none_cannot_be_packed(ids):
    with pytest.raises(ProtocolError):
        pack_tokens(ids)


@pytest.mark.parametrize("data", [b"\0", b"\0" * 7, b"\0\0\0\x80", b"\x01\0\0\0\xff\xff\xff\xff"])
def test_bytes_that_are_no_ids_cannot_be_unpacked(data):
    with pytest.raises(ProtocolError):
        unpack_tokens(data)


def test_a_round_costs_the_codec_little():
    verdict = Verdict(
        sequence=1,
        accepted=3,
        tokens=pack_tokens([5] * 4),
        chosen=pack_tokens([5] * 8),
        committed=100,
        finish="",
        seconds=0.01,
    )
    message = Verified(target_life=1, results=(verdict,))
    best = math.inf
    for _ in range(200):
        start = time.perf_counter()
        decode(encode(message), ALL)
        best = min(best, time.perf_counter() - start)
    assert best < 200e-6


def containers(hint):
    """Every list and map inside a type, each with the bounds it is declared with."""
    bounds = {}
    while typing.get_origin(hint) is typing.Annotated:
        hint, *extra = typing.get_args(hint)
        bounds |= {meta.max_length: True for meta in extra if isinstance(meta, msgspec.Meta)}
    origin = typing.get_origin(hint)
    if origin is dict or (origin is tuple and Ellipsis in typing.get_args(hint)):
        yield hint, max((bound for bound in bounds if bound is not None), default=None)
    for inner in typing.get_args(hint) if origin is not typing.Literal else ():
        yield from containers(inner)


@pytest.mark.parametrize("kind", EVERY_STRUCT, ids=lambda kind: kind.__name__)
def test_every_list_and_map_of_a_message_is_bounded(kind):
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for container, bound in containers(hint):
            assert bound is not None, f"{kind.__name__}.{name}: {container}"


def test_another_library_reads_the_wire():
    assert msgpack.unpackb(encode(PREFILL), use_list=False) == generated.tree(PREFILL)
