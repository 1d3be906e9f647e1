"""When a daemon that failed is started again: soon at first, then later, at last rarely. Pure."""

from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from protocol.config import FrozenConfig, Timeout
from protocol.errors import (
    ConfigError,
    DaemonAbsent,
    DaemonError,
    DeviceAbsent,
    InsufficientMemory,
)

# What starting again at once cannot help.
RARELY: Final = (ConfigError, InsufficientMemory, DaemonAbsent, DeviceAbsent)
Factor = Annotated[float, Meta(ge=1.0, le=100.0)]


class Restarts(FrozenConfig, frozen=True, kw_only=True):
    """How often, in seconds; the times double (or what `factor` says) from failure to failure."""

    first: Timeout = 0.05
    factor: Factor = 2.0
    longest: Timeout = 5.0
    patience: Annotated[int, Meta(ge=1, le=1000)] = 6  # failures in a row, then it is left off
    rarely: Timeout = 60.0
    healthy: Timeout = 10.0  # a life that served so long ends a row of failures


@dataclass(slots=True)
class Backoff:
    """One daemon's failures in a row; times are on the caller's monotonic clock."""

    times: Restarts
    failures: int = 0  # in a row
    _up_since: float | None = field(default=None)

    def up(self, now: float) -> None:
        """It serves."""
        self._up_since = now

    def failed(self, now: float, error: DaemonError) -> float:
        """Note a failure; returns how many seconds to wait before the next start.

        What trying again cannot help (a checkpoint, a mismatch) is tried again rarely at once.
        """
        since, self._up_since = self._up_since, None
        if since is not None and now - since >= self.times.healthy:
            self.failures = 0
        self.failures += 1
        if isinstance(error, RARELY):
            self.failures = max(self.failures, self.times.patience)
        if self.is_left_off:
            return self.times.rarely
        exponent = min(self.failures - 1, 64)  # so that no power overflows
        return min(self.times.first * self.times.factor**exponent, self.times.longest)

    @property
    def is_left_off(self) -> bool:
        """Whether it has failed so often that it is tried rarely."""
        return self.failures >= self.times.patience
