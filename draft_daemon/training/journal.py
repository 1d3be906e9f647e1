"""``train.jsonl``: one line for every step and every validation, also across interruptions."""

import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from draft_daemon.training.files import whole
from protocol.errors import CheckpointError
from protocol.storage_errors import storage_error
from protocol.training import Count, Validated

log = logging.getLogger(__name__)


class Stepped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """One step."""

    step: Count
    loss: float  # weighted mean over the predicted tokens
    rate: float
    accuracy: tuple[float, ...]  # per slot that was trained, over the rows that were scored
    tokens: Count  # predicted
    seconds: Annotated[float, Meta(ge=0.0)]  # of the whole run until now


Line = Stepped | Validated


class Journal:
    """Appends lines; each is there when `write` has returned."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, line: Line) -> None:
        """Append one line; a disk that refuses is a typed error."""
        left = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise storage_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[Line]:
    """All whole lines; CheckpointError for nonsense. A last line that was cut off is left out."""
    found, damaged = _read(path)
    if damaged:
        raise CheckpointError(f"{path}, {damaged[0]}")
    return found


def cut(path: Path, step: int, validated: int) -> None:
    """Leave the lines of steps below `step`, and of validations up to step `validated`.

    What came later is done again by the run that goes on from there. The journal is a record that
    nothing is computed from: a damaged line is told to the log and left out.
    """
    found, damaged = _read(path)
    for told in damaged:
        log.warning("%s, %s; it is left out", path, told)
    kept = [line for line in found if _is_kept(line, step, validated)]
    with whole(path) as hidden:
        hidden.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))


def _read(path: Path) -> tuple[list[Line], list[str]]:
    """The lines that can be read, and what is wrong with which others."""
    found, damaged = [], []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(msgspec.json.decode(line, type=Line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            damaged.append(f"line {number}: {error}")
    return found, damaged


def _is_kept(line: Line, step: int, validated: int) -> bool:
    match line:
        case Stepped():
            return line.step < step
        case Validated():
            return line.step <= validated
