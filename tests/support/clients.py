"""A service over the model daemons inside this process, and clients that the test steps along."""

from contextlib import contextmanager
from pathlib import Path

from support.supervised import FULL, model_command, plan_for
from support.waiting import until

from launch.service import Service
from launch.supervisor import Supervisor
from launch.token_ids import pack_ids, unpack_ids
from protocol.config import CLIENT_SOCKET
from protocol.connection import connect
from protocol.messages import (
    WIRE_VERSION,
    Accepted,
    Finished,
    Piece,
    Refused,
    Submit,
    Welcome,
)
from protocol.state import CLIENT_REPLIES


class SocketClient:
    """One connection; `messages` is everything that came."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path, CLIENT_REPLIES)
        self.messages = []

    def send(self, message) -> "SocketClient":
        self.connection.send(message)
        return self

    def submit(self, number, prompt, max_tokens, **fields) -> "SocketClient":
        """At full width unless `fields` say otherwise, so that a draft is always used."""
        fields = {"block_width": FULL} | fields
        tokens = pack_ids(prompt)
        return self.send(Submit(request=number, prompt=tokens, max_tokens=max_tokens, **fields))

    def read(self) -> None:
        self.connection.flush()
        self.messages += self.connection.receive()

    def all(self, kind) -> list:
        return [message for message in self.messages if isinstance(message, kind)]

    def number(self, asked) -> int:
        """What the supervisor calls this client's request."""
        return next(each.request for each in self.all(Accepted) if each.asked == asked)

    def tokens(self, asked) -> list[int]:
        number, found = self.number(asked), []
        for piece in self.all(Piece):
            found += unpack_ids(piece.tokens) if piece.request == number else ()
        return found

    def answer(self, asked):
        """Finished or Refused, or None as long as there is none; never more than one."""
        if not any(each.asked == asked for each in self.all(Accepted)):
            return None
        number = self.number(asked)
        found = [one for one in self.all((Finished, Refused)) if one.request == number]
        assert len(found) <= 1
        return found[0] if found else None

    def close(self) -> None:
        self.connection.close()


class World:
    """A running service and its clients, all stepped by `until`."""

    def __init__(self, supervisor, service) -> None:
        self.supervisor, self.service = supervisor, service
        self.clients = []

    def client(self) -> SocketClient:
        client = SocketClient(self.supervisor.run_dir / CLIENT_SOCKET)
        self.clients.append(client)
        return client

    def until(self, condition, *readers, seconds=60.0, what="the condition"):
        """Turn the supervisor's loop, and let `readers` (else all clients) read."""

        def look():
            self.supervisor.step(0.005)
            for client in readers or self.clients:
                if client.connection.fd >= 0:
                    client.read()
            return condition()

        return until(look, seconds=seconds, what=what)


@contextmanager
def serving(target, draft, find_stop=lambda _: None, *, ready=True, **changes):
    """A service whose daemons are ready, or load still."""
    plan = plan_for(target, draft, **changes)
    welcome = Welcome(
        wire_version=WIRE_VERSION,
        pid=1,
        model=plan.model,
        draft=plan.draft or "",
        max_positions=512,
        vocab_size=61,
    )
    with (
        Supervisor(plan, command=model_command) as supervisor,
        Service(supervisor, welcome, find_stop, farewell=1.0) as service,
    ):
        if ready:
            supervisor.wait_ready()
        world = World(supervisor, service)
        try:
            yield world
        finally:
            for client in world.clients:
                client.close()
