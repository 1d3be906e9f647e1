"""Tree verify: of several continuations, the path that the target would have chosen itself.

At each row the target's choice is made as it would be there in plain decoding, with the row's own
path as history; the child with that token is next. Where there is none, that choice is the round's
last token. So the text does not depend on the tree, only the number of tokens a round emits does.
"""

from typing import ClassVar, Final

import torch
from torch import Tensor

from protocol.choice import choose
from target_daemon.checks import check_tree
from target_daemon.target import DFlashTarget
from target_daemon.verify.base import Block, Judgement, Rules, VerifyStrategy, end


class TreeVerify(VerifyStrategy):
    """Rows follow their parents; see `protocol.trees`."""

    name: ClassVar[str] = "tree"

    def forward(self, target: DFlashTarget, slot: int, block: Block) -> Tensor:
        """One forward over all branches, with logits at every row."""
        logits = target.verify_tree(slot, block.tokens, block.base_pos, block.parents)
        if logits.shape[0] != len(block.ids):
            raise RuntimeError(f"the target gave no logits for {len(block.ids)} rows")
        return logits

    def judge(self, block: Block, logits: Tensor, rules: Rules) -> Judgement:
        """Walk down from row 0 by the target's choices; only rows of the path are judged."""
        children = {
            (parent, block.ids[row]): row for row, parent in enumerate(block.parents, start=1)
        }
        history, path, choices = rules.history, [0], list[int]()
        while True:
            row, position = path[-1], block.base_pos + len(path)
            choices.append(int(choose(logits[row : row + 1], position, rules.sampling, history)[0]))
            child = children.get((row, choices[-1]))
            if child is None or len(choices) >= rules.budget or choices[-1] in rules.stops:
                break
            path.append(child)
            history = torch.cat((history, history.new_tensor([choices[-1]])))
        emitted, finish = end(choices, rules)
        return Judgement(tuple(path), emitted, emitted, finish)

    def keep(self, target: DFlashTarget, slot: int, block: Block, judgement: Judgement) -> bool:
        """Move the path's rows together, behind what is committed."""
        return target.rollback_to_tree(slot, block.base_pos, judgement.path)


def tree_block(target: DFlashTarget, block: Block, parents: tuple[int, ...]) -> Block:
    """`block` as the tree of `parents`, less the rows that `target` cannot compute exactly.

    Raises UsageError where it verifies no trees, ProtocolError or PromptTooLong for a bad one.
    """
    check_tree(target, block.base_pos, block.ids, parents)
    rows = target.tree_rows(block.base_pos, parents)
    at = {row: index for index, row in enumerate(rows)}
    return Block(
        block.base_pos,
        tuple(block.ids[row] for row in rows),
        block.tokens[list(rows)],
        tuple(at[parents[row - 1]] for row in rows[1:]),
        rows,
    )


STRATEGY: Final[VerifyStrategy] = TreeVerify()
