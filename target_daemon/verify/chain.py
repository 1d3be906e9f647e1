"""Chain verify: the longest prefix of drafts that the target would have chosen itself."""

from typing import ClassVar, Final

from torch import Tensor

from protocol.choice import choose
from target_daemon.target import DFlashTarget
from target_daemon.verify.base import Block, Judgement, Rules, VerifyStrategy, end


class ChainVerify(VerifyStrategy):
    """Row ``i`` follows row ``i - 1``; an autoregressive step is a chain of width 1."""

    name: ClassVar[str] = "chain"

    def forward(self, target: DFlashTarget, slot: int, block: Block) -> Tensor:
        """One forward with logits at every row."""
        logits = target.verify_batch(slot, block.tokens, block.base_pos, "all")
        if logits is None or logits.shape[0] != len(block.ids):
            raise RuntimeError(f"the target gave no logits for {len(block.ids)} rows")
        return logits

    def judge(self, block: Block, logits: Tensor, rules: Rules) -> Judgement:
        """Keep the drafts that agree, and one more token, as far as the request goes on."""
        chosen = choose(logits, block.base_pos + 1, rules.sampling, rules.history).tolist()
        accepted = 0
        for draft, choice in zip(block.ids[1:], chosen, strict=False):
            if draft != choice:
                break
            accepted += 1
        emitted, finish = end(chosen[: accepted + 1], rules)
        return Judgement(tuple(range(len(emitted))), emitted, tuple(chosen), finish)

    def keep(self, target: DFlashTarget, slot: int, block: Block, judgement: Judgement) -> bool:
        """Fast rollback to the kept prefix."""
        return target.rollback_to(slot, block.base_pos, len(judgement.path))


STRATEGY: Final[VerifyStrategy] = ChainVerify()
