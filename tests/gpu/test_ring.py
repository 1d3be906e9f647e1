"""Stage ``ring``: two real processes share the ring on one GPU, or on two."""

import signal

import pytest
import torch
from support.cuda_peer import SHAPE, peer
from support.ring_peers import LIFE, NONCE, expected_rows

from protocol.errors import DeviceLost
from protocol.transports.cuda_ipc import CudaIpc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def attached(run_dir, device="cuda:0"):
    return CudaIpc.attach(
        str(run_dir / "ring.sock"),
        nonce=NONCE,
        life=LIFE,
        shape=SHAPE,
        timeout=60.0,
        device=device,
    )


def test_two_processes_share_the_ring_and_part_in_order(runtime, runtime_dir):
    with peer("host", runtime_dir, "cuda:0") as host:
        assert host.stdout.readline() == "ready\n"
        guest = attached(runtime_dir)
        rows = guest.read_rows(0, 3, 0, 4).rows
        assert rows.is_cuda
        assert torch.equal(rows.cpu(), expected_rows(SHAPE, 3, 0, 4))
        assert guest.weights()["embed"].cpu().eq(2.0).all()
        guest.close()
        host.stdin.close()
        assert host.stdout.readline() == "closed\n"


def test_a_second_gpu_gets_rows_and_head_over_the_link(runtime, gpus, runtime_dir):
    if len(gpus) < 2:
        pytest.skip("one GPU")
    with peer("host", runtime_dir, "cuda:0") as host:
        assert host.stdout.readline() == "ready\n"
        guest = attached(runtime_dir, "cuda:1")
        rows = guest.read_rows(0, 3, 0, 4).rows
        assert rows.device.index == 1
        assert torch.equal(rows.cpu(), expected_rows(SHAPE, 3, 0, 4))
        assert guest.weights()["embed"].device.index == 1
        guest.close()


@pytest.mark.fault
def test_a_killed_target_leaves_memory_that_the_draft_does_not_touch(runtime, runtime_dir):
    with peer("host", runtime_dir, "cuda:0") as host:
        assert host.stdout.readline() == "ready\n"
        guest = attached(runtime_dir)
        host.kill()
        assert host.wait(30) == -signal.SIGKILL
        with pytest.raises(DeviceLost, match="gone"):
            guest.read_rows(0, 3, 0, 4)
        guest.close()
    (runtime_dir / "ring.sock").unlink()


@pytest.mark.fault
def test_drafts_that_are_killed_or_overwrite_what_they_map_do_not_touch_the_target(
    runtime, runtime_dir
):
    with peer("host", runtime_dir, "cuda:0") as host:
        assert host.stdout.readline() == "ready\n"
        for half in ("guest", "spoiler"):
            with peer(half, runtime_dir, "cuda:0") as draft:
                assert draft.stdout.readline() == "right\n"
        host.stdin.close()
        assert host.stdout.readline() == "closed\n"  # where it found its own weights as they were
        assert host.wait(30) == 0
