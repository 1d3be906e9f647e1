"""What is one turn: lines that go on, quoted text, the end of input."""

import io
import sys

import pytest

from launch.commands.turn_input import MAX_BYTES, piped, read_turn
from protocol.errors import UsageError


def turns(text):
    lines = iter(text.split("\n"))
    asked = []

    def read_line(goes_on):
        asked.append(goes_on)
        return next(lines, None)

    found = []
    while (turn := read_turn(read_line)) is not None:
        found.append(turn)
    return found, asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", ["one"]),
        ("one\n\ntwo", ["one", "", "two"]),
        ("one\\\ntwo\\\n\\\nthree\nfour", ["one\ntwo\n\nthree", "four"]),
        ('"""\none\n\ntwo\\\n"""\nthree', ["one\n\ntwo\\", "three"]),
        ('"""one"""\ntwo', ["one", "two"]),
        ('  """one\ntwo""" \nthree', ["one\ntwo", "three"]),
        ('"""\none', ["one"]),
        ("one\\", ["one\n"]),
        ('say """ here', ['say """ here']),
    ],
)
def test_lines_become_turns(text, expected):
    assert turns(text)[0] == expected


def test_the_reader_is_told_whether_a_turn_goes_on():
    assert turns("one\\\ntwo\nthree")[1] == [False, True, False, False]


class Input:
    def __init__(self, data):
        self.buffer = io.BytesIO(data)


def test_a_pipe_gives_lines_until_its_end(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input("ä\r\n\nlast".encode()))
    read = piped()
    assert [read(False), read(True), read(False), read(False)] == ["ä", "", "last", None]


def test_what_is_no_text_or_far_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input(b"ab\xff\n"))
    with pytest.raises(UsageError, match="not UTF-8 text: byte 2 is 0xff"):
        piped()(False)
    monkeypatch.setattr(sys, "stdin", Input(b"x" * (MAX_BYTES + 1)))
    with pytest.raises(UsageError, match="longer than 16 MiB"):
        piped()(False)
