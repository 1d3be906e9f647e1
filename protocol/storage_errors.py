"""What the system says when it refuses to write, as a typed error."""

import errno
from pathlib import Path

from protocol.errors import DaemonError, PermissionRefused, TemporaryFailure, Unavailable


def storage_error(path: Path, error: OSError) -> DaemonError:
    """The typed error for a failure to write `path`."""
    sentence = f"cannot write {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TemporaryFailure(sentence)
    if isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)):
        return PermissionRefused(sentence)
    return Unavailable(sentence)
