"""One half of ``cuda-ipc`` in a process of its own, over the fake GPU.

``host RUN_DIR`` owns a ring, writes four rows of sequence 3 and serves until its input ends.
``guest RUN_DIR`` attaches, says what it read and how it closed, and waits for its input to end.
"""

import select
import sys
from pathlib import Path

import torch
from support.fake_cuda import FakeCuda, driven
from support.ring_peers import LIFE, NONCE, expected_rows, write_forward

from protocol.feature_ring import plan
from protocol.transports.base import WeightSpec
from protocol.transports.cuda_ipc import CudaIpc

SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


def own(run_dir):
    host = driven(CudaIpc, FakeCuda(), FakeCuda(), hand_over="event").host(Path(run_dir))
    view = host.create_ring(SHAPE)
    host.create_weights({"embed": WeightSpec((10, 6), "bfloat16")})["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    view.claim(0, 3)
    write_forward(view, 0, 3, 0, 4)
    print("ready", flush=True)
    while host.fileno() in select.select([host.fileno(), sys.stdin], [], [])[0]:
        host.serve()
    host.close()
    print("closed", flush=True)


def draw(run_dir):
    address = str(Path(run_dir) / "ring.sock")
    guest = driven(CudaIpc, FakeCuda(), FakeCuda()).attach(
        address, nonce=NONCE, life=LIFE, shape=SHAPE, timeout=10.0
    )
    right = expected_rows(SHAPE, 3, 0, 4)
    print("right" if torch.equal(guest.read_rows(0, 3, 0, 4).rows, right) else "wrong", flush=True)
    sys.stdin.read()
    guest.close()
    print("closed", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"host": own, "guest": draw}[sys.argv[1]](sys.argv[2])
