"""What is closed at the end of its ``with``."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """An owner of something: entered as itself, and closed however the ``with`` ends."""

    @abstractmethod
    def close(self) -> object:
        """Give up what it owns; what is returned is for who calls it by name."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        self.close()
