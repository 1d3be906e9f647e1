"""The change of a draft as the two daemons see it: who is loaded, put on, paired, and let go."""

from launch.introductions import TIED, Introductions
from launch.lives import Lives
from protocol.errors import DaemonDied
from protocol.placement import is_tied


class Casting:
    """Over one crew's lives and introductions; `launch.swapping` says when."""

    def __init__(self, lives: Lives, introductions: Introductions) -> None:
        self._lives = lives
        self._introductions = introductions

    def audition(self, draft: str) -> None:
        """Load another draft beside the present one; raises what is wrong with it at sight."""
        self._lives.understudy.audition(draft)

    def dismiss(self) -> None:
        """It is not wanted any more."""
        self._lives.understudy.dismiss()

    def promote(self) -> bool:
        """It takes over; True where the target is started again for it.

        Raises DraftMismatch, and changes nothing, where it cannot be this target's.
        """
        placement, before = self._introductions.placement, self._lives.peers.get("draft")
        renewed = self._lives.understudy.promote(self._introductions.target_hello)
        if renewed:
            self._renew_target()
            if before is not None and placement is not None and is_tied(placement.transport):
                self._lives.lose(before, DaemonDied(TIED), kill=True)
        return renewed

    def introduce(self) -> None:
        """Pair what can be paired now."""
        self._introductions.pair()

    def demote(self, *, renewed: bool) -> None:
        """It cannot serve after all: the one before comes back, and the target's own config."""
        self._lives.understudy.demote()
        if renewed:
            self._renew_target()

    def settle(self) -> None:
        """It serves: the one before may go."""
        self._lives.understudy.settle()

    def _renew_target(self) -> None:
        self._introductions.part()
        self._lives.renew("target")
