"""Where a model of `transformers` keeps its layers, embedding and head, and what passes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from protocol.errors import UnsupportedModel

# How far two ways of computing one row may differ, relative to the largest number.
TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the `count` decoder layers: the outermost of that length."""
    found = [
        (name.count("."), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise UnsupportedModel(f"{type(model).__name__} has no list of {count} layers to capture")
    return min(found, key=lambda one: one[0])[1]


def ends(model: Any) -> tuple[Any, Any]:
    """Embedding and head, each with a two-dimensional `weight`."""
    found = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in zip(("embedding", "head"), found, strict=True):
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() != 2:
            raise UnsupportedModel(f"{type(model).__name__} has no plain {name}")
    return found


@contextmanager
def passing(module: nn.Module, *, entering: bool) -> Iterator[list[Tensor]]:
    """The tensors that enter `module`, or leave it, while the context is open."""
    seen: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(args[0] if args else named["hidden_states"])

    def after(_module: nn.Module, _args: object, output: Any) -> None:
        seen.append(first(output))

    if entering:
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield seen
    finally:
        handle.remove()


def first(output: Any) -> Tensor:
    """The hidden rows of a layer's answer, which some layers put into a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways of computing the same rows in `dtype` agree."""
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    return bool(((found - expected).abs() <= limit).all())


def alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows [n, ...] that two forwards of one model made in `dtype` are the same rows.

    In 16 bits half of them are enough: where experts are chosen, rounding sends a row to others now
    and then, while a state that is lost, or cut wrongly, is wrong for all rows behind it.
    """
    if dtype == torch.float32:
        return near(found, expected, dtype)
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    good = ((found - expected).abs() <= limit).flatten(1).all(dim=1)
    return 2 * int(good.sum()) >= good.shape[0]
