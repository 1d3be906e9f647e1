"""Another draft in the place of the present one, while requests go on.

It is loaded beside the present one. Then it takes over: in a moment where the target's captured
layers, block and mask are right for it, else with a new life of the target, into which the running
requests are replayed. Whatever fails on the way, the draft of before serves on.
"""

from typing import Final, Literal

from launch.crew import Crew
from launch.desk import Desk
from launch.dispatch import Dispatch
from launch.events import DraftDown, Role, TargetDown
from launch.parking import Answer, Parking
from protocol.errors import DaemonError, TemporaryFailure, Unavailable

SWAPPING: Final = "another draft takes over"


class Swapping:
    """Of one supervisor; one swap at a time."""

    def __init__(self, crew: Crew, desk: Desk, dispatch: Dispatch, parking: Parking) -> None:
        self._crew = crew
        self._desk = desk
        self._dispatch = dispatch
        self._parking = parking
        self._state: Literal["idle", "loading", "pairing"] = "idle"
        self._renewed = False  # the target got another life for it
        self._draft = ""
        self._answer: Answer = _nobody

    @property
    def is_busy(self) -> bool:
        """Whether a swap is under way."""
        return self._state != "idle"

    def swap(self, draft: str, answer: Answer) -> None:
        """Answered once: when the other draft serves, or why the present one goes on serving."""
        try:
            self._check()
            self._crew.casting.audition(draft)
        except DaemonError as error:
            answer(error)
            return
        self._state, self._draft, self._answer = "loading", draft, answer

    def on_candidate(self, error: DaemonError | None) -> None:
        """It has loaded, or cannot."""
        if error is None:
            try:
                self._check_target()
                self._take_over()
            except DaemonError as failure:
                self._crew.casting.dismiss()
                error = failure
        if error is not None:
            self._conclude(error)

    def on_up(self, role: Role) -> None:
        """A draft serves: the other one, if there is a swap."""
        if role == "draft" and self._state == "pairing":
            self._crew.casting.settle()
            self._conclude(f"the draft is {self._draft} now")

    def on_lost(self, role: Role, error: DaemonError) -> None:
        """Before it served: back to the one before, and to the target's own life."""
        if self._state != "pairing":
            return
        self._crew.casting.demote(renewed=self._renewed)
        if self._renewed and role == "draft":
            self._pause()
        self._conclude(error)
        self._crew.casting.introduce()

    def _take_over(self) -> None:
        self._renewed = self._crew.casting.promote()
        self._state = "pairing"
        self._crew.no_draft = SWAPPING
        self._dispatch.lost("draft")
        self._desk.broadcast(DraftDown(SWAPPING, "swapped"))
        if self._renewed:
            self._pause()
        self._crew.casting.introduce()

    def _pause(self) -> None:
        """The target's life is over; requests wait for the next."""
        self._dispatch.lost("target")
        why = Unavailable("its layers are captured for another draft")
        self._desk.broadcast(TargetDown(why, cause="swapped"))

    def _check(self) -> None:
        if self.is_busy:
            raise Unavailable(f"the swap to {self._draft} is not done yet")
        if self._parking.is_busy("draft"):
            raise Unavailable("the draft is parked: unpark it first")
        self._check_target()

    def _check_target(self) -> None:
        if self._parking.is_busy("target") or self._crew.stage("target") != "ready":
            raise TemporaryFailure(f"the target is {self._crew.stage('target')}, not ready")

    def _conclude(self, what: str | DaemonError) -> None:
        self._state, answer, self._answer = "idle", self._answer, _nobody
        answer(what)


def _nobody(what: str | DaemonError) -> None:
    del what
