"""The supervisor over real processes that load in a moment, and misbehave as they are told.

The model daemons hold no torch; `test_supervisor_real_pair` runs our own.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.model_pair import local_token, model_text
from support.supervised import DEADLINES, Client, model_command, plan_for
from support.tiny_pair import write_pair
from support.waiting import until

from launch.interrupts import Interrupts
from launch.policy import AUTO
from launch.supervisor import Supervisor
from protocol import gpu
from protocol.errors import (
    CheckpointError,
    DaemonDied,
    DeadlineExceeded,
    DraftMismatch,
    InternalError,
    Overloaded,
)
from protocol.messages import Finished

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))
FAULTS = "DFLASH_TEST_FAULTS"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def start(folders, monkeypatch):
    """Make a supervisor over the model daemons with these faults and deadlines."""

    def make(*faults, draft=True, on_loading=None, **deadlines):
        monkeypatch.setenv(FAULTS, " ".join(faults))
        target, folder = folders
        times = {name: getattr(DEADLINES, name) for name in DEADLINES.__struct_fields__}
        plan = plan_for(
            target, folder if draft else None, deadlines=type(DEADLINES)(**(times | deadlines))
        )
        return Supervisor(plan, on_loading=on_loading, command=model_command)

    return make


def text(prompt, limit):
    return model_text(prompt, limit, -1, local_token)[0]


def test_one_request_from_start_to_finish(start):
    stages = []
    with start(on_loading=stages.append) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50).finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 50)
    assert [mark.done for mark in client.progress] == [16, 32, 40]
    figures = client.finished.statistics
    assert client.finished.finish_reason == "length"
    assert (figures.mode, figures.transport, figures.exact) == ("speculative", "shm", "native")
    assert figures.num_accepted_tokens > 0
    assert (status.mode, status.mode_reason, status.finished) == ("speculative", "", 1)
    assert status.num_stale_replies == 0
    assert [step.stage for step in stages if step.role == "draft"][-2:] == ["pairing", "ready"]
    assert any((step.done, step.total) == (2, 2) for step in stages)
    assert status.load_seconds > 0


def test_without_a_draft_it_is_autoregressive_and_says_why(start):
    with start(draft=False) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 20)
    assert client.finished.statistics.mode_reason == "no draft was asked for"
    assert (status.mode, status.transport, status.draft.stage) == (
        "autoregressive",
        "none",
        "absent",
    )


def test_two_requests_run_at_once_and_each_gets_its_own_text(start):
    with start() as supervisor:
        supervisor.wait_ready()
        clients = [Client(supervisor, n).submit(PROMPT[n:], 60) for n in (1, 2)]
        supervisor.run_until(lambda: supervisor.describe().running == 2)
        supervisor.run_until(lambda: all(client.done for client in clients))
    for client in clients:
        assert client.tokens == text(PROMPT[client.number :], 60)
        assert client.finished.statistics.mode == "speculative"


def test_cancelling_a_request_in_its_prefill_leaves_the_other_unaffected(start):
    with start() as supervisor:
        supervisor.wait_ready()
        first = Client(supervisor, 1).submit(PROMPT, 200)
        supervisor.run_until(lambda: len(first.pieces) > 2)
        second = Client(supervisor, 2).submit(PROMPT * 10, 100)
        supervisor.run_until(lambda: len(second.progress) > 1)
        second.cancel()
        second.finish()
        marks = len(second.progress)
        assert not first.done
        first.finish()
        assert supervisor.describe().running == 0
    assert second.finished.finish_reason == "cancelled"
    assert (second.tokens, len(second.progress)) == ([], marks)
    assert first.tokens == text(PROMPT, 200)
    assert first.finished.statistics.mode == "speculative"


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
def test_what_is_cancelled_computes_once_more_at_most_and_never_after_its_close(
    start, tmp_path, monkeypatch, phase
):
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("DFLASH_TEST_LOG", str(log))

    def calls(sequence):
        lines = [line.split() for line in log.read_text().splitlines()]
        return [(role, verb) for role, verb, number in lines if number == str(sequence)]

    with start() as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT * 10, 100)
        supervisor.run_until(lambda: client.pieces if phase == "decoding" else client.progress)
        before = calls(1)
        client.cancel()
        client.finish()
        Client(supervisor, 2).submit(PROMPT, 40).finish()
    after = calls(1)
    for role in ("target", "draft"):
        done = [verb for owner, verb in after if owner == role]
        assert done.count("Close") == (1 if "Open" in done else 0)
        assert done[-1:] in (["Close"], [])
        computed = [verb for owner, verb in before if owner == role]
        assert len(done) - len(computed) <= 2  # what was sent already, and the close
    assert len(calls(2)) > 10


def test_a_third_request_waits_for_a_slot_and_can_be_cancelled_there(start):
    with start() as supervisor:
        clients = [Client(supervisor, n).submit(PROMPT[n:], 40) for n in (1, 2, 3, 4)]
        supervisor.run_until(lambda: supervisor.describe().running == 2)
        assert supervisor.describe().waiting == 2
        clients[3].cancel()
        supervisor.run_until(lambda: all(client.done for client in clients))
    assert clients[3].finished.finish_reason == "cancelled"
    assert clients[3].finished.statistics.completion_tokens == 0
    for client in clients[:3]:
        assert client.tokens == text(PROMPT[client.number :], 40)


def test_what_cannot_be_served_is_refused_with_the_numbers(start, folders):
    plan = plan_for(*folders, max_waiting=1)
    with Supervisor(plan, command=model_command) as supervisor:
        first = Client(supervisor, 1).submit(PROMPT, 5)
        second = Client(supervisor, 2).submit(PROMPT, 5).finish()
        first.finish()
        again = Client(supervisor, 4).submit(PROMPT, 200)
        twin = Client(supervisor, 4).submit(PROMPT, 5).finish()
        again.cancel()
        again.finish()
        long = Client(supervisor, 3).submit([1] * 600, 5).finish()
        supervisor.cancel(type("", (), {"request": 99})())  # unknown: nothing happens
        status = supervisor.describe()
    assert second.refused.code == "overloaded"
    assert twin.refused.code == "usage"
    assert long.refused.code == "prompt_too_long"
    assert "600" in long.refused.detail
    assert "511" in long.refused.detail
    assert (status.finished, status.refused) == (2, 3)


@pytest.mark.fault
@pytest.mark.parametrize("verb", ["propose:3", "open:1", "close:1"])
def test_a_draft_that_dies_in_the_middle_changes_nothing_but_the_mode(start, verb):
    with start(f"draft:die:{verb}") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50)
        seen = []

        def is_over():
            seen.append(supervisor.describe())
            return client.done and seen[-1].num_draft_restarts == 1

        supervisor.run_until(is_over)
        after = Client(supervisor, 2).submit(PROMPT, 20).finish()
    assert client.tokens == text(PROMPT, 50)
    assert after.tokens == text(PROMPT, 20)
    assert "autoregressive" in {one.mode for one in seen if "SIGKILL" in one.mode_reason}
    figures = client.finished.statistics
    if verb != "close:1":
        assert "SIGKILL" in figures.mode_reason
        assert figures.num_drafts == (2 if verb == "propose:3" else 0)


@pytest.mark.fault
def test_a_draft_killed_from_outside_changes_nothing_but_the_mode(start):
    with start() as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 300)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
        client.finish()
    assert client.tokens == text(PROMPT, 300)
    assert client.finished.statistics.mode == "autoregressive"


@pytest.mark.fault
def test_without_a_target_the_reason_is_no_loss_of_the_draft_from_long_ago(start):
    seen = []
    with start(on_loading=lambda _: seen.append(supervisor.describe())) as supervisor:
        supervisor.wait_ready()
        os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        seen.clear()
        os.kill(supervisor.describe().target.pid, signal.SIGKILL)
        supervisor.run_until(lambda: supervisor.describe().num_target_restarts == 1)
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
    reasons = {one.mode_reason for one in seen if one.mode == "autoregressive"}
    assert reasons == {"the draft waits for the target to be started again"}


@pytest.mark.fault
def test_a_draft_that_hangs_is_killed_at_its_deadline(start):
    steps = []
    with start("draft:hang:propose:2", propose=0.2, on_loading=steps.append) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50).finish()
        # That it has no process is not always seen: it is started again in the same turn.
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
    assert client.tokens == text(PROMPT, 50)
    assert client.finished.statistics.mode_reason == "the draft did not answer Propose in time"
    assert any("within 0.2 s" in step.detail for step in steps if step.stage == "failed")


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["nonsense", "refuse", "garbage"])
def test_a_draft_that_answers_wrongly_is_not_asked_again(start, fault):
    with start(f"draft:{fault}:propose:2") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50).finish()
    assert client.tokens == text(PROMPT, 50)
    assert client.finished.statistics.mode == "autoregressive"
    assert client.finished.statistics.num_drafts == 1
    assert client.finished.statistics.mode_reason


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("draft:load_error", "no tensor `x` in the draft"),
        ("draft:exit", "the draft daemon ended with exit code 9"),
        ("draft:die:pair:1", "the draft daemon was ended by SIGKILL"),
        ("draft:refuse:pair:1", "refused in this test"),
        ("draft:wrong:version:1", "wire version"),
        ("draft:wrong:taps:1", "the target captures layers (0, 2, 3)"),
    ],
)
def test_a_draft_that_cannot_serve_leaves_its_own_error_as_the_reason(start, fault, reason):
    with start(fault) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        assert supervisor.describe().draft.stage != "ready"
    assert client.tokens == text(PROMPT, 20)
    assert reason in client.finished.statistics.mode_reason


@pytest.mark.fault
def test_a_draft_that_does_not_load_in_time_is_given_up(start):
    with start("draft:load_hang", load=1.5) as supervisor:
        assert supervisor.wait_ready()
        assert "did not load within 1.5 s" in supervisor.describe().mode_reason


def test_a_request_may_come_before_anything_is_loaded(start):
    with start() as supervisor:
        client = Client(supervisor, 1).submit(PROMPT, 30).finish()
    assert client.tokens == text(PROMPT, 30)


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
def test_a_draft_that_dies_is_started_again_and_counted(start):
    with start("draft:die:propose:3") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1)
        client.submit(PROMPT, 470)
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
        client.finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 470)
    assert status.num_draft_restarts == 1


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


@pytest.mark.fault
def test_a_draft_that_is_late_holds_up_no_request_and_is_not_started_again(start):
    with start(soft_seed=0.05, hard_least=9.0) as supervisor:
        supervisor.wait_ready()
        clients = [Client(supervisor, n).submit(PROMPT[n:], 400) for n in (0, 1)]
        supervisor.run_until(lambda: all(len(client.pieces) > 3 for client in clients))
        pid = supervisor.describe().draft.pid
        os.kill(pid, signal.SIGSTOP)
        before = [len(client.pieces) for client in clients]
        supervisor.run_until(
            lambda: all(
                client.done or len(client.pieces) > number + 8
                for client, number in zip(clients, before, strict=True)
            )
        )
        os.kill(pid, signal.SIGCONT)
        for client in clients:
            client.finish()
        status = supervisor.describe()
    for client in clients:
        assert client.tokens == text(PROMPT[client.number :], 400)
    assert (status.draft.pid, status.num_draft_restarts, status.mode) == (pid, 0, "speculative")
    figures = [client.finished.statistics for client in clients]
    assert sum(each.num_late_proposals for each in figures) > 0


@pytest.mark.fault
def test_a_draft_that_keeps_failing_is_left_off_with_a_reason(start):
    with start("draft:die:propose:1:always", "draft:die:pair:1:always") as supervisor:
        supervisor.wait_ready()
        supervisor.run_until(lambda: supervisor._crew.is_given_up("draft"))
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 20)
    assert "SIGKILL" in client.finished.statistics.mode_reason
    assert status.num_draft_restarts == supervisor._plan.restarts.patience - 1


def test_a_draft_for_another_target_is_refused_before_anything_starts(folders, tmp_path):
    _, other = write_pair(tmp_path, block_size=4)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
    )
    with (
        pytest.raises(DraftMismatch, match="hidden size 48"),
        Supervisor(plan_for(folders[0], other), command=model_command),
    ):
        raise AssertionError("nothing may have started")


def test_requests_that_run_when_the_supervisor_ends_are_refused(start):
    with start() as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        waiting = Client(supervisor, 2).submit(PROMPT, 400)
        supervisor.run_until(lambda: bool(client.pieces))
    assert client.refused.code == "unavailable"
    assert waiting.answers == 1


def test_a_signal_wakes_the_loop_and_the_request_can_still_be_cancelled(start):
    with start() as supervisor, Interrupts() as interrupts:
        supervisor.watch(interrupts.fd, interrupts.on_ready)
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        supervisor.run_until(lambda: bool(client.pieces))
        os.kill(os.getpid(), signal.SIGINT)
        supervisor.run_until(lambda: interrupts.number is not None)
        client.cancel()
        client.finish()
        assert supervisor.wait_ready(lambda: True)
        supervisor.unwatch(interrupts.fd)
    assert isinstance(client.finished, Finished)
    assert client.finished.finish_reason == "cancelled"


def test_waiting_for_the_pair_can_be_given_up(start):
    with start("target:load_hang") as supervisor:
        assert not supervisor.wait_ready(lambda: supervisor.describe().target.pid is not None)


def test_a_step_waits_no_longer_than_it_is_told(start):
    with start("target:load_hang", "draft:load_hang") as supervisor:
        for _ in range(20):
            supervisor.step(0.001)
        assert supervisor.describe().target.stage == "loading"


def test_a_client_that_raises_leaves_the_supervisor_usable(start):
    with start() as supervisor:
        supervisor.wait_ready()
        other = Client(supervisor, 1).submit(PROMPT, 30)
        bad = Client(supervisor, 2)
        bad._take = lambda message: 1 / 0
        bad.submit(PROMPT, 30)
        failures = 0
        while not (other.done and supervisor.describe().running == 0):
            try:
                supervisor.step()
            except ZeroDivisionError:
                failures += 1
    assert other.tokens == text(PROMPT, 30)
    assert failures > 2


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "failed", "code": "checkpoint", "detail": "no weights"}', flush=True)
time.sleep(600)
"""


@pytest.mark.fault
def test_a_failed_daemon_that_does_not_end_is_killed(folders):
    deadlines = msgspec.structs.replace(DEADLINES, terminate=0.2)
    commands = {"draft": (sys.executable, "-I", "-c", STUBBORN)}

    def command(role, config):
        return commands.get(role) or model_command(role, config)

    with Supervisor(plan_for(*folders, deadlines=deadlines), command=command) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        supervisor.run_until(lambda: supervisor.describe().draft.pid is None)
    assert client.finished.statistics.mode_reason == "no weights"


def test_a_daemon_that_takes_no_more_messages_is_given_up(start, monkeypatch):
    with start() as supervisor:
        supervisor.wait_ready()

        def full(message):
            raise Overloaded("64 messages already wait for the daemon")

        monkeypatch.setattr(supervisor._crew._lives.peers["draft"].link, "send", full)
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
    assert client.tokens == text(PROMPT, 20)
    assert "64 messages" in client.finished.statistics.mode_reason


@pytest.mark.fault
@pytest.mark.parametrize("stopped", [False, True], ids=["at-work", "stopped"])
def test_a_killed_supervisor_leaves_no_process_and_no_file(folders, runtime_dir, stopped):
    script = Path(__file__).parent.parent / "support" / "running_supervisor.py"
    command = [sys.executable, str(script), *(str(folder) for folder in folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert list(runtime_dir.iterdir())
        if stopped:  # neither can notice by itself
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        until(lambda: not any(_runs(pid) for pid in pids), what="the end of both daemons")
        until(lambda: not list(runtime_dir.iterdir()), what="the removal of the run directory")


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_pair_is_priced_before_it_is_ready_and_remembered(folders, tmp_path, monkeypatch):
    monkeypatch.setenv(FAULTS, "")
    target, draft = folders
    plan = plan_for(target, draft, cost_cache=str(tmp_path / "costs"))
    for _ in range(2):
        with Supervisor(plan, command=model_command) as supervisor:
            assert supervisor.wait_ready()
            (remembered,) = (tmp_path / "costs").iterdir()
            status = supervisor.describe()
            assert (status.running, status.finished, status.requests) == (0, 0, ())
            client = Client(supervisor, 1).submit(PROMPT, 12, block_width=AUTO).finish()
        assert client.tokens == text(PROMPT, 12)
        assert remembered.stat().st_size > 100
