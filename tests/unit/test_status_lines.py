import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.log_tail import TAIL_LINE_BYTES, TAIL_LINES, LineReader, LogTail
from protocol.errors import ProtocolError
from protocol.standing import StatusStream
from protocol.status import LoadFailed, Loading, Ready, decode_status, encode_status

STATUSES = (
    Loading(done=3, total=17),
    Ready(),
    LoadFailed(code="checkpoint", detail="line\nbreak"),
)


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_is_one_line_and_survives(status):
    line = encode_status(status)
    assert line.count(b"\n") == 1
    assert decode_status(line) == status


def test_the_lines_are_those_of_the_document():
    assert encode_status(STATUSES[0]) == b'{"event":"loading","done":3,"total":17}\n'
    assert encode_status(STATUSES[1]) == b'{"event":"ready"}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b'{"event":"x"}',
        b'{"event":"loading","done":-1,"total":2}',
        b"\xff",
        b'{"event":"ready","more":1}',
        b"[" * 60_000,
        b'{"event":"failed","code":"\xff","detail":""}',
    ],
)
def test_any_other_line_is_a_protocol_error(line):
    with pytest.raises(ProtocolError):
        decode_status(line)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_status_or_a_protocol_error(data):
    try:
        decode_status(data)
    except ProtocolError:
        return


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 50))
def test_lines_are_the_same_however_the_stream_is_cut(chunks, size):
    data = b"".join(chunks)
    reader = LineReader(1 << 20)
    found = [line for at in range(0, len(data), size) for line in reader.feed(data[at : at + size])]
    found += reader.feed(b"", ended=True)
    assert b"\n".join(found) in (data, data.removesuffix(b"\n"))


def test_a_line_without_end_is_passed_on_in_pieces():
    reader = LineReader(10)
    assert reader.feed(b"x" * 11) == [b"x" * 11]
    assert reader.feed(b"y\n") == [b"y"]


def test_a_log_keeps_its_last_lines_only():
    tail = LogTail()
    for number in range(1000):
        tail.feed(f"line {number}\n\n".encode())
    tail.feed(b"z" * 100_000)
    lines = tail.text().split("\n")
    assert len(lines) == TAIL_LINES
    assert lines[-2:] == ["line 999", "z" * TAIL_LINE_BYTES]


def test_a_log_shows_no_control_characters():
    tail = LogTail()
    tail.feed("a\x1b[31mb\tc é \N{RIGHT-TO-LEFT OVERRIDE}\n".encode() + b"\xff\n")
    bad = "\N{REPLACEMENT CHARACTER}"
    assert tail.text() == f"a{bad}[31mb    c é {bad}\n{bad}"


def test_a_services_log_has_the_load_in_steps_of_some_seconds(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("protocol.standing.time.monotonic", lambda: now)
    kept = os.dup(1)
    stream = StatusStream()
    try:
        stream.to_log()
        with caplog.at_level("INFO"):
            for step in range(100):
                now += 0.1
                stream.write(Loading(done=step + 1, total=100))
            stream.write(Ready())
    finally:
        stream.close()
        os.dup2(kept, 1)
        os.close(kept)
    assert caplog.messages == [
        *(f"loading: {done} of 100" for done in (1, 21, 41, 61, 81, 100)),
        "ready",
    ]
