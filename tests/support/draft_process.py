"""A real draft daemon in a process of its own, over a ring that the test itself hosts."""

import os
import select
import subprocess
import sys
import time

from support.tiny_draft import Features, shared_weights

from protocol.client import Poller
from protocol.config import DRAFT_SOCKET, RING_SOCKET, DraftConfig, write_config
from protocol.feature_ring import RingShape
from protocol.lifeline import PARENT_VARIABLE
from protocol.messages import WIRE_VERSION, Hello, Pair
from protocol.run_directory import RunDirectory
from protocol.state import DRAFT_REPLIES
from protocol.status import LoadFailed, Ready, decode_status
from protocol.transports.shared_memory import TRANSPORT

DRAFT_LIFE, TARGET_LIFE, NONCE = 9, 4, 31337
PATIENCE = 60.0


class DraftProcess:
    """Starts ``python -I -m draft_daemon``; leaving ends it by its lifeline and reaps it."""

    def __init__(self, folder, **settings):
        self._settings = {"draft": str(folder), "life": DRAFT_LIFE, "threads": 1, **settings}
        self._directory = RunDirectory()

    def __enter__(self):
        self.run_dir = self._directory.__enter__().path
        path = self.run_dir / "draft.json"
        write_config(DraftConfig(run_dir=str(self.run_dir), **self._settings), path)
        self._log = (self.run_dir / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "draft_daemon", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        self._poller = Poller().__enter__()
        self._link = None
        return self

    def __exit__(self, *_):
        try:
            self._poller.__exit__(None, None, None)
            self.process.stdin.close()
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self._log.close()
            self._directory.__exit__(None, None, None)

    def log(self):
        return (self.run_dir / "log").read_text()

    def started(self):
        """Status lines up to `Ready` or `LoadFailed`."""
        deadline, found, rest = time.monotonic() + PATIENCE, [], b""
        while not found or not isinstance(found[-1], Ready | LoadFailed):
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.process.stdout], [], [], left)[0]
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"no end of the start: {found}; log: {self.log()}"
            *lines, rest = (rest + data).split(b"\n")
            found += [decode_status(line) for line in lines]
        return found

    def ask(self, message, serve=None):
        """The one reply; `serve` is a ring host that is served meanwhile."""
        if self._link is None:
            self._link = self._poller.connect(f"ipc://{self.run_dir / DRAFT_SOCKET}", DRAFT_REPLIES)
        self._link.send(message)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if serve is not None and select.select([serve.fileno()], [], [], 0.005)[0]:
                serve.serve()
            if self._link in self._poller.poll(0.01):
                (reply,) = self._link.receive()
                return reply
        raise AssertionError(f"no reply to {type(message).__name__}; log: {self.log()}")

    def hello(self):
        return self.ask(Hello(**lives(), wire_version=WIRE_VERSION, nonce=NONCE))

    def items(self, kind, *items, target_life=TARGET_LIFE):
        return self.ask(kind(**lives(target_life), items=items))


def lives(target_life=TARGET_LIFE):
    return {"target_life": target_life, "draft_life": DRAFT_LIFE}


def pair_message(run_dir, shape, config, **changes):
    """What the supervisor would send for a target of the same dimensions."""
    fields = {
        "transport": "shm",
        "address": str(run_dir / RING_SOCKET),
        "ring_nonce": NONCE,
        "slots": shape.slots,
        "ring_capacity": shape.capacity,
        "dtype": shape.dtype,
        "hidden_size": config.hidden_size,
        "padded_vocab_size": config.vocab_size,
        "vocab_size": config.vocab_size,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "logit_softcap": 0.0,
    }
    return Pair(**lives(), **(fields | changes))


class RingHost:
    """The target's half in the test's own process, with shared weights."""

    def __init__(self, run_dir, config, *, transport=TRANSPORT, capacity=48, slots=2):
        self.shape = RingShape(slots, capacity - 16, 16, config.feature_width, "float32")
        self.host = transport.host(run_dir)
        self.ring = self.host.create_ring(self.shape)
        shared_weights(self.host, config)
        self.host.offer(NONCE, TARGET_LIFE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ring = None
        self.host.close()

    def features(self, *, slot=0, sequence=1):
        return Features(self.ring, slot=slot, sequence=sequence)
