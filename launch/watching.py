"""Descriptors that a poll loop watches for somebody, while that is wanted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watching(ABC):
    """A loop that looks at descriptors of others besides its own."""

    @abstractmethod
    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` whenever `fd` can be read."""

    @abstractmethod
    def unwatch(self, fd: int) -> None:
        """Stop that, before `fd` is closed."""

    @contextmanager
    def watching(self, fd: int, on_ready: Callable[[], None]) -> Iterator[None]:
        """Watch `fd` inside the ``with``."""
        self.watch(fd, on_ready)
        try:
            yield
        finally:
            self.unwatch(fd)
