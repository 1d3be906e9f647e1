"""A client's own loop: one connection to a running supervisor, and the signals beside it."""

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from launch.watching import Watching
from protocol.closing import Closing
from protocol.config import Deadlines
from protocol.connection import Connection, connect
from protocol.errors import (
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    Unavailable,
    WireMismatch,
    from_wire,
)
from protocol.messages import (
    WIRE_VERSION,
    Denied,
    Done,
    Message,
    Status,
    StatusReport,
    Welcome,
)
from protocol.state import CLIENT_REPLIES, ClientReply

OPERATION: Final = 1


class Remote(Watching, Closing):
    """``with Remote(socket) as remote``: entered when the supervisor has said what it serves.

    Raises Unavailable where none answers, DeadlineExceeded, WireMismatch and PermissionRefused.
    """

    def __init__(self, path: Path, deadlines: Deadlines | None = None) -> None:
        self._path = path
        self._deadlines = deadlines or Deadlines()
        self._connection: Connection[ClientReply] | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._welcome: Welcome | None = None

    def __enter__(self) -> Self:
        self._connection = connect(self._path, CLIENT_REPLIES)
        try:
            self._meet()
        except BaseException:
            self._connection.close()
            raise
        return self

    def close(self) -> None:
        self._joined.close()

    @property
    def welcome(self) -> Welcome:
        """What the supervisor serves."""
        if self._welcome is None:
            raise InternalError("the supervisor has not answered yet")
        return self._welcome

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` whenever `fd` can be read, as for `launch.interrupts`."""
        self._watched[fd] = on_ready

    def unwatch(self, fd: int) -> None:
        """Stop that, before `fd` is closed."""
        del self._watched[fd]

    @property
    def ended(self) -> bool:
        """Whether the supervisor is known to have gone away."""
        return self._joined.ended

    def send(self, message: Message) -> None:
        """Send; what the supervisor does not take at once goes out while `run_until` waits."""
        self._joined.send(message)

    def run_until(
        self,
        done: Callable[[], bool],
        take: Callable[[ClientReply], None],
        seconds: float | None = None,
    ) -> None:
        """Give every message to `take` until `done()`.

        Raises Unavailable when the connection ends first, DeadlineExceeded after `seconds`, and
        the supervisor's own error where it refuses the whole connection.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(
                    f"the supervisor at {self._path} did not answer within {seconds:g} s"
                )
            for message in self._wait(left):
                if isinstance(message, Denied) and message.operation == 0:
                    raise from_wire(message.code, message.detail)
                take(message)
            if self._joined.ended and not done():
                who = "" if self._welcome is None else f", process {self._welcome.pid},"
                raise Unavailable(f"the supervisor{who} has ended the connection")

    def status(self) -> StatusReport:
        """What it says about itself."""
        found: list[StatusReport] = []

        def take(message: ClientReply) -> None:
            if isinstance(message, StatusReport):
                found.append(message)

        self.send(Status())
        self.run_until(lambda: bool(found), take, self._deadlines.client)
        return found[0]

    def operate(self, message: Message, stop: Callable[[], bool] = lambda: False) -> str | None:
        """Carry out an operation, whose number is OPERATION; what was done, in a sentence.

        None when `stop` said so before it was done. Raises the error that it was refused with.
        """
        answers: list[Done | Denied] = []

        def take(answer: ClientReply) -> None:
            if isinstance(answer, Done | Denied) and answer.operation == OPERATION:
                answers.append(answer)

        self.send(message)
        self.run_until(lambda: bool(answers) or stop(), take)
        if not answers:
            return None
        if isinstance(answers[0], Denied):
            raise from_wire(answers[0].code, answers[0].detail)
        return answers[0].detail

    @property
    def _joined(self) -> Connection[ClientReply]:
        if self._connection is None:
            raise InternalError("the connection is not entered")
        return self._connection

    def _meet(self) -> None:
        found: list[Welcome] = []

        def take(message: ClientReply) -> None:
            if isinstance(message, Welcome):
                found.append(message)

        try:
            self.run_until(lambda: bool(found), take, self._deadlines.client)
        except ProtocolError as error:
            raise WireMismatch(
                f"the supervisor at {self._path} speaks another wire version than "
                f"{WIRE_VERSION}, or is none: {error}"
            ) from error
        if found[0].wire_version != WIRE_VERSION:
            raise WireMismatch(
                f"the supervisor at {self._path} speaks wire version {found[0].wire_version}, "
                f"this command {WIRE_VERSION}"
            )
        self._welcome = found[0]

    def _wait(self, seconds: float | None) -> list[ClientReply]:
        connection, poller = self._joined, select.poll()
        writes = select.POLLOUT if connection.has_unsent else 0
        poller.register(connection.fd, select.POLLIN | writes)
        for fd in self._watched:
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(None if seconds is None else seconds * 1000 + 1))
        for fd in ready.keys() & self._watched.keys():
            self._watched[fd]()
        if connection.fd not in ready:
            return []
        connection.flush()
        return connection.receive()
