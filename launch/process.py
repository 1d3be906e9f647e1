"""One child process: spawned isolated, watched, and ended for certain. Nothing here blocks.

The supervisor's loop watches `Child.fds`, calls `on_readable` for the ready ones and `on_deadline`
when `Child.deadline` has passed; both return events. `Child.close` does the same in a loop of its
own, for the end of the program.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from launch.events import Role
from launch.idle_threads import spin_settings
from launch.log_tail import LineReader, LogTail
from protocol.closing import Closing
from protocol.config import Deadlines
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    Unavailable,
)
from protocol.lifeline import PARENT_VARIABLE
from protocol.messages import LinkMessage
from protocol.status import MAX_LINE_BYTES, Status, decode_status

# What a service manager says to the supervisor alone.
_NOT_INHERITED: Final = ("NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_NOT_INHERITED_PREFIXES: Final = ("WATCHDOG_", "LISTEN_")
MAX_SHOWN_LOG: Final = 4096  # characters of its end, in a sentence that travels


@dataclass(frozen=True)
class Exited:
    """The child has ended and is reaped; its descriptors are closed.

    `code` is its exit code, or None; `signal` the name of the signal that ended it, or empty.
    Both are without value if it did not even end when killed. `log` is the end of what it wrote.
    """

    code: int | None
    signal: str
    log: str

    def __str__(self) -> str:
        if self.signal:
            how = f"was ended by {self.signal}"
        elif self.code is None:
            how = "did not end when it was killed"
        else:
            how = f"ended with exit code {self.code}"
        return f"{how}: {self.log[-MAX_SHOWN_LOG:]}" if self.log else how


Event = Status | Exited


def daemon_command(module: str, config: Path) -> tuple[str, ...]:
    """Run `module` with this interpreter, isolated from the user's folder and environment."""
    return (sys.executable, "-I", "-m", module, str(config))


class Child(Closing):
    """A process in a group of its own, tied to this one by a pipe on its standard input.

    ``with Child(...) as child`` starts it; leaving ends it, within `deadlines`. Start it from the
    main thread: the kernel's parent-death signal follows the thread, not the process.
    """

    opening: Final[tuple[LinkMessage, ...]] = ()
    may_come_later: Final = False

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadlines: Deadlines,
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        self._command = tuple(command)
        self._deadlines = deadlines
        self._environment = dict(environment or {})
        self._inherited = tuple(inherited)  # descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._status = LineReader(MAX_LINE_BYTES)
        self._log = LogTail()
        self._exited: Exited | None = None
        self._killed = False
        self.deadline: float | None = None  # on time.monotonic()'s clock

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> list[Event]:
        """Spawn; raises Unavailable when the system refuses. What it says comes later."""
        try:
            process = subprocess.Popen(  # noqa: S603 -- our own interpreter and modules
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=_child_environment(self._environment),
                process_group=0,
                pass_fds=self._inherited,
            )
        except OSError as error:
            raise Unavailable(f"cannot start {self._command[0]}: {error.strerror}") from error
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        for fd in self.fds[:2]:
            os.set_blocking(fd, False)
        return []

    def absent(self, role: Role, seconds: float) -> DaemonError:
        """It has loaded for too long."""
        return DeadlineExceeded(f"the {role} did not load within {seconds:g} s")

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def exited(self) -> Exited | None:
        """How it ended, once it has."""
        return self._exited

    @property
    def has_ended(self) -> bool:
        return self._exited is not None

    @property
    def log(self) -> str:
        """The last lines it wrote to standard error, and stray ones from standard output."""
        return self._log.text()

    @property
    def fds(self) -> tuple[int, ...]:
        """What to watch now; a stream that has ended is no longer among them."""
        if self._exited is not None or self._process is None:
            return ()
        streams = (self._process.stdout, self._process.stderr)
        return (*(s.fileno() for s in streams if s is not None and not s.closed), self._pidfd)

    def on_readable(self, fd: int) -> list[Event]:
        """Take what is there, without waiting. `fds` may be smaller afterwards."""
        process = self._started()
        if fd == self._pidfd:
            return self._reap()
        for stream, read in ((process.stdout, self._on_status), (process.stderr, self._on_log)):
            if stream is not None and not stream.closed and stream.fileno() == fd:
                data = _read(fd)
                if data == b"":
                    stream.close()
                return read(data or b"", ended=data == b"")
        return []

    def terminate(self) -> None:
        """Ask it to end; `on_deadline` kills it if it does not. Asking twice changes nothing."""
        if self._exited is not None or self.deadline is not None:
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process takes the signal only when it goes on
        self.deadline = time.monotonic() + self._deadlines.terminate

    def kill(self) -> None:
        """End it and what it started, without asking."""
        if self._exited is not None:
            return
        self._kill_group()
        self._killed = True
        self.deadline = time.monotonic() + self._deadlines.kill

    def on_deadline(self) -> list[Event]:
        """Call when `deadline` has passed: kill, or at last give up."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return []
        if not self._killed:
            self.kill()
            return []
        return [self._finish(None)]

    def close(self) -> Exited:
        """End it now and wait until it has, at most the two deadlines."""
        self.terminate()
        while self._exited is None:
            poller = select.poll()
            for fd in self.fds:
                poller.register(fd, select.POLLIN)
            wait = max(0.0, (self.deadline or 0.0) - time.monotonic())
            for fd, _ in poller.poll(wait * 1000 + 1):
                if fd in self.fds:
                    self.on_readable(fd)
            self.on_deadline()
        return self._exited

    def _on_status(self, data: bytes, *, ended: bool) -> list[Event]:
        found: list[Event] = []
        for line in self._status.feed(data, ended=ended):
            try:
                found.append(decode_status(line))
            except ProtocolError:
                self._log.feed(line + b"\n")
        return found

    def _on_log(self, data: bytes, *, ended: bool) -> list[Event]:
        del ended
        self._log.feed(data)
        return []

    def _reap(self) -> list[Event]:
        if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return []
        # Before it is reaped its id cannot be given to another, so the group is surely its own.
        self._kill_group()
        process = self._started()
        events: list[Event] = []
        for stream, read in ((process.stdout, self._on_status), (process.stderr, self._on_log)):
            while stream is not None and not stream.closed and (data := _read(stream.fileno())):
                events += read(data, ended=False)
        events += self._on_status(b"", ended=True)
        return [*events, self._finish(process.wait())]

    def _finish(self, status: int | None) -> Exited:
        process = self._started()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        os.close(self._pidfd)
        self._pidfd = -1
        self.deadline = None
        died = status is not None and status < 0
        self._exited = Exited(
            code=None if died else status,
            signal=signal.Signals(-status).name if status is not None and died else "",
            log=self._log.text(),
        )
        return self._exited

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # reaped by somebody else; the pidfd will say so
            signal.pidfd_send_signal(self._pidfd, number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._started().pid, signal.SIGKILL)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise InternalError("the child is not started")
        return self._process


def _read(fd: int) -> bytes | None:
    """What is there; None when nothing is yet, and no bytes at the end."""
    try:
        return os.read(fd, MAX_LINE_BYTES)
    except BlockingIOError:
        return None


def _child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }
    return {**kept, **spin_settings(kept), PARENT_VARIABLE: str(os.getpid()), **extra}
