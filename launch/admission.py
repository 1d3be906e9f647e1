"""What is refused before it is queued: one sentence, with the numbers."""

from launch.events import DraftFacts, TargetFacts
from protocol.errors import PromptTooLong, UsageError
from protocol.messages import Hints, TreeVerify


def positions(stated: int, most: int) -> int:
    """Of prompt and text of one request; `stated` 0 is all that the model takes, `most`."""
    if stated > most:
        raise UsageError(f"--max-positions {stated:,} is more than the model takes: {most:,}")
    return stated or most


def check_prompt(prompt_tokens: int, max_tokens: int, max_positions: int) -> None:
    """Refuse what no target can run, before anything is queued: the numbers, typed."""
    if prompt_tokens < 1:
        raise UsageError("the prompt has no tokens")
    if max_tokens < 1:
        raise UsageError(f"{max_tokens} tokens were asked for; at least 1 is needed")
    if prompt_tokens >= max_positions:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens:,} tokens; this target takes {max_positions - 1:,}, "
            "and one more to generate"
        )


def check_base(base_pos: int, prompt_tokens: int) -> None:
    """Refuse a kept prefix that is no part of the prompt."""
    if not 0 <= base_pos <= prompt_tokens:
        raise UsageError(f"base_pos {base_pos}; the prompt has {prompt_tokens} tokens")


def check_tree(
    verify: TreeVerify, nodes: int, target: TargetFacts, draft: DraftFacts | None
) -> None:
    """Refuse trees that were asked for by name and that this pair cannot verify.

    A draft that is not there yet, or not any more, is no reason: there is nothing to verify then.
    """
    if verify != "tree":
        return
    if not target.tree_verify:
        raise UsageError(f"--verify tree: {target.tree_detail or 'chains only'}")
    if draft is not None and not draft.top_k:
        raise UsageError("--verify tree: this draft has one token for each slot")
    if nodes >= target.max_width:
        raise UsageError(
            f"a tree of {nodes} nodes is a forward of {nodes + 1} rows; this target takes "
            f"{target.max_width}"
        )


def check_hints(hints: Hints, vocab_size: int) -> None:
    """Refuse hints that no target of this vocabulary could choose."""
    for position, token in hints:
        if position < 0 or not 0 <= token < vocab_size:
            raise UsageError(f"hint {token} at {position}: ids are 0 to {vocab_size - 1}")
