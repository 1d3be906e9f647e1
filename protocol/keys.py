"""CURVE keys of the three roles, as files: who may read them, and who may connect with which.

A folder, closed to all others, holds ``ROLE.secret`` (a key pair, for its owner alone) and
``allowed`` (public keys, one a line: role, key, and what else the line says is a comment). Under a
service manager ``$CREDENTIALS_DIRECTORY`` holds what its unit loads, and nothing else is looked at.

Secret keys go into no message, log line or error: what reads a secret says where, never what.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from protocol.errors import ConfigError, PermissionRefused

Role = Literal["target", "draft", "supervisor"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
ALLOWED: Final = "allowed"
PAIR_SUFFIX: Final = ".secret"
CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"
MAX_BYTES: Final = 1 << 16
MAX_ALLOWED: Final = 256

_OTHERS: Final = 0o077
_OTHERS_WRITE: Final = 0o022

# Z85, the printable form of 32 bytes that ZeroMQ takes.
_Z85: Final = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_KEY: Final = re.compile(_Z85)
_LINE: Final = re.compile(rf"""\s*(public|secret)-key\s*=\s*"({_Z85})"\s*""")


@dataclass(frozen=True)
class KeyPair:
    """One role's keys, each 40 characters of Z85; printing it shows the public one alone."""

    role: Role
    public: bytes
    secret: bytes = field(repr=False)


def default_folder(environment: Mapping[str, str]) -> Path:
    """``/etc/dflash/keys`` for root, else ``dflash/keys`` in the user's folder of settings."""
    if os.geteuid() == 0:
        return Path("/etc/dflash/keys")
    stated = environment.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(stated) if Path(stated).is_absolute() else Path.home() / ".config"
    return base / "dflash" / "keys"


def read_pair(role: Role, folder: Path | None, environment: Mapping[str, str]) -> KeyPair:
    """The keys of `role`, from `folder`, else from the credentials, else from the default folder.

    Raises ConfigError if there are none or they are none, and PermissionRefused if somebody else
    could have read or written them.
    """
    place = _Place.of(folder, environment)
    path = place.folder / f"{role}{PAIR_SUFFIX}"
    return _parse_pair(role, path, _read(path, open_bits=place.secret_bits))


def read_allowed(folder: Path | None, environment: Mapping[str, str]) -> dict[bytes, Role]:
    """Whose public keys may connect, and as what; the same places as for `read_pair`.

    Who connects finds here, by its role, the key that a server must have.
    """
    path = _Place.of(folder, environment).folder / ALLOWED
    text = _read(path, open_bits=_OTHERS_WRITE).decode("ascii", errors="replace")
    found: dict[bytes, Role] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role = next((each for each in ROLES if each == words[0]), None)
        if role is None or len(words) < 2 or _KEY.fullmatch(words[1]) is None:
            raise ConfigError(
                f"{path}, line {number}: expected one of {', '.join(ROLES)} and a public key"
            )
        key = words[1].encode()
        if found.setdefault(key, role) != role:
            raise ConfigError(f"{path}, line {number}: this key is that of a {found[key]} already")
    if len(found) > MAX_ALLOWED:
        raise ConfigError(f"{path} holds {len(found)} keys; at most {MAX_ALLOWED} are taken")
    return found


def encode_pair(pair: KeyPair) -> bytes:
    """The content of a secret file, in the form of ZeroMQ's own certificates."""
    return (
        b"# The secret key of a %s of dflashd: for its owner alone.\n"
        b'curve\n    public-key = "%s"\n    secret-key = "%s"\n'
        % (pair.role.encode(), pair.public, pair.secret)
    )


def allowed_line(role: Role, public: bytes) -> bytes:
    """One line of the list of those who may connect."""
    return b"%s %s\n" % (role.encode(), public)


@dataclass(frozen=True)
class _Place:
    folder: Path
    secret_bits: int  # of a mode, those that would open a secret to others

    @classmethod
    def of(cls, folder: Path | None, environment: Mapping[str, str]) -> "_Place":
        credentials = environment.get(CREDENTIALS_VARIABLE, "")
        if folder is None and credentials:
            # The manager may give access by a list, whose mask shows as the group's read bit.
            return cls(Path(credentials), _OTHERS & ~0o050)
        return cls(folder or default_folder(environment), _OTHERS)


def _parse_pair(role: Role, path: Path, data: bytes) -> KeyPair:
    found: dict[str, bytes] = {}
    for line in data.decode("ascii", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is not None:
            found[match[1]] = match[2].encode()
    if len(found) != 2:
        raise ConfigError(f"{path} holds no pair of keys; `dflashd keys new {role}` makes one")
    return KeyPair(role, found["public"], found["secret"])


def _read(path: Path, *, open_bits: int) -> bytes:
    """The content of a file that this user, or root, owns, if it and its folder are closed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there; `dflashd keys new` makes it") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise PermissionRefused(f"{path} is no plain file")
        _check_closed(path.parent, path.parent.stat(), open_bits)
        _check_closed(path, facts, open_bits)
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES >> 10} KiB")
    return data


def _check_closed(path: Path, facts: os.stat_result, open_bits: int) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionRefused(f"{path} belongs to user {facts.st_uid}, not to this one")
    if mode & open_bits:
        raise PermissionRefused(
            f"{path} has mode {mode:04o}, open to others; chmod it to {mode & ~open_bits:04o}"
        )
