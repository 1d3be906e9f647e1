"""What a verify strategy is: which rows of a block stay, and how they are kept.

A strategy is one file that ends in ``STRATEGY: Final[VerifyStrategy]``. The engine calls `forward`,
then `judge`, then `keep`; where `keep` answers False, it restores the snapshot and runs the kept
rows again as a chain. A block with `Block.parents` is a tree's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from protocol.messages import Finish, Sampling
from target_daemon.target import DFlashTarget


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one verify forward; row 0 is the pending token, at position `base_pos`."""

    base_pos: int
    ids: tuple[int, ...]
    tokens: Tensor  # [width] int64, the same ids
    parents: tuple[int, ...] = ()  # of each row but the first, as in `protocol.trees`; empty: chain
    rows: tuple[int, ...] = ()  # of a tree: which of the rows that were asked for these are


@dataclass(frozen=True, slots=True)
class Rules:
    """How one request chooses and ends."""

    sampling: Sampling
    stops: frozenset[int]  # EOS, where it is not ignored, and the request's stop tokens
    budget: int  # tokens that may still be emitted, at least 1
    history: Tensor  # [base_pos + 1] int64: every token up to and with the pending one


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a round keeps: ``len(path)`` rows stay, and as many tokens are emitted."""

    path: tuple[int, ...]  # kept rows, ascending, from row 0
    emitted: tuple[int, ...]  # the accepted drafts, then the new pending token
    chosen: tuple[int, ...]  # the target's own choice at every row, or at those of the path
    finish: Finish


def end(choices: Sequence[int], rules: Rules) -> tuple[tuple[int, ...], Finish]:
    """What a round emits of its agreeing `choices`, and whether the request ends with it.

    ``n = min(accepted + 1, budget, index of the first stop token + 1)`` is the one formula for
    every end (design.md section 8, rule 1): the n-th emitted token is pending and has no state, be
    it a correction, EOS or the budget's last.
    """
    emitted = tuple(choices[: rules.budget])
    for index, token in enumerate(emitted):
        if token in rules.stops:
            return emitted[: index + 1], "stop"
    return emitted, "length" if len(emitted) == rules.budget else ""


class VerifyStrategy(ABC):
    """Stateless; one object serves all sequences."""

    name: ClassVar[str]

    @abstractmethod
    def forward(self, target: DFlashTarget, slot: int, block: Block) -> Tensor:
        """Run the block; float32 logits [width, vocab_size]."""

    @abstractmethod
    def judge(self, block: Block, logits: Tensor, rules: Rules) -> Judgement:
        """Choose at every row, and keep the rows that agree; changes nothing."""

    @abstractmethod
    def keep(self, target: DFlashTarget, slot: int, block: Block, judgement: Judgement) -> bool:
        """Keep `judgement.path` of the last forward; False asks for restore and replay."""
