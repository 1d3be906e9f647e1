"""One half of ``cuda-ipc`` in a process of its own, over the fake GPU or a real one.

``host RUN_DIR DEVICE`` owns a ring, writes four rows of sequence 3, serves until its input ends,
and then looks whether its weights are as they were. ``guest`` attaches and says what it read;
``spoiler`` then also overwrites all that it has mapped. `DEVICE` is ``fake``, or ``cuda:N``.
"""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import torch
from support.fake_cuda import FakeCuda, driven
from support.ring_peers import LIFE, NONCE, expected_rows, write_forward

from protocol.feature_ring import plan
from protocol.transports.base import WeightSpec
from protocol.transports.cuda_ipc import CudaIpc

ROOT = Path(__file__).resolve().parents[2]
SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


@contextlib.contextmanager
def peer(half, run_dir, device="fake"):
    """That half as a process, which is killed at the end."""
    paths = f"{ROOT}:{ROOT / 'tests'}"
    process = subprocess.Popen(
        [sys.executable, __file__, half, run_dir, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def transport(device):
    """The class to use, and what its halves are told of the device."""
    if device == "fake":
        return driven(CudaIpc, FakeCuda(), FakeCuda()), {}
    return CudaIpc, {"device": device}


def own(run_dir, device):
    kind, where = transport(device)
    host = kind.host(Path(run_dir), hand_over="event", **where)
    view = host.create_ring(SHAPE)
    weights = host.create_weights({"embed": WeightSpec((10, 6), "bfloat16")})
    weights["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    view.claim(0, 3)
    write_forward(view, 0, 3, 0, 4)
    print("ready", flush=True)
    while host.fileno() in select.select([host.fileno(), sys.stdin], [], [])[0]:
        host.serve()
    untouched = bool(weights["embed"].eq(2.0).all())
    host.close()
    print("closed" if untouched else "spoiled", flush=True)


def draw(run_dir, device, *, spoil):
    kind, where = transport(device)
    address = str(Path(run_dir) / "ring.sock")
    guest = kind.attach(address, nonce=NONCE, life=LIFE, shape=SHAPE, timeout=60.0, **where)
    found, right = guest.read_rows(0, 3, 0, 4).rows.cpu(), expected_rows(SHAPE, 3, 0, 4)
    if spoil:
        for tensor in guest._imports.tensors.values():
            tensor.fill_(77)
    print("right" if torch.equal(found, right) else "wrong", flush=True)
    sys.stdin.read()
    guest.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted, folder, place = sys.argv[1:]
    if wanted == "host":
        own(folder, place)
    else:
        draw(folder, place, spoil=wanted == "spoiler")
