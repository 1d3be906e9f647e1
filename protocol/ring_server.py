"""The target's end of ``ring.sock``: guests ask for memory, are answered once, and may stay.

A guest states nonce and life and gets a layout with its descriptors, or a refusal. Where `probe`
is given the connection then stays open for as long as the guest maps the memory: it is the lease
by which each side learns of the other's end.
"""

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from protocol import arena_layout, ring_socket
from protocol.arena_layout import Ask, Layout, Probed, Refusal
from protocol.errors import DaemonError, InternalError, StaleMessage
from protocol.private_socket import check_peer

MAX_WAITING: Final = 8  # connections that have not stated nonce and life yet
MAX_LEASES: Final = 8  # guests that map memory at the same time
POLL_SECONDS: Final = 0.05

Offer: TypeAlias = tuple[Layout, list[int]]


class RingServer:
    """Constructing opens nothing; `offer` listens, `close` ends every connection."""

    def __init__(
        self,
        path: Path,
        layout: Callable[[], Offer],
        probe: Callable[[Probed], None] | None = None,
    ) -> None:
        self._path = path
        self._layout = layout
        self._probe = probe
        self._listener: socket.socket | None = None
        self._poller: select.epoll | None = None
        self._offered = (-1, -1)
        self.waiting: dict[int, socket.socket] = {}
        self.leases: dict[int, socket.socket] = {}

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def offer(self, nonce: int, life: int) -> None:
        """Listen, and answer guests that state this nonce and life from now on."""
        self._offered = (nonce, life)
        if self._listener is not None:
            return
        self._listener = ring_socket.listen(self._path, MAX_WAITING)
        self._poller = select.epoll()
        self._poller.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `serve` has something to do."""
        if self._poller is None:
            raise InternalError("the ring has not been offered")
        return self._poller.fileno()

    def serve(self, timeout: float = 0.0) -> None:
        """Handle what is there, waiting at most `timeout` seconds for it."""
        if self._poller is None or self._listener is None:
            return
        for fd, _ in self._poller.poll(timeout):
            if fd == self._listener.fileno():
                self._accept(self._listener)
            elif fd in self.waiting:
                self._answer(fd, self.waiting[fd])
            elif fd in self.leases:
                self._hear(fd, self.leases[fd])

    def wait_for_guests(self, seconds: float) -> bool:
        """Whether every guest has let go of the memory; waits for that at most so long."""
        deadline = time.monotonic() + seconds
        while self.leases and time.monotonic() < deadline:
            self.serve(POLL_SECONDS)
        return not self.leases

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the guest has gone again, or descriptors are short
            return
        connection.setblocking(False)
        if len(self.waiting) == MAX_WAITING:  # a silent one must not lock the others out
            self._drop(self.waiting, next(iter(self.waiting)))
        self.waiting[connection.fileno()] = connection
        if self._poller is not None:
            self._poller.register(connection, select.EPOLLIN)

    def _drop(self, table: dict[int, socket.socket], fd: int) -> None:
        table.pop(fd).close()  # closing takes it out of the poller

    def _answer(self, fd: int, connection: socket.socket) -> None:
        descriptors: list[int] = []
        answer: Layout | Refusal
        stays = False
        with suppress(OSError):  # a guest that is gone needs no answer
            try:
                # Read before anything is refused: closing with the question unread would reset
                # the connection, and the refusal would be lost.
                question = connection.recv(arena_layout.MAX_ASK_BYTES)
                check_peer(connection)
                self._check(arena_layout.decode_ask(question))
                answer, descriptors = self._layout()
                stays = self._probe is not None
            except DaemonError as error:
                answer = Refusal(code=error.code, detail=str(error))
            socket.send_fds(connection, [arena_layout.encode(answer)], descriptors)
            if stays and len(self.leases) < MAX_LEASES:
                self.leases[fd] = self.waiting.pop(fd)
                return
        self._drop(self.waiting, fd)

    def _check(self, ask: Ask) -> None:
        if (ask.nonce, ask.life) != self._offered:
            raise StaleMessage(
                f"life {ask.life} of the target was asked for, or its nonce is another; "
                f"this is life {self._offered[1]}"
            )

    def _hear(self, fd: int, connection: socket.socket) -> None:
        """A leaseholder says what its probe found, or has ended."""
        try:
            packet = connection.recv(arena_layout.MAX_ASK_BYTES)
            if packet and self._probe is not None:
                connection.send(arena_layout.encode(self._judge(packet)))
                return
        except OSError:  # the same as an end
            pass
        self._drop(self.leases, fd)

    def _judge(self, packet: bytes) -> Probed | Refusal:
        try:
            probed = arena_layout.decode_probed(packet)
            if self._probe is not None:
                self._probe(probed)
        except DaemonError as error:
            return Refusal(code=error.code, detail=str(error))
        return probed

    def close(self) -> None:
        """End every connection and remove the socket's name."""
        for table in (self.waiting, self.leases):
            for fd in list(table):
                self._drop(table, fd)
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
