"""What can be said of GPUs without CUDA, torch or a library: names, device nodes, WSL2, MPS."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError, DeviceAbsent

CPU: Final = "cpu"
DEVICE: Final = re.compile(r"cpu|cuda:(\d{1,3}|(GPU|MIG)-[0-9a-fA-F-]{1,64})")
NODES: Final = ("dev/nvidia[0-9]*", "dev/dxg")  # the second one is WSL2's
MPS_PIPES: Final = "/tmp/nvidia-mps"  # noqa: S108 - the driver's own default
WSL_OBSTACLE: Final = (
    "WSL2 has no CUDA IPC between processes; run on Linux itself, or put the draft on the CPU "
    "(--draft-device cpu)"
)


def is_gpu(device: str) -> bool:
    """Whether `device`, as configs and facts name it, is a GPU."""
    return device != CPU


def device_nodes(root: Path = Path("/")) -> tuple[str, ...]:
    """The kernel's names of NVIDIA GPUs; empty where there is no driver or no device."""
    return tuple(str(node) for pattern in NODES for node in sorted(root.glob(pattern)))


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Linux inside Windows."""
    try:
        return "microsoft" in (root / "proc/version").read_text(encoding="utf-8").lower()
    except OSError:
        return False


def mps_runs(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether CUDA processes of this user are clients of an MPS server."""
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES
    return (root / pipes.lstrip("/") / "control").exists()


def check_devices(devices: Mapping[str, str], root: Path = Path("/")) -> None:
    """Raise ConfigError for an option that names no device, DeviceAbsent where there is no GPU.

    Before any process is started. Nothing is ever run on the CPU instead.
    """
    for option, device in devices.items():
        if not DEVICE.fullmatch(device):
            raise ConfigError(f"{option} {device!r}: cpu, cuda:N or cuda:<uuid> is expected")
        if is_gpu(device) and not device_nodes(root):
            raise DeviceAbsent(
                f"no CUDA device: {option} {device} was asked for, and this machine has no NVIDIA "
                "GPU or no driver (no /dev/nvidia0); use cpu"
            )
