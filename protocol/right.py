"""Who may drive a daemon, and under which life; `protocol.server` asks for every message.

A life is a fencing number too: it only grows, every message names it, and what names an earlier
one is refused. So whoever lost the right to drive can change nothing any more.
"""

from abc import ABC, abstractmethod
from typing import Final

NOBODY: Final = -1  # the life of a daemon that nobody has driven yet; no message can name it


class Right(ABC):
    """The right to drive one daemon; `life` is the one that its messages must name now."""

    def __init__(self, life: int = NOBODY) -> None:
        self.life = life

    @abstractmethod
    def claim(self, life: int, owner: int) -> None:
        """Somebody says Hello for another life than the present one.

        `owner` is the supervisor's own number. If it may, it drives from now on: `life` is that
        life. Raises NotTheDriver or StaleMessage, which change nothing.
        """

    def heard(self) -> None:  # noqa: B027 -- only a right that ends with time listens
        """A message of the present life has come."""

    def worked(self, seconds: float) -> None:  # noqa: B027 -- see `heard`
        """The daemon has computed for so long, and could hear nobody meanwhile."""


class Given(Right):
    """Of a daemon that its supervisor spawned: one life, told at the start, and no other."""

    def claim(self, life: int, owner: int) -> None:
        """Nobody else may drive it: the life stays, and the server refuses the message."""
