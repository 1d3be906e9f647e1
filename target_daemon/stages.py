"""Consecutive layers on one device each: what a target that is split over several is made of."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first .. stop - 1`` and their keys and values, on `device`."""

    first: int
    stop: int
    device: torch.device

    @property
    def count(self) -> int:
        """How many layers."""
        return self.stop - self.first


def stages_of(counts: Sequence[int], devices: Sequence[torch.device]) -> tuple[Stage, ...]:
    """Stages of so many layers each, one after the other."""
    made: list[Stage] = []
    for count, device in zip(counts, devices, strict=True):
        first = made[-1].stop if made else 0
        made.append(Stage(first, first + count, device))
    return tuple(made)


def detour(devices: Sequence[torch.device]) -> str:
    """Where activations go between neighbours through the host's memory; empty: nowhere."""
    for one, other in itertools.pairwise(devices):
        if one.type == "cuda" and not torch.cuda.can_device_access_peer(one, other):
            return f"; between {one} and {other} through the host's memory, without peer access"
    return ""


def home_of(stages: Sequence[Stage]) -> Callable[[str], torch.device | None]:
    """Where a checkpoint's tensor belongs, by its name; None for one that is of no layer."""

    def place(name: str) -> torch.device | None:
        found = LAYER.match(name)
        layer = -1 if found is None else int(found[1])
        return next((each.device for each in stages if each.first <= layer < each.stop), None)

    return place
