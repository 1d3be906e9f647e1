"""Stage ``pair``: our own daemons with the target on a GPU; texts, deaths, and memory."""

import itertools
import os
import signal

import pytest
from support.supervised import Client, plan_for
from support.tiny_pair import write_pair

from launch.supervisor import Supervisor
from protocol.config import Deadlines

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(300)]
PROMPT = list(range(1, 41))
DEADLINES = Deadlines(load=90.0, hello=60.0, pair=60.0)
DRAFTS = ["cuda:0", "cpu"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


def planned(folders, draft="cuda:0", **changes):
    settings = {"target_device": "cuda:0", "draft_device": draft, "deadlines": DEADLINES}
    return plan_for(*folders, **(settings | changes))


def alone(folders, limit):
    """The target's own text, on the same GPU."""
    with Supervisor(planned(folders[:1])) as supervisor:
        supervisor.wait_ready()
        return Client(supervisor, 1).submit(PROMPT, limit).finish().tokens


@pytest.mark.parametrize("hand_over", ["synchronise", "event"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_the_targets_own(gpus, folders, draft, hand_over):
    expected = alone(folders, 80)
    with Supervisor(planned(folders, draft, hand_over=hand_over)) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 80).finish()
        status = supervisor.describe()
    assert client.tokens == expected
    assert client.finished.statistics.mode == "speculative"
    assert status.transport == ("cuda-ipc" if draft != "cpu" else "cuda-host")


def test_a_draft_on_the_gpu_reads_a_target_on_the_cpu(gpus, folders):
    plan = planned(folders, "cuda:0", target_device="cpu")
    with Supervisor(plan) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 40).finish()
        assert supervisor.describe().transport == "shm"
    assert client.finished.statistics.mode == "speculative"


@pytest.mark.fault
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_kill_in_the_middle_changes_no_token(gpus, folders, role):
    expected = alone(folders, 200)
    with Supervisor(planned(folders)) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 200)
        supervisor.run_until(lambda: len(client.pieces) > 5)
        os.kill(getattr(supervisor.describe(), role).pid, signal.SIGKILL)
        client.finish()
        status = supervisor.describe()
    assert client.tokens == expected
    assert status.num_draft_restarts == 1  # with the target, too
    assert status.num_target_restarts == (role == "target")


def restart(folders, runtime, times):
    """Free memory of the GPU after each of `times` deaths of the draft."""
    free = []
    with Supervisor(planned(folders)) as supervisor:
        supervisor.wait_ready()
        for number in itertools.count(1):
            Client(supervisor, number).submit(PROMPT, 8).finish()
            free.append(runtime.free_bytes())
            if number > times:
                return free
            os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
            supervisor.run_until(lambda done=number: _is_back(supervisor.describe(), done))
    return free


def _is_back(status, restarts):
    return status.num_draft_restarts >= restarts and status.draft.stage == "ready"


@pytest.mark.fault
def test_memory_is_flat_over_twenty_restarts_of_the_draft(runtime, folders):
    free = restart(folders, runtime, 20)
    assert min(free[1:]) >= free[1] - (8 << 20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_two_hundred_restarts_of_the_draft(runtime, folders):
    free = restart(folders, runtime, 200)
    assert min(free[1:]) >= free[1] - (8 << 20)
