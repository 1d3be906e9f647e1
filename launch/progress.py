"""Progress of a long action on standard error: a bar on a terminal, a line now and then elsewhere.

Standard output belongs to results; nothing here writes to it.
"""

import sys
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Final, TextIO

from protocol.closing import Closing

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_SECONDS: Final = 5.0


class Progress(Closing):
    """Told of stages by whoever works; a context manager, so that the bar always ends."""

    shows_bars = False  # whether a library may draw bars of its own on standard error

    @abstractmethod
    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `stage` ("download", "convert", "verify") are through."""

    @abstractmethod
    def note(self, text: str) -> None:
        """One sentence the user should read."""

    def close(self) -> None:
        """End the display."""
        return


class Silent(Progress):
    """Shows nothing (`--quiet`, and tests)."""

    def update(self, stage: str, done: int, total: int) -> None:
        del stage, done, total

    def note(self, text: str) -> None:
        del text


class Lines(Progress):
    """For logs: one line at the start and end of a stage, and every five seconds between."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._stage = ""
        self._last = 0.0
        self._ended = False

    def update(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        ends = done >= total
        if stage == self._stage and (self._ended or (not ends and now - self._last < LINE_SECONDS)):
            return
        self._ended = ends
        self._stage = stage
        self._last = now
        print(f"{stage}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=self._out, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bar(Progress):
    """A bar per stage on a terminal."""

    shows_bars = True

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rich: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        rich = self._started()
        if stage not in self._tasks:
            self._tasks[stage] = rich.add_task(stage, total=total)
        rich.update(self._tasks[stage], completed=done, total=total)

    def note(self, text: str) -> None:
        self._started().console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
            self._tasks.clear()

    def _started(self) -> "RichProgress":
        if self._rich is None:
            from rich.console import Console  # noqa: PLC0415 - 60 ms that most verbs do not need
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as RichProgress  # noqa: PLC0415

            self._rich = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._out),
                transient=True,
            )
            self._rich.start()
        return self._rich


def progress_for(out: TextIO | None = None, *, quiet: bool = False) -> Progress:
    """What suits the stream: nothing when quiet, a bar on a terminal, lines elsewhere."""
    stream = out or sys.stderr
    if quiet:
        return Silent()
    return Bar(stream) if stream.isatty() else Lines(stream)
