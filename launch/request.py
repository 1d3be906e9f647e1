"""One client's request as the desk holds it, and what can be said about it at any moment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from launch.hints import Mode
from launch.policy import WidthPolicy
from launch.session import Session
from launch.statistics import Clock
from launch.stream import FindStop
from launch.token_ids import WIDTH
from protocol.messages import Message, RequestStatus, Submit

Sink: TypeAlias = Callable[[Message], None]

NOT_BEGUN: Final[Mode] = ("autoregressive", "it has not begun")


@dataclass(slots=True)
class ActiveRequest:
    """From Submit to its answer; `session` is None while it waits for a slot."""

    submit: Submit
    sink: Sink
    clock: Clock
    find_stop: FindStop | None
    died_at: tuple[int, int] | None = None  # how far it had come when the target died of it
    session: Session | None = None
    policy: WidthPolicy | None = None  # of a request of the supervisor's own, which nobody counts

    @property
    def _phase(self) -> str:
        if self.session is None:
            return "waiting"
        return "paused" if self.session.phase == "waiting" else self.session.phase

    def status(self, now: float) -> RequestStatus:
        """What it has come to by `now`, on the clock of its own times."""
        session, submit = self.session, self.submit
        mode: Mode = NOT_BEGUN if session is None else session.mode
        prefilled, emitted = (0, 0) if session is None else session.progress
        tally = None if session is None else session.tally
        return RequestStatus(
            request=submit.request,
            phase=self._phase,
            prompt_tokens=len(submit.prompt) // WIDTH,
            prefilled_tokens=prefilled,
            completion_tokens=emitted,
            max_tokens=submit.max_tokens,
            mode=mode[0],
            mode_reason=mode[1],
            num_rounds=0 if tally is None else tally.num_rounds,
            num_draft_tokens=0 if tally is None else tally.num_draft_tokens,
            num_accepted_tokens=0 if tally is None else tally.num_accepted_tokens,
            seconds=max(0.0, now - self.clock.submitted),
        )


@dataclass(slots=True)
class Totals:
    """Figures of all requests that have ended."""

    completion_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_stale_replies: int = 0
    moved_bytes: int = 0

    def add(self, session: Session) -> None:
        """Count one that has ended, however."""
        tally = session.tally
        self.completion_tokens += session.journal.emitted
        self.num_rounds += tally.num_rounds
        self.num_drafts += tally.num_drafts
        self.num_draft_tokens += tally.num_draft_tokens
        self.num_accepted_tokens += tally.num_accepted_tokens
        self.moved_bytes += tally.moved_bytes
        self.num_stale_replies += session.num_stale_replies
