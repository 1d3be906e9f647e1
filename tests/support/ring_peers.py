"""Both halves of a transport in one test: attach while the host is served, and rows that tell."""

import select
from concurrent.futures import ThreadPoolExecutor

import torch

from protocol.config import RING_SOCKET
from protocol.feature_ring import RingShape

NONCE, LIFE = 1234, 7


def attach(transport, host, run_dir, shape, *, nonce=NONCE, life=LIFE, timeout=5.0):
    """Attach from a thread of its own while this one serves the host, as its poll loop would."""
    address = str(run_dir / RING_SOCKET)
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
    """Write the rows of one forward as a capture does: announce, then one tap after the other."""
    view.announce(slot, base + width)
    rows = expected_rows(view.shape, sequence, base, base + width)
    places = torch.arange(base, base + width) % view.shape.capacity
    for columns in torch.arange(view.shape.row_width).chunk(2):
        view.rows[slot, places.unsqueeze(1), columns.unsqueeze(0)] = rows[:, columns]
