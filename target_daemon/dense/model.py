"""The dense decoder: RMSNorm, rotary grouped-query attention, SwiGLU; Llama, Mistral, Qwen.

Every family of this shape is one `Rules` away: see `llama.py`. `target_daemon.dense.stack` has the
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from protocol.checkpoints.target_config import read_model_config
from protocol.config import TargetConfig
from protocol.errors import UnsupportedModel
from protocol.kernels.inference import inference
from protocol.kernels.rope import Turner, table
from target_daemon.checkpoint import Checkpoint
from target_daemon.columns import NOWHERE, Columns
from target_daemon.columns import settle as settle_columns
from target_daemon.dense.abreast import Abreast, Taken
from target_daemon.dense.joined import JoinedKeyValues
from target_daemon.dense.key_values import KeptRows, KeyValues, probed_rows
from target_daemon.dense.layout import Rules, resolve
from target_daemon.dense.passes import Ends, PassedTarget
from target_daemon.dense.places import Line, Tree
from target_daemon.dense.stack import Stack
from target_daemon.dense.static import StaticForwards
from target_daemon.dense.weights import DenseLoader
from target_daemon.exactness import BASE, REFERENCE, WIDE, AttentionShape, Exactness, Widths, settle
from target_daemon.families.base import Family, LoadRequest, NativeTarget, open_ring
from target_daemon.stages import Stage
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

    quantises = True
    splits = True

    def __init__(self, model_types: tuple[str, ...], rules: Rules) -> None:
        self.model_types = model_types
        self.rules = rules

    def load(self, request: LoadRequest) -> NativeTarget:
        if not request.model.dense:  # a type of which the config's reader knows nothing yet
            model = read_model_config(Path(request.config.model), dense=True)
            request = replace(request, model=model)
        return DenseTarget(request, self.rules)


class DenseTarget(KeptRows, PassedTarget):
    """A loaded dense decoder with K/V for ``config.slots`` sequences."""

    def __init__(self, request: LoadRequest, rules: Rules) -> None:
        model, config = request.model, request.config
        layout = resolve(model, rules)
        self.take_facts(request, layout.theta)
        self._capture, self.ring = open_ring(request)
        checkpoint = Checkpoint(request.tensors)
        loader = DenseLoader(checkpoint, model, layout, self.dtype, config.weights)
        self.weights = loader.load(request.host)
        self.weight_bytes = self.weights.bytes
        stages = request.stages or (Stage(0, model.num_layers, request.device),)
        parts = [(each.count, self._key_values(request, each)) for each in stages]
        self.key_values = parts[0][1] if len(parts) == 1 else JoinedKeyValues(parts)
        capacity = self.key_values.capacity
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        self._attention = self._shape(heads, capacity)
        turners = {each: self._turner(request, layout.theta, each, capacity) for each in stages}
        state = (self.key_values, self._capture)
        self._stack = Stack(model, self.weights, *state, turners, self.dtype)
        self._tree: tuple[int, Tree] | None = None  # of the last tree forward, and its slot
        self.forwards = self._static(capacity) if config.graphs else None
        self.widths, self.exactness = self._settle(config)

    def _key_values(self, request: LoadRequest, stage: Stage) -> KeyValues:
        model, config = request.model, request.config
        return KeyValues(
            slots=config.slots,
            layers=stage.count,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rows=self.max_positions + max(config.block_size, *WIDE),
            dtype=self.dtype,
            device=stage.device,
        )

    def _turner(self, request: LoadRequest, theta: float, stage: Stage, rows: int) -> Turner:
        size, scaling = request.model.head_dim, request.model.rope_scaling
        return Turner(table(size, theta, rows, self.dtype, scaling, stage.device), self.dtype)

    def _static(self, capacity: int) -> StaticForwards:
        widest, logits = max(self.max_width, REFERENCE), self._logits
        return StaticForwards(self._stack, self._capture, logits, self.device, capacity, widest)

    @property
    def ends(self) -> Ends:
        return self.weights

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
        rows = snapshot.rows
        if self._tree is not None and self._tree[0] == slot:
            rows = max(rows, self._tree[1].span)
        self.key_values.clear(slot, snapshot.base, rows)

    @property
    def supports_fast_rollback(self) -> bool:
        return True

    @property
    def rollback_detail(self) -> str:
        return "every position has rows of its own, so that rejected ones are dropped for nothing"

    def rollback_to(self, slot: int, base_pos: int, n: int) -> bool:
        # Every row has its own place, so that forgetting the last ones is doing nothing.
        del slot, base_pos, n
        return True

    @property
    def supports_tree_verify(self) -> bool:
        return self._columns is not None

    def tree_rows(self, base_pos: int, parents: Sequence[int]) -> tuple[int, ...]:
        places = self._columns.place(base_pos, parents) if self._columns is not None else ()
        return tuple(row for row, place in enumerate(places) if place != NOWHERE)

    def rollback_to_tree(self, slot: int, base_pos: int, path: Sequence[int]) -> bool:
        if self._tree is None or (self._tree[0], self._tree[1].base) != (slot, base_pos):
            return False
        places = self._tree[1].places
        self.key_values.compact(slot, base_pos, [places[row] for row in path])
        self._capture.compact(slot, base_pos, path)
        return True

    # --- forward -------------------------------------------------------------------------------

    @inference
    def verify_batch(
        self, slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        count, multiple = tokens.shape[0], self.widths.key_multiple
        tokens = tokens.to(self.device)
        if self.forwards is not None and logits == "all" and count <= self.max_width:
            return self.forwards.run(slot, tokens, base_pos, self.widths.least)

        def run(slot: int, part: Tensor, line: Line) -> Tensor:
            return self._stack.run(slot, part, line, multiple)

        return self.run_passes(run, slot, tokens, base_pos, logits)

    @inference
    def run_abreast(self, tokens: Tensor, places: Abreast, taken: Taken) -> Tensor:
        """Residual stream [rows, hidden] of `tokens` [rows] of several slots.

        Their K/V are written; of the feature ring nothing is. `score` makes logits of it.
        """
        return self._stack.run_abreast(tokens.to(self.device), places, taken)

    def move(self, source: int, goal: int, rows: int) -> None:
        """Give a slot the first `rows` positions of another."""
        self.key_values.move(source, goal, rows)

    @inference
    def score(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size], float32, of rows [n, hidden] behind the last layer."""
        return self._logits(hidden)

    @inference
    def verify_tree(
        self, slot: int, tokens: Tensor, base_pos: int, parents: Sequence[int]
    ) -> Tensor:
        if self._columns is None:
            raise UnsupportedModel(f"no trees: {self.tree_detail}")
        places = self._columns.place(base_pos, parents)
        if NOWHERE in places:
            raise ValueError("a row that `tree_rows` leaves out")
        tokens, tree = tokens.to(self.device), Tree(base_pos, parents, places)
        self._tree = slot, tree
        answers = []
        for start, stop, rows in self.widths.passes(tokens.shape[0]):
            part = tree.part(start, stop, rows)
            hidden = self._stack.run(slot, tokens[start:stop], part, self.widths.key_multiple)
            answers.append(self._logits(hidden)[: stop - start])
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    # --- width invariance ----------------------------------------------------------------------

    @cached_property
    def _columns(self) -> Columns | None:
        """How trees lie here, measured when it is first asked for; None where none is exact."""
        if self.exactness.kind == "no":
            return Columns()
        widest = max(self.max_width, REFERENCE)
        rows = sorted({self.widths.least, REFERENCE, *(w for w in WIDE if w < widest), widest})
        return settle_columns(self._attention, self.widths.key_multiple, rows)

    @property
    def tree_detail(self) -> str:
        if self._columns is None:
            wide = "" if self.dtype == torch.float32 else "; they may be with --dtype float32"
            return (
                f"attention depends on where a branch lies, so that trees would not be exact{wide}"
            )
        return "rows of a branch keep their bits" if self._columns.stride else "rows are not exact"

    @torch.inference_mode()
    def _settle(self, config: TargetConfig) -> tuple[Widths, Exactness]:
        """Probe, then remove every trace of it."""
        rows = REFERENCE + max(WIDE) + max(self.max_width, REFERENCE)
        base = min(BASE, max(0, self.max_positions - REFERENCE))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (rows,), generator=generator)
        self.key_values.fill_with_noise(PROBE_SLOT, base, generator)
        try:
            with self._capture.paused():
                return settle(
                    self,
                    tokens,
                    base=base,
                    block=self.max_width,
                    exact=config.exact,
                    coarse=self.dtype != torch.float32,
                )
        finally:
            if self.forwards is not None:
                self.forwards.pool.clear()  # recorded without taps
            self.key_values.clear(PROBE_SLOT, 0, base + rows)

    def probe_rows(self, tokens: Tensor, base: int) -> Tensor:
        logits = self.verify_batch(PROBE_SLOT, tokens, base, "all")
        return probed_rows(logits, self.key_values.save(PROBE_SLOT, base, tokens.shape[0]))

    def probe_attention(self) -> AttentionShape:
        return self._attention

    # --- embedding and head --------------------------------------------------------------------

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self._stack.embed(tokens)
