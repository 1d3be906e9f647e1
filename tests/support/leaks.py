"""What a test may leave behind: nothing. Snapshots of this process, its children and /dev/shm.

Every test runs with a marker of its own in the environment, which all processes it starts
inherit; a process that still carries it afterwards was left behind, also when its parent is gone.
"""

import gc
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISSOCK

MARKER = "DFLASH_TEST_MARKER"
GRACE_SECONDS = 15.0  # how long a process that was told to end may take to do so

# Descriptors and mappings that belong to libraries, are opened once, and stay.
FOREIGN = (
    "/dev/urandom",
    "/dev/null",
    "/proc/",
    "/sys/",
    "xbyak",
    "doublemapper",
    ".coverage",
    "mpl-data",
)


@dataclass(frozen=True)
class Snapshot:
    """What this process holds: descriptors with what they refer to, memfds, threads, segments."""

    descriptors: frozenset[tuple[int, str]]
    memfds: frozenset[str]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]


def take() -> Snapshot:
    return Snapshot(
        descriptors=_descriptors(),
        memfds=_mapped_memfds(),
        threads=frozenset(threading.enumerate()),
        segments=_segments(),
    )


def left_in_this_process(before: Snapshot) -> list[str]:
    """Say what is held now and was not at `before`; garbage that merely waits is collected."""
    for collect in (False, True):
        if collect:
            gc.collect()
        now = take()
        found = [
            *(
                f"descriptor {fd} -> {to}"
                for fd, to in sorted(now.descriptors - before.descriptors)
            ),
            *(f"mapped {name}" for name in sorted(now.memfds - before.memfds)),
            *(f"segment /dev/shm/{name}" for name in sorted(now.segments - before.segments)),
            *(
                f"thread {thread.name}"
                for thread in now.threads - before.threads
                if thread.is_alive() and not thread.daemon
            ),
        ]
        if not found:
            return []
    return found


def left_processes(marker: str, children_before: frozenset[int]) -> list[str]:
    """Wait briefly for the test's processes to end; kill and name those that do not."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (pids := _processes(marker, children_before)) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    left = [f"process {pid}: {_command(pid)}" for pid in sorted(pids)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    return left


def children() -> frozenset[int]:
    """Ids of this process's children, unreaped ones included."""
    me = os.getpid()
    return frozenset(pid for pid in _pids() if _parent(pid) == me)


def left_files(folder: Path) -> list[str]:
    """Name everything below `folder`: sockets by kind, since those are what daemons forget."""
    return [
        f"{'socket' if S_ISSOCK(path.lstat().st_mode) else 'file'} {path.relative_to(folder)}"
        for path in sorted(folder.rglob("*"))
    ]


def _processes(marker: str, children_before: frozenset[int]) -> set[int]:
    wanted = f"{MARKER}={marker}".encode()
    carrying = {pid for pid in _pids() if pid != os.getpid() and wanted in _environment(pid)}
    return carrying | (children() - children_before)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    return _read(pid, "environ").split(b"\0")


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else -1


def _command(pid: int) -> str:
    text = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return text or "(ended, not reaped)"


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{name}").readlink())
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        if not any(word in target for word in FOREIGN):
            found.add((int(name), target))
    return frozenset(found)


def _mapped_memfds() -> frozenset[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.split(None, 5)[5] + " " + line.split()[4] for line in lines if "/memfd:" in line}
    return frozenset(name for name in names if not any(word in name for word in FOREIGN))


def _segments() -> frozenset[str]:
    try:
        names = os.listdir("/dev/shm")
    except FileNotFoundError:
        return frozenset()
    # Other programs on this machine use the folder too: count only names that Python or we give.
    return frozenset(name for name in names if name.startswith(("psm_", "dflash")))
