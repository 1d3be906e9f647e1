"""The dense decoder: RMSNorm, rotary grouped-query attention, SwiGLU; Llama, Mistral, Qwen.

Every family of this shape is one `Rules` away: see `llama.py`. The layers are written as straight
code over preallocated state, since at width 1 each torch call costs as much as a small product.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from protocol.checkpoints.target_config import read_model_config
from protocol.config import TargetConfig
from protocol.errors import ConfigError
from protocol.kernels.attention import attend_folded, causal_mask, padded_length
from protocol.kernels.rope import Turner, table
from target_daemon.capture import open_capture
from target_daemon.checkpoint import Checkpoint
from target_daemon.dense.key_values import KeyValues
from target_daemon.dense.layout import Rules, resolve
from target_daemon.dense.weights import DenseLoader, LayerWeights
from target_daemon.exactness import (
    BASE,
    REFERENCE,
    WIDE,
    AttentionShape,
    Exactness,
    Widths,
    settle,
)
from target_daemon.families.base import Family, LoadRequest, NativeTarget
from target_daemon.target import Logits

PROBE_SLOT: Final = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows of one forward. Nothing is copied: it overwrites nothing that can be read again.

    Every position has a K/V row of its own, and nothing at or behind the base is valid. What it
    overwrites in the ring is out of every reader's reach once it is announced.
    """

    base: int
    rows: int


class DenseFamily(Family):
    """A family of dense decoders that differ in `rules` alone."""

    def __init__(self, model_types: tuple[str, ...], rules: Rules) -> None:
        self.model_types = model_types
        self.rules = rules

    def load(self, request: LoadRequest) -> NativeTarget:
        if not request.model.dense:  # a type of which the config's reader knows nothing yet
            model = read_model_config(Path(request.config.model), dense=True)
            request = replace(request, model=model)
        return DenseTarget(request, self.rules)


class DenseTarget(NativeTarget):
    """A loaded dense decoder with K/V for ``config.slots`` sequences."""

    embedding_scale = 1.0
    logit_scale = 1.0
    logit_softcap = 0.0
    supports_cut = True

    def __init__(self, request: LoadRequest, rules: Rules) -> None:
        model, config = request.model, request.config
        layout = resolve(model, rules)
        self._take_facts(request, layout.theta)
        self._windows = frozenset(layout.windows)
        self._heads, self._kv_heads, self._dim = (
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
        )
        self._capture, self.ring = open_capture(
            request.host,
            taps=config.taps,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            slots=config.slots,
            window=config.ring_window,
            widest_forward=max(config.prefill_chunk, config.block_size),
            dtype=self.dtype,
        )
        loader = DenseLoader(Checkpoint(request.tensors), model, layout, self.dtype)
        self.weights = loader.load(request.host)
        self.weight_bytes = self.weights.bytes
        self.key_values = KeyValues(
            slots=config.slots,
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rows=self.max_positions + max(config.block_size, *WIDE),
            dtype=self.dtype,
        )
        capacity, scaling = self.key_values.capacity, model.rope_scaling
        angles = table(model.head_dim, layout.theta, capacity, self.dtype, scaling)
        self._turner = Turner(angles, self.dtype)
        self.widths, self.exactness = self._settle(config)

    def _take_facts(self, request: LoadRequest, theta: float) -> None:
        model, config = request.model, request.config
        self.model_type = model.model_type
        self.dtype = request.dtype
        self.hidden_size = model.hidden_size
        self.num_layers = model.num_layers
        self.vocab_size = self.padded_vocab_size = model.vocab_size
        self.max_positions = request.max_positions
        self.slots = config.slots
        self.capture_layer_ids = config.taps
        self.mask_token_id = config.mask_token_id
        if self.mask_token_id >= model.vocab_size:
            raise ConfigError(
                f"mask token id {self.mask_token_id} is outside the vocabulary of "
                f"{model.vocab_size}"
            )
        self.eos_token_ids = model.eos_token_ids
        self.tied = model.tied
        self.rope_theta = theta
        self.max_width = max(config.block_size, 1)
        self.prefill_chunk = config.prefill_chunk

    # --- state ---------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        # Rows are read only below the position of a forward, and those are written by then.
        del slot

    def snapshot_kv(self, slot: int, base_pos: int, rows: int) -> Snapshot:
        del slot
        return Snapshot(base_pos, rows)

    def restore_kv(self, slot: int, snapshot: object) -> None:
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"not a snapshot of this target: {type(snapshot).__name__}")
        # A forward that failed may have left numbers that no mask silences.
        self.key_values.clear(slot, snapshot.base, snapshot.rows)

    @property
    def supports_fast_rollback(self) -> bool:
        return True

    def rollback_to(self, slot: int, base_pos: int, n: int) -> bool:
        # Every row has its own place, so that forgetting the last ones is doing nothing.
        del slot, base_pos, n
        return True

    # --- forward -------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify_batch(
        self, slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        count = tokens.shape[0]
        answers: list[Tensor] = []
        for start, stop, rows in self.widths.passes(count):
            wanted = "none" if logits == "last" and stop < count else logits
            hidden = self._layers(slot, tokens[start:stop], base_pos + start, rows)
            if wanted == "all":
                answers.append(self._logits(hidden)[: stop - start])
            elif wanted == "last":
                answers.append(self._last(hidden, stop - start))
        if not answers:
            return None
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _last(self, hidden: Tensor, count: int) -> Tensor:
        """Logits of row ``count - 1``, computed among `least` rows: the head's width counts too."""
        least = self.widths.least
        first = max(0, min(count - 1, hidden.shape[0] - least))
        return self._logits(hidden[first : first + least])[count - 1 - first :][:1]

    def _layers(self, slot: int, tokens: Tensor, base: int, rows: int) -> Tensor:
        """Residual stream [rows, hidden] after the last layer; K/V and taps of `tokens`.

        Rows beyond ``len(tokens)`` are padding, and leave no trace.
        """
        count = tokens.shape[0]
        if rows > count:
            tokens = torch.cat((tokens, tokens[-1:].expand(rows - count)))
        self._capture.begin(slot, base, count)
        hidden = self.embed_tokens(tokens)
        length = padded_length(base + rows, self.key_values.capacity, self.widths.key_multiple)
        masks = {window: self._mask(base, rows, length, window) for window in self._windows}
        angles = self._turner.at(base, base + rows)
        caches = self.key_values.readers(slot, length)
        writers = self.key_values.writers(slot, base, count)
        captured = self._capture.columns
        for index, layer in enumerate(self.weights.layers):
            fused = layer.qkv(layer.input_norm(hidden)).view(rows, -1, self._dim)
            self._turn(layer, fused, angles)
            self._store(fused[:count], writers[index])
            key, value = caches[2 * index], caches[2 * index + 1]
            layer.output.add_to(hidden, self._mix(fused, key, value, masks[layer.window]))
            inner = layer.gate_up(layer.post_norm(hidden))
            middle = inner.shape[1] // 2
            gate = functional.silu(inner[:, :middle], inplace=True).mul_(inner[:, middle:])
            layer.down.add_to(hidden, gate)
            if index in captured:
                self._capture.take(index, hidden)
        return hidden

    def _store(self, fused: Tensor, rows: Tensor) -> None:
        """Key and value of `fused` [n, heads + 2 kv, d] into `rows` [2, kv, n, d]."""
        pairs = fused[:, self._heads :].view(-1, 2, self._kv_heads, self._dim)
        rows.copy_(pairs.permute(1, 2, 0, 3))

    def _mix(self, fused: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of the query in `fused`; returns [n, heads * d]."""
        rows, kv, dim = fused.shape[0], self._kv_heads, self._dim
        query = fused[:, : self._heads].view(rows, kv, -1, dim)
        scale = dim**-0.5
        if rows == 1:  # nothing to fold: four views fewer a layer
            return attend_folded(query, key, value, mask, scale).reshape(1, -1)
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

    def _mask(self, base: int, rows: int, length: int, window: int | None) -> Tensor:
        group = self._heads // self._kv_heads
        return causal_mask(base, rows, length, window=window, group=group, dtype=self.dtype)[
            None, None
        ]

    # --- width invariance ----------------------------------------------------------------------

    @torch.inference_mode()
    def _settle(self, config: TargetConfig) -> tuple[Widths, Exactness]:
        """Probe, then remove every trace of it."""
        rows = REFERENCE + max(WIDE) + max(self.max_width, REFERENCE)
        base = min(BASE, max(0, self.max_positions - REFERENCE))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (rows,), generator=generator)
        past = self.key_values.save(PROBE_SLOT, 0, base)
        self.key_values.restore(PROBE_SLOT, 0, past.normal_(generator=generator))
        try:
            with self._capture.paused():
                return settle(
                    self,
                    tokens,
                    base=base,
                    block=self.max_width,
                    exact=config.exact,
                    coarse=self.dtype == torch.bfloat16,
                )
        finally:
            self.key_values.clear(PROBE_SLOT, 0, base + rows)

    def probe_rows(self, tokens: Tensor, base: int) -> Tensor:
        logits = self.verify_batch(PROBE_SLOT, tokens, base, "all")
        count = tokens.shape[0]
        made = self.key_values.save(PROBE_SLOT, base, count).permute(3, 0, 1, 2, 4)
        parts = made.reshape(count, -1).float()
        return parts if logits is None else torch.cat((logits, parts), dim=1)

    def probe_attention(self) -> AttentionShape:
        return AttentionShape(
            kv_heads=self._kv_heads,
            group=self._heads // self._kv_heads,
            head_dim=self._dim,
            capacity=self.key_values.capacity,
            dtype=self.dtype,
        )

    # --- embedding and head --------------------------------------------------------------------

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weights.embed).to(self.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.weights.head(self.weights.norm(hidden)).float()

    @torch.inference_mode()
    def project_hidden_to_tokens(self, hidden: Tensor) -> Tensor:
        return self.weights.head(hidden.to(self.dtype)).float().argmax(dim=-1)

    @torch.inference_mode()
    def project_hidden_to_topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = self.weights.head(hidden.to(self.dtype)).float()
        best, ids = scores.topk(k, dim=-1)
        return best - scores.logsumexp(dim=-1, keepdim=True), ids
