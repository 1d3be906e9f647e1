"""Making the key files that `protocol.keys` reads, and saying what is there without the secrets."""

import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from launch.whole_file import write_whole
from protocol.errors import ConfigError, DaemonError, PermissionRefused
from protocol.keys import (
    ALLOWED,
    PAIR_SUFFIX,
    ROLES,
    KeyPair,
    Role,
    allowed_line,
    encode_pair,
    read_allowed,
    read_pair,
)

FOLDER_MODE = 0o700
SECRET_MODE = 0o600


class KeyShown(msgspec.Struct, frozen=True, kw_only=True):
    """One public key: whose, whether it may connect here, and whether its secret is here."""

    role: Role
    public: str
    allowed: bool
    secret: bool


def make_folder(folder: Path) -> None:
    """A folder for this user alone; PermissionRefused if it is there and open to others."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise PermissionRefused(f"{folder} has mode {mode:04o}, open to others; chmod it to 0700")


def write_pairs(folder: Path, pairs: Sequence[KeyPair], *, force: bool) -> None:
    """Write the secret files, and allow their public keys; what is there is kept without `force`.

    With `force`, the public key that a new one replaces is allowed no longer.
    """
    make_folder(folder)
    paths = {pair.role: folder / f"{pair.role}{PAIR_SUFFIX}" for pair in pairs}
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not force:
        raise ConfigError(f"{', '.join(there)} there already; --force replaces for good")
    old = {_public(folder, pair.role) for pair in pairs} - {None}
    lines = _allowed_lines(folder)
    kept = [line for line in lines if not old.intersection(line.split()[1:2])]
    for pair in pairs:
        data = encode_pair(pair)
        write_whole(paths[pair.role], data, mode=SECRET_MODE, replace=force)
    new = [allowed_line(pair.role, pair.public) for pair in pairs]
    write_whole(folder / ALLOWED, b"".join([*kept, *new]), mode=SECRET_MODE, replace=True)


def show(folder: Path) -> list[KeyShown]:
    """Every public key that is known here: of the secret files, and of the list."""
    allowed = read_allowed(folder, {}) if (folder / ALLOWED).exists() else {}
    own = {}
    for role in ROLES:
        if (folder / f"{role}{PAIR_SUFFIX}").exists():
            own[read_pair(role, folder, {}).public] = role
    return [
        KeyShown(role=role, public=key.decode(), allowed=key in allowed, secret=key in own)
        for key, role in {**allowed, **own}.items()
    ]


def _public(folder: Path, role: Role) -> bytes | None:
    """The public key that a file holds now; None for none, or one that cannot be read."""
    try:
        return read_pair(role, folder, {}).public
    except DaemonError:
        return None


def _allowed_lines(folder: Path) -> list[bytes]:
    path = folder / ALLOWED
    if not path.exists():
        return [b"# Who may connect: role and public key, one a line.\n"]
    read_allowed(folder, {})  # a list that is wrong is mended by its owner, not written over
    return [line + b"\n" for line in path.read_bytes().splitlines()]
