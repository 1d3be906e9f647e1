"""What both ends of a control link share: numbers of their sockets, and how they are watched."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError

# A descriptor, and the events of `select.poll` to wait for from now on; 0: no more.
Watch = Callable[[int, int], None]

MAX_SOCKET_PATH: Final = 107  # bytes of a Unix socket's path, without the final zero
HIGH_WATER_MARK: Final = 64  # messages that may wait on one connection, each way
# A secured handshake also waits for the daemon's loop, which may be in a long forward.
NETWORK_HANDSHAKE_MILLISECONDS: Final = 5000
HEARTBEAT_MILLISECONDS: Final = 1000
HEARTBEAT_TIMEOUT_MILLISECONDS: Final = 3000
RECONNECT_MILLISECONDS: Final = 20
RECONNECT_MAX_MILLISECONDS: Final = 1000
LOCAL_RECONNECT_SECONDS: Final = 0.02
LOCAL_RECONNECT_MAX_SECONDS: Final = 0.1  # a look costs one system call
MAX_CONNECTIONS: Final = 64  # that a daemon keeps on its own host
LAST_WORDS_MILLISECONDS: Final = 100  # that an end waits for a peer to take its last replies
CONNECT_MILLISECONDS: Final = 2000  # the system's own limit is minutes


def check_socket_path(path: Path) -> None:
    """Refuse early what bind() would refuse late, with both numbers."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes; the system takes {MAX_SOCKET_PATH}"
        )
