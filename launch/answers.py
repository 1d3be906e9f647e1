"""Whether a daemon's answer can be true: each check returns the defect in words, or nothing.

A target that breaks one of these has lost count of the sequence, and the request must fail
rather than show text that may be wrong. A draft that does is only not asked again.
"""

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


def target_defect(asked: Request, answer: Result, vocab_size: int) -> str:
    """The defect of any answer of a target; an item that failed has none, but for a lost GPU.

    What CUDA says once it says of everything that follows in that process: only a new life helps.
    """
    match asked, answer:
        case _, ItemFailed(code=DeviceLost.code):
            return answer.detail
        case OpenItem(), OpenedItem():
            return opened_defect(asked, answer)
        case PrefillItem(), PrefilledItem():
            return prefill_defect(asked, answer, vocab_size)
        case ReplayItem(), ReplayedItem():
            return replay_defect(asked, answer)
        case VerifyItem(), Verdict():
            return verdict_defect(asked, answer, vocab_size)
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
    if asked.tokens[WIDTH : WIDTH * kept] != answer.tokens[:-WIDTH]:
        return "the accepted tokens are not the block's drafts"
    ids = unpack_ids(answer.tokens)
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"chosen ids {min(ids)}..{max(ids)} for a vocabulary of {vocab_size}"
    if len(answer.logprobs) not in (0, kept):
        return f"{len(answer.logprobs)} log-probabilities for {kept} tokens"
    if answer.finish == "length" and kept < asked.budget:
        return f"finished for length after {kept} of {asked.budget} tokens"
    return ""
