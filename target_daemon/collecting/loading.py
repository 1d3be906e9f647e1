"""Loads the target for answers in batches: how many slots, what it will need, and which way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import torch

from protocol.checkpoints.target_config import ModelConfig, read_model_config
from protocol.checkpoints.tensors import open_tensors
from protocol.config import TargetConfig
from protocol.cpu import resolve_dtype, threads_of
from protocol.errors import ConfigError, InsufficientMemory
from protocol.feature_ring import RingShape
from protocol.lent_weights import find_ends
from protocol.memory import MemoryPlan, counted
from protocol.training import CollectConfig
from protocol.transports.base import RingView, WeightSpec
from protocol.transports.devices import Device, open_device
from protocol.transports.plain import PlainHost
from target_daemon.capture import check_taps
from target_daemon.collecting.decoder import CHUNK_ROWS
from target_daemon.collecting.forwards import Forwards, OneByOne, Together
from target_daemon.collecting.records import Records
from target_daemon.dense.model import DenseFamily, DenseTarget
from target_daemon.families.base import NativeTarget, find_family, load_target
from target_daemon.memory_plan import SIZES, plan

SLOTS: Final = 64  # more answers at once are hardly faster: see docs/architecture.md
MOST_SLOTS: Final = 4096
TOP_BYTES: Final = 6  # an id and its log-probability
FEATURE_BYTES: Final = 2

Progress = Callable[[int, int, str], None]  # done, total, what in words


class OwnHost(PlainHost):
    """Ring and weights in memory of this process alone, on its device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def create_ring(self, shape: RingShape) -> RingView:
        with self._device:
            return super().create_ring(shape)

    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, torch.Tensor]:
        with self._device:
            return super().create_weights(specs)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target that is ready to answer."""

    target: NativeTarget
    forwards: Forwards
    slots: int
    device: torch.device  # where features are noted

    def records(self, config: CollectConfig, *, features: bool) -> Records:
        """Room for what is noted of all slots."""
        target = self.target
        return Records(
            slots=self.slots,
            positions=target.max_positions,
            likeliest=min(config.likeliest, target.vocab_size),
            taps=config.taps if features else (),
            hidden_size=target.hidden_size,
            device=self.device,
        )


def load(config: CollectConfig, progress: Progress) -> Loaded:
    """Load ``config.model``.

    Raises InsufficientMemory before anything is loaded, ConfigError for taps that are no layers,
    UnsupportedModel for one that no draft can be trained for, and whatever `load_target` does.
    """
    if config.slots > MOST_SLOTS:
        raise ConfigError(f"`slots` is {config.slots}; 0 to {MOST_SLOTS} are possible")
    torch.set_num_threads(threads_of(config.threads))
    device = open_device(config.device)
    model = read_model_config(Path(config.model))
    check_taps(config.taps, model.num_layers)
    with open_tensors(Path(config.model)) as source:
        find_ends(source, model)  # or no draft could be trained on what is collected
    together = isinstance(find_family(Path(config.model), model.model_type), DenseFamily)
    if not together:
        progress(0, 0, f"{model.model_type} answers one text at a time: no forward for several yet")
    settings = _settings(config, device, together=together)
    settings, told = _fitting(config, settings, model, device)
    progress(0, 0, told)
    host = OwnHost(device.torch)
    target = load_target(
        settings, host, lambda done, total: progress(done, total, ""), device.torch
    )
    if isinstance(target, DenseTarget):
        return Loaded(target, Together(target), settings.slots, device.torch)
    target.prepare_rollback("replay")  # no row is ever taken back
    return Loaded(target, OneByOne(target), settings.slots, device.torch)


def _settings(config: CollectConfig, device: Device, *, together: bool) -> TargetConfig:
    """The target's own settings; where rows go together, features bypass its ring."""
    return TargetConfig(
        model=config.model,
        run_dir="",
        life=0,
        dtype=config.dtype,
        device=device.name,
        draft_device=device.name,
        threads=config.threads,
        slots=config.slots or (SLOTS if together else 1),
        max_positions=config.max_positions,
        prefill_chunk=CHUNK_ROWS,
        ring_window=1,
        taps=() if together else config.taps,
    )


def _fitting(
    config: CollectConfig, settings: TargetConfig, model: ModelConfig, device: Device
) -> tuple[TargetConfig, str]:
    """`settings` with as many slots as fit, unless a number was asked for; and the plan."""
    left = device.available()
    while True:
        counted_up = memory(config, settings, model)
        try:
            return settings, counted_up.check(left)
        except InsufficientMemory:
            if config.slots or settings.slots == 1:
                raise
            settings = msgspec.structs.replace(settings, slots=settings.slots // 2)


def memory(config: CollectConfig, settings: TargetConfig, model: ModelConfig) -> MemoryPlan:
    """The target's plan, with what is noted of its slots and of the shard that is gathered."""
    base = plan(model, settings, resolve_dtype(settings.dtype, settings.device))
    row = config.likeliest * TOP_BYTES
    if config.feature_bytes:
        row += len(config.taps) * model.hidden_size * FEATURE_BYTES
    slots, noted = settings.slots, (row, "bytes noted")
    lines = (
        counted("notes", (slots, "slots"), (base.positions, "positions"), noted),
        # Once gathered and once joined, with the sequence that makes it full.
        counted("shard", (2, "copies"), (config.shard_tokens + base.positions, "tokens"), noted),
        counted(
            "logits",
            (2 * slots, "rows"),
            (model.vocab_size, "ids"),
            (SIZES["float32"], "bytes"),
        ),
    )
    fixed = base.fixed + sum(line.size for line in lines[1:])
    return replace(
        base,
        role="collecting target",
        lines=(*base.lines, *lines),
        fixed=fixed,
        per_position=base.per_position + slots * row,
    )
