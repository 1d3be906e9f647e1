"""The layers of a decoder of Gated DeltaNet and attention, as straight code over their state."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from protocol.kernels.attention import attend_folded, padded_length
from protocol.kernels.rope import RopeTable
from target_daemon.capture import Capture
from target_daemon.dense.key_values import KeyValues
from target_daemon.dense.places import Line
from target_daemon.exactness import WIDE
from target_daemon.hybrid.config import HybridConfig
from target_daemon.hybrid.delta import by_chunks, by_rows, convolve, rowwise, unit
from target_daemon.hybrid.state import DeltaStates, Forward
from target_daemon.hybrid.weights import AttentionWeights, DeltaWeights, HybridWeights

# Wider passes are prompts, whose rows may depend on how many there are: by chunks is quicker.
MOST_BY_ROWS: Final = max(WIDE)


@dataclass(frozen=True, slots=True)
class Pass:
    """What the attention layers of one pass share."""

    line: Line
    length: int  # of K, padded
    mask: Tensor  # [1, 1, group * rows, length]
    cos: Tensor  # [rows, 1, rotary_dim]
    sin: Tensor


class HybridStack:
    """Runs rows through every layer, writing state, K/V and taps."""

    def __init__(
        self,
        config: HybridConfig,
        weights: HybridWeights,
        key_values: KeyValues,
        states: DeltaStates,
        capture: Capture,
        table: RopeTable,
    ) -> None:
        self._config, self._weights = config, weights
        self._key_values, self._states = key_values, states
        self._capture, self._table = capture, table
        self._dtype = weights.head.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [n, hidden] of ids [n]."""
        return functional.embedding(tokens, self._weights.embed).to(self._dtype)

    def run(self, forward: Forward, tokens: Tensor, line: Line, multiple: int) -> Tensor:
        """Residual stream [rows, hidden] after the last layer; rows of padding leave no trace."""
        slot, count = forward.slot, line.count
        if line.rows > count:
            tokens = torch.cat((tokens, tokens[-1:].expand(line.rows - count)))
        line.begin(self._capture, slot)
        hidden = self.embed(tokens)
        own = self._pass(line, multiple, hidden)
        readers = self._key_values.readers(slot, own.length)
        writers = self._key_values.writers(slot, line.first, count)
        linear = full = 0
        for index, layer in enumerate(self._weights.layers):
            mixer, rows = layer.mixer, layer.input_norm(hidden)
            if isinstance(mixer, DeltaWeights):
                mixed = self._delta(mixer, rows, forward, linear, count)
                linear += 1
            else:
                caches = readers[2 * full], readers[2 * full + 1], writers[full]
                mixed = self._attend(mixer, rows, own, caches)
                full += 1
            mixer.output.add_to(hidden, mixed)
            inner = layer.gate_up(layer.post_norm(hidden))
            middle = inner.shape[1] // 2
            gate = functional.silu(inner[:, :middle], inplace=True).mul_(inner[:, middle:])
            layer.down.add_to(hidden, gate)
            if index in self._capture.columns:
                self._capture.take(index, hidden)
        self._states.end_pass(forward, count)
        return hidden

    def _pass(self, line: Line, multiple: int, hidden: Tensor) -> Pass:
        length = padded_length(line.reach, self._key_values.capacity, multiple)
        group = self._config.heads // self._config.kv_heads
        mask = line.mask(length, None, group, hidden)[None, None]
        cos, sin = self._table.at(line.first, line.first + line.rows)
        return Pass(line, length, mask, cos[:, None], sin[:, None])

    def _delta(
        self, weights: DeltaWeights, rows: Tensor, forward: Forward, layer: int, count: int
    ) -> Tensor:
        """Gated DeltaNet of normalised `rows` [n, hidden]; returns [n, values]."""
        c = self._config
        fused = weights.fused(rows)
        mixed, gate, beta, rate = fused.split([c.mixed, c.values, c.value_heads, c.value_heads], 1)
        # Padding must not enter the state: it goes through the products alone.
        inputs = torch.cat((forward.inputs[layer], mixed[:count]))
        seen = convolve(inputs[-(count + c.kernel - 1) :], weights.taps, count).float()
        forward.inputs[layer] = inputs
        query, key, value = seen.split([c.keys, c.keys, c.values], dim=1)
        group = c.value_heads // c.key_heads
        query, key = (
            unit(each.view(count, c.key_heads, c.key_dim)).repeat_interleave(group, dim=1)
            for each in (query, key)
        )
        query = query * c.key_dim**-0.5
        value = value.reshape(count, c.value_heads, c.value_dim)
        strength = rowwise(torch.sigmoid, beta[:count]).float()
        free = rate[:count].float() + weights.shift
        decay = weights.rate * rowwise(functional.softplus, free)
        state = forward.states[layer]
        if count <= max(MOST_BY_ROWS, self._states.widest):  # any block, whatever is kept of it
            steps = self._states.steps(forward, layer, count)
            out, state = by_rows(query, key, value, decay, strength, state, steps)
        else:
            out, state = by_chunks(query, key, value, decay, strength, state)
        forward.states[layer] = state
        return self._gated(weights, out, gate)

    def _gated(self, weights: DeltaWeights, out: Tensor, gate: Tensor) -> Tensor:
        """Each head's output normalised, and gated; padding is a repetition of the last row."""
        count, rows = out.shape[0], gate.shape[0]
        plain = out.to(gate.dtype).float()
        normal = functional.rms_norm(plain, plain.shape[-1:], eps=self._config.eps)
        normal = (normal.to(gate.dtype) * weights.norm).reshape(count, -1)
        mixed = (normal.float() * rowwise(functional.silu, gate[:count].float())).to(gate.dtype)
        if rows == count:
            return mixed
        return torch.cat((mixed, mixed[-1:].expand(rows - count, -1)))

    def _attend(
        self,
        weights: AttentionWeights,
        rows: Tensor,
        own: Pass,
        caches: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Gated attention of normalised `rows` [n, hidden]; returns [n, heads * head_dim]."""
        c, count = self._config, rows.shape[0]
        keys, values, written = caches
        fused = weights.fused(rows).view(count, -1, c.head_dim)
        query, key, value, gate = fused.split([c.heads, c.kv_heads, c.kv_heads, c.heads], dim=1)
        query = self._turned(weights.q_norm(query), own)
        key = self._turned(weights.k_norm(key), own)
        stored = own.line.count
        written[0].copy_(key[:stored].transpose(0, 1))
        written[1].copy_(value[:stored].transpose(0, 1))
        folded = query.view(count, c.kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, c.kv_heads, -1, c.head_dim)
        out = attend_folded(folded, keys, values, own.mask, c.head_dim**-0.5)
        out = out.view(c.kv_heads, -1, count, c.head_dim).permute(2, 0, 1, 3).reshape(count, -1)
        return out * rowwise(torch.sigmoid, gate.reshape(count, -1))

    def _turned(self, heads: Tensor, own: Pass) -> Tensor:
        """`heads` [n, heads, head_dim] with their first `rotary_dim` elements rotated."""
        size = self._config.rotary_dim
        first = heads[..., :size]
        turned = first * own.cos + first.roll(size // 2, dims=-1) * own.sin
        return torch.cat((turned, heads[..., size:]), dim=-1)
