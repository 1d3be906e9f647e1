"""What a foreign model can do, found by running it at load: nothing is believed.

The reference is the model without any cache. Against it are held: one row at a time over the
cache, a block over the cache (some recurrent models start from nothing whenever they are given
more than one row), and a block that was cut (fast rollback).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from protocol.errors import ExactUnavailable, UnsupportedModel
from target_daemon.adapter.caches import SlotCaches
from target_daemon.adapter.parts import alike
from target_daemon.exactness import BASE, Exactness

SLOT: Final = 0
LEAST_BLOCK: Final = 4
# How the library's layers refuse to record, or to be cropped.
REFUSALS: Final = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)


class Runnable(Protocol):
    """What the probe needs of a target."""

    caches: SlotCaches
    stepwise: bool

    def run(self, tokens: Tensor, base: int) -> Tensor:
        """Logits [n, vocab] of `tokens` over the cache of the probe's slot."""
        ...

    def run_bare(self, tokens: Tensor) -> Tensor:
        """Logits [n, vocab] of `tokens` from position 0, without a cache."""
        ...


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found; the target's caches are set to it already."""

    fast: bool  # rejected rows can be cut off
    detail: str  # why, or why not
    cut: bool  # and so can those of any earlier forward
    stepwise: bool  # only one row at a time continues a state
    exactness: Exactness


def settle(
    target: Runnable, *, vocab: int, positions: int, block: int, dtype: torch.dtype, exact: bool
) -> Findings:
    """Probe `target`, whose slots are empty before and after.

    Raises UnsupportedModel where the cache does not continue what was run, ExactUnavailable where
    `exact` is asked for and rows depend on how many there are.
    """
    width = max(2, min(max(block, LEAST_BLOCK), positions - 1))
    base = max(1, min(BASE, positions - width))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (base + width,), generator=generator)
    caches, block_ids = target.caches, tokens[base:]
    bare = target.run_bare(tokens)[base:]
    target.run(tokens[:base], 0)
    start = caches.save(SLOT)
    single = torch.cat([target.run(block_ids[i : i + 1], base + i) for i in range(width)])
    if not alike(single, bare, dtype):
        raise UnsupportedModel(
            "this model does not continue from the cache that `transformers` gives it"
        )
    caches.restore(SLOT, start)
    whole = target.run(block_ids, base)
    target.stepwise = not alike(whole, bare, dtype)
    obstacle = _obstacle(target, tokens, base, bare, dtype)
    fast = not obstacle
    caches.record(fast)
    target.run(tokens[:base], 0)
    start = caches.save(SLOT)
    exactness = _exactness(target, block_ids, base, single, lambda: caches.restore(SLOT, start))
    cut = fast and caches.keeps_all(SLOT)
    detail = obstacle or f"tried at load: rejected rows can be cut off ({caches.kinds(SLOT)})"
    caches.reset(SLOT)
    if exact and exactness.kind == "no":
        raise ExactUnavailable(f"--exact: {exactness.detail}, and this model's are not padded")
    return Findings(fast, detail, cut, target.stepwise, exactness)


def _obstacle(
    target: Runnable, tokens: Tensor, base: int, expected: Tensor, dtype: torch.dtype
) -> str:
    """Why a slot that holds `tokens` does not go on rightly from the middle of those behind `base`.

    Empty where it does.
    """
    caches, half = target.caches, base + (tokens.shape[0] - base) // 2
    caches.record(True)
    try:
        target.run(tokens[:base], 0)
        target.run(tokens[base:], base)
        if not caches.can_cut(SLOT):
            return f"{caches.kinds(SLOT)}: a recurrent state holds no row by itself"
        caches.cut(SLOT, half)
        again = target.run(tokens[half:], half)
    except REFUSALS as error:
        return f"{caches.kinds(SLOT)} cannot be cut ({type(error).__name__})"
    if alike(again, expected[half - base :], dtype):
        return ""
    return f"{caches.kinds(SLOT)} went on wrongly when they had been cut"


def _exactness(
    target: Runnable, block: Tensor, base: int, single: Tensor, start: Callable[[], None]
) -> Exactness:
    """Compare every width with single rows, bit for bit."""
    width = block.shape[0]
    if target.stepwise:
        return Exactness("native", "every forward over a state has one row")
    for rows in range(2, width + 1):
        start()
        if not torch.equal(target.run(block[:rows], base), single[:rows]):
            return Exactness("no", f"rows at width {rows} differ from width 1")
    return Exactness("native", f"rows agree at widths 1 to {width}")
