"""What a request says of a draft that it was without for a while."""

from typing import Final, TypeAlias

from launch.events import Cause, Role

Gone: TypeAlias = tuple[Role, Cause]  # whose life ended, and how

_JOINED: Final[dict[Gone, str]] = {
    ("draft", "lost"): "draft was lost and joined again",
    ("draft", "parked"): "draft was parked and joined again",
    ("draft", "swapped"): "another draft took over",
    ("target", "lost"): "target was lost; draft joined again",
    ("target", "parked"): "target was parked; draft joined again",
    ("target", "swapped"): "another draft took over",
}


def joined_again(gone: Gone) -> str:
    """Why it was not there, and that it is again."""
    return _JOINED[gone]
