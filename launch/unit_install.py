"""Unit files on disk. The first line says what the rest was, so that changes by hand are kept."""

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from launch.unit_files import Choice, unit_files
from launch.whole_file import write_whole
from protocol import __version__
from protocol.errors import ConfigError

State = Literal["new", "same", "older", "changed"]
SYSTEM_BASE: Final = Path("/etc")
MODE: Final = 0o644
MAX_BYTES: Final = 1 << 20

_FIRST: Final = re.compile(rb"# Written by dflashd \S+, sha256 ([0-9a-f]{64}) of what follows.*\n")
_PLAIN: Final = re.compile(r"/[A-Za-z0-9/._+@:,=-]+")  # nothing that systemd would read otherwise
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - not used


@dataclass(frozen=True)
class Planned:
    """One file: where, what it shall hold, and how that is to what is there."""

    path: Path
    content: bytes
    state: State


def default_base(environment: Mapping[str, str], *, user: bool) -> Path:
    """The manager's folder of settings: ``/etc``, or the user's."""
    if not user:
        return SYSTEM_BASE
    stated = environment.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    return Path(stated) if Path(stated).is_absolute() else Path.home() / ".config"


def choose(program: Path | None, *, user: bool, gpu: bool) -> Choice:
    """With the command that runs now, unless `program` says another.

    Raises ConfigError for one that a hardened service of the system could not see.
    """
    needed = [] if program is not None else [Path(sys.base_prefix)]
    if program is None:
        program = Path(sys.executable).with_name("dflashd")
        if not program.exists():
            raise ConfigError(f"{program} is not there; --program names the installed command")
    if not _PLAIN.fullmatch(str(program)):
        raise ConfigError(f"{str(program)!r} is no absolute path of plain characters")
    for path in () if user else (program, *needed):
        hidden = next((place for place in _HIDDEN if path.is_relative_to(place)), None)
        if hidden is not None:
            raise ConfigError(
                f"a service of the system cannot see {path}: {hidden} is hidden from it; "
                f"install dflashd elsewhere, as in /opt/dflash, or use --user"
            )
    return Choice(program=program, user=user, gpu=gpu)


def plan(choice: Choice, base: Path) -> list[Planned]:
    """What `install` would do, without doing it."""
    planned = []
    for name, text in unit_files(choice).items():
        path, content = base / name, _signed(text)
        planned.append(Planned(path, content, _state(path, content)))
    return planned


def install(planned: list[Planned], *, force: bool) -> None:
    """Write what is new or older; without `force`, nothing at all if a file was changed by hand."""
    changed = [str(each.path) for each in planned if each.state == "changed"]
    if changed and not force:
        raise ConfigError(f"changed by hand, and kept: {', '.join(changed)}; --force replaces them")
    for each in planned:
        if each.state != "same":
            each.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(each.path, each.content, mode=MODE, replace=True)


def _signed(text: str) -> bytes:
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    first = f"# Written by dflashd {__version__}, sha256 {digest} of what follows; to change it, "
    return f"{first}use a drop-in.\n".encode() + data


def _state(path: Path, content: bytes) -> State:
    if path.is_symlink():  # masked, or somebody's own
        return "changed"
    try:
        with path.open("rb") as file:
            found = file.read(MAX_BYTES)
    except FileNotFoundError:
        return "new"
    if found == content:
        return "same"
    first = _FIRST.match(found)
    if first is None:
        return "changed"
    rest = hashlib.sha256(found[first.end() :]).hexdigest()
    return "older" if rest == first[1].decode() else "changed"
