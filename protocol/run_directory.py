"""A private folder for the sockets and configs of one supervisor, gone with the last process.

Two lock files say who is there. The owner (a supervisor, or a daemon that is a service of its own)
holds ``owner.lock`` exclusively; each daemon of a supervisor holds ``members.lock`` shared. The
kernel frees both at death, however it came, so that a dead owner's folder is free at once and the
last daemon out can tell that it is the last.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from protocol.config import DRAFT_SOCKET, RING_SOCKET, TARGET_SOCKET
from protocol.driving import DRIVER_LOCK, is_driven
from protocol.errors import ConfigError, PermissionRefused, TemporaryFailure, Unavailable
from protocol.file_locks import lock, still_there, taken
from protocol.link_settings import MAX_SOCKET_PATH

OWNER_LOCK: Final = "owner.lock"
MEMBERS_LOCK: Final = "members.lock"
RUNTIME_VARIABLE: Final = "DFLASH_RUNTIME"  # where run directories go; for tests and services
ADDRESS_FILE: Final = "address"
MAX_ADDRESS: Final = 300  # bytes of it
_NAME_BYTES: Final = 4
_MAX_TEXT: Final = 32  # bytes of a file that names a process
_MAX_DIGITS: Final = 9  # of a process's number, which is below 2^22
_ENDING_SECONDS: Final = 1.0  # how long a killed process, or removing a folder, may take
_LONGEST_SOCKET: Final = max(TARGET_SOCKET, DRAFT_SOCKET, RING_SOCKET, key=len)


class RunDirectory:
    """Owned inside a ``with``; `path` is a new folder, or `path` itself if one was named.

    A named folder whose owner lives is refused with the owner's pid.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._named = path
        self._path: Path | None = None
        self._lock = -1

    @property
    def path(self) -> Path:
        if self._path is None:
            raise ConfigError("the run directory is not entered")
        return self._path

    def __enter__(self) -> Self:
        path = self._named or _new_path()
        _check_length(path)
        self._lock = _own(path)
        self._path = path
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Removed under the lock: a next owner of the same name waits for nothing and finds nothing.
        # A service that ends while a supervisor drives it leaves that lock for its next process.
        if not is_driven(self.path):
            _remove(self.path)
        os.close(self._lock)
        self._lock, self._path = -1, None


class Member:
    """A daemon's stay in the run directory, inside a ``with``.

    The last daemon out removes the directory if its owner is dead. `leave` does that early, for a
    process that is about to be killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._lock = os.open(self._path / MEMBERS_LOCK, flags, 0o600)
        except OSError as error:
            reason = f"the run directory {self._path} is gone: {error.strerror}"
            raise Unavailable(reason) from error
        if not lock(self._lock, fcntl.LOCK_SH):
            os.close(self._lock)
            raise TemporaryFailure(f"the run directory {self._path} is being removed")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self, *, orphaned: bool = False) -> None:
        """Give up the place; `orphaned` if the owner is known to be dead. Twice is harmless.

        Without an owner it waits a moment for the rest: a process that was killed takes some time
        to die, closes its files one by one, and can then not clean up.
        """
        fd, self._lock = self._lock, -1
        if fd < 0:
            return
        os.close(fd)
        deadline = time.monotonic() + _ENDING_SECONDS
        while not remove_if_orphaned(self._path) and self._path.exists():
            if not (orphaned or _owner_is_dead(self._path)):
                return
            if time.monotonic() > deadline:
                return
            time.sleep(_ENDING_SECONDS / 100)


def _owner_is_dead(path: Path) -> bool:
    """Whether the owner's lock is free, or will be in a moment.

    The parent-death signal comes when the owner's main thread ends. Its other threads may still be
    ending then, and hold its files open: to a daemon that looks at the lock, the owner lives.
    """
    with taken(path / OWNER_LOCK) as owner_is_dead:
        if owner_is_dead:
            return True
    try:
        pid = (path / OWNER_LOCK).read_text(encoding="ascii").strip()
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # removed meanwhile, or the process is gone
    return state.rpartition(")")[2].split()[0] in "ZX"


def living_owner(path: Path) -> int:
    """The process that owns the folder; 0 when none does, or it has only just begun to."""
    lock_file = path / OWNER_LOCK
    with taken(lock_file) as is_free:
        if is_free:
            return 0
    return read_pid(lock_file)


def read_pid(path: Path) -> int:
    """The process that a file names; 0 for one that names none, or is not there."""
    try:
        text = path.read_bytes()[:_MAX_TEXT].strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0


def say_address(path: Path, address: str) -> None:
    """Tell `dflashd ps` where a daemon that owns the folder listens; empty: in the folder alone."""
    (path / ADDRESS_FILE).write_text(address, encoding="ascii")


def read_address(path: Path) -> str:
    """The network address of the folder's daemon; empty where it has none."""
    try:
        with (path / ADDRESS_FILE).open("rb") as file:
            text = file.read(MAX_ADDRESS).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.isprintable() else ""


def remove_if_orphaned(path: Path) -> bool:
    """Remove the folder if its owner is dead and nobody is left in it; True when it did."""
    with taken(path / OWNER_LOCK) as owner_is_dead:
        if not owner_is_dead or is_driven(path):
            return False
        with taken(path / MEMBERS_LOCK, create=True) as is_empty:
            if is_empty:
                _remove(path)
            return is_empty


def sweep_orphans() -> int:
    """Remove this user's run directories whose processes are all dead; returns how many."""
    return sum(
        remove_if_orphaned(path)
        for base in bases()
        for path in base.glob(f"{prefix()}*")
        if is_private(path)
    )


def _own(path: Path) -> int:
    """Take the owner's lock of `path`, making the folder if need be; returns the descriptor."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        fd = _open_owner_lock(path)
        try:
            if _try_to_own(path, fd):
                return fd
            _refuse_a_live_owner(
                path, read_pid(path / OWNER_LOCK), late=time.monotonic() > deadline
            )
        except BaseException:
            os.close(fd)
            raise
        # A dead owner's lock is held only by someone who is just removing the folder.
        os.close(fd)
        time.sleep(_ENDING_SECONDS / 100)


def _open_owner_lock(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if not is_private(path):
            raise PermissionRefused(f"{path} is not a private folder (mode 0700) of this user")
        return os.open(path / OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot make the run directory {path}: {error.strerror}") from error


def _try_to_own(path: Path, fd: int) -> bool:
    if not lock(fd, fcntl.LOCK_EX) or not still_there(path / OWNER_LOCK, fd):
        return False
    with taken(path / MEMBERS_LOCK, create=True) as is_empty:
        if not is_empty:
            raise TemporaryFailure(f"daemons of an earlier owner are still ending in {path}")
    for leftover in path.iterdir():
        if leftover.is_dir() and not leftover.is_symlink():
            _remove(leftover)
        elif leftover.name not in (OWNER_LOCK, MEMBERS_LOCK, DRIVER_LOCK):
            leftover.unlink()
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return True


def _refuse_a_live_owner(path: Path, pid: int, *, late: bool) -> None:
    if late or (pid > 0 and Path(f"/proc/{pid}").exists()):
        raise TemporaryFailure(f"{path} is in use by process {pid or 'unknown'}")


def _remove(path: Path) -> None:
    # Daemons that end at the same time remove their own sockets.
    shutil.rmtree(path, ignore_errors=True)


def prefix() -> str:
    """How the names of this user's run directories begin."""
    return f"dflashd-{os.getuid()}-"


def bases() -> list[Path]:
    """Folders that may hold run directories, best first."""
    named = os.environ.get(RUNTIME_VARIABLE, "")
    if named:
        return [Path(named)]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    private = [Path(runtime)] if runtime and is_private(Path(runtime)) else []
    return [*private, Path(tempfile.gettempdir())]


def _new_path() -> Path:
    name = prefix() + secrets.token_hex(_NAME_BYTES)
    paths = [base.absolute() / name for base in bases()]
    fitting = [path for path in paths if _socket_bytes(path) <= MAX_SOCKET_PATH]
    return (fitting or paths)[0]


def _socket_bytes(path: Path) -> int:
    return len(os.fsencode(path / _LONGEST_SOCKET))


def _check_length(path: Path) -> None:
    if _socket_bytes(path) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the run directory {path} is too long a name: a socket's path in it has "
            f"{_socket_bytes(path)} bytes, and the system takes {MAX_SOCKET_PATH}; "
            f"name a shorter one in ${RUNTIME_VARIABLE}"
        )


def is_private(path: Path) -> bool:
    """A folder, no link, of this user, closed to all others."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    closed = stat.S_IMODE(facts.st_mode) & 0o077 == 0
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and closed
