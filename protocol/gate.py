"""Who may connect to a secured socket: ZeroMQ's authentication protocol (RFC 27) and a list.

Without such a handler CURVE admits every key that can do the handshake. The handler is a socket
of the daemon's own context and poll loop: no thread, and a handshake waits for one call at most.
"""

import logging
from collections.abc import Mapping
from typing import Final

import zmq
from zmq.utils import z85

from protocol.errors import ConfigError
from protocol.sockets import ZAP_DOMAIN, Context

HANDLER: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
ROLE: Final = "User-Id"  # the property of a received frame that holds what was admitted
MAX_BATCH: Final = 64
READABLE: Final = int(zmq.POLLIN)
NOT_WAITING: Final = int(zmq.NOBLOCK)

log = logging.getLogger(__name__)


def judge(request: list[bytes], admitted: Mapping[bytes, str]) -> str:
    """The role of the key that asks, or the empty string. `request`: the frames of RFC 27."""
    if len(request) != 7:
        return ""
    version, _, domain, _, _, mechanism, key = request
    if (version, domain, mechanism) != (VERSION, ZAP_DOMAIN, b"CURVE") or len(key) != 32:
        return ""
    return admitted.get(z85.encode(key), "")


class Gate:
    """The handler of one context; `admitted` has the role of each public key in Z85."""

    def __init__(self, context: Context, admitted: Mapping[bytes, str]) -> None:
        if not admitted:
            raise ConfigError("no public key is admitted: nobody could connect")
        self._admitted = dict(admitted)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind(HANDLER)

    def answer(self) -> None:
        """Answer the handshakes that wait; what is refused is counted, and logged now and then."""
        for _ in range(MAX_BATCH):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & READABLE:
                return
            request = self.socket.recv_multipart(NOT_WAITING)
            role = judge(request, self._admitted)
            number = request[1] if len(request) > 1 else b""
            code, text = (b"200", b"OK") if role else (b"400", b"this key is not admitted")
            self.socket.send_multipart([VERSION, number, code, text, role.encode(), b""])
            if not role:
                self._refuse(request)

    def _refuse(self, request: list[bytes]) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            address = request[3].decode("ascii", "replace")[:64] if len(request) > 3 else "?"
            log.warning("refused an unknown key from %s (%d so far)", address, self.refused)
