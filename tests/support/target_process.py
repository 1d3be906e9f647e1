"""A real target daemon in a process of its own, and a link that speaks to it like an engine."""

import itertools
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from protocol.client import Poller
from protocol.config import TARGET_SOCKET, TargetConfig, write_config
from protocol.errors import from_wire
from protocol.lifeline import PARENT_VARIABLE
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Failed,
    Hello,
    ItemFailed,
    Open,
    Prefill,
    Verify,
)
from protocol.run_directory import RunDirectory
from protocol.state import TARGET_REPLIES
from protocol.status import LoadFailed, Loading, Ready, decode_status

LIFE, NONCE, DRAFT_LIFE = 41, 987654321, 7
PATIENCE = 60.0  # seconds until a wait in a test is given up
PROBLEM = Path(__file__).with_name("problem_target.py")


class TargetProcess:
    """Starts ``python -I -m target_daemon``; leaving ends it by its lifeline and reaps it."""

    def __init__(
        self, model: Path, *, problem: bool = False, place: Path | None = None, **settings
    ):
        self._settings = {"model": str(model), "life": LIFE, "threads": 1, **settings}
        self._problem = problem
        self._directory = RunDirectory(place)
        self.status = []
        self.process = None

    def __enter__(self):
        self.run_dir = self._directory.__enter__().path
        config = TargetConfig(run_dir=str(self.run_dir), **self._settings)
        path = self.run_dir / "target.json"
        write_config(config, path)
        module = [str(PROBLEM)] if self._problem else ["-m", "target_daemon"]
        environment = {
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
        }
        self._log = (self.run_dir / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-I", *module, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            process_group=0,
        )
        return self

    def __exit__(self, *_):
        try:
            self.process.stdin.close()
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self._log.close()
            self._directory.__exit__(None, None, None)

    def log(self) -> str:
        return (self.run_dir / "log").read_text()

    def wait_until_started(self, patience=PATIENCE):
        """Read status lines up to `Ready` or `LoadFailed`, which is returned."""
        deadline = time.monotonic() + patience
        for line in _lines(self.process.stdout, deadline):
            self.status.append(decode_status(line))
            if isinstance(self.status[-1], Ready | LoadFailed):
                return self.status[-1]
        raise AssertionError(f"no end of the start: {self.status}; log: {self.log()}")

    def wait_until_loading(self):
        deadline = time.monotonic() + PATIENCE
        line = next(_lines(self.process.stdout, deadline))
        assert isinstance(decode_status(line), Loading)


def _lines(stream, deadline):
    rest = b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([stream], [], [], deadline - time.monotonic())
        data = os.read(stream.fileno(), 65536) if ready else b""
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


class Refused(Exception):
    """The whole message was refused."""


class Link:
    """Sends one item a message and raises what it answers: a TargetEngine over a socket."""

    def __init__(self, daemon: TargetProcess, *, greet: bool = True, life: int = LIFE):
        self._address = f"ipc://{daemon.run_dir / TARGET_SOCKET}"
        self._greet = greet
        self.life = life
        self.hello = None

    def __enter__(self):
        self._poller = Poller().__enter__()
        self._link = self._poller.connect(self._address, TARGET_REPLIES)
        if self._greet:
            self.hello = self.ask(Hello(**self.lives(), wire_version=WIRE_VERSION, nonce=NONCE))
        return self

    def __exit__(self, *_):
        self._poller.__exit__(None, None, None)

    def lives(self):
        return {"target_life": self.life, "draft_life": DRAFT_LIFE}

    def send(self, message):
        self._link.send(message)

    def next_reply(self):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._link in self._poller.poll(deadline - time.monotonic()):
                replies = self._link.receive()
                assert len(replies) == 1, replies
                return replies[0]
        raise AssertionError("no reply")

    def ask(self, message):
        self.send(message)
        reply = self.next_reply()
        if isinstance(reply, Failed):
            raise Refused(reply.code, reply.detail) from from_wire(reply.code, reply.detail)
        assert (reply.target_life, reply.draft_life) == (self.life, DRAFT_LIFE)
        return reply

    def ask_all(self, kind, *items):
        return self.ask(kind(**self.lives(), items=items)).results

    def _one(self, kind, item):
        (result,) = self.ask_all(kind, item)
        assert (result.sequence, result.round) == (item.sequence, item.round)
        if isinstance(result, ItemFailed):
            raise from_wire(result.code, result.detail)
        return result

    def open(self, item):
        return self._one(Open, item)

    def prefill(self, item):
        return self._one(Prefill, item)

    def verify(self, item):
        return self._one(Verify, item)

    def close(self, item):
        return self._one(Close, item)


numbers = itertools.count(1)  # sequence numbers, never repeated
