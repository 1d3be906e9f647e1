"""Bounded reading of a child's output: lines, and the last of its log."""

from collections import deque
from typing import Final

TAIL_LINES: Final = 20
TAIL_LINE_BYTES: Final = 2000


class LineReader:
    """Cuts a stream into lines; one that is too long is passed on in pieces."""

    def __init__(self, max_line: int) -> None:
        self._max_line = max_line
        self._rest = b""

    def feed(self, data: bytes, *, ended: bool = False) -> list[bytes]:
        """Lines that are complete now, without their newlines; with `ended`, the rest as well."""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (ended or len(rest) > self._max_line):
            lines.append(rest)
            rest = b""
        self._rest = rest
        return lines


class LogTail:
    """The last lines of a log, as text that is safe to show: no control characters."""

    def __init__(self) -> None:
        self._reader = LineReader(TAIL_LINE_BYTES)
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        self._keep(self._reader.feed(data))

    def text(self) -> str:
        """The lines so far, the unfinished one included."""
        self._keep(self._reader.feed(b"", ended=True))
        return "\n".join(_printable(line) for line in self._lines)

    def _keep(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:TAIL_LINE_BYTES] for line in lines if line.strip())


def _printable(line: bytes) -> str:
    text = line.decode("utf-8", "replace").replace("\t", "    ")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
