"""What a folder that is being made was begun with, so that `--resume` goes on with the same."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from launch.store import make_folder
from launch.whole_file import write_whole
from protocol.config import DType, FrozenConfig, read_config
from protocol.errors import ConfigError, TemporaryFailure, UsageError
from protocol.file_locks import held
from protocol.storage_errors import storage_error
from protocol.training import DATA_FOLDER

WORK: Final = "work"
PLAN: Final = "work/plan.json"
COMPOSED: Final = "work/composed.json"
LOCK: Final = "work/.lock"
# As `launch.whole_file`, the training process and safetensors call what is not whole yet.
HALF: Final = re.compile(r"\.[\w-]+\.(json|jsonl|md|png|safetensors)\.[0-9a-f]+|\.tmp\w{6}")
MAX_SHOWN: Final = 200  # characters of a value in a sentence


class DataPlan(FrozenConfig, frozen=True, kw_only=True):
    """What data are made of: fixed once the first of them lie there."""

    model: str  # as it was named
    target: str  # digests of its config and tokenizer
    weights: str | None = None  # digest; None: not known
    template: str | None = None  # digest of its chat template; None: not known
    taps: tuple[int, ...]
    seed: int
    max_positions: int
    dtype: DType
    prompts: tuple[str, ...] = ()  # digests of the files
    prompt_files: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    text_files: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    exclude_files: tuple[str, ...] = ()


class TrainPlan(FrozenConfig, frozen=True, kw_only=True):
    """What training is told: fixed once it has begun, but for `hours`, `steps`, `data_only`."""

    layers: int
    block_size: int
    gamma: float = 4.0
    mask_token_id: int
    hours: float = 0.0
    steps: int = 0
    start: str = ""  # a draft that is begun with
    data_only: bool = False
    tokens: int = 0  # of data; 0: as many as the time for collecting allows


class Plan(FrozenConfig, frozen=True, kw_only=True):
    """The file `PLAN`."""

    data: DataPlan
    train: TrainPlan
    training_began: bool = False


class Composed(FrozenConfig, frozen=True, kw_only=True):
    """The file `COMPOSED`: what the shards do not say about how they came about."""

    dropped: dict[str, list[int]] = {}  # noqa: RUF012 - a field of a struct: copied for each
    seconds: float = 0.0  # of collecting


# Field -> the option that sets it, for sentences.
_OPTIONS: Final[Mapping[str, str]] = {
    "target": "--model",
    "weights": "the weights of --model",
    "template": "the chat template of --model",
    "taps": "--taps",
    "seed": "--seed",
    "max_positions": "the longest sequence",
    "dtype": "--dtype",
    "prompts": "--prompts",
    "texts": "--texts",
    "exclude": "--exclude",
    "layers": "--layers",
    "block_size": "--block-size",
    "gamma": "--gamma",
    "mask_token_id": "the mask id",
    "start": "--start",
    "tokens": "--tokens",
}

# Digests -> what they are of.
_DIGESTS: Final[Mapping[str, str]] = {
    "target": "model",
    "weights": "model",
    "template": "model",
    "prompts": "prompt_files",
    "texts": "text_files",
    "exclude": "exclude_files",
}


def differing(before: FrozenConfig, now: FrozenConfig) -> list[str]:
    """The options in which the two differ, with both values."""
    found = []
    for name, option in _OPTIONS.items():
        old, new = getattr(before, name, None), getattr(now, name, None)
        if old != new and old is not None:
            found.append(f"{option} ({_shown(before, name)}, now {_shown(now, name)})")
    return found


def check_same(folder: Path, plan: Plan, data: DataPlan, train: TrainPlan) -> None:
    """Raise UsageError where what was begun in `folder` cannot go on with these."""
    wrong = differing(plan.data, data) if has_data(folder) else []
    wrong += differing(plan.train, train) if plan.training_began else []
    if wrong:
        raise UsageError(
            f"--resume goes on with the settings that it was begun with; other are: "
            f"{', '.join(wrong)}"
        )


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder; None where there is none."""
    return read_config(Plan, folder / PLAN) if (folder / PLAN).exists() else None


def read_composed(folder: Path) -> Composed:
    """How its data came about so far."""
    path = folder / COMPOSED
    return read_config(Composed, path) if path.exists() else Composed()


def write_part(folder: Path, name: str, part: FrozenConfig) -> None:
    """Put a plan or record into place, whole."""
    try:
        data = msgspec.json.encode(part)
    except UnicodeEncodeError as error:
        raise UsageError(f"a name that is not UTF-8 cannot be written down: {error}") from error
    _write(folder, name, data)


def write_text(folder: Path, name: str, text: str) -> None:
    """Put a text into place, whole."""
    _write(folder, name, text.encode())


def _write(folder: Path, name: str, data: bytes) -> None:
    try:
        write_whole(folder / name, data, mode=0o644, replace=True)
    except OSError as error:
        raise storage_error(folder / name, error) from error


def remove(path: Path) -> None:
    """Have no such file there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error) from error


@dataclass(frozen=True)
class Opened:
    """A folder that is this process's, and its children's for as long as they inherit `lock`."""

    before: Plan | None  # what was begun there
    lock: int


@contextmanager
def opened(folder: Path, *, resume: bool) -> Iterator[Opened]:
    """Make the folder or open one that was begun, for this process and its children alone.

    Raises UsageError where it holds something else, or was begun and `resume` is not said.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; a folder is expected")
    begun = read_plan(folder)
    if begun is None and folder.is_dir() and _holds_others(folder):
        raise UsageError(f"--out {folder} is not empty, and was not begun by `dflashd train`")
    if begun is not None and not resume and not has_data(folder):
        begun = None  # it was refused before it came to anything
    if begun is not None and not resume:
        raise UsageError(f"--out {folder} was begun before; --resume goes on there")
    if begun is None and resume:
        raise UsageError(f"--resume: nothing was begun in {folder}")
    make_folder(folder / DATA_FOLDER)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(held(folder / LOCK, create=True))
        except OSError as error:
            raise storage_error(folder / LOCK, error) from error
        if lock is None:
            raise TemporaryFailure(
                f"another `dflashd train` works in {folder}, or still ends there"
            )
        clear_remains(folder)
        yield Opened(begun, lock)


def has_data(folder: Path) -> bool:
    """Whether any data lie there."""
    return any((folder / DATA_FOLDER).glob("*.safetensors"))


def clear_remains(folder: Path) -> None:
    """Remove what kills left: files that were never put into place, folders of features."""
    for place in (folder, folder / WORK):
        for path in place.glob(".*"):
            if HALF.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
    for path in (folder / WORK).glob("features-*"):
        shutil.rmtree(path, ignore_errors=True)


def _holds_others(folder: Path) -> bool:
    try:
        return any(path.name != WORK for path in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from error


def _shown(plan: FrozenConfig, name: str) -> str:
    """A value for a sentence; of a digest the beginning, behind the name of what it is of."""
    value = getattr(plan, name)
    values = tuple(map(str, value if isinstance(value, tuple) else (value,)))
    if name in _DIGESTS:
        named = getattr(plan, _DIGESTS[name])
        names = named if isinstance(named, tuple) else (named,)
        values = tuple(f"{of} {digest[:12]}" for of, digest in zip(names, values, strict=False))
    return ",".join(values)[:MAX_SHOWN] or "none"
