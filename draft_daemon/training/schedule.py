"""How far a run is, and what that means for its rate: by steps, or by the wall clock."""

import math
from dataclasses import dataclass
from typing import Final

from protocol.errors import ConfigError
from protocol.training import TrainConfig

WARM_UP: Final = 0.02  # of the run
LEAST: Final = 0.1  # of the rate, at the end
FIRST: Final = 0.05  # of the rate, at the first step
SECONDS_AN_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pure: progress from 0 to 1, rate, and whether head and blocks are whole."""

    rate: float
    steps: int  # 0: by the clock
    seconds: float
    whole: float

    def progress(self, step: int, seconds: float) -> float:
        """Which part of the run is over, after `step` steps and `seconds`."""
        return min(1.0, step / self.steps if self.steps else seconds / self.seconds)

    def rate_at(self, progress: float) -> float:
        """A linear warm-up, then a cosine."""
        warm = min(1.0, FIRST + (1 - FIRST) * progress / WARM_UP)
        return self.rate * warm * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * progress)) / 2)

    def is_whole(self, progress: float) -> bool:
        """Whether all rows of the head are scored, and all rows of a block trained."""
        return progress >= 1 - self.whole


def schedule_of(config: TrainConfig) -> Schedule:
    """Raises ConfigError where neither steps nor hours are said, or both are."""
    if (config.steps > 0) == (config.hours > 0):
        raise ConfigError(f"{config.steps} steps and {config.hours:g} hours: say one of both")
    return Schedule(config.rate, config.steps, config.hours * SECONDS_AN_HOUR, config.whole)
