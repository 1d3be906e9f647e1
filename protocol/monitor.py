"""What becomes of a connection over a network, as ZeroMQ's own thread reports it.

A handshake that fails is retried by ZeroMQ without a word: here it becomes the error that says
why nothing is answered.
"""

import struct
from typing import Final

import zmq

from protocol.errors import DaemonError, PermissionRefused, Unavailable
from protocol.sockets import Socket

WATCHED: Final = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
)
READABLE: Final = int(zmq.POLLIN)
EVENT: Final = struct.Struct("=HI")
MAX_BATCH: Final = 1000  # ZeroMQ keeps no more


class Monitor:
    """Of one DEALER; made before it connects, closed before it is: both in the loop's thread."""

    def __init__(self, socket: Socket, peer: str) -> None:
        self._watched = socket
        self._peer = peer
        self._trouble: DaemonError | None = Unavailable(f"{peer}: no connection yet")
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

    def close(self) -> None:
        """Stop the reports; a context whose monitors are open never ends."""
        if self._events is not None:
            events, self._events = self._events, None
            self._watched.disable_monitor()
            events.close(linger=0)

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._trouble = None
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._trouble = PermissionRefused(f"{self._peer} does not admit this process's key")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._trouble = PermissionRefused(
                f"{self._peer}: no handshake; it has another key than this process was told, "
                "or only one of the two uses keys"
            )
        elif not isinstance(self._trouble, PermissionRefused):
            self._trouble = Unavailable(f"{self._peer} cannot be reached; still trying")
