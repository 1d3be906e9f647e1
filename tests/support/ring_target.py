"""A process that owns a ring and decodes as fast as it can, for readers that try to keep up.

Run with the run directory and the seconds to go on. Prompts of three times the capacity are
prefilled in chunks of the widest forward; then blocks of changing width keep a changing number of
rows; then the slot goes to the next sequence. The shared weight `progress` holds
``sequence << 32 | committed``, set after each forward as a reply message would be sent.
"""

import random
import select
import sys
import time
from pathlib import Path

import torch
from support.ring_peers import LIFE, NONCE, expected_rows

from protocol.feature_ring import plan
from protocol.transports.base import WeightSpec
from protocol.transports.shared_memory import TRANSPORT

WIDEST = 8
SHAPE = plan(slots=1, window=1, widest_forward=WIDEST, row_width=8192, dtype="float32")
SPECS = {"progress": WeightSpec((1,), "int64"), "embed": WeightSpec((4, 4), "bfloat16")}


def forward(view, sequence, base, width):
    """Write the rows tap by tap, so that a row is torn for as long as possible."""
    view.announce(0, base + width)
    rows = expected_rows(view.shape, sequence, base, base + width)
    places = torch.arange(base, base + width) % view.shape.capacity
    for columns in range(0, view.shape.row_width, 1024):
        view.rows[0, places, columns : columns + 1024] = rows[:, columns : columns + 1024]


def decode(view, progress, sequence, chance):
    view.claim(0, sequence)
    committed = 0
    while committed < 3 * SHAPE.capacity:
        width = min(WIDEST, 3 * SHAPE.capacity - committed)
        forward(view, sequence, committed, width)
        committed += width
        progress[0] = sequence << 32 | committed
    for _ in range(chance.randrange(20, 60)):
        width = chance.randint(1, WIDEST)
        forward(view, sequence, committed, width)
        committed += chance.randint(1, width)
        progress[0] = sequence << 32 | committed
    view.release(0)


def main(run_dir, seconds):
    torch.set_num_threads(1)
    host = TRANSPORT.host(Path(run_dir))
    view = host.create_ring(SHAPE)
    weights = host.create_weights(SPECS)
    weights["embed"].fill_(3.0)
    host.offer(NONCE, LIFE)
    print("ready", flush=True)
    while host.fileno() in select.select([host.fileno(), sys.stdin], [], [])[0]:
        host.serve()
    chance = random.Random(20260101)
    sequence = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sequence += 1
        decode(view, weights["progress"], sequence, chance)
    print(sequence, flush=True)
    del view, weights
    host.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
