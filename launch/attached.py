"""Daemons that run as services of their own: driven by this supervisor, never started or ended.

The right to drive one is a lock in its run directory (`protocol.driving`), and every life that it
is given is greater than all before, whoever gave them. A daemon that hangs or talks nonsense is
asked to leave; whoever runs the service starts it again.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch.daemon_process import Event, Lost, Present
from launch.events import Role
from launch.far import Far
from launch.peer import SOCKETS, Peer
from launch.plan import Attach
from protocol.addresses import is_tcp
from protocol.config import RING_SOCKET
from protocol.driving import DriverLock, read_driver
from protocol.errors import (
    DaemonAbsent,
    DaemonDied,
    DaemonError,
    DeadlineExceeded,
    PermissionRefused,
    ProtocolError,
    StaleMessage,
)
from protocol.keyring import keyring_for
from protocol.messages import Leave
from protocol.run_directory import is_private, living_owner, remove_if_orphaned

SICK: Final = (DeadlineExceeded, ProtocolError)  # what starting again may help against
# Over a network silence may be the cable's; one that hangs is its service manager's to find.
FAR_SICK: Final = (ProtocolError,)
MAX_REASON: Final = 4096
# On another host no file names the last life. Where the clock of an earlier driver was ahead, each
# refusal makes up for an hour of it.
CLOCK_STEP: Final = 3600 * 10**9
LOOK_SECONDS: Final = 0.1  # between two looks whether a daemon is there


class Attached:
    """One life of such a daemon; `pid` is that of its process, once that is there."""

    may_come_later: Final = True

    def __init__(
        self, role: Role, run_dir: Path, lock: DriverLock, life: int, opening: Sequence[Leave]
    ) -> None:
        self._role = role
        self._run_dir = run_dir
        self._lock = lock
        self._life = life
        self._pidfd = -1
        self.opening = tuple(opening)
        self.deadline: float | None = None
        self.pid = 0
        self.has_ended = False

    @property
    def log(self) -> str:
        return ""

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self._pidfd < 0 else (self._pidfd,)

    def start(self) -> list[Event]:
        """Take the right to drive it, or wait until it is there.

        Raises NotTheDriver with the pid of the process that drives it, or PermissionRefused.
        """
        if self._run_dir.exists() and not is_private(self._run_dir):
            raise PermissionRefused(
                f"{self._run_dir} is not a private folder (mode 0700) of this user"
            )
        pid = living_owner(self._run_dir)
        if pid:
            with suppress(OSError):  # of another namespace: the link's silence must tell
                self._pidfd = os.pidfd_open(pid)
        # What is watched must be what was looked at: a number may be given again.
        if not pid or living_owner(self._run_dir) != pid:
            self._unwatch()
            self.deadline = time.monotonic() + LOOK_SECONDS
            return []
        self.pid, self.deadline = pid, None
        try:
            self._lock.take(self._life)
        except DaemonError:
            self._unwatch()
            raise
        return [Present()]

    def absent(self, role: Role, seconds: float) -> DaemonError:
        """Nobody there, or one that loads for longer than that."""
        return DaemonAbsent(f"no {role} daemon in {self._run_dir} answered within {seconds:g} s")

    def on_readable(self, fd: int) -> list[Event]:
        """Its process has ended."""
        del fd
        self.terminate()
        return [Lost(DaemonDied(f"the {self._role} daemon has ended; its own log says why"))]

    def on_deadline(self) -> list[Event]:
        """Look again whether it is there."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return []
        try:
            return self.start()
        except DaemonError as error:
            return [Lost(error)]

    def terminate(self) -> None:
        """Its process is not ours: this life alone is over."""
        self.has_ended, self.deadline = True, None
        self._unwatch()

    def kill(self) -> None:
        """The same; `Attacher.peer` asks it to leave, over the next link."""
        self.terminate()

    def close(self) -> None:
        """The lock stays with the `Attacher`."""
        self.terminate()

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Attacher:
    """Makes the peers of a pair that runs already; every life is greater than any before."""

    def __init__(self, attach: Attach, environment: Mapping[str, str]) -> None:
        """Raises ConfigError or PermissionRefused for keys that are needed and cannot be read."""
        self._places: dict[Role, str] = {"target": attach.target}
        if attach.draft is not None:
            self._places["draft"] = attach.draft
        folders = {role: Path(place) for role, place in self._places.items() if not is_tcp(place)}
        self._folders: dict[Role, Path] = folders
        self._locks = {role: DriverLock(folder) for role, folder in folders.items()}
        self._keyring = keyring_for("supervisor", attach.keys, self._places.values(), environment)
        self._last = 0

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self._places)

    @property
    def ring_address(self) -> str:
        place = self._places["target"]
        return place if is_tcp(place) else str(Path(place) / RING_SOCKET)

    def peer(self, role: Role, before: Peer | None = None) -> Peer:
        """A peer of a new life; the daemon is asked to end `before` if it was sick in that one."""
        folder = self._folders.get(role)
        given = 0 if folder is None else read_driver(folder).life
        # By the clock, and not by it alone: a clock can be set back.
        if before is not None and isinstance(before.error, StaleMessage):
            self._last += CLOCK_STEP
        self._last = max(self._last + 1, time.time_ns(), given + 1)
        if folder is None:
            address = self._places[role]
            far = Far(address, leave_messages(before, FAR_SICK))
            return Peer(role, self._last, far, address, self._keyring)
        process = Attached(role, folder, self._locks[role], self._last, leave_messages(before))
        return Peer(role, self._last, process, f"ipc://{folder / SOCKETS[role]}")

    def close(self) -> None:
        """Give up the right; a folder that a dead daemon left is removed."""
        for role, lock in self._locks.items():
            lock.release()
            remove_if_orphaned(self._folders[role])


def leave_messages(
    before: Peer | None, sick: tuple[type[DaemonError], ...] = SICK
) -> tuple[Leave, ...]:
    """What asks a daemon to end that was sick in its life before; nothing for any other reason."""
    if before is None or before.hello is None or not isinstance(before.error, sick):
        return ()
    target, draft = (before.life, 0) if before.role == "target" else (0, before.life)
    reason = str(before.error)[:MAX_REASON]
    return (Leave(target_life=target, draft_life=draft, reason=reason),)
