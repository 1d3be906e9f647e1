"""Having a folder's own entries on the disk, behind the files that were put there."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Have the folder's own entries on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
