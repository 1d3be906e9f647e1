"""What the training process wrote about itself: its validations, and its last step."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.errors import CheckpointError
from protocol.training import Validated


class LastStep(msgspec.Struct, frozen=True, kw_only=True, tag="Stepped"):
    """What is wanted of a step's line."""

    step: int
    loss: float
    accuracy: tuple[float, ...] = ()  # of each slot


@dataclass(frozen=True)
class History:
    """Of one folder, in order of their steps."""

    validations: tuple[Validated, ...]
    last: LastStep | None

    @property
    def best(self) -> Validated | None:
        """The one whose weights the folder holds."""
        best = [one for one in self.validations if one.best]
        return best[-1] if best else None


def read_history(path: Path) -> History:
    """Read the lines of all steps; a last one that was cut off is left out.

    Raises CheckpointError where a line is none.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return History((), None)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    found: dict[int, Validated] = {}
    last: LastStep | None = None
    decoder = msgspec.json.Decoder(LastStep | Validated)
    for number, line in enumerate(lines, 1):
        try:
            told = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{path}, line {number}: {error}") from error
        if isinstance(told, Validated):
            found[told.step] = told  # one that a resumed run told again counts once
        else:
            last = told
    return History(tuple(found[step] for step in sorted(found)), last)
