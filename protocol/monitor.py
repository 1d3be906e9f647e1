"""What becomes of a connection over a network, as ZeroMQ's own thread reports it.

A handshake that fails is retried by ZeroMQ without a word: here it becomes the error that says
why nothing is answered.
"""

import struct
import time
from typing import Final

import zmq

from protocol.errors import DaemonError, PermissionRefused, Unavailable
from protocol.link_settings import NETWORK_HANDSHAKE_MILLISECONDS
from protocol.sockets import Socket

WATCHED: Final = int(
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
)
READABLE: Final = int(zmq.POLLIN)
EVENT: Final = struct.Struct("=HI")
HANDSHAKES: Final = 3  # that fail promptly and in a row before it is said
PROMPT_SECONDS: Final = NETWORK_HANDSHAKE_MILLISECONDS / 2000
MAX_BATCH: Final = 1000  # ZeroMQ keeps no more


class Monitor:
    """Of one DEALER; made before it connects, closed before it is: both in the loop's thread."""

    def __init__(self, socket: Socket, peer: str) -> None:
        self._watched = socket
        self._peer = peer
        self._trouble: DaemonError | None = Unavailable(f"{peer}: no connection yet")
        self._failed = 0  # handshakes in a row
        self._connected_at = 0.0  # as far as it is known here
        self.broken: DaemonError | None = None  # a connection that was lost, or never will be
        self._events: Socket | None = socket.get_monitor_socket(WATCHED)

    def trouble(self) -> DaemonError | None:
        """Why there is no connection now, or None: all that was reported is taken in first."""
        events = self._events
        for _ in range(MAX_BATCH):
            if events is None or not int(events.getsockopt(zmq.EVENTS)) & READABLE:
                break
            frame, *_ = events.recv_multipart(zmq.NOBLOCK)
            if len(frame) == EVENT.size:
                self._take(EVENT.unpack(frame)[0])
        return self._trouble

    @property
    def source(self) -> Socket | None:
        """What a poll loop waits for; None once it is closed."""
        return self._events

    def close(self) -> None:
        """Stop the reports; a context whose monitors are open never ends."""
        if self._events is not None:
            events, self._events = self._events, None
            self._watched.disable_monitor()
            events.close(linger=0)

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = time.monotonic()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._trouble, self._failed = None, 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse(f"{self._peer} does not admit this process's key")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            # One that takes its time fails for another reason: the daemon loads, or computes. Once
            # may be an accident, but not another mechanism: ZeroMQ does not try again then.
            prompt = time.monotonic() - self._connected_at < PROMPT_SECONDS
            self._failed = self._failed + 1 if prompt else 0
            if self._failed == HANDSHAKES or event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse(
                    f"{self._peer}: no handshake; it has another key than this process was told, "
                    "or only one of the two uses keys"
                )
        elif not isinstance(self._trouble, PermissionRefused):
            lost, self._trouble = (
                self._trouble is None,
                Unavailable(f"{self._peer} cannot be reached; still trying"),
            )
            if lost:
                self.broken = Unavailable(f"the connection to {self._peer} was lost")

    def _refuse(self, why: str) -> None:
        self._trouble = self.broken = PermissionRefused(why)
