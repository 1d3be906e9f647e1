"""Plans over a tiny pair, how to start the model daemons, and what a client collects. No torch."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.model_pair import local_token, model_text

from launch.plan import ATTACHED_RESTARTS, Attach, Plan
from launch.policy import FULL
from launch.supervisor import Supervisor
from launch.token_ids import pack_ids, unpack_ids
from protocol.config import Deadlines
from protocol.messages import Cancel, Finished, Message, Piece, Progress, Refused, Submit

DEADLINES = Deadlines(load=60.0, hello=15.0, pair=15.0)
FAULTS = "DFLASH_TEST_FAULTS"


def model_command(role, config: Path) -> tuple[str, ...]:
    """Start the model daemons: real processes that load in a moment."""
    return (sys.executable, "-I", str(Path(__file__).parent / "model_daemon.py"), role, str(config))


def plan_for(target: Path, draft: Path | None = None, **changes) -> Plan:
    settings = {
        "model": str(target),
        "draft": None if draft is None else str(draft),
        "threads": 1,
        "dtype": "float32",
        "prefill_chunk": 16,
        "ring_window": 64,
        "draft_context": 64,
        "deadlines": DEADLINES,
    }
    return Plan(**(settings | changes))


def starter(folders, monkeypatch):
    """Makes a supervisor over the model daemons with these faults and deadlines."""

    def make(*faults, draft=True, on_loading=None, **deadlines):
        monkeypatch.setenv(FAULTS, " ".join(faults))
        target, folder = folders
        times = {name: getattr(DEADLINES, name) for name in DEADLINES.__struct_fields__}
        plan = plan_for(
            target, folder if draft else None, deadlines=type(DEADLINES)(**(times | deadlines))
        )
        return Supervisor(plan, on_loading=on_loading, command=model_command)

    return make


def text(prompt, limit):
    """What the model daemons say."""
    return model_text(prompt, limit, -1, local_token)[0]


def attach_plan(target, draft=None, **changes) -> Plan:
    """For services in these run directories."""
    attach = Attach(target=str(target), draft=None if draft is None else str(draft))
    times = {"restarts": ATTACHED_RESTARTS, "deadlines": DEADLINES}
    return Plan(**({"attach": attach} | times | changes))


@dataclass
class Client:
    """Collects what one request's sink gets."""

    supervisor: Supervisor
    number: int
    messages: list[Message] = field(default_factory=list)
    answers: int = 0

    def submit(self, prompt, max_tokens, **fields) -> "Client":
        """At full width unless `fields` say otherwise, so that what a round holds is known."""
        fields = {"block_width": FULL} | fields
        message = Submit(
            request=self.number, prompt=pack_ids(prompt), max_tokens=max_tokens, **fields
        )
        self.supervisor.submit(message, self._take)
        return self

    def _take(self, message: Message) -> None:
        self.messages.append(message)
        self.answers += isinstance(message, Finished | Refused)

    def cancel(self) -> None:
        self.supervisor.cancel(Cancel(request=self.number))

    def finish(self) -> "Client":
        self.supervisor.run_until(lambda: self.answers > 0)
        return self

    @property
    def done(self) -> bool:
        return self.answers > 0

    @property
    def pieces(self) -> list[Piece]:
        return [message for message in self.messages if isinstance(message, Piece)]

    @property
    def progress(self) -> list[Progress]:
        return [message for message in self.messages if isinstance(message, Progress)]

    @property
    def tokens(self) -> list[int]:
        """Everything emitted; fails where a position is missing or repeated."""
        found: list[int] = []
        first = self.pieces[0].position if self.pieces else 0
        for piece in self.pieces:
            assert piece.position == first + len(found)
            found += unpack_ids(piece.tokens)
        return found

    @property
    def finished(self) -> Finished:
        assert isinstance(self.messages[-1], Finished), self.messages[-1]
        return self.messages[-1]

    @property
    def refused(self) -> Refused:
        assert isinstance(self.messages[-1], Refused), self.messages[-1]
        return self.messages[-1]
