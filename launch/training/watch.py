"""What both stages look at beside their child: signals, the display, and the deadlines."""

import signal
from dataclasses import dataclass, field

from launch.interrupts import Interrupts
from launch.training.bars import Stages
from protocol.config import Deadlines


class Stopped(Exception):
    """No error: a signal came. What is on the disk is whole."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.lost = ""  # what is not on the disk, if it is worth a word


@dataclass(frozen=True)
class Watch:
    """Of one command."""

    interrupts: Interrupts
    stages: Stages
    deadlines: Deadlines = field(default_factory=Deadlines)
    held: tuple[int, ...] = ()  # locks that the child holds too, so that it outlives none of them

    def check(self) -> None:
        """Raise Stopped when a signal came."""
        if self.interrupts.number is not None:
            self.stages.note("stopping: what is complete is written")
            raise Stopped(self.interrupts.number)
        self.interrupts.on_ready()
