"""A draft's own connection to a target: attached, asked for pulls, and made anew after a failure.

An answer that does not come in time ends the connection, with whatever is under way on it; the
next pull makes another, which attaches again: to the same life of the target, or not at all.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

from protocol.client import Link, Poller
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    FeatureExpired,
    InternalError,
    PermissionRefused,
    ProtocolError,
    StaleMessage,
    from_wire,
)
from protocol.messages import Attach, Attached, Failed, Pull
from protocol.state import FEATURE_REPLIES, FeatureReply
from protocol.transports.base import Terms

IN_FLIGHT: Final = 8  # pulls that are asked before the first is answered: hides the distance
LOOK: Final = 0.2  # seconds between two looks at whether the connection was refused

Answer = TypeVar("Answer", bound=Pull)


class Connection:
    """To the target at `address`, which `ask` names; made by `attach`, ended by `close`."""

    def __init__(self, address: str, ask: Attach, terms: Terms) -> None:
        self._address = address
        self._ask = ask
        self._terms = terms
        self._stack = ExitStack()
        self._poller = Poller()
        self._link: Link[FeatureReply] | None = None
        self._inbox: deque[FeatureReply | ProtocolError] = deque()
        self._facts: Attached | None = None
        self._pulls = 0
        self._moved = 0  # on connections that are over
        self._closed = False

    @property
    def facts(self) -> Attached:
        """What the target said of itself; the same on every connection."""
        if self._facts is None:
            raise InternalError("the target has not been attached to")
        return self._facts

    @property
    def moved_bytes(self) -> int:
        """Of all connections, both ways, before encryption."""
        return self._moved + (0 if self._link is None else self._link.moved_bytes)

    def attach(self, timeout: float) -> None:
        """Connect and be recognised; a target that has changed meanwhile is FeatureExpired."""
        self._stack.close()
        self._poller = self._stack.enter_context(Poller())
        link = self._poller.connect(
            self._address, FEATURE_REPLIES, role="target", keyring=self._terms.keyring
        )
        self._link = link
        self._inbox.clear()
        self._stack.callback(self._forget)
        link.send(self._ask)
        answer = self._next(timeout, "Attach")
        if isinstance(answer, Failed):
            raise from_wire(answer.code, answer.detail)
        if not isinstance(answer, Attached):
            raise ProtocolError(f"the target answered {type(answer).__name__} to Attach")
        if self._facts not in (None, answer):
            raise StaleMessage("the target has other weights than before")
        self._facts = answer

    def _forget(self) -> None:
        if self._link is not None:
            self._moved += self._link.moved_bytes
            self._link = None

    def close(self) -> None:
        """For good; closing again is harmless."""
        self._closed = True
        self._stack.close()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Any failure but rows that are gone ends the connection, with all that is under way."""
        if self._closed:
            raise InternalError("the ring has been let go of")
        try:
            if self._link is None:
                self.attach(self._terms.pull)
            yield
        except FeatureExpired:
            raise
        except StaleMessage as error:  # a new life: what was referred to is gone
            self._stack.close()
            raise FeatureExpired(str(error)) from error
        except DaemonError:
            self._stack.close()
            raise

    def answers(self, asks: Sequence[Pull], kind: type[Answer]) -> Iterator[Answer]:
        """One answer to each of `asks`, in order; a refusal is raised once all are answered."""
        refused: DaemonError | None = None
        sent = 0
        for number, ask in enumerate(asks):
            while refused is None and sent < min(len(asks), number + IN_FLIGHT):
                self._connected.send(asks[sent])
                sent += 1
            if number == sent:
                break
            answer = self._next(self._terms.pull, type(ask).__name__)
            if isinstance(answer, Failed):  # of the oldest; what was asked after it is read too
                refused = refused or from_wire(answer.code, answer.detail)
            elif not isinstance(answer, kind) or answer.pull != ask.pull:
                raise ProtocolError(f"the target answered {type(answer).__name__} out of order")
            elif refused is None:
                yield answer
        if refused is not None:
            raise refused

    def _next(self, seconds: float, what: str) -> FeatureReply:
        """The next message of the target, within so many seconds from now."""
        link, deadline = self._connected, time.monotonic() + seconds
        while not self._inbox:
            left = deadline - time.monotonic()
            trouble = link.trouble
            if isinstance(trouble, PermissionRefused):
                raise trouble
            if left <= 0:
                why = "" if trouble is None else f": {trouble}"
                raise DeadlineExceeded(
                    f"no answer to {what} from {self._address} within {seconds:g} s{why}"
                )
            if link in self._poller.poll(min(left, LOOK)):
                self._inbox.extend(link.receive())
        answer = self._inbox.popleft()
        if isinstance(answer, ProtocolError):
            raise answer
        return answer

    @property
    def _connected(self) -> Link[FeatureReply]:
        if self._link is None:
            raise InternalError("there is no connection to the target")
        return self._link

    def stamp(self) -> dict[str, int]:
        """What the next pull carries: the lives, and its number."""
        self._pulls += 1
        lives = {"target_life": self._ask.target_life, "draft_life": self._ask.draft_life}
        return lives | {"pull": self._pulls}
