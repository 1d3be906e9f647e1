"""Which descriptor belongs to which daemon's process, and that a process really ends."""

from collections.abc import Callable
from functools import partial

from launch.deadlines_heap import DeadlineHeap
from launch.peer import Peer
from protocol.client import Poller


class Children:
    """Keeps the poller up to date, and kills what does not end when it was asked to."""

    def __init__(
        self, poller: Poller, timers: DeadlineHeap, on_end: Callable[[Peer], None]
    ) -> None:
        self._poller = poller
        self._timers = timers
        self._on_end = on_end
        self._by_fd: dict[int, Peer] = {}

    def find(self, fd: int) -> Peer | None:
        """Whose descriptor that is; None for one that was closed meanwhile."""
        return self._by_fd.get(fd)

    def watch(self, peer: Peer) -> None:
        """Follow the descriptors that its process has now."""
        before = peer.fds
        peer.watch(self._poller)
        for fd in before:
            self._by_fd.pop(fd, None)
        for fd in peer.fds:
            self._by_fd[fd] = peer

    def end(self, peer: Peer, *, kill: bool) -> None:
        """End its process, by force if need be or `kill`; `on_end` may be called more than once."""
        if kill:
            peer.child.kill()
        else:
            peer.child.terminate()
        self._await_end(peer)

    def _await_end(self, peer: Peer) -> None:
        if peer.child.deadline is not None:
            self._timers.add(peer.child.deadline, partial(self._on_deadline, peer))

    def _on_deadline(self, peer: Peer) -> None:
        peer.child.on_deadline()
        self.watch(peer)
        self._await_end(peer)
        self._on_end(peer)
