"""Where models live on this machine, and how a folder appears there: whole, or not at all.

A folder is written under a hidden name, synced, described by a manifest and renamed into place
while a lock is held. What an interrupted run left under a hidden name is swept by the next one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from protocol.errors import (
    CheckpointError,
    TemporaryFailure,
)
from protocol.file_locks import lock
from protocol.storage_errors import storage_error
from protocol.storage_sync import sync_folder

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
CHUNK: Final = 1 << 20
LOCK_WAIT_SECONDS: Final = 3600.0  # another pull of the same model, on a slow line
LOCK_POLL_SECONDS: Final = 0.2
MAX_MANIFEST_BYTES: Final = 1 << 20


def default_home(environment: Mapping[str, str]) -> Path:
    """$DFLASH_HOME, else `dflash` in the XDG cache folder."""
    stated = environment.get("DFLASH_HOME")
    if stated:
        return Path(stated).expanduser().absolute()
    cache = environment.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "dflash"


def models_folder(home: Path) -> Path:
    return home / "models"


@contextmanager
def locked(home: Path, name: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of model `name`; `waiting` is told once if somebody else holds it."""
    folder = models_folder(home)
    make_folder(folder)
    path = folder / f".{name}.lock"
    with _open_lock(path) as file:
        _acquire(file.fileno(), name, waiting)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        _sweep(folder, name)
        yield


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; a refusal is typed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error


def _open_lock(path: Path) -> Any:
    try:
        return path.open("a+")
    except OSError as error:
        raise storage_error(path, error) from error


def _acquire(handle: int, name: str, waiting: Callable[[str], None]) -> None:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    told = False
    while True:
        if lock(handle, fcntl.LOCK_EX):
            return
        if time.monotonic() > deadline:
            raise TemporaryFailure(
                f"another process has been preparing {name} for {LOCK_WAIT_SECONDS:.0f} s"
            )
        if not told:
            waiting(f"another process is preparing {name}; waiting for it")
            told = True
        time.sleep(LOCK_POLL_SECONDS)


def _sweep(folder: Path, name: str) -> None:
    """Remove what earlier runs left; the lock says that nobody is writing it."""
    for leftover in folder.glob(f".partial-{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def new_folder(home: Path, name: str) -> Iterator[Path]:
    """A hidden folder to fill; becomes `models/name` when the block ends, vanishes if it raises.

    The caller holds the lock of `name`, and has called `write_manifest` before the block ends.
    """
    final = models_folder(home) / name
    partial = models_folder(home) / f".partial-{name}-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        _sync(partial)
        if final.exists():  # damaged: it is swept with the next lock if removing it is cut short
            final.rename(partial.with_name(f"{partial.name}-old"))
        partial.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial.with_name(f"{partial.name}-old"), ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sha256_of(path: Path, step: Callable[[int], None] = lambda _: None) -> str:
    """Hex digest of a file; `step` gets the number of bytes of each piece."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK):
                digest.update(piece)
                step(len(piece))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def write_manifest(folder: Path, name: str, source: Mapping[str, Any]) -> None:
    """Describe every file of `folder`: size and sha256."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "name": name, "source": dict(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def defect_of(folder: Path, *, checksums: bool = False) -> str | None:
    """Why `folder` is not what its manifest says, in words; None: it is."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or damaged"
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}" if size else f"no {name}"
        if checksums and sha256_of(path) != entry["sha256"]:
            return f"{name} has another sha256 than recorded"
    return None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if it is there and well formed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        raw = (folder / MANIFEST).read_bytes()[: MAX_MANIFEST_BYTES + 1]
        value = json.loads(raw)
        files = {
            str(name): {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
            for name, entry in value["files"].items()
            if Path(name).name == name
        }
        if value["format"] == FORMAT and files:
            return {"name": str(value["name"]), "source": dict(value["source"]), "files": files}
    return None
