"""A file that appears whole or not at all, with its mode from its first moment."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from protocol.storage_sync import sync_folder


def write_whole(path: Path, data: bytes, *, mode: int, replace: bool) -> None:
    """Write under a hidden name, sync, and put in place; without `replace`, FileExistsError.

    What was there stays until the last moment, and stays for good if anything fails.
    """
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask
            file.write(data)
            file.flush()
            os.fsync(fd)
        if replace:
            hidden.replace(path)
        else:
            os.link(hidden, path)
        sync_folder(path.parent)
    finally:
        with suppress(FileNotFoundError):
            hidden.unlink()
