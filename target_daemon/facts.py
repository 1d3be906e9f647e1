"""What torch sees of this machine: printed as JSON by ``python -I -m target_daemon --facts``."""

import platform
from typing import Any

import torch

from protocol import cpu


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
        "threads": torch.get_num_threads(),
        "usable_cores": cpu.usable_cores(),
        "cuda": torch.version.cuda,
        "devices": ["cpu", *_gpus()],
    }


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"cuda:GPU-{each.uuid} ({each.name})" for each in properties]
