"""A control link on one host: a Unix stream socket, for this user alone.

There is no thread and no heartbeat in it. The kernel tells both ends when the other process is
gone; one that is stopped or hangs keeps its connection, and what was sent to it.
"""

import itertools
import logging
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Final

from protocol import private_socket
from protocol.errors import ConfigError, DaemonError, PermissionRefused, ProtocolError
from protocol.framing import Frames
from protocol.link_settings import (
    HIGH_WATER_MARK,
    LAST_WORDS_MILLISECONDS,
    LOCAL_RECONNECT_MAX_SECONDS,
    LOCAL_RECONNECT_SECONDS,
    MAX_CONNECTIONS,
    Watch,
    check_socket_path,
)
from protocol.private_socket import check_peer

BACKLOG: Final = 16
READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT

log = logging.getLogger(__name__)


class LocalCaller:
    """`protocol.ends.Caller` of the socket file at `path`, which need not be there yet.

    It looks for the daemon in `prepare` and in `send`, and again after a connection has ended.
    """

    def __init__(self, path: Path, watch: Watch) -> None:
        self._path = path
        self._watch = watch
        self._frames: Frames | None = None
        self._retry_at = 0.0
        self._patience = LOCAL_RECONNECT_SECONDS
        self._is_closed = False
        self.is_steady = False
        self.broken: DaemonError | None = None

    @property
    def trouble(self) -> DaemonError | None:
        return self.broken

    @property
    def has_news(self) -> bool:
        return self.broken is not None

    def prepare(self) -> float | None:
        if self.is_steady:
            return None
        left = self._retry_at - time.monotonic()
        if left > 0:
            return left
        if self._connect() is not None or self.broken is not None:
            return 0.0
        wait, self._patience = self._patience, min(2 * self._patience, LOCAL_RECONNECT_MAX_SECONDS)
        self._retry_at = time.monotonic() + wait
        return wait

    def want_write(self, *, wanted: bool) -> None:
        if self._frames is not None:
            self._watch(self._frames.fd, READABLE | (WRITABLE if wanted else 0))

    def send(self, data: bytes) -> bool:
        frames = self._frames or self._connect()
        return frames is not None and frames.send(data, most=1)

    def flush(self) -> bool:
        frames = self._frames
        if frames is None:
            return False
        frames.flush()
        return not frames.unsent

    def receive(self) -> list[bytes | ProtocolError]:
        frames = self._frames
        if frames is None:
            return []
        found: list[bytes | ProtocolError] = []
        try:
            found += frames.receive()
        except ProtocolError as error:
            found.append(error)
            self._disconnect()
        if not found and frames.ended:
            self._disconnect()
        return found

    def close(self) -> None:
        self._disconnect()
        self._is_closed = self.is_steady = True

    def _connect(self) -> Frames | None:
        """Look whether the daemon is there. It is not waited for: one that is full is not there."""
        if self._is_closed or self.broken is not None:
            return None
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.connect(str(self._path))
            check_peer(end)
        except (OSError, PermissionRefused) as error:
            end.close()
            if isinstance(error, PermissionError | PermissionRefused):
                self.broken = PermissionRefused(f"{self._path}: {error}")
                self.is_steady = True
            return None
        self._frames = Frames(end)
        self.is_steady = True
        self._patience = LOCAL_RECONNECT_SECONDS
        self._watch(self._frames.fd, READABLE)
        return self._frames

    def _disconnect(self) -> None:
        """A message that was taken in part is lost: whoever read it is gone."""
        if self._frames is not None:
            self._watch(self._frames.fd, 0)
            self._frames.close()
            self._frames = None
            self.is_steady = False
            self._retry_at = 0.0


class LocalListener:
    """`protocol.ends.Listener` at the socket file `path`; the run directory's lock must be held.

    A peer's name is the number of its connection. What has come is read when nothing else waits.
    """

    def __init__(self, path: Path, watch: Watch) -> None:
        check_socket_path(path)
        self._path = path
        self._watch = watch
        self._numbers = itertools.count(1)
        self._peers: dict[bytes, Frames] = {}
        self._names: dict[int, bytes] = {}
        self._silent: dict[bytes, None] = {}  # that have sent no message yet, oldest first
        self._waiting: deque[tuple[bytes, bytes | ProtocolError]] = deque()
        try:
            path.unlink(missing_ok=True)
            self._listener = private_socket.bind(path, socket.SOCK_STREAM, BACKLOG, ConfigError)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error
        watch(self._listener.fileno(), READABLE)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self._path}"

    def has_message(self) -> bool:
        return bool(self._waiting)

    def attend(self, fd: int, events: int) -> None:
        name = self._names.get(fd)
        if name is None:
            self._accept()
            return
        if events & WRITABLE:
            self._flush(name)
        if events & ~WRITABLE and not self._waiting:
            self._read(name)

    def receive(self) -> tuple[bytes, str | None, bytes | ProtocolError] | None:
        if not self._waiting:
            return None
        name, data = self._waiting.popleft()
        return name, None, data

    def send(self, peer: bytes, data: bytes) -> str:
        frames = self._peers.get(peer)
        if frames is None:
            return "the peer is gone"
        if not frames.send(data, most=HIGH_WATER_MARK):
            gone = f"the peer has not read {frames.unsent} replies"
            return "the peer is gone" if frames.ended else gone
        if frames.unsent:
            self._watch(frames.fd, READABLE | WRITABLE)
        return ""

    def close(self) -> None:
        for frames in self._peers.values():
            _drain(frames, time.monotonic() + LAST_WORDS_MILLISECONDS / 1000)
        for name in tuple(self._peers):
            self._drop(name)
        self._watch(self._listener.fileno(), 0)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is left for it
            return
        try:
            check_peer(end)
        except PermissionRefused as error:
            log.warning("refused a connection to %s: %s", self._path.name, error)
            end.close()
            return
        if len(self._peers) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._silent or self._peers)))
        name, frames = b"%d" % next(self._numbers), Frames(end)
        self._peers[name], self._names[frames.fd] = frames, name
        self._silent[name] = None
        self._watch(frames.fd, READABLE)

    def _read(self, name: bytes) -> None:
        frames = self._peers[name]
        try:
            found = frames.receive()
        except ProtocolError as error:  # no message can be told from the next one any more
            self._waiting.append((name, error))
            self._drop(name)
            return
        if found:
            self._silent.pop(name, None)
            self._waiting += [(name, data) for data in found]
        elif frames.ended:
            self._drop(name)

    def _flush(self, name: bytes) -> None:
        frames = self._peers[name]
        frames.flush()
        if not frames.unsent:
            self._watch(frames.fd, READABLE)

    def _drop(self, name: bytes) -> None:
        frames = self._peers.pop(name)
        self._silent.pop(name, None)
        del self._names[frames.fd]
        self._watch(frames.fd, 0)
        frames.close()


def _drain(frames: Frames, deadline: float) -> None:
    """Wait until then for the other end to take what was sent."""
    poller = select.poll()
    poller.register(frames.fd, WRITABLE)
    while frames.unsent and not frames.ended and (left := deadline - time.monotonic()) > 0:
        poller.poll(left * 1000)
        frames.flush()
