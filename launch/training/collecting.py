"""The first stage: a child answers what `launch.training.harvest` asks, until there is enough."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from launch.process import daemon_command
from launch.training.harvest import Harvest
from launch.training.pace import Pace
from launch.training.watch import Stopped, Watch
from launch.training.worker import Worker
from protocol.errors import DaemonDied, DaemonError
from protocol.training import ANSWER, Answered, CollectLine, Report, Written

MODULE: Final = "target_daemon.collecting"
STAGE: Final = "collect"
OUTSTANDING: Final = 192  # requests: some times more than the child answers at once
TICK_SECONDS: Final = 0.5

Said: TypeAlias = Answered | Written | Report  # `Worker` raises a Problem


@dataclass(frozen=True)
class Goal:
    """When there is enough: so many tokens, or so many seconds, whichever is said; 0: neither."""

    tokens: int = 0
    seconds: float = 0.0

    def is_reached(self, tokens: int, seconds: float) -> bool:
        """Whether it is, with so many tokens, after so many seconds."""
        return bool(self.tokens and tokens >= self.tokens) or bool(
            self.seconds and seconds >= self.seconds
        )


def command(config: Path) -> tuple[str, ...]:
    """The command line of our own child."""
    return daemon_command(MODULE, config)


class Collecting:
    """One run of the child. `saved` is called with the seconds so far, at each shard."""

    def __init__(
        self,
        harvest: Harvest,
        goal: Goal,
        watch: Watch,
        saved: Callable[[float], None],
        *,
        before: float = 0.0,
    ) -> None:
        self._harvest, self._goal, self._watch, self._saved = harvest, goal, watch, saved
        self._before = before  # seconds that earlier runs took
        self._began = 0.0  # when the child was loaded: that makes no data
        self._pace = Pace()
        self._under_way = ""  # in the child, in words
        self._loading = ""  # the stage that is shown before there are answers

    def run(self, line: Sequence[str]) -> None:
        """Start the child `line`, and end it when there is enough; raises what is wrong with it.

        Whatever it answered in full is on the disk afterwards, also where Stopped is raised.
        """
        worker: Worker[Said] = Worker(
            "collecting",
            line,
            CollectLine,
            deadlines=self._watch.deadlines,
            inherited=self._watch.held,
        )
        try:
            with worker:
                self._ask(worker)
                self._finish(worker)
        except Stopped as stopped:
            with suppress(DaemonError):  # of its end, which was asked for
                self._take(worker.poll(0.0))  # what it said while it ended
            stopped.lost = self._under_way
            raise
        finally:
            self._saved(self.seconds)
        self._watch.stages.end(STAGE)

    def _ask(self, worker: Worker[Said]) -> None:
        while not self._is_enough():
            self._watch.check()
            self._send(worker)
            self._take(worker.poll(TICK_SECONDS, self._watch.interrupts.fd))
            self._show()
            if worker.has_ended and not self._is_enough():
                worker.check()
                raise DaemonDied("the collecting process ended before there was enough")

    def _send(self, worker: Worker[Said]) -> None:
        """Ask as much as is missing, and no more than the child is to have before it."""
        harvest = self._harvest
        while harvest.outstanding < OUTSTANDING:
            is_enough = self._goal.is_reached(harvest.tokens + harvest.coming, self.seconds)
            if is_enough and (harvest.has_held_out or harvest.outstanding):
                return
            asks = harvest.asks(1)
            if not asks:
                return
            worker.send(asks[0])

    def _finish(self, worker: Worker[Said]) -> None:
        tokens = self._harvest.tokens
        self._watch.stages.update(STAGE, tokens, tokens, "tokens", "writing")
        worker.terminate()
        while not worker.has_ended:
            self._watch.check()
            self._take(worker.poll(TICK_SECONDS, self._watch.interrupts.fd))
            worker.on_deadline()

    @property
    def seconds(self) -> float:
        """Of answering, those of earlier runs included."""
        return self._before + (time.monotonic() - self._began if self._began else 0.0)

    def _is_enough(self) -> bool:
        harvest = self._harvest
        if not self._goal.is_reached(harvest.tokens, self.seconds):
            return harvest.is_over
        # Without something to walk the data are of no use, and it is what is asked next.
        return harvest.has_held_out or harvest.is_over

    def _take(self, lines: Sequence[Said]) -> None:
        for line in lines:
            match line:
                case Answered():
                    self._begin()
                    self._harvest.answered(line)
                case Written():
                    self._saved(self.seconds)
                case Report():
                    self._on_report(line)

    def _begin(self) -> None:
        """The child answers."""
        if not self._began:
            self._began = time.monotonic()
            self._pace.note(self._began, self._harvest.tokens)
            self._watch.stages.end(self._loading)

    def _on_report(self, report: Report) -> None:
        if report.stage == ANSWER:
            self._begin()
            self._under_way = report.detail if report.done else ""
        elif not self._began:
            self._loading = report.stage
            self._watch.stages.report(report)

    def _show(self) -> None:
        if not self._began:
            return
        tokens, left = self._harvest.tokens, self._goal.seconds - self.seconds
        self._pace.note(time.monotonic(), tokens)
        rate = self._pace.rate
        total = self._goal.tokens or tokens + max(0.0, left) * rate
        detail = f"{rate:,.0f} a second"
        detail += f", {self._under_way}" if self._under_way else ""
        self._watch.stages.update(STAGE, tokens, total, "tokens", detail)
