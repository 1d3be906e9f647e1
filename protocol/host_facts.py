"""Where this process runs, as far as sharing memory with another one depends on it. No torch."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

from protocol.messages import GpuFacts, HostFacts

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES: Final = Path("/proc/self/ns")
PACKAGES: Final = ("dflash-daemons", "torch", "numpy", "pyzmq", "msgspec")


def gather(device: str, threads: int, listens: str = "", gpu: GpuFacts | None = None) -> HostFacts:
    """Return the facts of this process, which computes on `device` with `threads` threads.

    `listens` is its address on a network, or empty.
    What the kernel does not tell is the empty string, which matches nothing in `placement`.
    """
    return HostFacts(
        pid=os.getpid(),
        boot_id=boot_id(),
        pid_namespace=_namespace("pid"),
        ipc_namespace=_namespace("ipc"),
        device=device,
        threads=threads,
        listens=listens,
        versions=versions(),
        gpu=gpu,
    )


def boot_id() -> str:
    """Return the kernel's random id of this boot, equal in all containers of one machine."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return str((NAMESPACES / kind).readlink())
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Versions of Python and of what the daemons stand on, from the packages' own records."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found
