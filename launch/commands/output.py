"""Where the text, the progress and the trace of one request go.

Standard output carries the text (or the JSON object) and nothing else. Progress and statistics go
to standard error, and only when that is a terminal, so that logs and pipes stay clean.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.status import Status

from launch.commands.standard_output import named
from protocol.closing import Closing
from protocol.codec import unpack_tokens
from protocol.errors import UsageError
from protocol.messages import Piece

SPINNER: Final = "dots"


class TextOutput:
    """Standard output, written as blocks are accepted; closed silently for ``--json``."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._ends_line = True

    def write(self, text: str) -> None:
        """Write `text` at once; BrokenPipeError when the reader went away."""
        if self._shown and text:
            with named("standard output"):
                sys.stdout.write(text)
                sys.stdout.flush()
            self._ends_line = text.endswith("\n")

    def finish(self) -> None:
        """End the last line, so that a shell's prompt or another program's line starts afresh."""
        if not self._ends_line:
            self.write("\n")


class ProgressLine(Closing):
    """One line on standard error that says what is going on until the first token is there."""

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True)
        self._wanted = self._shown = shown and self._console.is_terminal
        self._status: Status | None = None

    @property
    def on_terminal(self) -> bool:
        return self._console.is_terminal

    def say(self, text: str) -> None:
        if not self._shown:
            return
        if self._status is None:
            self._status = self._console.status(text, spinner=SPINNER)
            self._status.start()
        self._status.update(text)

    def end(self) -> None:
        """Remove the line for good: text is being written, on what may be the same terminal."""
        self.clear()
        self._shown = False

    def begin(self) -> None:
        """Another text is waited for."""
        self._shown = self._wanted

    def clear(self) -> None:
        """Remove the line; the next `say` shows it again."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def print(self, text: str) -> None:
        """Write one line that stays."""
        self.clear()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.clear()


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One commit, as a line of the ``--trace`` file.

    Round 0 is the token that prefill chose: it has width 0 and proposes nothing. `chosen` is the
    target's own choice at each row of the block; `kept` are the tokens that were emitted. A tree's
    proposals have `parents`, by the numbers of rows, of which row 0 is the pending token; `path`
    are its kept rows, and `chosen` is what the target chose there.
    """

    round: int
    position: int  # of the first kept token
    width: int
    proposed: tuple[int, ...]
    parents: tuple[int, ...]  # none: a chain
    path: tuple[int, ...]
    chosen: tuple[int, ...]
    kept: tuple[int, ...]
    draft_seconds: float
    ingest_seconds: float
    verify_seconds: float
    moved_bytes: int  # by the draft, over a network


class TraceFile(Closing):
    """The file of ``--trace``, one JSON line per round; nothing at all without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._round = 0
        try:
            self._file = path.open("wb", buffering=0) if path else None
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}") from error

    def add(self, piece: Piece) -> None:
        """Write the round that `piece` came from; whole lines only, also when killed."""
        if self._file is None:
            return
        line = TraceLine(
            round=self._round,
            position=piece.position,
            width=piece.width,
            proposed=unpack_tokens(piece.proposed),
            parents=unpack_tokens(piece.parents),
            path=unpack_tokens(piece.path),
            chosen=unpack_tokens(piece.chosen),
            kept=unpack_tokens(piece.tokens),
            draft_seconds=piece.draft_seconds,
            ingest_seconds=piece.ingest_seconds,
            verify_seconds=piece.verify_seconds,
            moved_bytes=piece.moved_bytes,
        )
        with named(str(self._path)):
            self._file.write(msgspec.json.encode(line) + b"\n")
        self._round += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
