"""A slot's caches as named tensors and plain facts, which can be kept apart from the slot.

The way back trusts what it is given as far as its shape goes: ValueError where it is none of ours.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from target_daemon.adapter.caches import SlotCaches, Snapshot
from target_daemon.families.base import NativeTarget
from target_daemon.target import StateCopy

PLAIN: Final = (bool, int, float, str, type(None))
LENGTH: Final = "length"
FIELDS: Final = "fields"
LAYERS: Final = "layers"


class CopiedCaches(NativeTarget):
    """A target whose whole state is `caches`."""

    caches: SlotCaches

    def state_bytes(self, slot: int, length: int) -> int:
        if length != self.caches.lengths[slot] and not self.supports_cut:
            return 0
        tensors = 0
        for value in self.caches.values(slot):
            if isinstance(value, Tensor):
                tensors += value.numel() * value.element_size()
            elif not isinstance(value, (*PLAIN, torch.dtype, torch.device)):
                return 0  # of a kind that this file does not know
        return tensors

    @torch.inference_mode()
    def copy_state(self, slot: int, length: int, *, shared: bool = False) -> StateCopy:
        saved = self.caches.save(slot)
        tensors: dict[str, Tensor] = {}

        def flat(value: Any) -> Any:
            return _flat(value, tensors)

        facts = {
            LENGTH: saved.length,
            FIELDS: flat(dict(saved.fields)),
            LAYERS: [flat(dict(layer)) for layer in saved.layers],
        }
        del length, shared  # what lies behind it is cut off when it is put back
        return StateCopy(tensors, facts)

    @torch.inference_mode()
    def set_state(self, slot: int, state: StateCopy, length: int) -> None:
        found, layers = state.facts.get(LAYERS, ()), self.caches.num_layers(slot)
        if len(found) != layers:
            raise ValueError(f"no state of this model: {len(found)} of {layers} layers")
        try:
            fields, *parts = [_whole(each, state.tensors) for each in (state.facts[FIELDS], *found)]
            self.caches.restore(slot, Snapshot(int(state.facts[LENGTH]), fields, tuple(parts)))
        except (KeyError, TypeError, AttributeError) as error:
            self.caches.reset(slot)
            raise ValueError(f"no state of this model: {error!r}") from error
        if length < self.caches.lengths[slot]:
            self.caches.cut(slot, length)


def _flat(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` with its tensors moved into `tensors`, as JSON can hold it."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, _flat(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list):
        return {"list": [_flat(item, tensors) for item in value]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"plain": value}


def _whole(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """What `_flat` was given."""
    ((kind, held),) = value.items()
    return READERS[kind](held, tensors)


def _dtype(name: Any, tensors: Mapping[str, Tensor]) -> torch.dtype:
    del tensors
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


READERS: Final[Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    "tensor": lambda name, tensors: tensors[name],
    "items": lambda pairs, tensors: {key: _whole(item, tensors) for key, item in pairs},
    "list": lambda items, tensors: [_whole(item, tensors) for item in items],
    "dtype": _dtype,
    "device": lambda name, _: torch.device(name),
    "plain": lambda plain, _: plain,
}
