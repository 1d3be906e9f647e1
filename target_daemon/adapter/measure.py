"""What a draft must know of a foreign model, found by watching one forward of it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from protocol.errors import UnsupportedModel
from target_daemon.adapter import parts

TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Watched:
    """The parts of a model that a draft meets, and how the model is run."""

    embedding: Any
    head: Any
    layers: nn.ModuleList
    taps: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    run: Callable[[Tensor], Tensor]  # ids [n] -> logits [n, vocab], without a cache
    scores: Callable[[Tensor], Tensor]  # hidden rows -> logits, as a draft would have them


def embedding_scale(model: Watched) -> float:
    """The factor of embedding rows before the first layer, 1 where there is none.

    Raises UnsupportedModel where a tapped layer gives no row per token, or where a draft that
    borrows the head would not see the model's own logits.
    """
    tokens = torch.arange(min(model.embedding.weight.shape[0], TOKENS))
    with ExitStack() as stack:
        entering = stack.enter_context(parts.passing(model.layers[0], entering=True))
        leaving = stack.enter_context(parts.passing(model.head, entering=True))
        outputs = [
            stack.enter_context(parts.passing(model.layers[tap], entering=False))
            for tap in model.taps
        ]
        logits = model.run(tokens)
    for tap, seen in zip(model.taps, outputs, strict=True):
        if seen[0].shape != (1, tokens.shape[0], model.hidden_size):
            raise UnsupportedModel(
                f"layer {tap} gives {list(seen[0].shape)}: no one row of {model.hidden_size} "
                "for each token, which a draft could read"
            )
    if model.taps and not parts.near(model.scores(leaving[0][0]), logits, model.dtype):
        raise UnsupportedModel("logits are no scaled, capped product of the head: no draft")
    return _factor(
        functional.embedding(tokens, model.embedding.weight), entering[0][0], model.dtype
    )


def _factor(table: Tensor, first: Tensor, dtype: torch.dtype) -> float:
    """The least-squares factor, if it explains the rows: learned positions do not."""
    table, first = table.float(), first.float()
    if first.shape != table.shape:
        return 1.0
    scale = float((first * table).sum()) / float(table.pow(2).sum())
    if abs(scale - 1.0) < 1e-6 or not parts.near(table * scale, first, dtype):
        return 1.0
    return scale
