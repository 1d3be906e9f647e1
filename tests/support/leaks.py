"""What a test may leave behind: nothing. Snapshots of this process, its children and /dev/shm.

Every test runs with a marker of its own in the environment, which all processes it starts
inherit; a process that still carries it afterwards was left behind, also when its parent is gone.
Tests may run in several workers at once: what other processes of this machine hold is not counted.
"""

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISSOCK

MARKER = "DFLASH_TEST_MARKER"
GRACE_SECONDS = 30.0  # how long a process that was told to end may take to do so
UNLINK_SECONDS = 2.0  # and a segment that another test has closed, to go
SHM = Path("/dev/shm")

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


@dataclass(frozen=True)
class Processes:
    """Ids of this machine's processes, and of this process's own children."""

    everyone: frozenset[int]
    children: frozenset[int]


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
            _await_unlinking(before.segments)
            _await_threads(before.threads)
            _await_descriptors(before.descriptors)
        now = take()
        found = [
            *(
                f"descriptor {fd} -> {to}"
                for fd, to in sorted(now.descriptors - before.descriptors)
            ),
            *(f"mapped {name}" for name in sorted(now.memfds - before.memfds)),
            *(f"segment {SHM}/{name}" for name in _own_segments(now.segments - before.segments)),
            *(
                f"thread {thread.name}"
                for thread in now.threads - before.threads
                if thread.is_alive() and not thread.daemon
            ),
        ]
        if not found:
            return []
    return found


def left_processes(marker: str, before: Processes) -> list[str]:
    """Wait briefly for the test's processes to end; kill and name those that do not."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (pids := _processes(marker, before)) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    left = [f"process {pid}: {_command(pid)}" for pid in sorted(pids)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    return left


def processes() -> Processes:
    """All there are now."""
    return Processes(everyone=_pids(), children=_children())


def left_files(folder: Path) -> list[str]:
    """Name everything below `folder`: sockets by kind, since those are what daemons forget."""
    return [
        f"{'socket' if S_ISSOCK(path.lstat().st_mode) else 'file'} {path.relative_to(folder)}"
        for path in sorted(folder.rglob("*"))
    ]


def _processes(marker: str, before: Processes) -> set[int]:
    wanted = f"{MARKER}={marker}".encode()
    carrying = {pid for pid in _pids() - before.everyone if wanted in _environment(pid)}
    return carrying | (_children() - before.children)


def _children() -> frozenset[int]:
    """Ids of this process's children, unreaped ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # as mostly: there is none, and the rest need not be looked through
        return frozenset()
    me = os.getpid()
    return frozenset(pid for pid in _pids() if _parent(pid) == me)


def _pids() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


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
    lines = _read(os.getpid(), "maps").splitlines()
    mapped = [line.decode(errors="replace").split(None, 5) for line in lines if b"/memfd:" in line]
    names = {f"{fields[5]} {fields[4]}" for fields in mapped}
    return frozenset(name for name in names if not any(word in name for word in FOREIGN))


def _segments() -> frozenset[str]:
    try:
        names = os.listdir(SHM)
    except FileNotFoundError:
        return frozenset()
    # Other programs on this machine use the folder too: count only names that Python or we give.
    return frozenset(name for name in names if name.startswith(("psm_", "dflash")))


def _own_segments(names: frozenset[str]) -> list[str]:
    """Those that no other living process holds: the test's own processes have ended by now."""
    if not names:
        return []
    held = {name for pid in _pids() - {os.getpid()} for name in _held_segments(pid)}
    return sorted(names - held)


def _held_segments(pid: int) -> set[str]:
    """Names of the segments that a process has mapped or open."""
    lines = _read(pid, "maps").decode(errors="replace").splitlines()
    paths = [fields[5] for line in lines if len(fields := line.split(None, 5)) == 6]
    with suppress(OSError):  # ended meanwhile, or another user's
        paths += [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return {path.removeprefix(f"{SHM}/") for path in paths if path.startswith(f"{SHM}/")}


def _await_unlinking(before: frozenset[str]) -> None:
    """Another worker's test closes a segment, and then unlinks it."""
    deadline = time.monotonic() + UNLINK_SECONDS
    while _own_segments(_segments() - before) and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def _await_descriptors(before: frozenset[tuple[int, str]]) -> None:
    """ZeroMQ closes what a socket accepted in a thread of its own, after the socket."""
    deadline = time.monotonic() + UNLINK_SECONDS
    while _descriptors() - before and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def _await_threads(before: frozenset[threading.Thread]) -> None:
    """A pool that was told to end, and not waited for, has threads on their way out."""
    deadline = time.monotonic() + UNLINK_SECONDS
    for thread in frozenset(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
