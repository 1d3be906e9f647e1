"""Two real processes share the fake GPU's memory, and either is killed while the other uses it."""

import select
import signal
import time

import pytest
import torch
from support.cuda_peer import SHAPE, peer
from support.fake_cuda import FakeCuda, Violation, driven
from support.ring_peers import LIFE, NONCE, expected_rows, write_forward

from protocol.errors import DeviceLost
from protocol.transports.base import WeightSpec
from protocol.transports.cuda_ipc import CudaIpc

pytestmark = pytest.mark.process
SECONDS = 30.0


@pytest.fixture
def fake():
    mine = FakeCuda()
    yield mine
    mine.abandon()


def attached(fake, run_dir):
    return driven(CudaIpc, FakeCuda(), fake).attach(
        str(run_dir / "ring.sock"), nonce=NONCE, life=LIFE, shape=SHAPE, timeout=SECONDS
    )


def test_two_processes_share_the_ring_and_part_in_order(runtime_dir, fake):
    with peer("host", runtime_dir) as host:
        assert host.stdout.readline() == "ready\n"
        guest = attached(fake, runtime_dir)
        assert torch.equal(guest.read_rows(0, 3, 0, 4).rows, expected_rows(SHAPE, 3, 0, 4))
        assert guest.weights()["embed"].eq(2.0).all()
        guest.close()
        host.stdin.close()
        assert host.stdout.readline() == "closed\n"  # its fake saw every importer go first
        assert host.wait(60) == 0


@pytest.mark.fault
def test_a_killed_target_leaves_memory_that_the_draft_does_not_touch(runtime_dir, fake):
    with peer("host", runtime_dir) as host:
        assert host.stdout.readline() == "ready\n"
        guest = attached(fake, runtime_dir)
        host.kill()
        assert host.wait(60) == -signal.SIGKILL
        with pytest.raises(DeviceLost, match="gone"):
            guest.read_rows(0, 3, 0, 4)
        pointer = next(iter(fake._opened))
        with pytest.raises(Violation, match="poison"):  # what it did not do
            fake.copy_async(pointer, pointer, 8)
        guest.close()
    (runtime_dir / "ring.sock").unlink()


@pytest.mark.fault
def test_a_killed_draft_keeps_the_target_from_nothing(runtime_dir, fake):
    host = driven(CudaIpc, fake, FakeCuda()).host(runtime_dir)
    view = host.create_ring(SHAPE)
    host.create_weights({"embed": WeightSpec((10, 6), "bfloat16")})["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    view.claim(0, 3)
    write_forward(view, 0, 3, 0, 4)
    with peer("guest", runtime_dir) as guest:
        deadline = time.monotonic() + SECONDS
        while not select.select([guest.stdout], [], [], 0.01)[0]:
            assert time.monotonic() < deadline
            host.serve()
        assert guest.stdout.readline() == "right\n"
        guest.kill()
        guest.wait(60)
        view.publish(0, 0, 4)
        host.close()  # frees everything: the dead one's mappings are the driver's business
    assert fake.left() == []


def test_a_draft_that_overwrites_all_it_maps_does_not_touch_the_target(runtime_dir):
    with peer("host", runtime_dir) as host:
        assert host.stdout.readline() == "ready\n"
        with peer("spoiler", runtime_dir) as draft:
            assert draft.stdout.readline() == "right\n"
            draft.stdin.close()
            assert draft.wait(60) == 0
        host.stdin.close()
        assert host.stdout.readline() == "closed\n"  # where it found its own weights as they were
