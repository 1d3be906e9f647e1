"""Where a daemon listens: ``ipc://PATH``, or ``tcp://HOST:PORT`` for another host. Pure.

An IPv6 address is written in brackets, ``tcp://[::1]:7000``. A name is resolved to IPv4 by ZeroMQ.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from protocol.errors import ConfigError

SCHEME: Final = "tcp://"
IPC: Final = "ipc://"  # and the path of a socket file
MAX_PORT: Final = 65535
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class TcpAddress:
    """A host and a port; `host` is a name, or an address without brackets."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Whether nothing but this host can reach it, as far as the text alone can tell."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: it may mean anything

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"{SCHEME}{host}:{self.port}"


def is_tcp(text: str) -> bool:
    """Whether `text` names a place on a network."""
    return text.startswith(SCHEME)


def parse_tcp(text: str, *, listens: bool = False) -> TcpAddress:
    """Read ``tcp://HOST:PORT``; ConfigError says what is wrong. Port 0 only where one `listens`."""
    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    least = 0 if listens else 1
    # At most five ASCII digits: int() takes others, and as many as there are.
    if not is_tcp(text) or not colon or not re.fullmatch("[0-9]{1,5}", port):
        raise ConfigError(f"{text!r}: tcp://HOST:PORT is expected")
    if not least <= int(port) <= MAX_PORT:
        raise ConfigError(f"{text!r}: the port is {port}; {least} to {MAX_PORT} are possible")
    return TcpAddress(_host(text, host), int(port))


def _host(text: str, host: str) -> str:
    bare = host.removeprefix("[").removesuffix("]")
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        if _NAME.fullmatch(host) is None:
            raise ConfigError(f"{text!r}: {host!r} is no address and no host's name") from None
        return host
    if host != (f"[{bare}]" if version == 6 else bare):
        raise ConfigError(f"{text!r}: an IPv6 address, and no other, is written in brackets")
    return bare
