"""Where this program keeps models, and where it makes the run directories of its daemons."""

import os
import tempfile
from pathlib import Path


def home() -> Path:
    """Folder of pulled models: ``$DFLASH_HOME``, else ``dflash`` in the XDG cache."""
    chosen = os.environ.get("DFLASH_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dflash"


def runtime_root() -> Path:
    """Parent of the run directories: ``$DFLASH_RUNTIME``, ``$XDG_RUNTIME_DIR``, or the temp folder.

    Short on purpose: a Unix socket's path has at most 107 bytes.
    """
    for variable in ("DFLASH_RUNTIME", "XDG_RUNTIME_DIR"):
        chosen = os.environ.get(variable)
        if chosen:
            return Path(chosen)
    return Path(tempfile.gettempdir())
