"""Both halves of a transport in one test: attach while the host is served, and rows that tell."""

import select
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from protocol.boundary import answer
from protocol.config import RING_SOCKET
from protocol.feature_ring import RingShape, plan
from protocol.messages import Attach, Attached
from protocol.right import Given
from protocol.server import Server
from protocol.state import FEATURE_REQUESTS
from protocol.transports.tcp import RowsDesk

NONCE, LIFE = 1234, 7
SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


def address_of(transport, run_dir):
    """Where a guest of `transport` finds the target of this run directory."""
    path = run_dir / RING_SOCKET
    return str(path) if transport.maps else f"ipc://{path}"


class Pulled:
    """A host that maps nothing, with the target's loop that answers pulls: in a thread here."""

    def __init__(self, host, run_dir, *, network=None, handle=None):
        self._host = host
        self._place = network or run_dir / RING_SOCKET
        self._handle = handle  # a real target's answers, by message and what was offered
        self._stack = ExitStack()
        self.endpoint = None
        self.weights_hash = "w"
        self.handled = []  # pulls, in the order in which they came
        self.on_pull = lambda message: None  # may raise, or change the ring

    def __getattr__(self, name):
        return getattr(self._host, name)

    def offer(self, nonce, life):
        self._host.offer(nonce, life)
        self._stack.close()
        server = Server(self._place, FEATURE_REQUESTS, link="target", right=Given(life))
        end = threading.Event()
        ready = threading.Event()
        desk = RowsDesk(self._host.ring)
        thread = threading.Thread(
            target=self._serve, args=(server, desk, (nonce, life), ready, end)
        )
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(end.set)
        assert ready.wait(60)

    def close(self):
        self._stack.close()
        self._host.close()

    def _serve(self, server, desk, offered, ready, end):
        def handle(message):
            if isinstance(message, Attach) and self._handle is not None:
                return self._handle(message, offered)
            lives = {"target_life": message.target_life, "draft_life": message.draft_life}
            if isinstance(message, Attach):
                desk.check(message, offered)
                facts = {"config_hash": "c", "tokenizer_hash": "t", "embedding_scale": 1.0}
                return Attached(**lives, **facts, weights_hash=self.weights_hash)
            self.handled.append(message)
            if self._handle is not None:
                return self._handle(message, offered)
            given = self.on_pull(message)
            return desk.rows(message) if given is None else given

        with server:
            self.endpoint = server.endpoint
            ready.set()
            while not end.is_set():
                server.poll((), 0.01)
                received = server.receive()
                if received is not None:
                    server.reply(received.peer, answer(handle, received.message))


def hosted(transport, run_dir):
    """The target's half, answering where a target's own loop would."""
    host = transport.host(run_dir)
    return host if transport.maps else Pulled(host, run_dir)


def attach(transport, host, run_dir, shape, *, nonce=NONCE, life=LIFE, timeout=5.0):
    """Attach from a thread of its own while this one serves the host, as its poll loop would."""
    address = address_of(transport, run_dir)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            transport.attach, address, nonce=nonce, life=life, shape=shape, timeout=timeout
        )
        while not future.done():
            if select.select([host.fileno()], [], [], 0.01)[0]:
                host.serve()
        return future.result()


def expected_rows(shape: RingShape, sequence: int, start: int, stop: int) -> torch.Tensor:
    """Rows whose every element depends on sequence, position and column; exact in bf16."""
    positions = torch.arange(start, stop).unsqueeze(1)
    columns = torch.arange(shape.row_width).unsqueeze(0)
    mixed = (positions * 31 + sequence * 101 + columns * 7) % 251
    return mixed.to(getattr(torch, shape.dtype))


def write_forward(view, slot: int, sequence: int, base: int, width: int) -> None:
    """Write the rows of one forward: announce, then one tap after the other, then publish."""
    view.announce(slot, base + width)
    rows = expected_rows(view.shape, sequence, base, base + width).to(view.rows.device)
    places = torch.arange(base, base + width) % view.shape.capacity
    for columns in torch.arange(view.shape.row_width).chunk(2):
        view.rows[slot, places.unsqueeze(1), columns.unsqueeze(0)] = rows[:, columns]
    view.publish(slot, base, base + width)
