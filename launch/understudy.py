"""The draft that is to take over: loaded beside the present one, which comes back if it fails."""

import time
from typing import Protocol

from launch.events import Role
from launch.meeting import check_pair
from launch.peer import Peer
from launch.starter import Configs, Spawner
from protocol.errors import InternalError
from protocol.messages import DraftHello, TargetHello


class Cast(Protocol):
    """What it needs of `launch.lives.Lives`."""

    peers: dict[Role, Peer]

    @property
    def spawner(self) -> Spawner:
        """Where configs can be changed."""
        ...

    def begin(self, peer: Peer) -> None:
        """Start its process."""
        ...

    def end(self, peer: Peer, *, kill: bool) -> object:
        """End its process and link."""
        ...

    def forgive(self, role: Role) -> None:
        """Forget its failures."""
        ...

    def forget_sent(self, peer: Peer) -> object:
        """Wait for none of its answers."""
        ...

    def restart_if_due(self, peer: Peer) -> None:
        """Start it again, if its time has come."""
        ...


class Understudy:
    """`candidate` loads; `promote` puts it on, with the one before as `spare` until `settle`."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._configs: Configs = {}  # with the candidate
        self._before: Configs = {}
        self.candidate: Peer | None = None
        self.spare: Peer | None = None
        self.leaving: list[Peer] = []  # told to end; their processes may still be there

    def audition(self, draft: str) -> None:
        """Load a candidate; raises what is wrong with it at sight."""
        spawner = self._cast.spawner
        self._configs = spawner.configs_with(draft)
        self.candidate = spawner.candidate(self._configs)
        self._cast.begin(self.candidate)

    def lost(self, peer: Peer) -> bool:
        """Whether it was the candidate, which is one no more."""
        if peer is not self.candidate:
            return False
        self._leave(peer)
        self.candidate = None
        return True

    def dismiss(self) -> None:
        """The candidate is not wanted any more."""
        peer, self.candidate = self.candidate, None
        if peer is not None:
            self._end(peer)

    def promote(self, target: TargetHello | None) -> bool:
        """Make the candidate the draft; True where the target needs another life for it.

        Raises DraftMismatch, and changes nothing, where it cannot be this target's.
        """
        peer = self.candidate
        if peer is None or not isinstance(peer.hello, DraftHello) or target is None:
            raise InternalError("there is no candidate that has loaded")
        before = self._cast.spawner.configs
        renews = self._configs["target"] != before["target"]
        if not renews:
            check_pair(target, peer.hello)
        self._before, self.candidate = before, None
        self._cast.spawner.adopt(self._configs)
        self._cast.forgive("draft")
        self.spare = self._cast.peers.get("draft")
        if self.spare is not None:
            self._cast.forget_sent(self.spare)
            self.spare.restart_at = None
            if self.spare.stage in ("pairing", "ready"):
                self.spare.stage = "greeting"
        self._cast.peers["draft"] = peer
        return renews

    def demote(self) -> None:
        """Bring back the one before, to be paired anew."""
        self._end(self._cast.peers.pop("draft"))
        self._cast.spawner.adopt(self._before)
        self._cast.forgive("draft")
        spare, self.spare = self.spare, None
        if spare is None:
            return
        self._cast.peers["draft"] = spare
        if spare.stage == "failed":
            spare.restart_at = time.monotonic()
            self._cast.restart_if_due(spare)

    def settle(self) -> None:
        """The one before may go."""
        spare, self.spare = self.spare, None
        if spare is not None:
            self._end(spare)

    def _end(self, peer: Peer) -> None:
        if not peer.is_over:
            self._cast.end(peer, kill=False)
        peer.stage, peer.restart_at = "parked", None
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        self.leaving = [*(each for each in self.leaving if not each.has_ended), peer]
