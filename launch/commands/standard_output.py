"""Writing to standard output: at once, and with its name in the error of a write that fails."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec


@contextmanager
def named(file: str) -> Iterator[None]:
    """Put the name of `file` into a failed write's error, which does not say what was written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or file
        raise


def print_json(value: object, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Write one JSON object as a line, at once; OSError names standard output."""
    with named("standard output"):
        sys.stdout.buffer.write(msgspec.json.encode(value, enc_hook=enc_hook) + b"\n")
        sys.stdout.flush()
