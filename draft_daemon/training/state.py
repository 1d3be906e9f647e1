"""What a run goes on from: one safetensors file with weights, moments, average and counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_daemon.training.data import Facts
from draft_daemon.training.files import write_tensors
from draft_daemon.training.optimiser import MOMENTS
from protocol.checkpoints.identity import identify
from protocol.errors import CheckpointError, ConfigError
from protocol.training import Count, TrainConfig

STATE: Final = "work/training.safetensors"
WEIGHTS: Final = "weights"
AVERAGE: Final = "average"
# Where a run happens and how long it lasts may change; what it computes may not.
PLACE: Final = frozenset({"folder", "model", "device", "threads", "collect", "start"})
LENGTH: Final = frozenset(
    {"steps", "hours", "validate_every", "validate_sequences", "validate_tokens"}
)
FREE: Final = PLACE | LENGTH | {"save_seconds"}


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a state."""

    step: Count = 0  # that comes next
    seconds: float = 0.0  # that were used
    validated: int = -1  # the last step that was
    best: float = -1.0  # mean acceptance length of the weights in the folder


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a state is of; another run's is refused."""

    target: str  # digest of the config that is understood
    settings: str  # of TrainConfig, without `FREE`
    data: str


class _Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    counts: Counts
    origin: Origin


@dataclass(frozen=True, slots=True)
class State:
    """A state as it was read."""

    counts: Counts
    tensors: dict[str, Tensor]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors under ``name.``."""
        start, every = f"{name}.", self.tensors.items()
        return {key.removeprefix(start): each for key, each in every if key.startswith(start)}

    @property
    def moments(self) -> dict[str, Tensor]:
        """Those of the optimiser."""
        return {key: each for key, each in self.tensors.items() if key.startswith(MOMENTS)}


def origin_of(config: TrainConfig, facts: Facts) -> Origin:
    """Of a run with this config, on these data."""
    settings = msgspec.structs.asdict(config)
    kept = {key: value for key, value in settings.items() if key not in FREE}
    return Origin(
        target=identify(Path(config.model)).config,
        settings=msgspec.json.encode(kept, order="deterministic").decode(),
        data=f"{facts.sequences} sequences of {facts.tokens} tokens in shards {list(facts.shards)}",
    )


def write_state(folder: Path, counts: Counts, origin: Origin, tensors: dict[str, Tensor]) -> None:
    """Put a state in place of the last one."""
    text = msgspec.json.encode(_Metadata(counts=counts, origin=origin)).decode()
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    write_tensors(folder / STATE, on_host, {"state": text})


def read_state(folder: Path, origin: Origin, shapes: Mapping[str, tuple[int, ...]]) -> State | None:
    """The state that lies in `folder`, if any, of a network whose parameters have these `shapes`.

    Raises ConfigError for one of another target, other settings or other data, and CheckpointError
    for a damaged file.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as source:
            text = (source.metadata() or {}).get("state", "")
            found = msgspec.json.decode(text, type=_Metadata)
            tensors = {name: source.get_tensor(name).clone() for name in source.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be gone on from: {error}") from error
    _compare(path, found.origin, origin)
    wrong = _defect(tensors, shapes, begun=found.counts.step > 0)
    if wrong:
        raise CheckpointError(f"{path} cannot be gone on from: {wrong}")
    return State(found.counts, tensors)


def _defect(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, begun: bool
) -> str:
    """What is wrong with the tensors; empty if nothing is. There are moments once it has `begun`.

    Torch's own kernels take moments for as long as their parameters, without a look.
    """
    groups = (WEIGHTS, AVERAGE, *(MOMENTS if begun else ()))
    wanted = {f"{group}.{name}": shape for group in groups for name, shape in shapes.items()}
    if differing := sorted(wanted.keys() ^ tensors.keys()):
        return f"tensor {differing[0]} is missing, or one too many"
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.shape != wanted[name]:
            return f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not {wanted[name]}"
        if not tensor.isfinite().all():
            return f"tensor {name} holds numbers that are not finite"
    return ""


def _compare(path: Path, theirs: Origin, ours: Origin) -> None:
    if theirs.target != ours.target:
        raise ConfigError(f"{path} was trained for another target: its config differs")
    if theirs.data != ours.data:
        raise ConfigError(f"{path} was trained on {theirs.data}; here are {ours.data}")
    if theirs.settings != ours.settings:
        differing = _differing(theirs.settings, ours.settings)
        raise ConfigError(f"{path} was trained with other settings: {differing}")


def _differing(theirs: str, ours: str) -> str:
    before, now = msgspec.json.decode(theirs), msgspec.json.decode(ours)
    names = sorted({*before, *now})
    pairs = ((name, before.get(name), now.get(name)) for name in names)
    return "; ".join(f"{name} {was}, now {is_}" for name, was, is_ in pairs if was != is_)
