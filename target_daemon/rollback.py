"""How rejected rows are undone: which way a target allows, which is cheaper, and doing it.

*Fast*: the target drops them as they stand. *Replay*: its state from before the forward is
restored, and the kept rows are run again. Fast has a price, too, where a target must keep more than
it needs for the next row: so the quicker one by measurement is taken, unless the user says which.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, TypeAlias

import torch

from protocol.config import Rollback
from protocol.errors import ConfigError
from target_daemon.target import DFlashTarget
from target_daemon.verify.base import Block, Judgement, VerifyStrategy

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["fast", "replay"]

SLOT: Final = 0
WIDTH: Final = 8  # rows of the measured block, of which half are kept
CONTEXT: Final = 32
ASKED: Final = "as asked, though this target can drop rejected rows as they stand"
ROUNDS: Final = 3  # of either way; the quickest counts


@dataclass(frozen=True, slots=True)
class Way:
    """The way back in use, and why that one."""

    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class Undone:
    """What became of a round's rejected rows: "none" where there were none."""

    way: Literal["none", "fast", "replay"]
    replayed: int = 0  # kept rows that were run again


class WayBack:
    """Leaves a slot holding the kept rows of its last forward alone."""

    def __init__(self, target: DFlashTarget, kind: Kind) -> None:
        self._target = target
        self.kind: Kind = kind if target.supports_fast_rollback else "replay"
        target.prepare_rollback(self.kind)

    def keep(
        self,
        strategy: VerifyStrategy,
        slot: int,
        block: Block,
        judgement: Judgement,
        restore: Callable[[], None],
    ) -> Undone:
        """Keep the rows of `judgement`; `restore` returns to the state before the forward."""
        path = judgement.path
        if self._dropped(strategy, slot, block, judgement):
            return Undone("none" if len(path) == len(block.ids) else "fast")
        restore()
        self._target.verify_batch(slot, block.tokens[list(path)], block.base_pos, "none")
        return Undone("replay", len(path))

    def _dropped(
        self, strategy: VerifyStrategy, slot: int, block: Block, judgement: Judgement
    ) -> bool:
        if self.kind == "replay":
            return len(judgement.path) == len(block.ids)
        try:
            return strategy.keep(self._target, slot, block, judgement)
        except (RuntimeError, MemoryError):
            # A failed fast rollback is a reason to replay, never an error.
            log.warning("fast rollback to %d rows failed; replaying", len(judgement.path))
            return False


def settle(
    target: DFlashTarget, wanted: Rollback, clock: Callable[[], float] = perf_counter
) -> Way:
    """Choose how `target`, which no sequence has been opened in, undoes rejected rows.

    Raises ConfigError where `wanted` is what it cannot do.
    """
    able, why = target.supports_fast_rollback, target.rollback_detail
    if wanted == "fast" and not able:
        raise ConfigError(f"--rollback fast: {why}")
    if wanted != "auto":
        return Way(wanted, f"as asked; {why}" if wanted == "fast" or not able else ASKED)
    if not able:
        return Way("replay", why)
    if target.supports_cut:
        return Way("fast", why)  # rows of their own are dropped by not reading them
    base = min(CONTEXT, target.max_positions - WIDTH - ROUNDS * (WIDTH // 2))
    if base < 1:
        return Way("fast", f"{why}; the context is too short to measure what it costs")
    seconds = {kind: _measured(target, kind, base, clock) for kind in ("fast", "replay")}
    best: Kind = "fast" if seconds["fast"] <= seconds["replay"] else "replay"
    times = ", ".join(f"{kind} {time * 1e3:.2f} ms" for kind, time in seconds.items())
    return Way(best, f"{why}; a block of {WIDTH} rows with half of them kept takes {times}")


@torch.inference_mode()
def _measured(target: DFlashTarget, kind: Kind, base: int, clock: Callable[[], float]) -> float:
    """Seconds of a block and of the way back from it; leaves the slot empty."""
    target.prepare_rollback(kind)
    target.reset(SLOT)
    tokens, kept, best = torch.zeros(WIDTH, dtype=torch.int64), WIDTH // 2, float("inf")
    for start in range(0, base, WIDTH):
        target.verify_batch(SLOT, tokens[: base - start], start, "none")
    for _ in range(ROUNDS):
        started = clock()
        snapshot = target.snapshot_kv(SLOT, base, WIDTH)
        target.verify_batch(SLOT, tokens, base, "all")
        if kind == "replay" or not target.rollback_to(SLOT, base, kept):
            target.restore_kv(SLOT, snapshot)
            target.verify_batch(SLOT, tokens[:kept], base, "none")
        best = min(best, clock() - started)
        base += kept
    target.reset(SLOT)
    return best
