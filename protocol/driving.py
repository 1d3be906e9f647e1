"""The right to drive a daemon of the same host: a lock on a file in the daemon's run directory.

The supervisor's process holds it, and the file names its pid and the life it gives to the daemon.
The kernel frees it at the supervisor's death, so that a dead driver's daemon can be had at once,
and a live one's never.
"""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import NotTheDriver, StaleMessage, Unavailable
from protocol.file_locks import lock, still_there, taken
from protocol.right import Right

DRIVER_LOCK: Final = "driver.lock"
_MAX_TEXT: Final = 64
_MAX_LIFE: Final = (1 << 63) - 1  # what a message can name
_TRIES: Final = 6  # somebody may just be looking whether the lock is held
_PAUSE_SECONDS: Final = 0.01


@dataclass(frozen=True)
class Driver:
    """What the lock's file says: a process, 0 for none, and the last life that was given."""

    pid: int
    life: int


def read_driver(run_dir: Path) -> Driver:
    """Who drives, or drove last; zeros where nobody has, or the daemon is not there yet."""
    try:
        fd = os.open(run_dir / DRIVER_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return Driver(0, 0)
    try:
        words = os.pread(fd, _MAX_TEXT, 0).split()
    finally:
        os.close(fd)
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return Driver(0, 0)
    pid, life = map(int, words)
    return Driver(pid, life) if life < _MAX_LIFE else Driver(0, 0)


def is_driven(run_dir: Path) -> bool:
    """Whether a living process holds the right to drive the daemon of this folder."""
    path = run_dir / DRIVER_LOCK
    with taken(path) as is_free:
        return not is_free and path.exists()


class DriverLock:
    """The supervisor's half: `take` before each Hello of a new life, `release` at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fd = -1
        self._life = 0

    def take(self, life: int) -> None:
        """Hold the right, and give the daemon `life` next.

        Raises NotTheDriver with the pid of the process that holds it, or Unavailable when there is
        no run directory: the daemon has not been started.
        """
        path = self._run_dir / DRIVER_LOCK
        for _ in range(_TRIES):
            if self._fd >= 0 and still_there(path, self._fd):
                self._write(os.getpid(), life)
                return
            self._close()
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise Unavailable(f"no daemon runs in {self._run_dir}: {error.strerror}") from error
            if not lock(self._fd, fcntl.LOCK_EX):
                self._close()
                time.sleep(_PAUSE_SECONDS)
        pid = read_driver(self._run_dir).pid
        raise NotTheDriver(f"the daemon in {self._run_dir} is driven by process {pid or 'unknown'}")

    def release(self) -> None:
        """Give up the right; harmless if it was never taken."""
        if self._fd >= 0:
            self._write(0, self._life)
        self._close()

    def _write(self, pid: int, life: int) -> None:
        self._life = life
        os.pwrite(self._fd, f"{pid:>10} {life:>20}\n".encode(), 0)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Locked(Right):
    """The daemon's half: only the life that the holder of the lock has written may begin."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir

    def claim(self, life: int, owner: int) -> None:
        """Raises NotTheDriver with the driver's pid, or StaleMessage with both lives."""
        del owner  # the kernel knows it
        driver = read_driver(self._run_dir)
        if not is_driven(self._run_dir):
            raise NotTheDriver(
                f"nobody holds {DRIVER_LOCK} of this daemon; its holder alone may drive it"
            )
        if life != driver.life:
            raise NotTheDriver(f"this daemon is driven by process {driver.pid}")
        if life <= self.life:
            raise StaleMessage(f"life {life} is not above the last one, {self.life}")
        self.life = life
