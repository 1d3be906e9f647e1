"""From a plan to the two daemons' configs, reading both checkpoints' configs without torch.

Which layers are captured comes from the draft's config; a draft for another target is refused
here, before anything is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from launch.admission import positions
from launch.plan import Plan
from protocol.checkpoints.draft_config import TargetFacts, check_pair, read_draft_config
from protocol.checkpoints.target_config import read_model_config
from protocol.config import DraftConfig, TargetConfig
from protocol.errors import ConfigError
from protocol.gpu import CPU, check_devices
from protocol.layer_split import DEVICES, SHARES, check_lists

NO_LIFE: Final = 0


@dataclass(frozen=True)
class Prepared:
    """What each daemon is told; `draft` is None for autoregressive generation."""

    target: TargetConfig
    draft: DraftConfig | None


def prepare(plan: Plan, run_dir: Path) -> Prepared:
    """Raises ConfigError, CheckpointError, UnsupportedModel or DraftMismatch; loads nothing.

    The life is that of no start; `launch.starter` gives each its own.
    """
    _check_devices(plan)
    model = read_model_config(Path(plan.model))
    target = _target(plan, run_dir, model.max_positions)
    if plan.draft is None:
        return Prepared(target, None)
    network = read_draft_config(Path(plan.draft))
    check_pair(network, TargetFacts(model.hidden_size, model.num_layers, model.vocab_size))
    return Prepared(
        msgspec.structs.replace(
            target,
            taps=network.target_layer_ids,
            block_size=max(network.max_proposals + 1, plan.widest),
            mask_token_id=network.mask_token_id,
            golden=plan.golden,
        ),
        draft_config(plan, run_dir),
    )


def _check_devices(plan: Plan) -> None:
    check_devices({"--target-device": plan.target_device, "--draft-device": plan.draft_device})
    if plan.target_devices and plan.target_device not in (CPU, plan.target_devices[0]):
        raise ConfigError(
            f"--target-device {plan.target_device}, and {DEVICES} {','.join(plan.target_devices)}: "
            "say one of them"
        )
    if plan.layer_split and not plan.target_devices:
        raise ConfigError(f"{SHARES} is said of no {DEVICES}")
    check_lists(plan.target_devices, plan.layer_split)
    for name in plan.target_devices:
        check_devices({DEVICES: name})


def _target(plan: Plan, run_dir: Path, most: int) -> TargetConfig:
    # What a draft attends to stays readable, so that one that begins in the middle has all of it.
    reach = min(plan.draft_context, positions(plan.max_positions, most))
    window = plan.ring_window or max(1, reach)
    return TargetConfig(
        model=plan.model,
        run_dir=str(run_dir),
        life=NO_LIFE,
        dtype=plan.dtype,
        weights=plan.target_weights,
        device=(*plan.target_devices, plan.target_device)[0],
        devices=plan.target_devices,
        layer_split=plan.layer_split,
        draft_device=plan.draft_device,
        hand_over=plan.hand_over,
        graphs=plan.graphs,
        exact=plan.exact,
        threads=plan.threads,
        slots=plan.slots,
        max_positions=plan.max_positions,
        prefill_chunk=plan.prefill_chunk,
        ring_window=window,
        prefix_bytes=plan.prefix_bytes,
        prefix_folder=plan.prefix_folder,
        prefix_disk_bytes=plan.prefix_disk_bytes,
        block_size=max(1, plan.widest),
        rollback=plan.rollback,
        log_level=plan.log_level,
    )


def draft_config(plan: Plan, run_dir: Path) -> DraftConfig:
    """The draft's alone, of a plan that names one; nothing is read."""
    return DraftConfig(
        draft=plan.draft or "",
        run_dir=str(run_dir),
        life=NO_LIFE,
        dtype=plan.dtype,
        device=plan.draft_device,
        threads=plan.threads,
        slots=plan.slots,
        context_window=plan.draft_context,
        vocab=plan.draft_vocab,
        log_level=plan.log_level,
    )
