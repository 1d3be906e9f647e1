"""Which descriptor belongs to which daemon's process, and that a process really ends."""

from collections.abc import Callable, Sequence
from functools import partial

from launch.daemon_process import Event
from launch.deadlines_heap import DeadlineHeap
from launch.peer import Peer
from protocol.client import Poller


class Children:
    """Keeps the poller up to date, and kills what does not end when it was asked to."""

    def __init__(
        self,
        poller: Poller,
        timers: DeadlineHeap,
        on_events: Callable[[Peer, Sequence[Event]], None],
    ) -> None:
        self._poller = poller
        self._timers = timers
        self._on_events = on_events
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
        """End its process, by force if need be or `kill`; a second time changes nothing."""
        peer.end(kill=kill)
        self.watch(peer)
        self.await_deadline(peer)

    def await_deadline(self, peer: Peer) -> None:
        """Do what its process wants done at a time, if it does."""
        if peer.process.deadline is not None:
            self._timers.add(peer.process.deadline, partial(self._on_deadline, peer))

    def _on_deadline(self, peer: Peer) -> None:
        events = peer.process.on_deadline()
        self.watch(peer)
        self.await_deadline(peer)
        self._on_events(peer, events)
