"""Whether a daemon's answer can be true: each check returns the defect in words, or nothing.

A target that breaks one of these has lost count of the sequence, and the request must fail
rather than show text that may be wrong. A draft that does is only not asked again.
"""

from typing import Final

from launch.events import Request, Result
from launch.token_ids import WIDTH, unpack_ids
from protocol.errors import DeviceLost
from protocol.messages import (
    IngestedItem,
    IngestItem,
    ItemFailed,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    ProposedItem,
    ProposeItem,
    ReplayedItem,
    ReplayItem,
    Verdict,
    VerifyItem,
)
from protocol.trees import is_path

OTHER_DRAFTS: Final = "the accepted tokens are not the block's drafts"


def target_defect(asked: Request, answer: Result, vocab_size: int) -> str:
    """The defect of any answer of a target; an item that failed has none, but for a lost GPU.

    What CUDA says once it says of everything that follows in that process: only a new life helps.
    """
    match asked, answer:
        case VerifyItem(), Verdict():
            return verdict_defect(asked, answer, vocab_size)
        case _, ItemFailed(code=DeviceLost.code):
            return answer.detail
        case OpenItem(), OpenedItem():
            return opened_defect(asked, answer)
        case PrefillItem(), PrefilledItem():
            return prefill_defect(asked, answer, vocab_size)
        case ReplayItem(), ReplayedItem():
            return replay_defect(asked, answer)
        case _:
            return ""


def opened_defect(asked: OpenItem, answer: OpenedItem) -> str:
    """A sequence begins with no more state than the prefix that it may continue."""
    most = len(asked.prefix) // WIDTH
    if answer.committed > most or answer.oldest > answer.committed:
        return (
            f"opened with {answer.committed} positions, rows from {answer.oldest} on, of a prefix "
            f"of {most}"
        )
    return ""


def prefill_defect(asked: PrefillItem, answer: PrefilledItem, vocab_size: int) -> str:
    """A chunk ends where it should, and the last one alone brings a token."""
    stop = asked.start + len(asked.tokens) // WIDTH
    if answer.committed != stop:
        return f"prefill to {stop} left {answer.committed} committed"
    if asked.last and not 0 <= answer.token < vocab_size:
        return f"first token {answer.token} is outside the vocabulary of {vocab_size}"
    if answer.finish == "length":
        return "the prompt's end finished the request for length"
    if not asked.last and (answer.token != -1 or answer.finish):
        return f"prefill to {stop} answered token {answer.token} before the prompt's end"
    return ""


def replay_defect(asked: ReplayItem, answer: ReplayedItem) -> str:
    """All tokens but the pending one have state, and no more can differ than there are."""
    tokens = len(asked.tokens) // WIDTH
    stop = asked.base_pos + tokens - 1
    if answer.committed != stop or answer.mismatches > tokens:
        return f"replay to {stop} left {answer.committed}, {answer.mismatches} of {tokens} differ"
    return ""


def ingest_defect(asked: IngestItem, answer: IngestedItem) -> str:
    """The span ends where it was asked to, whatever gap lies before it."""
    if answer.stop != asked.stop or answer.start > answer.stop:
        return f"ingest to {asked.stop} answered rows {answer.start}..{answer.stop}"
    return ""


def proposal_defect(asked: ProposeItem, answer: ProposedItem, vocab_size: int) -> str:
    """As many ids as were asked for, all of them the target's."""
    if len(answer.tokens) != (asked.width - 1) * WIDTH:
        return f"{len(answer.tokens)} bytes of proposals for {asked.width - 1} ids"
    ids = unpack_ids(answer.tokens)
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"proposed ids {min(ids)}..{max(ids)} for a vocabulary of {vocab_size}"
    if len(answer.confidences) not in (0, len(ids)):
        return f"{len(answer.confidences)} confidences for {len(ids)} ids"
    return (
        _alternatives_defect(asked, answer, vocab_size)
        if answer.top_ids or answer.top_logprobs
        else ""
    )


def _alternatives_defect(asked: ProposeItem, answer: ProposedItem, vocab_size: int) -> str:
    """At most as many as were asked for, all different, the proposed one first."""
    best, top = unpack_ids(answer.tokens), unpack_ids(answer.top_ids)
    few, left = divmod(len(top), len(best))
    if left or few > asked.top_k or len(answer.top_logprobs) != len(top):
        return (
            f"{len(top)} ids and {len(answer.top_logprobs)} log-probabilities for {asked.top_k} at "
            f"each of {len(best)} slots"
        )
    slots = [top[start : start + few] for start in range(0, len(top), few)]
    if min(top) < 0 or max(top) >= vocab_size or any(len(set(slot)) < few for slot in slots):
        return f"alternatives that differ, below {vocab_size}, were expected: {slots[0]}, ..."
    if tuple(slot[0] for slot in slots) != best:
        return "the likeliest ids are not the proposed ones"
    return ""


def verdict_defect(asked: VerifyItem, answer: Verdict, vocab_size: int) -> str:
    """The kept drafts are the block's, the tokens are the target's choices, the count holds.

    With ``committed = prompt + emitted - 1`` before the round, and `n` tokens kept, it must be
    ``base_pos + n`` after it.
    """
    width = len(asked.tokens) // WIDTH
    kept = len(answer.tokens) // WIDTH
    if len(answer.tokens) % WIDTH or kept != answer.accepted + 1 or kept > min(width, asked.budget):
        return (
            f"{len(answer.tokens)} bytes of tokens for {answer.accepted} accepted of "
            f"{width - 1} drafts, {asked.budget} tokens wanted"
        )
    if answer.committed != asked.base_pos + kept:
        return f"committed {answer.committed}, expected {asked.base_pos} + {kept}"
    # A target whose block failed may answer for its first row alone, so `chosen` may be shorter.
    if len(answer.chosen) > len(asked.tokens) or not answer.chosen.startswith(answer.tokens):
        return "the kept tokens are not the target's own choices"
    if defect := _path_defect(asked, answer, kept):
        return defect
    if answer.replayed > (kept if answer.rollback == "replay" else 0):
        return f"{answer.replayed} rows run again of {kept} kept, undone by {answer.rollback}"
    ids = unpack_ids(answer.tokens)
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"chosen ids {min(ids)}..{max(ids)} for a vocabulary of {vocab_size}"
    if len(answer.logprobs) not in (0, kept):
        return f"{len(answer.logprobs)} log-probabilities for {kept} tokens"
    if answer.finish == "length" and kept < asked.budget:
        return f"finished for length after {kept} of {asked.budget} tokens"
    return ""


def _path_defect(asked: VerifyItem, answer: Verdict, kept: int) -> str:
    """The accepted tokens are those of the block's first rows, or of a tree's `path`."""
    if not asked.parents:
        if answer.path:
            return "a path through a block that is no tree"
        same = asked.tokens[WIDTH : kept * WIDTH] == answer.tokens[:-WIDTH]
        return "" if same else OTHER_DRAFTS
    rows = unpack_ids(answer.path) if len(answer.path) % WIDTH == 0 else ()
    if len(rows) != kept or not is_path(rows, unpack_ids(asked.parents)):
        return f"rows {rows} are no path of {kept} through the tree"
    ids = unpack_ids(asked.tokens)
    same = tuple(ids[row] for row in rows[1:]) == unpack_ids(answer.tokens)[:-1]
    return "" if same else OTHER_DRAFTS
