"""A service manager's half of the notify protocol: a socket that keeps what it is told."""

import socket
from contextlib import contextmanager

from support.waiting import until


class Manager:
    """`told` is every assignment so far, in order; `environment` is what a service is given."""

    def __init__(self, line, address, watchdog):
        self._line, self._told = line, []
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(watchdog * 1e6))}

    @property
    def told(self):
        while True:
            try:
                self._told += self._line.recv(4096).decode().splitlines()
            except BlockingIOError:
                return list(self._told)

    def await_told(self, assignment, *, times=1, seconds=60.0):
        until(
            lambda: self.told.count(assignment) >= times,
            seconds=seconds,
            what=f"{assignment} x {times}",
        )
        return self.told


@contextmanager
def manager(address, *, watchdog=0.0):
    """Listen at a path, or at an abstract ``@name``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        line.setblocking(False)
        yield Manager(line, address, watchdog)
