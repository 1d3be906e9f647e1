"""Our own daemons, supervised, on a fake GPU: every placement, both hand-overs, and deaths."""

import os
import signal

import pytest
from support.fake_cuda import gpu as gpu_number
from support.fake_gpu_daemon import command
from support.supervised import Client, plan_for
from support.tiny_pair import write_pair

from launch.commands import status_text
from launch.supervisor import Supervisor
from protocol import gpu
from protocol.config import Deadlines

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
PROMPT = list(range(1, 41))
LIMIT = 60
SPLIT = {"target_devices": ("cuda:0", "cuda:1"), "layer_split": (0.6, 0.4)}
PATIENT = Deadlines(load=100.0, hello=60.0, pair=60.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(folders):
    """The target's own text, on the CPU and without a draft."""
    with Supervisor(plan_for(folders[0])) as supervisor:
        supervisor.wait_ready()
        return Client(supervisor, 1).submit(PROMPT, LIMIT).finish().tokens


@pytest.fixture
def start(folders, monkeypatch):
    monkeypatch.setattr(gpu, "device_nodes", lambda root: ("/dev/nvidia0",))

    def make(target, draft, **changes):
        devices = {"target_device": target, "draft_device": draft}
        plan = plan_for(*folders, deadlines=PATIENT, **devices, **changes)
        return Supervisor(plan, command=command)

    return make


@pytest.mark.parametrize(
    ("target", "draft", "changes", "transport"),
    [
        ("cuda:0", "cuda:0", {"hand_over": "event", "graphs": True}, "cuda-ipc"),
        ("cuda:0", "cpu", {}, "cuda-host"),
        ("cpu", "cuda:1", SPLIT, "cuda-ipc"),
        pytest.param("cpu", "cuda:0", {}, "shm", marks=pytest.mark.soak),
    ],
    ids=["one GPU", "draft on the CPU", "layers on two GPUs", "target on the CPU"],
)
def test_the_text_is_the_targets_own_wherever_the_two_are(
    start, expected, target, draft, changes, transport
):
    with start(target, draft, **changes) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, LIMIT).finish()
        status = supervisor.describe()
    assert client.tokens == expected
    where = [f" on cuda:{gpu_number(at).uuid}" for at in (0, 1)] if changes is SPLIT else []
    assert all(each in status.target_facts.split for each in where)
    assert any("target's layers" in line for line in status_text.full(status)) == bool(where)
    figures = client.finished.statistics
    assert (figures.mode, figures.transport, figures.num_drafts > 0) == (
        "speculative",
        transport,
        True,
    )
    assert (status.num_draft_restarts, status.num_target_restarts) == (0, 0)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("role", "hand_over"),
    [("target", "event"), pytest.param("draft", "synchronise", marks=pytest.mark.soak)],
)
def test_a_kill_in_the_middle_breaks_no_rule_of_cuda_and_changes_no_token(
    start, expected, role, hand_over
):
    with start("cuda:0", "cuda:0", hand_over=hand_over) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, LIMIT)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        os.kill(getattr(supervisor.describe(), role).pid, signal.SIGKILL)
        client.finish()
        supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready")
        status = supervisor.describe()
    assert client.tokens == expected
    assert status.num_draft_restarts == 1  # with the target, too
    assert status.num_target_restarts == (role == "target")
