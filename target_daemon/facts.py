"""What torch sees of this machine: printed as JSON by ``python -I -m target_daemon --facts``."""

import platform
from typing import Any

import msgspec
import torch

from protocol import cpu
from protocol.errors import Unavailable
from protocol.kernels import quantised
from protocol.transports.devices import survey


def gather() -> dict[str, Any]:
    """Facts for `dflashd doctor`, which itself never imports torch."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx": "amx_tile" in cpu.flags(),
        "bf16_flags": sorted(cpu.flags().intersection(cpu.FAST_BF16_FLAGS)),
        "fast_bf16": cpu.fast_bf16(),
        "auto_dtype": cpu.resolve_dtype("auto"),
        "weights": ["dtype", *quantised.available()],
        "usable_cores": cpu.usable_cores(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
    }


def _gpus() -> dict[str, Any]:
    """Every GPU that this process sees and what stands against sharing it, or why there is none."""
    try:
        found, nothing = survey()
    except Unavailable as error:
        found, nothing = (), str(error)
    if nothing:
        return {"none": nothing}
    return {f"cuda:{number}": msgspec.to_builtins(facts) for number, facts in enumerate(found)}
