"""What this machine offers and what would be used, as plain facts and a list of problems.

`quick` reads files and package records only. `full` also asks the target daemon, in a process of
its own, what torch sees (``python -I -m target_daemon --facts``).
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from launch import idle_threads
from launch.store import default_home
from protocol import __version__, cpu, gpu
from protocol.errors import DaemonError
from protocol.host_facts import gather
from protocol.placement import AUTO, choose
from protocol.run_directory import RunDirectory

Facts = dict[str, Any]

DISTRIBUTION: Final = "dflash-daemons"
IMPORT_NAMES: Final = ("protocol", "target_daemon", "draft_daemon", "launch")
# package: whether the program needs it
PACKAGES: Final[dict[str, bool]] = {
    "torch": True,
    "numpy": True,
    "pyzmq": True,
    "msgspec": True,
    "click": True,
    "rich": True,
    "safetensors": True,
    "gguf": True,
    "tokenizers": True,
    "jinja2": True,
    "huggingface_hub": True,
    "transformers": False,
    "cupy-cuda12x": False,
    "cupy-cuda13x": False,
    "matplotlib": False,
}
CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "KMP_AFFINITY",
    *idle_threads.VARIABLES,
)
FACTS_SECONDS: Final = 60.0


def quick() -> Facts:
    """Gather what needs no torch and no other process."""
    names = {name: _import_name(name) for name in IMPORT_NAMES}
    facts: Facts = {
        "version": __version__,
        "python": _python(),
        "import_names": names,
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "memory": _memory(),
        "threads": _thread_variables(),
        "devices": ["cpu", *gpu.device_nodes()],
        "gpu": _gpu(),
        "home": str(default_home(os.environ)),
        "runtime": _runtime(),
        "transport": _transport(),
    }
    facts["problems"] = _problems(facts)
    return facts


def full() -> Facts:
    """Add to `quick` who claims the import names, and what the target daemon says of torch."""
    facts = quick()
    claims = metadata.packages_distributions()
    for name, entry in facts["import_names"].items():
        # A name can be listed once per file of one distribution.
        entry["claimed_by"] = sorted(set(claims.get(name, ())))
        entry["ours"] = entry["ours"] and entry["claimed_by"] == [DISTRIBUTION]
    facts["target_daemon"] = daemon_facts()
    facts["problems"] = _problems(facts)
    return facts


def daemon_facts(timeout: float = FACTS_SECONDS) -> Facts:
    """Return the target daemon's own facts, or ``{"error": sentence}`` when it cannot tell."""
    command = [sys.executable, "-I", "-m", "target_daemon", "--facts"]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
            return {"error": f"target_daemon --facts ended with {done.returncode}: {lines[-1]}"}
        facts = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"target_daemon --facts did not answer within {timeout:.0f} s"}
    except (OSError, ValueError) as error:
        return {"error": f"target_daemon --facts: {error}"}
    return facts if isinstance(facts, dict) else {"error": "target_daemon --facts: no JSON object"}


def _python() -> Facts:
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "environment": sys.prefix,
        "own_environment": sys.prefix != sys.base_prefix,
    }


def _import_name(name: str) -> Facts:
    """Say where a child started with ``-I`` would find `name`: beside this file, or not."""
    spec = importlib.util.find_spec(name)
    origin = str(Path(spec.origin).parent) if spec and spec.origin else ""
    expected = Path(__file__).resolve().parent.parent / name
    return {"location": origin, "ours": bool(origin) and Path(origin).resolve() == expected}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> Facts:
    return {
        "model": _cpu_model(),
        "usable_cores": cpu.usable_cores(),
        "flags": [flag for flag in CPU_FLAGS if flag in cpu.flags()],
        "fast_bf16": cpu.fast_bf16(),
        "auto_dtype": cpu.resolve_dtype("auto"),
    }


def _cpu_model() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _memory() -> Facts:
    fields = {}
    for line in _text("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return {
        "total_bytes": _kilobytes(fields.get("MemTotal")),
        "available_bytes": _kilobytes(fields.get("MemAvailable")),
        "limit_bytes": int(limit) if limit.isdigit() else None,
    }


def _kilobytes(words: list[str] | None) -> int | None:
    return int(words[0]) * 1024 if words else None


def _gpu() -> Facts:
    """What stands against computing on GPUs, as far as files tell; the daemon knows the rest."""
    here = gather("cpu", 1)
    nodes = gpu.device_nodes()
    sharing = "no device node" if not nodes else gpu.WSL_OBSTACLE if gpu.is_wsl() else ""
    return {
        "nodes": list(nodes),
        "mps": gpu.mps_runs(os.environ),
        "obstacle": sharing,
        "pid_namespace": here.pid_namespace,
        "ipc_namespace": here.ipc_namespace,
    }


def _runtime() -> Facts:
    """Make a run directory, as a supervisor does, and remove it."""
    try:
        with RunDirectory() as directory:
            return {"folder": str(directory.path.parent), "error": ""}
    except (DaemonError, OSError) as error:
        return {"folder": "", "error": str(error)}


def _transport() -> Facts:
    """Ask the placement rules about two daemons on this machine's CPU, as they are started."""
    here = gather("cpu", cpu.usable_cores())
    try:
        placement = choose(AUTO, here, here)
    except DaemonError as error:
        return {"name": None, "reason": str(error)}
    return {"name": placement.transport, "reason": placement.reason}


def _thread_variables() -> dict[str, str]:
    """What steers threads, as daemons get it: the user's own, and what is added for them."""
    found = {**idle_threads.spin_settings(os.environ), **os.environ}
    return {name: found.get(name, "") for name in THREAD_VARIABLES}


def _problems(facts: Facts) -> list[str]:
    """List, as sentences, what would keep `generate` from working here."""
    found = [
        f"the import name {name!r} does not belong to {DISTRIBUTION} alone: "
        f"{', '.join(entry.get('claimed_by', ())) or entry['location'] or 'not found'}; "
        "install into an environment of its own"
        for name, entry in facts["import_names"].items()
        if not entry["ours"]
    ]
    found += [
        f"the package {name} is not installed"
        for name, needed in PACKAGES.items()
        if needed and facts["packages"][name] is None
    ]
    if facts["runtime"]["error"]:
        found.append(f"no run directory can be made: {facts['runtime']['error']}")
    if facts["transport"]["name"] is None:
        found.append(facts["transport"]["reason"])
    if "error" in facts.get("target_daemon", {}):
        found.append(facts["target_daemon"]["error"])
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
