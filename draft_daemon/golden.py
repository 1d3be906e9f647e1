"""Whether a draft belongs to the target that it is paired with: its first tokens on known text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from protocol.errors import DraftMismatch
from protocol.transports.base import GOLDEN_IDS, GOLDEN_ROWS

CONTEXT: Final = 8  # positions before the first block


@dataclass(frozen=True, slots=True)
class Agreement:
    """In so many of `compared` places the draft's first token was the target's choice."""

    agreed: int
    compared: int


NOT_COMPARED: Final = Agreement(0, 0)


def compare(
    weights: Mapping[str, Tensor],
    feature_width: int,
    first_tokens: Callable[[Tensor, Tensor, range], tuple[int, ...]],
    *,
    window: int,
) -> Agreement:
    """Hold the draft against what the target shares of its fixed prompt, if it does.

    Not where the prompt has more rows than the `window` of context that the draft keeps.

    `first_tokens` takes feature rows [n, width], ids [n] and the positions of pending tokens, and
    answers the token that the draft proposes to follow each. Raises DraftMismatch for a prompt
    that is not of the shape that was agreed.
    """
    ids, rows = weights.get(GOLDEN_IDS), weights.get(GOLDEN_ROWS)
    if ids is None or rows is None:
        return NOT_COMPARED
    if ids.dim() != 2 or ids.shape[0] != 2 or rows.shape != (ids.shape[1], feature_width):
        raise DraftMismatch(
            f"the target shares feature rows {tuple(rows.shape)} of a prompt {tuple(ids.shape)}; "
            f"rows of {feature_width} were expected"
        )
    places = range(CONTEXT, ids.shape[1])
    if not places or ids.shape[1] > window:
        return NOT_COMPARED
    found = first_tokens(rows, ids[0], places)
    chosen = ids[1, CONTEXT:].tolist()
    return Agreement(
        sum(one == other for one, other in zip(found, chosen, strict=True)), len(found)
    )
