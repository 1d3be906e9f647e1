"""What a supervisor tells the service manager: how far it is, when it serves, and that it lives."""

from collections.abc import Callable
from typing import Final

from launch.events import Role
from launch.plan import Loading
from launch.supervisor import Supervisor
from protocol.messages import StatusReport
from protocol.notify import Notifier

# Stages that nothing comes to again and again, as one that is not there is looked for.
FURTHER: Final = ("pairing", "ready")


class Managed:
    """Tells `notifier` of the steps of a start, then of each change of how requests are served.

    `on_loading` is for the supervisor's constructor, `run` for its loop.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.is_ready = False  # and was told so
        self._changed = False
        self._steps: dict[Role, str] = {}  # of each daemon, the last one

    def on_loading(self, step: Loading) -> None:
        """A daemon has come a step further, or was lost; only a step further asks for more time."""
        self._changed = True
        if self.is_ready:
            return
        count = f" {step.done} of {step.total}" if step.total else ""
        is_further = bool(step.total) or step.stage in FURTHER
        tell = self._notifier.loading if is_further else self._notifier.status
        self._steps[step.role] = f"{step.role}: {step.stage}{count}"
        tell("; ".join(self._steps.values()))

    def run(self, supervisor: Supervisor, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping`: ready at first, then signs of life from each turn."""
        self.is_ready, self._changed = True, False
        self._notifier.ready(words(supervisor.describe()))
        while not stopping():
            supervisor.step(self._notifier.interval)
            self._notifier.alive()
            if self._changed:
                self._changed = False
                self._notifier.status(words(supervisor.describe()))


def words(status: StatusReport) -> str:
    """How requests are served now, in one line."""
    return f"serving, {status.mode}" + (f": {status.mode_reason}" if status.mode_reason else "")
