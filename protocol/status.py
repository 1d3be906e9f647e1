"""What a starting daemon tells its parent: one JSON object a line on standard output."""

from typing import Final

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import Count, Name, Text

MAX_LINE_BYTES: Final = 1 << 16
WARNING: Final = "warning: "  # begins the detail of what its user should read, and not only see


class StatusLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="event",
    omit_defaults=True,
):
    """Base of the status lines; the key ``event`` names which."""


class Loading(StatusLine, frozen=True, kw_only=True, tag="loading"):
    """`done` of `total` steps of the load; without any, `detail` says in words what comes."""

    done: Count
    total: Count
    detail: Text = ""


class Ready(StatusLine, frozen=True, kw_only=True, tag="ready"):
    """Loaded, bound and serving."""


class LoadFailed(StatusLine, frozen=True, kw_only=True, tag="failed"):
    """The daemon ends, with the exit code of this error (`protocol.errors.from_wire`)."""

    code: Name
    detail: Text


Status = Loading | Ready | LoadFailed


def encode_status(status: Status) -> bytes:
    """One line, with its newline."""
    return msgspec.json.encode(status) + b"\n"


def decode_status(line: bytes) -> Status:
    """Read one line; anything else on that stream is a ProtocolError."""
    try:
        return msgspec.json.decode(line, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a status line: {error}") from error
