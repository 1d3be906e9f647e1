"""Where a measurement was made: processor, versions, commit; and what processes hold in memory."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

from protocol.cpu import fast_bf16, flags, usable_cores

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("dflash-daemons", "torch", "numpy", "pyzmq", "msgspec", "tokenizers")
TELLING_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    """Processor, memory, load, versions and commit."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": usable_cores(),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags()],
        "fast_bf16": fast_bf16(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def memory(pid: int) -> dict[str, int]:
    """Bytes: peak and present resident set, its proportional share, and its private pages."""
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return {
        "peak_rss": _fields(Path(f"/proc/{pid}/status"))["VmHWM"],
        "rss": rollup["Rss"],
        "pss": rollup["Pss"],
        "private": rollup["Private_Clean"] + rollup["Private_Dirty"],
    }


def _fields(path: Path) -> dict[str, int]:
    """Lines ``Name:  123 kB``, in bytes."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _first(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()
