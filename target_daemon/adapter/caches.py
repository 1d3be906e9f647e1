"""Caches of `transformers`, one a slot. This file alone knows how they are passed, cut and copied.

What changed between the library's versions is found by looking, never by a version's number:
the keyword (`past_key_values`, `cache_params`, then `cache` for both), whether layers can record
what they would drop, whether a cache says that it can be cropped. `crop` takes the number of rows
to remove, negated; positive numbers once meant a length, and are refused since.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from protocol.errors import InternalError, UnsupportedModel

KEYWORDS: Final = ("cache", "past_key_values", "cache_params")
# Layers that grow by concatenation replace these and never write into them.
REPLACED: Final = ("keys", "values")
RECORDS: Final = "record_past"
PLAIN: Final = "DynamicLayer"  # a row of keys and values per position, and nothing else


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One slot's state: K/V by reference, what is overwritten in place as copies."""

    length: int
    fields: Mapping[str, Any]  # of the cache, but for its layers
    layers: tuple[Mapping[str, Any], ...]


class SlotCaches:
    """State of `slots` sequences of `model`, each as long as what was run."""

    def __init__(self, library: Any, model: Any, slots: int) -> None:
        parameters = inspect.signature(model.forward).parameters
        found = [name for name in KEYWORDS if name in parameters]
        if not found:
            raise UnsupportedModel(
                f"{type(model).__name__} takes none of {', '.join(KEYWORDS)}: its state is kept in "
                "no cache that could be set back"
            )
        self.keyword = found[0]
        self._library, self._config = library, model.config
        self.recording = False
        self.lengths = [0] * slots
        self._caches = [self._fresh() for _ in range(slots)]

    def _fresh(self) -> Any:
        cache = self._library.DynamicCache(config=self._config)
        if self.recording and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def reset(self, slot: int) -> None:
        """Forget everything."""
        self._caches[slot], self.lengths[slot] = self._fresh(), 0

    def record(self, on: bool) -> None:
        """Empty all slots; from now on a window keeps what it would drop until the next forward.

        Or, switched off, no more than the model needs: rows are then never given up one by one.
        """
        self.recording = on
        for slot in range(len(self.lengths)):
            self.reset(slot)

    def at(self, slot: int, base: int) -> Any:
        """The cache of `slot`, holding exactly `base` rows; InternalError where it cannot."""
        if base == 0 and self.lengths[slot]:
            self.reset(slot)
        if base > self.lengths[slot] or (base < self.lengths[slot] and not self.recording):
            raise InternalError(f"no state at position {base}; {self.lengths[slot]} rows were run")
        if base and self.recording:
            self.cut(slot, base)
        return self._caches[slot]

    def cut(self, slot: int, length: int) -> None:
        """Keep the first `length` rows; RuntimeError or ValueError where a layer cannot."""
        # Cutting nothing also lets a window drop what it recorded.
        self._caches[slot].crop(length - self.lengths[slot])
        self.lengths[slot] = length

    def can_cut(self, slot: int) -> bool:
        """Whether all layers keep their rows apart; asked once a forward has filled them."""
        cache = self._caches[slot]
        if any(tensor is not None for tensor in _recurrent(cache)):
            return False
        return bool(getattr(cache, "is_croppable", True))

    def keeps_all(self, slot: int) -> bool:
        """Whether no layer gives rows up as it goes on; asked once a forward has filled them."""
        return all(type(layer).__name__ == PLAIN for layer in self._caches[slot].layers)

    def kinds(self, slot: int) -> str:
        """What the layers keep, by the library's names."""
        return ", ".join(sorted({type(layer).__name__ for layer in self._caches[slot].layers}))

    def save(self, slot: int) -> Snapshot:
        """The state of `slot`, which later forwards do not change."""
        cache = self._caches[slot]
        fields = {name: value for name, value in vars(cache).items() if name != "layers"}
        layers = tuple(_copied(vars(layer)) for layer in cache.layers)
        return Snapshot(self.lengths[slot], _copied(fields), layers)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Return to what `save` found; the snapshot can be used again."""
        cache = self._caches[slot]
        vars(cache).update(_copied(snapshot.fields))
        del cache.layers[len(snapshot.layers) :]
        for layer, fields in zip(cache.layers, snapshot.layers, strict=True):
            vars(layer).clear()
            vars(layer).update(_copied(fields))
            if hasattr(layer, RECORDS):  # a state of another process may come from the other way
                setattr(layer, RECORDS, self.recording)
        self.lengths[slot] = snapshot.length

    def num_layers(self, slot: int) -> int:
        """How many layers have state of their own."""
        return len(self._caches[slot].layers)

    def values(self, slot: int) -> Iterator[Any]:
        """Every value that the slot's state is made of, that of dicts and lists one by one."""
        cache = self._caches[slot]
        layers = [vars(layer) for layer in cache.layers]
        fields = {name: value for name, value in vars(cache).items() if name != "layers"}
        return _leaves([fields, *layers])

    def constant_bytes(self, slot: int) -> int:
        """Bytes of state that do not grow with the context, which no config states."""
        layers = self._caches[slot].layers
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in layers
            for name, value in vars(layer).items()
            if name not in REPLACED
            for tensor in _leaves(value)
            if isinstance(tensor, Tensor) and tensor.is_floating_point()
        )


def _copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in REPLACED else _copy(value) for name, value in fields.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _recurrent(cache: Any) -> Iterator[Tensor | None]:
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", None)
        yield from states.values() if isinstance(states, dict) else (states,)
