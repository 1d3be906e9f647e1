"""The supervisor and a target that cannot load or is lost, and daemons that hang while idle."""

import os
import signal

import pytest
from support.supervised import (
    FAULTS,
    Client,
    model_command,
    plan_for,
    starter,
    text,
)
from support.tiny_pair import write_pair

from launch.supervisor import Supervisor
from protocol import gpu
from protocol.errors import (
    CheckpointError,
    DaemonDied,
    DeadlineExceeded,
    InternalError,
)

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def start(folders, monkeypatch):
    return starter(folders, monkeypatch)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "hello", "error", "words"),
    [
        ("target:load_error", 9.0, CheckpointError, "no tensor `x` in the target"),
        ("target:exit", 9.0, DaemonDied, "exit code 9"),
        ("target:refuse:hello:1", 9.0, InternalError, "refused in this test"),
        ("target:hang:hello:1", 0.3, DeadlineExceeded, "Hello within 0.3 s"),
    ],
)
def test_a_target_that_cannot_load_is_its_own_typed_error(start, fault, hello, error, words):
    with start(fault, hello=hello) as supervisor:
        client = Client(supervisor, 1).submit(PROMPT, 20)
        with pytest.raises(error, match=words):
            supervisor.wait_ready()
        client.finish()
        late = Client(supervisor, 2).submit(PROMPT, 20).finish()
    assert words in client.refused.detail
    assert words in late.refused.detail


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("target:die:verify:1:always", "daemon_died"),
        ("target:die:prefill:2:always", "daemon_died"),
        ("target:hang:verify:1:always", "deadline"),
        ("target:refuse:verify:3", "internal"),
        ("target:nonsense:verify:1:always", "protocol"),
        ("target:garbage:verify:1:always", "protocol"),
    ],
)
def test_a_request_that_ends_the_target_twice_is_refused_with_a_typed_error(start, fault, code):
    with start(fault, verify=0.5 if "hang" in fault else 9.0) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
    assert client.refused.code == code
    assert client.tokens == text(PROMPT, 60)[: len(client.tokens)]


@pytest.mark.fault
@pytest.mark.parametrize(
    "fault",
    [
        "die:open:1",
        "die:prefill:2",
        "die:prefill:3",
        "die:verify:1",
        "die:verify:4",
        "hang:verify:3",
        "nonsense:verify:3",
        "nonsense:prefill:2",
        "garbage:verify:3",
        "garbage:prefill:3",
    ],
)
def test_a_target_that_is_lost_costs_a_pause_and_no_token(start, fault):
    with start(f"target:{fault}", verify=0.5 if "hang" in fault else 9.0) as supervisor:
        supervisor.wait_ready()
        clients = [Client(supervisor, n).submit(PROMPT[n:], 60) for n in (0, 1)]
        for client in clients:
            client.finish()
        status = supervisor.describe()
    for client in clients:
        assert client.tokens == text(PROMPT[client.number :], 60)
    assert (status.num_target_restarts, status.target.stage) == (1, "ready")
    assert status.num_draft_restarts == 0  # it is paired with the new target as it is
    figures = [client.finished.statistics for client in clients]
    assert max(each.num_target_restarts for each in figures) == 1
    assert [each.num_replay_mismatches for each in figures] == [0, 0]


@pytest.mark.fault
def test_a_draft_that_maps_the_gpu_of_a_dead_target_is_started_again_with_it(folders, monkeypatch):
    monkeypatch.setenv(FAULTS, "target:die:verify:3")
    monkeypatch.setattr(gpu, "device_nodes", lambda root: ("/dev/nvidia0",))
    plan = plan_for(*folders, target_device="cuda:0", draft_device="cuda:0")
    with Supervisor(plan, command=model_command) as supervisor:
        supervisor.wait_ready()
        before = supervisor.describe()
        client = Client(supervisor, 1).submit(PROMPT, 300).finish()
        after = supervisor.describe()
    assert client.tokens == text(PROMPT, 300)
    assert (before.transport, before.num_draft_restarts) == ("cuda-ipc", 0)
    assert (after.num_target_restarts, after.num_draft_restarts) == (1, 1)
    assert client.finished.statistics.num_draft_restarts == 1


@pytest.mark.parametrize(
    ("devices", "transport"),
    [(("cuda:0", "cpu"), "cuda-host"), (("cpu", "cuda:0"), "shm")],
)
def test_a_gpu_and_a_cpu_are_paired_through_host_memory(folders, monkeypatch, devices, transport):
    monkeypatch.setattr(gpu, "device_nodes", lambda root: ("/dev/nvidia0",))
    plan = plan_for(*folders, target_device=devices[0], draft_device=devices[1])
    with Supervisor(plan, command=model_command) as supervisor:
        assert supervisor.wait_ready()
        assert supervisor.describe().transport == transport


@pytest.mark.fault
def test_speculation_resumes_inside_the_request_after_a_death_of_the_target(start):
    with start("target:die:verify:3") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 300).finish()
        assert supervisor.describe().mode == "speculative"
    figures = client.finished.statistics
    assert client.tokens == text(PROMPT, 300)
    assert figures.mode == "speculative"
    assert figures.num_drafts > 5


@pytest.mark.fault
def test_a_killed_target_is_started_again_for_the_next_request(start):
    with start() as supervisor:
        supervisor.wait_ready()
        first = Client(supervisor, 1).submit(PROMPT, 20).finish()
        os.kill(supervisor.describe().target.pid, signal.SIGKILL)
        supervisor.run_until(lambda: supervisor.describe().target.stage == "failed")
        second = Client(supervisor, 2).submit(PROMPT, 20).finish()
        assert supervisor.describe().num_target_restarts == 1
    assert first.tokens == second.tokens == text(PROMPT, 20)


@pytest.mark.fault
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_daemon_that_hangs_with_nothing_to_do_is_found_out_and_started_again(start, role):
    with start(heartbeat=0.2, heartbeat_answer=0.3) as supervisor:
        supervisor.wait_ready()
        pid = getattr(supervisor.describe(), role).pid
        beats = []
        supervisor.run_until(lambda: beats.append(1) or len(beats) > 4)  # it answers
        assert getattr(supervisor.describe(), role).pid == pid
        os.kill(pid, signal.SIGSTOP)
        supervisor.run_until(lambda: getattr(supervisor.describe(), role).pid not in (pid, None))
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 60)
    assert client.finished.statistics.mode == "speculative"
    restarts = (status.num_target_restarts, status.num_draft_restarts)
    assert restarts == ((1, 0) if role == "target" else (0, 1))


@pytest.mark.fault
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_daemon_that_is_stopped_while_it_loads_again_is_not_waited_for_as_the_first_time(
    start, role
):
    with start(load_least=0.5) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        stopped = getattr(supervisor.describe(), role).pid
        os.kill(stopped, signal.SIGKILL)

        def next_life():
            status = getattr(supervisor.describe(), role)
            return status.pid not in (None, stopped) and status.stage == "loading"

        supervisor.run_until(next_life)
        os.kill(getattr(supervisor.describe(), role).pid, signal.SIGSTOP)
        supervisor.run_until(lambda: supervisor._crew.restarts[role] >= 2)
        client.finish()
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
    assert client.tokens == text(PROMPT, 400)


@pytest.mark.fault
@pytest.mark.parametrize("comes_back", [True, False], ids=["for-a-while", "for-good"])
def test_a_run_directory_that_is_gone_costs_a_pause_or_is_the_requests_error(start, comes_back):
    with start() as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        place = supervisor.run_dir
        aside = place.rename(place.with_suffix(".aside"))
        os.kill(supervisor.describe().target.pid, signal.SIGKILL)
        supervisor.run_until(lambda: "cannot write" in supervisor.describe().target.reason)
        if comes_back:
            aside.rename(place)
        client.finish()
        if not comes_back:
            aside.rename(place)
    if comes_back:
        assert client.tokens == text(PROMPT, 400)
    else:
        assert client.refused.code == "unavailable"
        assert "target.json: No such file or directory" in client.refused.detail
