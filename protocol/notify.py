"""What a process tells the service manager that started it: sd_notify(3), as systemd reads it.

One datagram of lines ``NAME=value`` each. Without ``NOTIFY_SOCKET`` nothing happens at all. The
signs of life are sent by the loop that does the work, so that one that hangs is found out.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final, Self

from protocol.errors import ConfigError

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
MAX_STATUS: Final = 256  # characters
_SEND_SECONDS: Final = 1.0  # a manager that does not read is not waited for
_LOADING_SECONDS: Final = 120  # that one step of a load may take
_MICROSECONDS: Final = 1_000_000

log = logging.getLogger(__name__)


class Notifier:
    """The line to the manager at `address`, which wants a sign of life within `watchdog` seconds.

    With an empty address it is silent. `interval` says how long a loop may wait before it calls
    `alive`; None for as long as it likes.
    """

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        if address and address[0] not in "/@":
            raise ConfigError(f"{SOCKET_VARIABLE} is {address}; a path or an @name is expected")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.interval = watchdog / 2 if address and watchdog > 0 else None
        self._due = 0.0
        self._told = ""
        self._is_stopping = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """As the manager has put it into the environment; ConfigError for what cannot be."""
        stated = environment.get("WATCHDOG_USEC", "")
        for_us = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        watchdog = int(stated) / _MICROSECONDS if stated.isdecimal() and for_us else 0.0
        return cls(environment.get(SOCKET_VARIABLE, ""), watchdog)

    def loading(self, status: str) -> None:
        """A step of the load is done; the next one may take its time."""
        self._send(f"EXTEND_TIMEOUT_USEC={_LOADING_SECONDS * _MICROSECONDS}", _status(status))

    def ready(self, status: str) -> None:
        """What was promised is there: whoever was ordered behind this unit may start."""
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """One line for ``systemctl status``; the same again is not sent."""
        if status != self._told:
            self._told = status
            self._send(_status(status))

    def stopping(self) -> None:
        """The end has begun; the first time counts."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1", _status("ending"))

    def alive(self) -> None:
        """The loop goes round; sends a sign of life if one is due."""
        if self.interval is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.interval
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.settimeout(_SEND_SECONDS)
                line.connect(self._address)
                line.sendall("\n".join(lines).encode(errors="replace"))
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error)


def _status(text: str) -> str:
    # A newline would begin another assignment.
    return f"STATUS={' '.join(text.split())[:MAX_STATUS]}"
