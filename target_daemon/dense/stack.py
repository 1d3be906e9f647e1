"""The layers of a dense decoder as straight code over preallocated state.

At width 1 each torch call costs as much as a small product.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from protocol.checkpoints.target_config import ModelConfig
from protocol.kernels.attention import attend_folded, padded_length
from protocol.kernels.rope import Turner
from target_daemon.capture import Capture
from target_daemon.dense.abreast import Abreast, Taken
from target_daemon.dense.key_values import KeyValues
from target_daemon.dense.places import Line, Places
from target_daemon.dense.weights import DenseWeights, LayerWeights
from target_daemon.stages import Stage

ABREAST_MULTIPLE = 16  # of K where rows need not be the same at every width

# Rows of a forward, keys and values that they attend to, and by window what of them is seen.
Part: TypeAlias = tuple[slice, Sequence[Tensor], Mapping[int | None, Tensor]]
Attend: TypeAlias = Callable[[int, Tensor], Tensor]  # see `Stack._through`


class Stack:
    """Runs rows through every layer, writing their K/V and taps."""

    def __init__(
        self,
        model: ModelConfig,
        weights: DenseWeights,
        key_values: KeyValues,
        capture: Capture,
        turners: Mapping[Stage, Turner],
        dtype: torch.dtype,
    ) -> None:
        """The layers of a stage, its keys and values and its `turners` entry lie on its device."""
        self._heads, self._kv_heads = model.num_heads, model.num_kv_heads
        self._dim = model.head_dim
        self._dtype = dtype
        self._weights = weights
        self._key_values = key_values
        self._capture = capture
        self._turners = tuple(turners.items())
        self._turner = self._turners[0][1]  # all of them turn alike
        self._windows = frozenset(layer.window for layer in weights.layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [n, hidden] of ids [n]."""
        return functional.embedding(tokens, self._weights.embed).to(self._dtype)

    def run(self, slot: int, tokens: Tensor, places: Places, multiple: int) -> Tensor:
        """Residual stream [rows, hidden] after the last layer; K/V and taps of `tokens`.

        Rows beyond ``len(tokens)`` are padding, and leave no trace. K is padded to `multiple`.
        """
        count, rows = places.count, places.rows
        if rows > count:
            tokens = torch.cat((tokens, tokens[-1:].expand(rows - count)))
        places.begin(self._capture, slot)
        hidden = home = self.embed(tokens)
        length = padded_length(places.reach, self._key_values.capacity, multiple)
        caches, columns = self._key_values.readers(slot, length), places.columns
        if columns is None:
            writers = self._key_values.writers(slot, places.first, count)
        else:
            writers = self._key_values.layers(slot)
        for stage, turner in self._turners:
            hidden = hidden.to(stage.device)  # rows of activations are all that moves
            there = None if columns is None else columns.to(stage.device)
            attend = self._attend(places, there, hidden, (caches, writers))
            hidden = self._through(stage, hidden, places.angles(turner), attend, self._capture)
        return hidden.to(home.device)

    def _attend(
        self,
        places: Places,
        columns: Tensor | None,
        like: Tensor,
        state: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> Attend:
        """How layers on the device of `like` keep rows at `places`, and attend to what is kept.

        `state` holds the readers and the writers of all layers; `columns` are those of `places`.
        """
        caches, writers = state
        group, count, length = self._heads // self._kv_heads, places.count, caches[0].shape[2]
        masks = {
            window: places.mask(length, window, group, like)[None, None] for window in self._windows
        }

        def attend(index: int, fused: Tensor) -> Tensor:
            self._store(fused[:count], writers[index], columns)
            mask = masks[self._weights.layers[index].window]
            return self._mix(fused, caches[2 * index], caches[2 * index + 1], mask)

        return attend

    def run_abreast(self, tokens: Tensor, places: Abreast, taken: Taken) -> Tensor:
        """Residual stream [rows, hidden] of rows of several slots; K/V of all of them, and taps."""
        hidden = home = self.embed(tokens)
        for stage, turner in self._turners:
            hidden = hidden.to(stage.device)
            attend = self._attend_abreast(places, hidden)
            hidden = self._through(stage, hidden, places.angles(turner), attend, taken)
        return hidden.to(home.device)

    def _attend_abreast(self, places: Abreast, like: Tensor) -> Attend:
        """The same of rows of several slots."""
        slots, positions = places.slots.to(like.device), places.positions.to(like.device)
        parts = [*self._groups(places, like), *self._chunks(places, like)]

        def attend(index: int, fused: Tensor) -> Tensor:
            self._key_values.put(index, slots, positions, self._pairs(fused))
            window = self._weights.layers[index].window
            seen = [
                self._mix(fused[rows], caches[2 * index], caches[2 * index + 1], masks[window])
                for rows, caches, masks in parts
            ]
            return seen[0] if len(seen) == 1 else torch.cat(seen)

        return attend

    def _groups(self, places: Abreast, like: Tensor) -> Iterator[Part]:
        """The slots' own rows, what they read, and what of it they see."""
        for slots, reach in places.groups():
            length = padded_length(reach, self._key_values.capacity, ABREAST_MULTIPLE)
            masks = {window: places.mask(slots, length, window, like) for window in self._windows}
            yield slots, self._key_values.abreast(slots, length), masks

    def _chunks(self, places: Abreast, like: Tensor) -> Iterator[Part]:
        """The same of each chunk."""
        group, first = self._heads // self._kv_heads, places.own
        for chunk in places.chunks:
            line = Line(chunk.first, chunk.count, chunk.count)
            length = padded_length(line.reach, self._key_values.capacity)
            masks = {
                window: line.mask(length, window, group, like)[None, None]
                for window in self._windows
            }
            rows = slice(first, first + chunk.count)
            yield rows, self._key_values.readers(chunk.slot, length), masks
            first = rows.stop

    def _through(
        self,
        stage: Stage,
        hidden: Tensor,
        angles: tuple[Tensor, ...],
        attend: Attend,
        taken: Taken,
    ) -> Tensor:
        """The layers of `stage` over `hidden` [rows, hidden], in place.

        ``attend(layer's index, fused [rows, heads + 2 kv, d])`` keeps keys and values and gives
        what the queries see, [rows, heads * d].
        """
        captured, rows = taken.columns, hidden.shape[0]
        for index in range(stage.first, stage.stop):
            layer = self._weights.layers[index]
            fused = layer.qkv(layer.input_norm(hidden)).view(rows, -1, self._dim)
            self._turn(layer, fused, angles)
            layer.output.add_to(hidden, attend(index, fused))
            inner = layer.gate_up(layer.post_norm(hidden))
            middle = inner.shape[1] // 2
            gate = functional.silu(inner[:, :middle], inplace=True).mul_(inner[:, middle:])
            layer.down.add_to(hidden, gate)
            if index in captured:
                taken.take(index, hidden)
        return hidden

    def _store(self, fused: Tensor, rows: Tensor, columns: Tensor | None) -> None:
        """Key and value of `fused` [n, heads + 2 kv, d] into `rows`.

        `rows` [2, kv, n, d] are their own, or with `columns` [n] all of the layer's.
        """
        pairs = self._pairs(fused).permute(1, 2, 0, 3)
        if columns is None:
            rows.copy_(pairs)
        else:
            rows.index_copy_(2, columns, pairs)

    def _pairs(self, fused: Tensor) -> Tensor:
        """Key and value in `fused` [n, heads + 2 kv, d], as [n, 2, kv, d]."""
        return fused[:, self._heads :].view(-1, 2, self._kv_heads, self._dim)

    def _mix(self, fused: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of the query in `fused` over one slot, or each row over its own.

        `key`, `value` [slots, kv, length, d], with `mask` as `attend_folded` has it. Returns
        [n, heads * d].
        """
        rows, kv, dim = fused.shape[0], self._kv_heads, self._dim
        query = fused[:, : self._heads].view(rows, kv, -1, dim)
        scale = dim**-0.5
        if rows == key.shape[0]:  # nothing to fold: four views fewer a layer
            return attend_folded(query, key, value, mask, scale).reshape(rows, -1)
        folded = query.permute(1, 2, 0, 3).reshape(1, kv, -1, dim)
        mixed = attend_folded(folded, key, value, mask, scale)
        return mixed.view(kv, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1)

    def _turn(self, layer: LayerWeights, fused: Tensor, angles: tuple[Tensor, ...]) -> None:
        """Normalise (Qwen3) and rotate query and key in place; `fused` [n, heads + 2 kv, d]."""
        heads = self._heads
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = fused[:, :heads], fused[:, heads : heads + self._kv_heads]
            query.copy_(layer.q_norm(query))
            key.copy_(layer.k_norm(key))
        self._turner.turn_(fused[:, : heads + self._kv_heads], angles)
