"""The supervisors and services of this user on this host, found by their run directories."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.config import CLIENT_SOCKET
from protocol.driving import is_driven, read_driver
from protocol.errors import Unavailable, UsageError
from protocol.run_directory import (
    OWNER_LOCK,
    bases,
    is_private,
    living_owner,
    prefix,
    read_address,
    read_pid,
)

DEFAULT: Final = "default"  # the pair of daemons that no name was given
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Instance:
    """One supervisor that seems to run; whether it does, its socket tells."""

    name: str
    run_dir: Path
    pid: int  # 0: not known

    @property
    def socket(self) -> Path:
        return self.run_dir / CLIENT_SOCKET

    @property
    def is_service(self) -> bool:
        """Whether clients can connect; a single `dflashd generate` has no socket."""
        return self.socket.is_socket()


@dataclass(frozen=True)
class Daemon:
    """One daemon that is a service of its own."""

    instance: str  # the pair it belongs to
    role: str
    run_dir: Path
    pid: int
    driver: int  # the supervisor's process; 0: nobody drives it
    listens: str  # where a driver on any host reaches it, under a lease; empty: by this folder


def named_directory(name: str) -> Path:
    """The run directory of the instance `name`; UsageError where it is no possible name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name of an instance: 1 to 32 letters, digits, - and _"
        )
    return bases()[0].absolute() / f"{prefix()}{name}"


def daemon_directory(role: str, instance: str | None, named: str | None) -> Path:
    """The run directory of a daemon that is a service of its own, of the pair `instance`.

    `named` is one that was chosen in its place: only one of the two may be said.
    """
    if named is not None:
        if instance is not None:
            raise UsageError("--instance chooses a run directory, and --run-dir names one")
        return Path(named).absolute()
    folder = named_directory(instance or DEFAULT)
    return folder.with_name(f"{folder.name}.{role}")


def instances() -> list[Instance]:
    """All of them, by name; those that run elsewhere than in the usual places are not found."""
    found = {
        path.name.removeprefix(prefix()): path
        for base in reversed(bases())
        for path in base.glob(f"{prefix()}*")
        if is_private(path) and "." not in path.name  # that is a daemon's
    }
    listed = [
        Instance(name, path, read_pid(path / OWNER_LOCK)) for name, path in sorted(found.items())
    ]
    return [one for one in listed if one.pid and Path(f"/proc/{one.pid}").exists()]


def daemons() -> list[Daemon]:
    """The daemons that run as services of their own, by name, as `instances` finds supervisors."""
    found = {
        path.name.removeprefix(prefix()): path
        for base in reversed(bases())
        for path in base.glob(f"{prefix()}*.*")
        if is_private(path)
    }
    listed = []
    for name, path in sorted(found.items()):
        instance, _, role = name.rpartition(".")
        driver = read_driver(path).pid if is_driven(path) else 0
        listens = read_address(path)
        listed.append(Daemon(instance, role, path, living_owner(path), driver, listens))
    return [one for one in listed if one.pid]


def find(named: str) -> Path:
    """The socket that `named` means: a socket, a run directory, an instance's name.

    Empty means the one that runs. Raises Unavailable, listing what there is.
    """
    services = [one for one in instances() if one.is_service]
    names = ", ".join(one.name for one in services) or "none"
    if not named:
        if len(services) == 1:
            return services[0].socket
        if not services:
            raise Unavailable("no supervisor runs here that takes clients: `dflashd supervisor`")
        raise Unavailable(f"{len(services)} supervisors run here ({names}): name the one to use")
    path = Path(named).expanduser()
    if "/" not in named:
        path = named_directory(named)
    socket = path if path.is_socket() else path / CLIENT_SOCKET
    if not socket.is_socket():
        raise Unavailable(f"no supervisor listens at {named}; running: {names}")
    return socket
