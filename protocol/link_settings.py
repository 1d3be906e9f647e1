"""Numbers that both ends of a control link set on their sockets."""

import os
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError

MAX_SOCKET_PATH: Final = 107  # bytes of a Unix socket's path, without the final zero
HIGH_WATER_MARK: Final = 64  # messages that may wait on one connection, each way
HANDSHAKE_MILLISECONDS: Final = 2000
# A secured handshake also waits for the daemon's loop, which may be in a long forward.
NETWORK_HANDSHAKE_MILLISECONDS: Final = 5000
HEARTBEAT_MILLISECONDS: Final = 1000
HEARTBEAT_TIMEOUT_MILLISECONDS: Final = 3000
RECONNECT_MILLISECONDS: Final = 20
RECONNECT_MAX_MILLISECONDS: Final = 1000
CONNECT_MILLISECONDS: Final = 2000  # the system's own limit is minutes


def check_socket_path(path: Path) -> None:
    """Refuse early what bind() would refuse late, with both numbers."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes; the system takes {MAX_SOCKET_PATH}"
        )
