"""Facts of this machine's processor, read without torch, so that every process agrees on them."""

import os
from functools import cache
from pathlib import Path
from typing import Final

from protocol.config import Computed, DType
from protocol.errors import ConfigError
from protocol.gpu import CPU, is_gpu

MOST_A_CORE: Final = 4  # threads, above which they do little but wait for each other
FAST_BF16_FLAGS: Final = ("amx_bf16", "avx512_bf16")


@cache
def flags() -> frozenset[str]:
    """The kernel's list of processor features; empty where there is none to read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def fast_bf16() -> bool:
    """Whether bf16 products run in hardware here (AMX or AVX512-BF16)."""
    return any(flag in flags() for flag in FAST_BF16_FLAGS)


def resolve_dtype(name: DType, device: str = CPU) -> Computed:
    """``auto`` is bf16 where the device is fast at it, else fp32; anything else is honoured.

    Every GPU that this program is for (Ampere and later) is fast at it.
    """
    if name != "auto":
        return name
    return "bfloat16" if is_gpu(device) or fast_bf16() else "float32"


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_of(asked: int) -> int:
    """`asked` threads, or with 0 one for each core; ConfigError where they are far too many."""
    cores = usable_cores()
    if asked > MOST_A_CORE * cores:
        raise ConfigError(
            f"--threads {asked}: this process may use {cores} cores; at most {MOST_A_CORE * cores} "
            "threads are taken, and as many as cores are quickest"
        )
    return asked or cores
