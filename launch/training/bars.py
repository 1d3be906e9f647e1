"""Progress of stages that count something: a bar on a terminal, a line a minute elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

from protocol.closing import Closing
from protocol.training import Report

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS: Final = 60.0


class Stages(Closing):
    """Shows nothing: `--quiet`, and the base of what does."""

    def update(
        self, stage: str, done: float, total: float, unit: str = "", detail: str = ""
    ) -> None:
        """`done` of `total` of what `stage` counts, in `unit`; total 0: unknown."""

    def report(self, told: Report) -> None:
        """The same, of a child."""
        self.update(told.stage, told.done, told.total, told.unit, told.detail)

    def note(self, text: str) -> None:
        """One line that stays."""

    def end(self, stage: str) -> None:
        """The stage is over."""

    def close(self) -> None:
        """End the display."""


class Lines(Stages):
    """For logs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._told: dict[str, float] = {}

    def update(
        self, stage: str, done: float, total: float, unit: str = "", detail: str = ""
    ) -> None:
        now = time.monotonic()
        if now - self._told.get(stage, -LINE_SECONDS) < LINE_SECONDS:
            return
        self._told[stage] = now
        self.note(f"{stage}: {told(done, total, unit, detail)}")

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bars(Stages):
    """A bar for the present stage on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rich: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(
        self, stage: str, done: float, total: float, unit: str = "", detail: str = ""
    ) -> None:
        rich, text = self._started(), told(done, total, unit, detail)
        if stage not in self._tasks:
            self._tasks[stage] = rich.add_task(stage, total=total or None, told=text)
        rich.update(self._tasks[stage], completed=done, total=total or None, told=text)

    def note(self, text: str) -> None:
        self._started().console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self, stage: str) -> None:
        if stage in self._tasks:
            self._started().remove_task(self._tasks.pop(stage))

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
            self._tasks.clear()

    def _started(self) -> "Progress":
        if self._rich is None:
            from rich.console import Console  # noqa: PLC0415 - 60 ms that most verbs do not need
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[told]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(file=self._out),
                transient=True,
            )
            self._rich.start()
        return self._rich


def told(done: float, total: float, unit: str, detail: str) -> str:
    """How far something is, in words: "61 of 100 tokens, 7 a second"."""
    of = f" of {total:,.0f}" if total else ""
    count = f"{done:,.0f}{of} {unit}".rstrip() if done or total or unit else ""
    return ", ".join(part for part in (count, detail) if part)


def stages_for(out: TextIO | None = None, *, quiet: bool = False) -> Stages:
    """What suits the stream."""
    stream = out or sys.stderr
    if quiet:
        return Stages()
    return Bars(stream) if stream.isatty() else Lines(stream)
