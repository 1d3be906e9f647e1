"""The seed's function: any two objects of `protocol.engines`, one process, the same session.

No codec, socket or shared memory: items pass by reference, so that what is left between two
engine calls is the session itself.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from launch.admission import check_base, check_hints, check_prompt, check_tree
from launch.auto_width import Experience
from launch.coupling import Couplings
from launch.events import (
    Accuse,
    CancelRequested,
    Command,
    DraftFacts,
    Emit,
    Fail,
    Finish,
    Reason,
    Reply,
    Request,
    Send,
    Start,
    TargetFacts,
)
from launch.events import (
    Result as Answer,
)
from launch.policy import AUTO
from launch.session import Session
from launch.statistics import Clock, statistics
from launch.stream import FindStop
from launch.token_ids import pack_ids, unpack_ids
from protocol.engines import DraftEngine, TargetEngine
from protocol.errors import DaemonError, ProtocolError
from protocol.messages import (
    DEFAULT_TREE_BUDGET,
    CloseItem,
    IngestItem,
    ItemFailed,
    Ngram,
    OpenItem,
    Piece,
    PrefillItem,
    ProposeItem,
    ReplayItem,
    Sampling,
    Statistics,
    Submit,
    TreeVerify,
    VerifyItem,
)

Engine: TypeAlias = TargetEngine | DraftEngine
VERBS: Final[dict[type[Request], str]] = {
    OpenItem: "open",
    PrefillItem: "prefill",
    ReplayItem: "replay",
    IngestItem: "ingest",
    ProposeItem: "propose",
    VerifyItem: "verify",
    CloseItem: "close",
}


@dataclass(frozen=True)
class Result:
    """What `run_spec_decode` returns; hints are counted apart from the draft's proposals."""

    token_ids: tuple[int, ...]
    finish_reason: Reason
    statistics: Statistics
    num_hint_tokens: int
    num_accepted_hint_tokens: int


def run_spec_decode(  # noqa: PLR0913  # the seed's signature
    target: TargetEngine,
    draft: DraftEngine | None,
    prompt: Sequence[int],
    n_gen: int,
    *,
    facts: TargetFacts,
    block_size: int = 1,
    draft_context: int = 4096,
    sampling: Sampling | None = None,
    hint_tokens: Mapping[int, int] | None = None,
    ngram: Ngram = "auto",
    find_stop: FindStop | None = None,
    block_width: int = AUTO,
    top_k: int = 0,
    verify: TreeVerify = "chain",
    tree_budget: int = DEFAULT_TREE_BUDGET,
    on_piece: Callable[[Piece], None] | None = None,
    sequence: int = 1,
    base_pos: int = 0,
    retain: bool = False,
    is_cancelled: Callable[[], bool] | None = None,
) -> Result:
    """Generate up to `n_gen` tokens after `prompt`; the text is the target's own.

    `block_size` and `draft_context` (rows) belong to the draft and are ignored without one.
    `hint_tokens` maps generated positions (0 is the first token after the prompt) to guesses,
    which override the draft's there; `ngram` adds proposals by looking up the last tokens,
    where they pay unless it says otherwise.
    `block_width` fixes the rows of a verify, as `Submit` does, and `verify` and `tree_budget` ask
    for trees, of a draft that states `top_k` ids for each slot. `find_stop` sees every token before
    it goes out, and may end the text. `sequence` is one that neither engine has seen. `base_pos`
    says how many positions of `prompt` an earlier call with `retain` has left in the engines; what
    is not there any more, or is another text, is run again: ``statistics.num_kept_tokens`` were
    not. `is_cancelled` is asked before every engine call, and ends the text.

    Raises UsageError for an empty prompt or budget, an impossible hint or `base_pos`,
    PromptTooLong, and whatever the target raises.
    """
    check_prompt(len(prompt), n_gen, facts.max_positions)
    check_base(base_pos, len(prompt))
    hints = tuple((hint_tokens or {}).items())
    check_hints(hints, facts.vocab_size)
    described = None if draft is None else DraftFacts(1, block_size, draft_context, top_k=top_k)
    check_tree(verify, tree_budget, facts, described)
    submit = Submit(
        request=0,
        prompt=pack_ids(prompt),
        max_tokens=n_gen,
        sampling=sampling or Sampling(),
        draft_context=draft_context,
        hints=hints,
        ngram=ngram,
        base_pos=base_pos,
        retain=retain,
        block_width=block_width,
        verify=verify,
        tree_budget=tree_budget,
    )
    experience = Experience()
    session = Session(
        submit,
        sequence,
        facts,
        described,
        no_draft="no draft was given",
        manner=experience.manner(block_width, verify, tree_budget, submit.sampling.temperature),
        find_stop=find_stop,
        coupling=Couplings().at(submit.sampling.temperature),
    )
    clock = Clock(time.perf_counter())
    deliver = partial(_deliver, clock, on_piece)
    reason = _drive(session, target, draft, deliver, is_cancelled)
    return _result(session, clock, reason)


def _result(session: Session, clock: Clock, reason: Reason) -> Result:
    figures = statistics(
        session.tally,
        clock,
        tokens=(session.journal.prompt_tokens, session.journal.emitted),
        mode=session.mode,
        shape=session.shape,
        transport="inprocess",
        target=(session.target.exact, session.target.rollback),
        stale=session.num_stale_replies,
    )
    return Result(
        unpack_ids(session.journal.tokens),
        reason,
        figures,
        session.tally.num_hint_tokens,
        session.tally.num_accepted_hint_tokens,
    )


def _deliver(clock: Clock, on_piece: Callable[[Piece], None] | None, piece: Piece) -> None:
    clock.mark(time.perf_counter())
    if on_piece is not None:
        on_piece(piece)


def _drive(
    session: Session,
    target: TargetEngine,
    draft: DraftEngine | None,
    deliver: Callable[[Piece], None],
    is_cancelled: Callable[[], bool] | None,
) -> Reason:
    """Perform the session's commands one by one until it ends."""
    engines: dict[str, Engine | None] = {"target": target, "draft": draft}
    todo = deque[Command](session.handle(Start()))
    while True:
        match todo.popleft():
            case Send(_, item) if _ends_here(item, is_cancelled):
                is_cancelled = None
                todo = deque(command for command in todo if not isinstance(command, Send))
                todo.extend(session.handle(CancelRequested()))
            case Send(role, item):
                reply = Reply(role, session.target.life, 1, _call(engines[role], item))
                todo.extend(session.handle(reply))
            case Emit(Piece() as piece):
                deliver(piece)
            case Accuse("target", _, reason, _):
                raise ProtocolError(reason)
            case Emit() | Accuse():
                pass  # nobody can start an object again
            case Fail(error):
                raise error
            case Finish(reason):
                return reason


def _ends_here(item: Request, is_cancelled: Callable[[], bool] | None) -> bool:
    """Whether a cancel comes before `item`; a sequence that is being closed has ended already."""
    return is_cancelled is not None and not isinstance(item, CloseItem) and is_cancelled()


def _call(engine: Engine | None, item: Request) -> Answer:
    """One engine call; its typed error becomes the item's failure, as in a daemon."""
    try:
        answer: Answer = getattr(engine, VERBS[type(item)])(item)
    except DaemonError as error:
        return ItemFailed(
            sequence=item.sequence, round=item.round, code=error.code, detail=str(error)
        )
    return answer
