"""What is said in a conversation, turn by turn: at a terminal, or from a file or pipe.

A turn is a line. One that ends with a backslash goes on in the next; text between two lines of
triple quotes is one turn, and so is what is pasted with several lines.
"""

import sys
from collections.abc import Callable
from typing import Final, TypeAlias

from launch.commands.prompt_input import text_of
from protocol.errors import UsageError

MAX_BYTES: Final = 16 << 20  # of one line; more than any context takes
PROMPT: Final = "> "
MORE: Final = ". "
QUOTES: Final = '"""'

# One line without its end; None at the end of input. It is told whether a turn goes on.
ReadLine: TypeAlias = Callable[[bool], str | None]


def read_turn(read_line: ReadLine) -> str | None:
    """The next turn, or None at the end of input; what was begun there is a turn."""
    line = read_line(False)
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read_line)
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(True)
    return "\n".join([*lines, line or ""])


def _quoted(line: str, read_line: ReadLine) -> str:
    lines: list[str] = []
    following: str | None = line
    while following is not None:
        if following.rstrip().endswith(QUOTES):
            lines.append(following.rstrip().removesuffix(QUOTES))
            break
        lines.append(following)
        following = read_line(True)
    return "\n".join(lines).strip("\n")


def is_interactive() -> bool:
    """Whether somebody types, and reads the answers where they type."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def terminal() -> ReadLine:
    """Lines that can be edited, with those before them at hand; Ctrl-C is a KeyboardInterrupt."""
    try:
        import readline  # noqa: PLC0415 - changes how `input` behaves, which no other verb wants
    except ImportError:  # a Python without it: lines are the terminal's own
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")

    def read(goes_on: bool) -> str | None:
        try:
            return input(MORE if goes_on else PROMPT)
        except EOFError:
            return None

    return read


def piped() -> ReadLine:
    """Lines of standard input; UsageError for what is no text, or far too long."""

    def read(goes_on: bool) -> str | None:
        del goes_on
        data = sys.stdin.buffer.readline(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"a line of standard input is longer than {MAX_BYTES >> 20} MiB")
        return text_of(data, "a line of standard input").rstrip("\r\n") if data else None

    return read
