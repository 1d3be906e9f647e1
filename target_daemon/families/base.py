"""What a model family is, and the target that every family yields.

A family is one file of this package (or of another package's entry point) that ends in
``FAMILY: Final[Family]``. It is found by the `model_type` of `config.json`; one that states `ANY`
is asked where no other is found.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from protocol import plugins
from protocol.checkpoints.target_config import ModelConfig, read_model_config
from protocol.checkpoints.tensors import OnDevice, TensorSource, open_tensors
from protocol.config import TargetConfig, Weights
from protocol.cpu import resolve_dtype
from protocol.errors import UnsupportedModel
from protocol.layer_split import DEVICES, layers_of
from protocol.transports.base import FeatureHost, RingView
from target_daemon.capture import Capture, open_capture
from target_daemon.checks import check_mask
from target_daemon.exactness import Exactness
from target_daemon.progress import Progress, ReportingSource, unreported
from target_daemon.stages import Stage, home_of, stages_of
from target_daemon.target import DFlashTarget

PACKAGE: Final = "target_daemon.families"
CPU: Final = torch.device("cpu")
ANY: Final = "*"  # the model type of the family for all the rest


class NativeTarget(DFlashTarget):
    """A loaded target with the facts that `TargetHello` states."""

    model_type: str
    dtype: torch.dtype
    num_layers: int
    padded_vocab_size: int
    tied: bool
    rope_theta: float
    max_width: int  # widest block that `verify_batch` takes with logits for all rows
    prefill_chunk: int
    ring: RingView
    exactness: Exactness
    weight_bytes: int
    weights_kind: Weights = "dtype"  # of the layers
    device: torch.device

    def take_facts(self, request: "LoadRequest", theta: float) -> None:
        """Set what config and checkpoint say; ConfigError for an impossible mask token."""
        model, config = request.model, request.config
        check_mask(config.mask_token_id, model.vocab_size)
        self.model_type, self.dtype, self.device = model.model_type, request.dtype, request.device
        self.hidden_size, self.num_layers = model.hidden_size, model.num_layers
        self.vocab_size = self.padded_vocab_size = model.vocab_size
        self.max_positions, self.slots = request.max_positions, config.slots
        self.capture_layer_ids, self.mask_token_id = config.taps, config.mask_token_id
        self.eos_token_ids, self.tied = model.eos_token_ids, model.tied
        self.rope_theta, self.weights_kind = theta, config.weights
        self.max_width, self.prefill_chunk = max(config.block_size, 1), config.prefill_chunk


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Everything a family needs to load a target."""

    model: ModelConfig
    tensors: TensorSource
    dtype: torch.dtype
    config: TargetConfig
    host: FeatureHost
    device: torch.device = CPU  # of the tensors that `tensors` gives, and of all state
    stages: tuple[Stage, ...] = ()  # where layers and their state lie otherwise

    @property
    def max_positions(self) -> int:
        """Context length: what was asked for, at most what the model was made for."""
        stated = self.model.max_positions
        return min(self.config.max_positions or stated, stated)


def open_ring(request: LoadRequest) -> tuple[Capture, RingView]:
    """Have the host allocate the target's feature ring; its writer. ConfigError for bad taps."""
    model, config = request.model, request.config
    return open_capture(
        request.host,
        taps=config.taps,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        slots=config.slots,
        window=config.ring_window,
        widest_forward=max(config.prefill_chunk, config.block_size),
        dtype=request.dtype,
    )


class Family(ABC):
    """Loads checkpoints of some `model_types`."""

    model_types: tuple[str, ...]
    quantises = False  # whether it can hold the weights of its layers in 8 or 4 bits
    splits = False  # whether its layers can lie on several devices

    @abstractmethod
    def load(self, request: LoadRequest) -> NativeTarget:
        """Load the target: ring and shared weights come from ``request.host``."""


def known_families() -> Mapping[str, Family]:
    """Every family by the `model_type` it loads."""
    names = plugins.names(PACKAGE, "FAMILY")
    families: list[Family] = [plugins.load(PACKAGE, name, "FAMILY", Family) for name in names]
    return {name: family for family in families for name in family.model_types}


def find_family(path: Path, model_type: str) -> Family:
    """The family that loads `path`; UnsupportedModel where there is none.

    A GGUF file has what the families of this program need alone.
    """
    families = known_families()
    family = families.get(model_type) or families.get(ANY)
    if family is None or (model_type not in families and path.is_file()):
        raise UnsupportedModel(
            f"{path}: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(families.keys() - {ANY}))}"
        )
    return family


def load_target(
    config: TargetConfig,
    host: FeatureHost,
    progress: Progress = unreported,
    device: torch.device = CPU,
    others: Sequence[torch.device] = (),
) -> NativeTarget:
    """Load ``config.model``, a folder or GGUF file, for computing on `device`.

    `host` allocates ring and shared weights, there as well. With `others` the layers go on there,
    in the shares that the config says.

    Raises CheckpointError, UnsupportedModel or ExactUnavailable.
    """
    path = Path(config.model)
    model = read_model_config(path)
    family = find_family(path, model.model_type)
    if config.weights != "dtype" and not family.quantises:
        raise UnsupportedModel(
            f"--target-weights {config.weights}: a {model.model_type} model has its weights as "
            "--dtype says; dense decoders alone (Llama, Mistral, Qwen2, Qwen3) can round them"
        )
    stages = _stages(config, model, family, (device, *others)) if others else ()
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, device.type))
    with open_tensors(path) as tensors:
        source = OnDevice(ReportingSource(tensors, progress), device, home_of(stages))
        return family.load(LoadRequest(model, source, dtype, config, host, device, stages))


def _stages(
    config: TargetConfig, model: ModelConfig, family: Family, devices: Sequence[torch.device]
) -> tuple[Stage, ...]:
    if not family.splits:
        raise UnsupportedModel(
            f"{DEVICES}: a {model.model_type} model is on one device; dense decoders alone "
            "(Llama, Mistral, Qwen2, Qwen3) can be split"
        )
    if config.graphs:
        raise UnsupportedModel(
            f"--graphs with {DEVICES}: a recorded forward is one device's; leave one of them out"
        )
    counts = layers_of(model.num_layers, [str(each) for each in devices], config.layer_split)
    return stages_of(counts, devices)
