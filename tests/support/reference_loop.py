"""The slow way to greedy text, to compare the engine with: nothing is kept between tokens.

Every token comes from a forward over its whole prefix, in a slot that was just reset, and a plain
argmax. It shares no code with the engine, its strategies or `protocol.choice`.
"""

from collections.abc import Callable, Sequence

import torch

from target_daemon.target import DFlashTarget

Drafter = Callable[[list[int], int], list[int]]  # (text so far, tokens wanted) -> proposals


def next_token(target: DFlashTarget, text: Sequence[int], slot: int = 0, chunk: int = 0) -> int:
    """The best token after `text`; in one forward, or in chunks of `chunk` rows."""
    target.reset(slot)
    step = chunk or len(text)
    logits = None
    for start in range(0, len(text), step):
        tokens = torch.tensor(list(text[start : start + step]))
        logits = target.verify_batch(slot, tokens, start, "last")
    assert logits is not None
    return int(torch.max(logits[-1], dim=-1).indices)


def greedy(
    target: DFlashTarget,
    prompt: Sequence[int],
    max_tokens: int,
    stops: Sequence[int] = (),
    slot: int = 0,
    chunk: int = 0,
) -> list[int]:
    """The text of `max_tokens` tokens at most, the stop token included."""
    text: list[int] = []
    while len(text) < max_tokens:
        text.append(next_token(target, [*prompt, *text], slot, chunk))
        if text[-1] in stops:
            break
    return text


def acceptances(
    text: Sequence[int], prompt: Sequence[int], width: int, drafter: Drafter, max_tokens: int
) -> list[int]:
    """Tokens emitted by each round of a block speculation whose text is `text` (greedy).

    The first token comes from prefill. A round proposes ``min(width, budget left) - 1`` tokens.
    """
    done, rounds = 1, []
    while done < len(text):
        wanted = min(width, max_tokens - done) - 1
        proposal = drafter([*prompt, *text[:done]], wanted)
        agreed = 0
        while agreed < wanted and done + agreed < len(text):
            if proposal[agreed] != text[done + agreed]:
                break
            agreed += 1
        rounds.append(min(agreed + 1, len(text) - done))
        done += rounds[-1]
    return rounds
