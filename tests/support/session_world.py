"""Drives one pure session over the model pair through any order of events."""

from collections import deque
from dataclasses import dataclass, field, replace

import msgspec
from support.model_pair import VOCAB, ModelDraft, ModelTarget, model_text

from launch.auto_width import Experience
from launch.coupling import Coupling
from launch.dispatch import MESSAGES
from launch.events import (
    Accuse,
    CancelRequested,
    Cause,
    DeadlineExpired,
    DraftDown,
    DraftFacts,
    DraftLate,
    DraftUp,
    Emit,
    Fail,
    Finish,
    Reply,
    Send,
    Start,
    TargetDown,
    TargetFacts,
    TargetUp,
    Withdrawn,
)
from launch.inprocess import VERBS
from launch.peer import ANSWERED_BY
from launch.policy import FULL
from launch.session import Session
from launch.token_ids import pack_ids, unpack_ids
from protocol.errors import DaemonDied, DaemonError
from protocol.messages import CloseItem, ItemFailed, OpenItem, Piece, ProposedItem, Submit
from protocol.state import Phase, advance

SEQUENCE = 7
TARGET_LIFE = 3


@dataclass
class Setting:
    prompt: list[int]
    max_tokens: int
    block_size: int = 5
    draft: bool = True
    chunk: int = 24
    context: int = 32
    luck: int = 3
    max_positions: int = 200
    eos: int = 0  # -1: the text never stops
    block_width: int = FULL
    verify: str = "chain"
    trees: bool = True  # whether the target verifies them
    top_k: int = 8
    draft_positions: int = 1 << 20

    @property
    def facts(self) -> TargetFacts:
        capacity = ModelTarget.capacity
        rows = (self.max_positions, self.chunk, capacity, 16)
        return TargetFacts(TARGET_LIFE, VOCAB, *rows, tree_verify=self.trees)

    @property
    def text(self) -> tuple[list[int], str]:
        limit = min(self.max_tokens, self.max_positions - len(self.prompt))
        return model_text(self.prompt, limit, self.eos)


@dataclass
class World:
    """One session, what it has asked of whom, and what it has said to its client."""

    setting: Setting
    session: Session = field(init=False)
    fields: dict[str, object] = field(default_factory=dict)  # more of Submit
    coupling: Coupling | None = None
    target: ModelTarget = field(default_factory=ModelTarget)
    draft: ModelDraft = field(init=False)
    draft_life: int = 10
    draft_lives: bool = True
    target_life: int = TARGET_LIFE
    target_lives: bool = True
    accused: list[Accuse] = field(default_factory=list)
    asked: dict[str, deque] = field(default_factory=lambda: {"target": deque(), "draft": deque()})
    held: list[Reply] = field(default_factory=list)
    said: list[Reply] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    ends: list[Finish | Fail] = field(default_factory=list)
    target_faults: int = 0
    phases: dict[str, Phase] = field(
        default_factory=lambda: {"target": Phase.NEW, "draft": Phase.NEW}
    )

    def __post_init__(self):
        setting = self.setting
        self.target = self._new_target()
        self.draft = ModelDraft(self.target, setting.context, setting.luck)
        self.draft_lives = setting.draft
        submit = Submit(
            request=1,
            prompt=pack_ids(setting.prompt),
            max_tokens=setting.max_tokens,
            **self.fields,
        )
        self.session = Session(
            submit,
            SEQUENCE,
            setting.facts,
            self.draft_facts if setting.draft else None,
            no_draft="none was given",
            coupling=self.coupling,
            manner=Experience().manner(setting.block_width, setting.verify, 9),
        )

    def _new_target(self) -> ModelTarget:
        return ModelTarget(eos=self.setting.eos)

    @property
    def draft_facts(self) -> DraftFacts:
        setting = self.setting
        rows = (setting.block_size, setting.context)
        more = {"top_k": setting.top_k, "positions": setting.draft_positions}
        return DraftFacts(self.draft_life, *rows, **more)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in unpack_ids(piece.tokens)]

    def feed(self, event) -> None:
        """Perform the commands of one event, checking what must hold of every emission."""
        for command in self.session.handle(event):
            assert not self.ends, f"{command} after the end"
            match command:
                case Send(role, item):
                    assert self.target_lives if role == "target" else self.draft_lives
                    self.asked[role].append(item)
                    self._step(role, MESSAGES[type(item)])
                case Emit(Piece() as piece):
                    assert piece.position == len(self.setting.prompt) + len(self.tokens)
                    self.pieces.append(piece)
                case Emit(mark):
                    assert not self.marks or mark.done > self.marks[-1][0]
                    self.marks.append((mark.done, mark.total))
                case Accuse():
                    self.accused.append(command)
                case Finish() | Fail():
                    self.ends.append(command)

    def start(self) -> "World":
        self.feed(Start())
        return self

    # --- one action each ---------------------------------------------------------------------

    def answer(self, role: str, change=lambda answer: answer) -> None:
        reply = self._compute(role)
        if reply is not None:
            self.said.append(reply)
            self.feed(msgspec.structs.replace(reply, item=change(reply.item)))

    def hold(self, role: str) -> None:
        """The daemon answers, but the answer is late."""
        reply = self._compute(role)
        if reply is not None:
            self.held.append(reply)

    def release(self) -> None:
        if self.held:
            reply = self.held.pop(0)
            self.said.append(reply)
            self.feed(reply)

    def lose(self, role: str) -> None:
        """The daemon computes, and the answer never comes."""
        self._compute(role)

    def repeat(self) -> None:
        for reply in self.said[-2:]:
            self.feed(reply)

    def foreign(self) -> None:
        """Answers of another life, sequence and round."""
        for reply in self.said[-1:]:
            self.feed(msgspec.structs.replace(reply, target_life=self.target_life - 1))
            self.feed(
                msgspec.structs.replace(reply, item=msgspec.structs.replace(reply.item, sequence=1))
            )
            for number in (reply.item.round - 1, reply.item.round + 1000):
                item = msgspec.structs.replace(reply.item, round=max(0, number))
                self.feed(msgspec.structs.replace(reply, item=item, draft_life=self.draft_life - 1))

    def nonsense(self) -> None:
        """The draft proposes too few, or ids that no target has."""

        def spoil(answer):
            if not isinstance(answer, ProposedItem):
                return answer
            wrong = (b"", pack_ids([VOCAB]) * (len(answer.tokens) // 4))
            tokens = wrong[len(self.said) % 2]
            return msgspec.structs.replace(answer, tokens=tokens)

        self.answer("draft", spoil)

    def refuse(self, role: str, code: str = "internal") -> None:
        """The daemon refuses one request without computing; closing is never refused."""
        if self.asked[role] and isinstance(self.asked[role][0], CloseItem):
            self.answer(role)
        elif self.asked[role]:
            item = self.asked[role].popleft()
            self.target_faults += role == "target"
            answer = _failed(item, code, "refused in this test")
            self._see(role, item, answer)
            self.feed(self._reply(role, answer))

    def deadline(self, role: str) -> None:
        number = self.session._asked.asked[role].round if role in self.session._asked.asked else 0
        self.feed(DeadlineExpired(role, number))
        if role == "target":
            self.kill_target()

    def late(self) -> None:
        """The draft's soft deadline passes."""
        asked = self.session._asked.asked.get("draft")
        self.feed(DraftLate(asked.round if asked is not None else 0))

    def withdraw(self) -> None:
        """The draft is late with another sequence, and is not asked at all."""
        asked = self.session._asked.asked.get("draft")
        if asked is None or isinstance(asked, OpenItem | CloseItem):
            return
        if self.asked["draft"] and self.asked["draft"][-1].round == asked.round:
            self.asked["draft"].pop()
            self.phases["draft"] = Phase.OPEN
            self.feed(Withdrawn(asked.round))

    def kill_draft(self, cause: Cause = "lost") -> None:
        self.draft_lives = False
        self.asked["draft"].clear()
        self.feed(DraftDown("it was killed", cause))

    def start_draft(self) -> None:
        if not self.target_lives:
            return
        if self.draft_lives:
            self.kill_draft()
        self.draft_life += 1
        self.draft = ModelDraft(self.target, self.setting.context, self.setting.luck)
        self.draft_lives = True
        self.phases["draft"] = Phase.NEW
        self.feed(DraftUp(self.draft_facts))

    def kill_target(self, *, fatal: bool = False, cause: Cause = "lost") -> None:
        """The draft is paired with this life, and waits for the next one."""
        self.target_faults += fatal
        self.target_lives = self.draft_lives = False
        self.asked["target"].clear()
        self.asked["draft"].clear()
        self.feed(TargetDown(DaemonDied("it was killed"), fatal, cause))

    def start_target(self) -> None:
        if self.target_lives:
            self.kill_target()
        self.target_life += 1
        self.target = self._new_target()
        self.target_lives = True
        self.phases["target"] = Phase.NEW
        self.feed(TargetUp(replace(self.setting.facts, life=self.target_life)))

    def pair(self) -> None:
        """The draft of this life meets the new target, and forgets what it held."""
        if self.target_lives and not self.draft_lives and self.setting.draft:
            self.draft = ModelDraft(self.target, self.setting.context, self.setting.luck)
            self.draft_lives = True
            self.phases["draft"] = Phase.NEW
            self.feed(DraftUp(self.draft_facts))

    def cancel(self) -> None:
        self.feed(CancelRequested())

    def drain(self) -> None:
        """Answer everything; what was lost meets its deadline."""
        for _ in range(2000):
            if self.ends:
                return
            if self.session.phase == "waiting":
                self.start_target()
                self.pair()
            for role in ("target", "draft"):
                if self.asked[role]:
                    self.answer(role)
                elif role in self.session._asked.asked:
                    self.deadline(role)
        raise AssertionError("the session does not end")

    def _compute(self, role: str) -> Reply | None:
        if not self.asked[role]:
            return None
        item = self.asked[role].popleft()
        engine = self.target if role == "target" else self.draft
        try:
            answer = getattr(engine, VERBS[type(item)])(item)
        except DaemonError as error:
            answer = _failed(item, error.code, str(error))
        self._see(role, item, answer)
        return self._reply(role, answer)

    def _see(self, role: str, item, answer) -> None:
        (reply,) = ANSWERED_BY[MESSAGES[type(item)]]
        self._step(role, ItemFailed if isinstance(answer, ItemFailed) else reply)

    def _step(self, role: str, message) -> None:
        """Whatever is sent and answered must be legal by the table of the protocol."""
        self.phases[role] = advance(role, self.phases[role], message, sequence=SEQUENCE)

    def _reply(self, role: str, item) -> Reply:
        return Reply(role, self.target_life, self.draft_life, item)


def _failed(item, code: str, detail: str) -> ItemFailed:
    return ItemFailed(sequence=item.sequence, round=item.round, code=code, detail=detail)
