"""Qwen3.5's text model: Gated DeltaNet layers, and gated attention in every fourth.

The recurrent layers' state after each row of the last forward is kept, so that rejected rows are
dropped without running the others again. `target_daemon.hybrid` has the arithmetic.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from protocol.config import TargetConfig
from protocol.errors import InsufficientMemory, UnsupportedModel
from protocol.kernels.rope import table
from protocol.memory import Available, available
from target_daemon.dense.key_values import KEY_VALUES, KeyValues, probed_rows
from target_daemon.dense.passes import Ends, PassedTarget
from target_daemon.dense.places import Line
from target_daemon.exactness import BASE, REFERENCE, WIDE, AttentionShape, Exactness, Widths, settle
from target_daemon.families.base import Family, LoadRequest, NativeTarget, open_ring
from target_daemon.hybrid.config import FULL, read_hybrid_config
from target_daemon.hybrid.stack import HybridStack
from target_daemon.hybrid.state import DeltaStates, Held
from target_daemon.hybrid.weights import HybridLoader
from target_daemon.target import Logits, StateCopy

PROBE_SLOT: Final = 0
LENGTH: Final = "length"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One slot before a forward of `rows` rows; its K/V rows are not overwritten by one."""

    held: Held
    rows: int


class HybridTarget(PassedTarget):
    """A loaded model with state for ``config.slots`` sequences."""

    def __init__(self, request: LoadRequest) -> None:
        model, config = request.model, request.config
        hybrid = read_hybrid_config(Path(config.model), model)
        if config.graphs:
            raise UnsupportedModel(
                f"--graphs: the recurrent state of {model.model_type} is replaced in each forward, "
                "which a recorded one cannot do"
            )
        self.take_facts(request, hybrid.theta)
        self._capture, self.ring = open_ring(request)
        self.weights = HybridLoader(request.tensors, model, hybrid, self.dtype).load(request.host)
        self.weight_bytes = self.weights.bytes
        heads = (hybrid.heads, hybrid.kv_heads, hybrid.head_dim)
        self.key_values = KeyValues(
            slots=config.slots,
            layers=hybrid.layer_types.count(FULL),
            kv_heads=hybrid.kv_heads,
            head_dim=hybrid.head_dim,
            rows=self.max_positions + max(config.block_size, *WIDE),
            dtype=self.dtype,
            device=request.device,
        )
        widest = max(self.max_width, REFERENCE)
        self.states = DeltaStates(hybrid, config.slots, widest, self.dtype, request.device)
        capacity = self.key_values.capacity
        self._attention = self._shape(heads, capacity)
        self._stack = HybridStack(
            hybrid,
            self.weights,
            self.key_values,
            self.states,
            self._capture,
            table(hybrid.rotary_dim, hybrid.theta, capacity, self.dtype, device=request.device),
        )
        self._start: Snapshot | None = None  # of the probe
        self._tokens = torch.zeros(0)
        self.widths = Widths()
        self._fits = self._check_memory(widest)
        self.widths, self.exactness = self._settle(config)

    @property
    def ends(self) -> Ends:
        return self.weights

    def _check_memory(self, widest: int) -> bool:
        """Whether the states of each row fit; InsufficientMemory where those of slots do not."""
        left, slots = self._left(), (self.slots + 2) * self.states.bytes
        if slots > left.size:
            raise InsufficientMemory(
                f"recurrent state: {self.slots} slots and two copies take {self.states.bytes:,} "
                f"bytes each; {left.size:,} are left ({left.source})"
            )
        size, fits = self.states.step_bytes, slots + self.states.step_bytes <= left.size
        self._detail = f"the states of its last {widest} rows are kept, in {size:,} bytes"
        if not fits:
            self._detail = (
                f"the states of {widest} rows take {size:,} bytes, and {left.size:,} are left"
            )
        return fits

    def _left(self) -> Available:
        if self.device.type == "cpu":
            return available()
        return Available(torch.cuda.mem_get_info(self.device)[0], f"free memory of {self.device}")

    # --- state ---------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        self.states.begin(slot, 0, 0)

    def snapshot_kv(self, slot: int, base_pos: int, rows: int) -> Snapshot:
        del base_pos
        return Snapshot(self.states.slots[slot], rows)

    def restore_kv(self, slot: int, snapshot: object) -> None:
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"not a snapshot of this target: {type(snapshot).__name__}")
        self.states.slots[slot] = snapshot.held
        # A forward that failed may have left numbers that no mask silences.
        self.key_values.clear(slot, snapshot.held.length, snapshot.rows)

    @property
    def supports_fast_rollback(self) -> bool:
        return self._fits

    @property
    def rollback_detail(self) -> str:
        return self._detail

    def prepare_rollback(self, kind: Literal["fast", "replay"]) -> None:
        self.states.record(self._fits and kind == "fast")

    @torch.inference_mode()
    def rollback_to(self, slot: int, base_pos: int, n: int) -> bool:
        length = base_pos + n
        return self.states.slots[slot].length == length or self.states.go_back(slot, length)

    def state_bytes(self, slot: int, length: int) -> int:
        if length != self.states.slots[slot].length:
            return 0
        return self.key_values.bytes(length) + self.states.bytes

    def copy_state(self, slot: int, length: int, *, shared: bool = False) -> StateCopy:
        copied = {str(at): each.cpu() for at, each in enumerate(self.states.copies(slot))}
        rows = self.key_values.view if shared else self.key_values.save
        copied[KEY_VALUES] = rows(slot, 0, length).cpu()
        return StateCopy(copied, {LENGTH: length})

    def set_state(self, slot: int, state: StateCopy, length: int) -> None:
        own = [state.tensors.get(str(at)) for at in range(len(self.states.copies(slot)))]
        tensors = [each for each in own if each is not None]
        if state.facts.get(LENGTH) != length or KEY_VALUES not in state.tensors:
            raise ValueError(f"no state of this model at {length}")
        self.key_values.load(slot, state.tensors[KEY_VALUES].narrow(3, 0, length))
        self.states.put(slot, tensors, length)

    # --- forward -------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify_batch(
        self, slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        forward = self.states.begin(slot, base_pos, tokens.shape[0])

        def run(_slot: int, part: Tensor, line: Line) -> Tensor:
            return self._stack.run(forward, part, line, self.widths.key_multiple)

        return self.run_passes(run, slot, tokens.to(self.device), base_pos, logits)

    # --- width invariance ----------------------------------------------------------------------

    @torch.inference_mode()
    def _settle(self, config: TargetConfig) -> tuple[Widths, Exactness]:
        """Probe, then remove every trace of it."""
        rows = REFERENCE + max(WIDE) + max(self.max_width, REFERENCE)
        base = min(BASE, max(1, self.max_positions - REFERENCE))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (base + rows,), generator=generator)
        self.prepare_rollback("fast")
        with self._capture.paused():
            self.verify_batch(PROBE_SLOT, tokens[:base], 0, "none")
            self._start, self._tokens = self.snapshot_kv(PROBE_SLOT, base, rows), tokens[base:]
            try:
                return settle(
                    self,
                    self._tokens,
                    base=base,
                    block=self.max_width,
                    exact=config.exact,
                    coarse=self.dtype != torch.float32,
                )
            finally:
                self.restore_kv(PROBE_SLOT, self._start)
                self.key_values.clear(PROBE_SLOT, 0, base)
                self.reset(PROBE_SLOT)
                self._start = None

    def probe_rows(self, tokens: Tensor, base: int) -> Tensor:
        start = self._start
        if start is not None and base == start.held.length:
            self.restore_kv(PROBE_SLOT, start)
        elif start is not None and not self.states.go_back(PROBE_SLOT, base):
            self.restore_kv(PROBE_SLOT, start)
            # Among as many rows as the reference has, of which only these leave a state.
            own, self.widths = self.widths, replace(self.widths, least=REFERENCE)
            between = self._tokens[: base - start.held.length]
            for at in range(0, len(between), REFERENCE):
                part = between[at : at + REFERENCE]
                self.verify_batch(PROBE_SLOT, part, start.held.length + at, "none")
            self.widths = own
        logits = self.verify_batch(PROBE_SLOT, tokens, base, "all")
        return probed_rows(logits, self.key_values.save(PROBE_SLOT, base, tokens.shape[0]))

    def probe_attention(self) -> AttentionShape:
        return self._attention

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self._stack.embed(tokens)


class HybridFamily(Family):
    """The dense text model, alone or as a part of one that also sees."""

    model_types = ("qwen3_5", "qwen3_5_text")

    def load(self, request: LoadRequest) -> NativeTarget:
        return HybridTarget(request)


FAMILY: Final = HybridFamily()
