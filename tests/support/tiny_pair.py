"""A tiny target and a draft made for it, on disk, and what a supervisor's client collects."""

from dataclasses import dataclass, field
from pathlib import Path

from support.tiny_draft import Z_LAB, merged, write_draft
from support.tiny_target import write_tiny_target

from launch.plan import Plan
from launch.supervisor import Supervisor
from launch.token_ids import pack_ids, unpack_ids
from protocol.config import Deadlines
from protocol.messages import Cancel, Finished, Message, Piece, Progress, Refused, Submit

DEADLINES = Deadlines(load=25.0, hello=5.0, pair=10.0, terminate=3.0)
LAYERS, HIDDEN, VOCAB = 4, 32, 97


def write_pair(folder: Path, **draft_changes) -> tuple[Path, Path]:
    """Write both checkpoints; EOS is an id the target never chooses by being out of reach."""
    target = write_tiny_target(folder / "target", "llama2", eos_token_id=VOCAB - 1)
    raw = merged(
        Z_LAB,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_target_layers=LAYERS,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
        **draft_changes,
    )
    draft = folder / "draft"
    write_draft(draft, raw)
    return target, draft


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


@dataclass
class Client:
    """Collects what one request's sink gets."""

    supervisor: Supervisor
    number: int
    messages: list[Message] = field(default_factory=list)
    answers: int = 0

    def submit(self, prompt, max_tokens, **fields) -> "Client":
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
