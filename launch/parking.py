"""Parking: a daemon whose process is ended on purpose, to free its memory, until it is unparked.

Requests that run finish first, or are paused; what waits for a parked target is refused in time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from launch.crew import DRAFT_PARKED, Crew
from launch.deadlines_heap import DeadlineHeap, Timer
from launch.desk import Desk
from launch.dispatch import Dispatch
from launch.events import DraftDown, Role, TargetDown
from protocol.errors import DaemonError, Parked, Unavailable, UsageError
from protocol.messages import DaemonStatus

BEING_PARKED: Final = "the target is being parked: new requests wait until it is unparked"
TARGET_PARKED: Final = "the target is parked: nothing is served until it is unparked"
Answer: TypeAlias = Callable[[str | DaemonError], None]  # what was done, or why it was not


@dataclass(slots=True)
class _Side:
    """One daemon. "draining": no new request uses it; "ending": its process is told to end."""

    state: Literal["running", "draining", "ending", "parked", "starting"] = "running"
    within: float = 0.0
    since: float = 0.0  # when it was parked
    answers: list[Answer] = field(default_factory=list)

    def answer(self, what: str | DaemonError) -> None:
        """Tell all who wait for the present change."""
        answers, self.answers = self.answers, []
        for answer in answers:
            answer(what)


class Parking:
    """Of one supervisor, which calls `advance` after whatever may have ended a request."""

    def __init__(self, crew: Crew, desk: Desk, dispatch: Dispatch, timers: DeadlineHeap) -> None:
        self._crew = crew
        self._desk = desk
        self._dispatch = dispatch
        self._timers = timers
        self._sides: dict[Role, _Side] = {"target": _Side(), "draft": _Side()}
        self._patience = Timer(0.0, None)

    def holds(self, role: Role) -> bool:
        """Whether no new request may use it."""
        return self._sides[role].state not in ("running", "starting")

    def is_busy(self, role: Role) -> bool:
        """Whether it is parked, or on the way there or back."""
        return self._sides[role].state != "running"

    def status(self, role: Role) -> DaemonStatus:
        """The daemon's status; one that requests only finish with says so."""
        status = self._crew.status(role)
        draining = self._sides[role].state == "draining"
        return msgspec.structs.replace(status, reason="being parked") if draining else status

    @property
    def no_draft(self) -> str:
        """Why new requests go without the draft that is there; empty where they do not."""
        return "the draft is being parked" if self._sides["draft"].state == "draining" else ""

    @property
    def no_target(self) -> str:
        """Why new requests wait until it is unparked; empty where they do not."""
        if not self.holds("target"):
            return ""
        is_draining = self._sides["target"].state == "draining"
        return BEING_PARKED if is_draining else TARGET_PARKED

    @property
    def is_ready(self) -> bool:
        """Whether requests may start."""
        return not self.holds("target")

    def park(self, role: Role, answer: Answer, *, now: bool, within: float) -> None:
        """Answered when the process has ended; parking again with `now` stops the waiting."""
        side = self._sides[role]
        if refusal := self._refusal(role):
            answer(refusal)
            return
        if side.state == "parked":
            answer(f"the {role} is parked")
            return
        if side.state == "starting":
            side.answer(Unavailable(f"the {role} is parked again"))
        side.answers.append(answer)
        side.within = within
        if side.state in ("running", "starting"):
            side.state = "draining"
        if side.state == "draining" and now:
            self._end(role)
        self.advance()

    def unpark(self, role: Role, answer: Answer) -> None:
        """Answered when it serves, or when it turns out that it cannot."""
        side = self._sides[role]
        if refusal := self._refusal(role):
            answer(refusal)
            return
        if side.state in ("draining", "ending"):
            side.answer(Unavailable(f"the {role} is unparked again"))
        if role == "draft" and self._draft_comes_later:
            side.state = "running"
            answer("the draft is started with the target")
            return
        if side.state in ("running", "draining"):
            side.state = "running"
            answer(f"the {role} runs")
            return
        side.state = "starting"
        side.answers.append(answer)
        if role == "target":
            self._timers.cancel(self._patience)
            self._crew.unpark("target")
        if not self.holds("draft"):
            self._crew.unpark("draft")

    def advance(self) -> None:
        """Go on with what waits for requests to end."""
        target, draft = self._sides["target"], self._sides["draft"]
        if target.state == "draining" and not self._desk.running:
            self._end("target")
        if draft.state == "draining" and not self._desk.uses_draft:
            self._end("draft")

    def note_submitted(self) -> None:
        """A request waits, maybe for a parked target."""
        parked = self._sides["target"].state in ("ending", "parked")
        if parked and self._patience.action is None:
            self._await(time.monotonic() + self._sides["target"].within)

    def on_parked(self) -> None:
        """A process has ended; with a target, the draft's must have ended as well."""
        for role, side in self._sides.items():
            ended = self._crew.is_gone(role) and (role == "draft" or self._crew.is_gone("draft"))
            if side.state == "ending" and ended:
                side.state = "parked"
                side.answer(f"the {role} is parked")

    def on_up(self, role: Role) -> None:
        """It serves."""
        side = self._sides[role]
        if side.state == "starting":
            side.state = "running"
            side.answer(f"the {role} runs")

    def on_lost(self, role: Role, error: DaemonError) -> None:
        """It could not be started; it is tried again, as any that is lost."""
        side = self._sides[role]
        if side.state == "starting":
            side.state = "running"
            side.answer(error)

    @property
    def _draft_comes_later(self) -> bool:
        """Whether it has no process, and gets none before its target has one again."""
        down = ("ending", "parked")
        is_parked = self._sides["draft"].state in down and self.holds("target")
        return is_parked or self._sides["target"].state in down

    def _refusal(self, role: Role) -> UsageError | None:
        if not self._crew.spawns:
            return UsageError(f"the {role} is a service of its own: stop and start that")
        return UsageError("there is no draft") if self._crew.stage(role) == "absent" else None

    def _end(self, role: Role) -> None:
        """End the process; requests that still run are paused, or go on without a draft."""
        side = self._sides[role]
        side.state, side.since = "ending", time.monotonic()
        if role == "draft":
            self._dispatch.lost("draft")
            self._desk.broadcast(DraftDown(DRAFT_PARKED, "parked"))
        else:
            for each in ("target", "draft"):
                self._dispatch.lost(each)
            self._desk.broadcast(TargetDown(Parked("the target is parked"), cause="parked"))
            self._await(side.since + side.within)
        self._crew.park(role)
        self.on_parked()  # it may have had no process

    def _await(self, when: float) -> None:
        self._timers.cancel(self._patience)
        self._patience = self._timers.add(when, self._expire)

    def _expire(self) -> None:
        """Refuse what has waited long enough, and look again when the next one has."""
        side, now = self._sides["target"], time.monotonic()
        error = Parked(f"the target is parked, and was not unparked within {side.within:g} s")
        if now >= side.since + side.within:
            self._desk.broadcast(TargetDown(error, fatal=True, cause="parked"))
        oldest = self._desk.refuse_older(now - side.within, error)
        if oldest is not None:
            self._await(oldest + side.within)
