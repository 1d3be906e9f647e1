"""Unix sockets for one user: the file's mode keeps others out, and behind it the peer's uid."""

import os
import socket
import struct
from pathlib import Path
from typing import Final

from protocol.errors import DaemonError, PermissionRefused, map_exceptions

MODE: Final = 0o600


def bind(
    path: Path, kind: socket.SocketKind, backlog: int, error: type[DaemonError]
) -> socket.socket:
    """Listen at `path`, which must be free, without ever blocking; an OSError becomes `error`."""
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    # Whoever finds the file is taken in: it gets its name once the socket listens.
    nameless = path.with_name(f".{os.getpid()}")
    try:
        os.fchmod(listener.fileno(), MODE)  # before the bind: the file has this mode at once
        with map_exceptions({OSError: error}):
            nameless.unlink(missing_ok=True)
            listener.bind(str(nameless))
            try:
                listener.listen(backlog)
                path.hardlink_to(nameless)
            finally:
                nameless.unlink()
    except BaseException:
        listener.close()
        raise
    return listener


def check_peer(connection: socket.socket) -> None:
    """Raise PermissionRefused unless the other end was opened by this process's user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = int(struct.unpack("3i", packed)[1])
    if uid != os.geteuid():
        raise PermissionRefused(f"the other end of the socket is user {uid}, not {os.geteuid()}")
