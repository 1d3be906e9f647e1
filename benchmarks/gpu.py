"""Time per round on one device, with random weights in the shapes of known pairs.

``python benchmarks/gpu.py [--shape qwen3-8b] [--device cuda:0] [--contexts 1024,16384]``

The engines' own forwards in this process: an autoregressive step, a verify of the widest block,
the draft's ingest and block, against the time to read the weights once (a reduction over as many
bytes). With random weights acceptance means nothing: what is reported is time per round, and from
which acceptance length on speculation wins. What another process or package would have to be
there for is listed as not run.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from measuring import machine
from torch import Tensor

from draft_daemon.context import DraftContext
from draft_daemon.models.dflash import DFlash
from protocol.checkpoints.draft_config import read_draft_config
from protocol.checkpoints.target_config import parse_model_config
from protocol.checkpoints.tensors import TensorSource
from protocol.choice import best_ids
from protocol.config import TargetConfig
from protocol.cpu import resolve_dtype
from protocol.errors import DaemonError
from protocol.kernels.quantised import BITS
from protocol.transports.devices import Device, open_device
from protocol.transports.plain import PlainHost
from target_daemon.dense.model import DenseTarget
from target_daemon.families.base import LoadRequest, known_families

ROUNDS: Final = 21
WARM_UP: Final = 5
WINDOW: Final = 4096  # the draft's context
SCALE: Final = 0.02  # of random weights, as training starts from
NOT_RUN: Final = (
    "split against one process, and hand-over between two (make gpu STAGE=pair proves them)",
    "the reference package dflash",
    "generation by transformers",
)


@dataclass(frozen=True)
class Shape:
    """One pair: the keys of `config.json` in which it differs from the others."""

    target: dict[str, Any]
    draft: dict[str, Any]
    taps: tuple[int, ...]


def _pair(layers: int, draft_layers: int, block: int, taps: tuple[int, ...], **sizes: int) -> Shape:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, **sizes}
    target = {"model_type": "qwen3", "num_hidden_layers": layers, "hidden_act": "silu", **common}
    draft = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(taps)},
        "num_hidden_layers": draft_layers,
        "hidden_act": "silu",
        **common,
    }
    return Shape(target | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}, draft, taps)


SHAPES: Final = {
    "tiny": _pair(
        4, 2, 6, (0, 2, 3), hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=96,
    ),
    "smollm2-135m": _pair(
        30, 3, 8, (1, 14, 27), hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49152,
    ),
    "qwen3-8b": _pair(
        36, 5, 16, (1, 9, 17, 25, 33), hidden_size=4096, intermediate_size=12288,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
}  # fmt: skip


@dataclass
class RandomTensors(TensorSource):
    """Any tensor that is asked for, made on the device; the checkpoint is never on a disk."""

    device: torch.device
    dtype: torch.dtype
    made: int = field(default=0)

    def names(self) -> frozenset[str]:
        return frozenset()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def get(self, name: str) -> Tensor:
        raise KeyError(name)

    def expect(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norms of ones, and small random numbers."""
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=SCALE)
        self.made += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Nothing is open."""


class DeviceHost(PlainHost):
    """Ring and shared weights on the device, for this process alone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def create_ring(self, shape: Any) -> Any:
        ring = super().create_ring(shape)
        object.__setattr__(ring, "rows", ring.rows.to(self._device))
        return ring

    def create_weights(self, specs: Any) -> dict[str, Tensor]:
        return {name: each.to(self._device) for name, each in super().create_weights(specs).items()}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write."""
    options = parse(arguments)
    try:
        device = open_device(options.device)
    except DaemonError as error:
        raise SystemExit(str(error)) from error
    dtype = getattr(torch, resolve_dtype(options.dtype, options.device))
    shape = SHAPES[options.shape]
    target = load_target(shape, options, device, dtype)
    draft, context = load_draft(shape, device, dtype)
    report = {
        "machine": machine.describe(),
        "device": options.device if device.facts is None else device.facts.name,
        "driver": "-" if device.facts is None else device.facts.driver,
        "shape": options.shape,
        "dtype": str(dtype),
        "weights": options.weights,
        "exact": [target.exactness.kind, target.exactness.detail],
        "weight_bytes": target.weight_bytes,
        "graphs": options.graphs,
        "contexts": {
            str(length): measure(target, draft, context, device.torch, length)
            for length in options.contexts
        },
        "not run": list(NOT_RUN),
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    parser.add_argument(
        "--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 16384]
    )
    parser.add_argument("--weights", default="dtype", choices=("dtype", *BITS))
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def load_target(
    shape: Shape, options: argparse.Namespace, device: Device, dtype: torch.dtype
) -> DenseTarget:
    """The target over random weights."""
    config = TargetConfig(
        model="",
        run_dir="",
        life=0,
        device=options.device,
        weights=options.weights,
        slots=1,
        max_positions=2 * max(options.contexts),
        taps=shape.taps,
        block_size=shape.draft["block_size"],
        mask_token_id=3,
        graphs=options.graphs,
    )
    model = parse_model_config(shape.target, {}, where=options.shape)
    family = known_families()[model.model_type]
    tensors = RandomTensors(device.torch, dtype)
    host = DeviceHost(device.torch)
    target = family.load(LoadRequest(model, tensors, dtype, config, host, device.torch))
    if not isinstance(target, DenseTarget):
        raise SystemExit("only dense targets are measured here")
    return target


def load_draft(shape: Shape, device: Device, dtype: torch.dtype) -> tuple[DFlash, DraftContext]:
    """The draft over random weights, and its context."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.draft), encoding="utf-8")
        config = read_draft_config(Path(folder))
    shapes, tensors = DFlash.shapes(config), RandomTensors(device.torch, dtype)
    network = DFlash.build(config, lambda name: tensors.expect(name, shapes[name]), dtype)
    return network, DraftContext(config, 1, WINDOW, dtype, device.torch)


@torch.inference_mode()
def measure(
    target: DenseTarget, draft: DFlash, context: DraftContext, device: torch.device, length: int
) -> dict[str, Any]:
    """Median milliseconds of each part after `length` positions, and what follows from them."""
    width, buffer = target.max_width, _buffer(target.weight_bytes, device)
    ids = torch.zeros(length + width, dtype=torch.int64)
    for start in range(0, length, target.prefill_chunk):
        stop = min(start + target.prefill_chunk, length)
        target.verify_batch(0, ids[start:stop], start, "none")
    rows = target.ring.rows[0, :width].clone()
    embedded = torch.zeros(width, target.hidden_size, dtype=target.dtype, device=device)
    context.write(0, max(0, length - width), *draft.project_context(rows, max(0, length - width)))

    def ask(count: int) -> Tensor | None:
        logits = target.verify_batch(0, ids[:count], length, "all")
        return None if logits is None else best_ids(logits).cpu()

    work: dict[str, Callable[[], object]] = {
        "weights_read_ms": lambda: buffer.sum().cpu(),
        "step_ms": lambda: ask(1),
        "verify_ms": lambda: ask(width),
        "ingest_ms": lambda: draft.project_context(rows, length),
        "draft_ms": lambda: draft.block(embedded, context.view(0, length, width, WINDOW)),
    }
    found = {name: round(_median(call, device), 4) for name, call in work.items()}
    spent = found["draft_ms"] + found["ingest_ms"] + found["verify_ms"]
    found["round_ms"] = round(spent, 4)
    found["verify / weights read"] = round(found["verify_ms"] / found["weights_read_ms"], 3)
    found["wins from acceptance length"] = round(spent / found["step_ms"], 2)
    return found


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)


def _median(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for number in range(WARM_UP + ROUNDS):
        _synchronise(device)
        started = time.perf_counter()
        call()
        _synchronise(device)
        if number >= WARM_UP:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
