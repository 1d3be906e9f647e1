"""Clients on one host: the supervisor's socket, served inside the supervisor's own poll loop.

What a client asks goes to the supervisor at once, and what the supervisor says to it waits in that
client's own bounded queue: a client that is slow, or stopped, holds up nobody.
"""

import itertools
import socket
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Self, assert_never

import msgspec

from launch.deadlines_heap import Timer
from launch.stream import FindStop
from launch.supervisor import Supervisor
from protocol.config import CLIENT_SOCKET
from protocol.connection import Connection, accept, listen
from protocol.errors import (
    DaemonError,
    Overloaded,
    PermissionRefused,
    ProtocolError,
    Unavailable,
    UsageError,
)
from protocol.messages import (
    Accepted,
    Cancel,
    Denied,
    Done,
    Finished,
    Message,
    Park,
    Refused,
    Status,
    Submit,
    Swap,
    Unpark,
    Watch,
    Welcome,
)
from protocol.state import CLIENT_REQUESTS, ClientRequest

MAX_CLIENTS: Final = 32
MAX_REQUESTS: Final = 64  # of one client, without an answer
MAX_DETAIL: Final = 4096
PAUSE: Final = 0.25  # seconds, where no client could be taken in


class _Client:
    """One connection, and which requests are to be cancelled when it ends."""

    def __init__(self, connection: Connection[ClientRequest]) -> None:
        self.connection = connection
        self.requests: set[int] = set()
        self.given_up: set[int] = set()  # of these, what it does not read fast enough
        self.watches: Timer | None = None
        self.waits_to_write = False
        self.is_leaving = False  # it gets its last word, and is read no more


class Service:
    """Inside the supervisor's ``with``; leaving answers everybody and removes the socket.

    `find_stop` makes what ends a request at its stop strings. Nothing here raises into the loop.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        welcome: Welcome,
        find_stop: Callable[[Submit], FindStop | None],
        *,
        farewell: float,
    ) -> None:
        self._supervisor = supervisor
        self._welcome = welcome
        self._find_stop = find_stop
        self._farewell = farewell
        self._path = supervisor.run_dir / CLIENT_SOCKET
        self._listener: socket.socket | None = None
        self._pause: Timer | None = None  # until clients are taken in again
        self._clients: dict[int, _Client] = {}  # by descriptor
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        self._listener = listen(self._path)
        self._watch_listener()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._listener is not None:
            self._watch_listener(watched=False)
            self._listener.close()
            self._path.unlink(missing_ok=True)
        self._supervisor.abandon(Unavailable("the supervisor is ending"))
        deadline = time.monotonic() + self._farewell  # for all of them together
        for client in tuple(self._clients.values()):
            client.connection.drain(deadline - time.monotonic())
            self._drop(client)

    # --- connections -------------------------------------------------------------------------

    def _watch_listener(self, *, watched: bool = True) -> None:
        """Take clients in, or do not; the other of the two is over."""
        if self._listener is None:
            return
        if self._pause is not None:
            self._supervisor.call_off(self._pause)
            self._pause = None
        elif not watched:
            self._supervisor.unwatch(self._listener.fileno())
        if watched:
            connects = partial(self._on_connect, self._listener)
            self._supervisor.watch(self._listener.fileno(), connects)

    def _on_connect(self, listener: socket.socket) -> None:
        try:
            connection = accept(listener, CLIENT_REQUESTS)
        except PermissionRefused:
            return  # it was closed
        if connection is None:  # maybe no descriptor is left: it would be ready in every turn
            self._watch_listener(watched=False)
            self._pause = self._supervisor.call_later(PAUSE, self._watch_listener)
            return
        client = _Client(connection)
        self._clients[connection.fd] = client
        self._supervisor.watch(connection.fd, partial(self._on_ready, client))
        self._send(client, self._welcome)
        if len(self._clients) > MAX_CLIENTS:
            self._dismiss(client, Overloaded(f"{MAX_CLIENTS} clients are connected already"))

    def _on_ready(self, client: _Client) -> None:
        connection = client.connection
        connection.flush()
        messages: list[ClientRequest] = []
        if not client.is_leaving:
            try:
                messages = connection.receive()
            except ProtocolError as error:
                self._dismiss(client, error)
        for message in messages:
            if not client.is_leaving:
                self._handle(client, message)
        if connection.ended or (client.is_leaving and not connection.has_unsent):
            self._drop(client)  # harmless if that was done
        else:
            self._watch_writing(client)

    def _send(self, client: _Client, message: Message) -> None:
        client.connection.send(message)
        self._watch_writing(client)

    def _watch_writing(self, client: _Client) -> None:
        wanted = client.connection.has_unsent
        if wanted != client.waits_to_write and client.connection.fd in self._clients:
            client.waits_to_write = wanted
            on_ready = partial(self._on_ready, client)
            self._supervisor.watch(client.connection.fd, on_ready, write=wanted)

    def _dismiss(self, client: _Client, error: DaemonError) -> None:
        """One last word, then the end of the connection."""
        client.is_leaving = True
        self._cancel_all(client)
        self._deny(client, 0, error)
        if client.connection.has_unsent:
            self._supervisor.call_later(self._farewell, partial(self._drop, client))
        else:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """It is gone, and so is all it asked for."""
        if self._clients.pop(client.connection.fd, None) is None:
            return
        self._supervisor.unwatch(client.connection.fd)
        client.connection.close()
        self._cancel_all(client)

    def _cancel_all(self, client: _Client) -> None:
        if client.watches is not None:
            self._supervisor.call_off(client.watches)
            client.watches = None
        for number in tuple(client.requests):
            client.requests.discard(number)
            self._supervisor.cancel(Cancel(request=number))

    # --- what a client asks ------------------------------------------------------------------

    def _handle(self, client: _Client, message: ClientRequest) -> None:
        if client.connection.is_full and not isinstance(message, Cancel):
            self._dismiss(client, Overloaded("this client does not read what it is told"))
            return
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel():
                self._cancel(client, message)
            case Status():
                self._send(client, self._supervisor.describe())
            case Park():
                answer = partial(self._answer, client, message.operation)
                self._supervisor.park(message.role, answer, now=message.now, within=message.within)
            case Unpark():
                answer = partial(self._answer, client, message.operation)
                self._supervisor.unpark(message.role, answer)
            case Swap():
                self._supervisor.swap(message.draft, partial(self._swapped, client, message))
            case Watch():
                self._watch(client, message.seconds)
            case _:
                assert_never(message)

    def _submit(self, client: _Client, submit: Submit) -> None:
        number = next(self._numbers)
        waits = self._supervisor.no_target
        self._send(client, Accepted(asked=submit.request, request=number, waits=waits))
        if len(client.requests) >= MAX_REQUESTS:
            detail = f"{MAX_REQUESTS} requests of this client have no answer yet"
            self._send(client, Refused(request=number, code=Overloaded.code, detail=detail))
            return
        client.requests.add(number)
        submit = msgspec.structs.replace(submit, request=number)
        sink = partial(self._deliver, client, number)
        self._supervisor.submit(submit, sink, self._find_stop(submit))

    def _deliver(self, client: _Client, number: int, message: Message) -> None:
        """The sink of one request."""
        if number not in client.requests:
            return  # nobody waits for it any more
        if isinstance(message, Finished | Refused):
            client.requests.discard(number)
            if number in client.given_up:
                client.given_up.discard(number)
                detail = "its client did not read what it was told, and its queue is full"
                message = Refused(request=number, code=Overloaded.code, detail=detail)
        elif client.connection.is_full:
            if number not in client.given_up:
                client.given_up.add(number)
                self._supervisor.cancel(Cancel(request=number))
            return
        self._send(client, message)

    def _cancel(self, client: _Client, cancel: Cancel) -> None:
        known = self._supervisor.cancel(cancel)
        if client.connection.is_full:
            return  # it is answered by the request's own end
        if known:
            detail = f"request {cancel.request} is cancelled"
            self._send(client, Done(operation=cancel.operation, detail=detail))
        else:
            error = UsageError(f"request {cancel.request} neither runs nor waits")
            self._deny(client, cancel.operation, error)

    def _answer(self, client: _Client, operation: int, what: str | DaemonError) -> None:
        """An operation has come to its end, maybe after its client has gone."""
        if client.connection.fd not in self._clients or client.is_leaving:
            return
        if isinstance(what, DaemonError):
            self._deny(client, operation, what)
        else:
            self._send(client, Done(operation=operation, detail=what))

    def _swapped(self, client: _Client, swap: Swap, what: str | DaemonError) -> None:
        if not isinstance(what, DaemonError):
            self._welcome = msgspec.structs.replace(self._welcome, draft=swap.draft)
        self._answer(client, swap.operation, what)

    def _deny(self, client: _Client, operation: int, error: DaemonError) -> None:
        detail = str(error)[:MAX_DETAIL]
        self._send(client, Denied(operation=operation, code=error.code, detail=detail))

    def _watch(self, client: _Client, seconds: float) -> None:
        if client.watches is not None:
            self._supervisor.call_off(client.watches)
        if not client.connection.has_unsent:  # else it still has an older one to read
            self._send(client, self._supervisor.describe())
        again = partial(self._watch, client, seconds)
        client.watches = self._supervisor.call_later(seconds, again)
