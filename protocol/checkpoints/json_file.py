"""A JSON object from a file that somebody else wrote, with a bound on its size."""

import json
from pathlib import Path
from typing import Any, Final

from protocol.errors import CheckpointError

MAX_JSON_BYTES: Final = 16 << 20


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read one object of at most `most` bytes; CheckpointError says what is wrong with the file."""
    try:
        if path.stat().st_size > most:
            raise CheckpointError(f"{path}: larger than {most} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(value).__name__}")
    return value
