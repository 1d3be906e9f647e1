"""Where the prompt comes from: the argument, a file, or standard input."""

import sys
from pathlib import Path
from typing import Final

from protocol.errors import UsageError

MAX_BYTES: Final = 16 << 20  # more than any context takes; bounds what a wrong file name reads


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Return the prompt, which has at least one visible character, or raise UsageError.

    Exactly one source counts: `argument` (``-`` means standard input), `file`, or standard input
    when neither is given and it is not a terminal. The newline that ends a file or a pipe is no
    part of the prompt, so that all three ways of giving a text give the same one.
    """
    if argument is not None and file is not None:
        raise UsageError("give the prompt as an argument or with --prompt-file, not both")
    if file is not None:
        text = _read_file(file)
    elif argument == "-" or (argument is None and not sys.stdin.isatty()):
        text = _decode(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input")
    elif argument is not None:
        text = argument
    else:
        raise UsageError("no prompt: give it as an argument, with --prompt-file, or through a pipe")
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return _decode(stream.read(MAX_BYTES + 1), str(file))
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {file}: {error.strerror}") from error


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        raise UsageError(f"the prompt from {source} is larger than {MAX_BYTES >> 20} MiB")
    return text_of(data, f"the prompt from {source}").removesuffix("\n").removesuffix("\r")


def text_of(data: bytes, what: str) -> str:
    """Decode UTF-8; UsageError says where `what` is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error
