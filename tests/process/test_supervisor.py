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
from support.supervised import (
    DEADLINES,
    FAULTS,
    Client,
    model_command,
    plan_for,
    starter,
    text,
)
from support.tiny_pair import write_pair
from support.waiting import until

from launch.interrupts import Interrupts
from launch.policy import AUTO
from launch.supervisor import Supervisor
from protocol.errors import (
    Overloaded,
)
from protocol.messages import Finished

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def start(folders, monkeypatch):
    return starter(folders, monkeypatch)


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


def test_a_request_may_come_before_anything_is_loaded(start):
    with start() as supervisor:
        client = Client(supervisor, 1).submit(PROMPT, 30).finish()
    assert client.tokens == text(PROMPT, 30)


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
