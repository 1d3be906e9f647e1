"""A supervisor over daemons that it did not start: it drives them, and never starts or ends one."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from support.model_pair import local_token, model_text
from support.services import Service, model_services, target_config
from support.supervised import DEADLINES, Client, attach_plan
from support.waiting import until

from launch.supervisor import Supervisor
from protocol.driving import is_driven
from protocol.errors import NotTheDriver, PermissionRefused
from protocol.run_directory import sweep_orphans

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))
SUPPORT = Path(__file__).parent.parent / "support"
HOLDER = SUPPORT / "lock_holder.py"
ATTACHED = Path(__file__).parent.parent / "support" / "attached_supervisor.py"


@pytest.fixture
def pair(runtime_dir):
    with model_services(runtime_dir) as services:
        yield services


def attach(pair, **deadlines):
    target, draft = pair
    times = msgspec.structs.replace(DEADLINES, **deadlines)
    return Supervisor(attach_plan(target.run_dir, draft.run_dir, deadlines=times))


def text(limit):
    return model_text(PROMPT, limit, -1, local_token)[0]


def run_until_tokens(supervisor, client, number):
    supervisor.run_until(lambda: len(client.tokens) >= number or client.done)
    assert not client.done


@contextmanager
def another(pair):
    """A supervisor in a process of its own, in the middle of two requests."""
    command = (sys.executable, str(ATTACHED), *(str(service.run_dir) for service in pair))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "driving\n"
            yield process
        finally:
            process.kill()
            process.wait()
            sweep_orphans()  # the folder for its clients' socket, as the next command would


def test_a_pair_that_runs_already_serves_and_runs_on(pair):
    pids = [service.pid for service in pair]
    for number in (1, 2):
        with attach(pair) as supervisor:
            assert supervisor.wait_ready()
            client = Client(supervisor, number).submit(PROMPT, 60).finish()
            status = supervisor.describe()
        assert client.tokens == text(60)
        assert client.finished.statistics.mode == "speculative"
        assert [status.target.pid, status.draft.pid] == pids
    assert [service.process.poll() for service in pair] == [None, None]
    assert not any(is_driven(service.run_dir) for service in pair)


def test_a_killed_target_that_comes_back_is_replayed(pair):
    target, _ = pair
    with attach(pair) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 300)
        run_until_tokens(supervisor, client, 30)
        target.kill()
        supervisor.run_until(lambda: supervisor.describe().target.stage != "ready")
        target.start()
        client.finish()
        status = supervisor.describe()
    assert client.tokens == text(300)
    assert status.num_target_restarts >= 1
    assert status.target.pid == target.pid


def test_a_killed_draft_that_comes_back_speculates_in_the_same_request(pair):
    _, draft = pair
    with attach(pair) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        run_until_tokens(supervisor, client, 30)
        draft.kill()
        supervisor.run_until(lambda: supervisor.describe().draft.stage != "ready")
        assert "draft daemon has ended" in supervisor.describe().mode_reason
        draft.start()
        supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready" or client.done)
        again = Client(supervisor, 2).submit(PROMPT, 60)
        client.finish()
        again.finish()
    assert client.tokens == text(400)
    assert again.tokens == text(60)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_daemon_that_talks_nonsense_is_asked_to_leave(runtime_dir, role):
    verb = {"target": "verify", "draft": "propose"}[role]
    faults = f"{role}:nonsense:{verb}:3:always"
    with model_services(runtime_dir, faults=faults) as pair, attach(pair) as supervisor:
        sick = next(service for service in pair if service.role == role)
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 100)
        supervisor.run_until(lambda: sick.process.poll() is not None)
        assert sick.wait() == 75
        assert f"asked the {role} to leave" in sick.said()
        sick.start(faults="")
        client.finish()
    assert client.tokens == text(100)


def test_a_daemon_that_hung_past_its_deadline_leaves_when_it_comes_to_its_senses(pair):
    _, draft = pair
    with attach(pair, hard_least=0.5, propose=0.5) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 400)
        run_until_tokens(supervisor, client, 30)
        draft.process.send_signal(signal.SIGSTOP)
        client.finish()
        supervisor.run_until(lambda: supervisor.describe().draft.stage != "ready")
        draft.process.send_signal(signal.SIGCONT)
        supervisor.run_until(lambda: draft.process.poll() is not None)
        assert draft.wait() == 75
        draft.start()
        supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready")
        again = Client(supervisor, 2).submit(PROMPT, 60).finish()
    assert client.tokens == text(400)
    assert again.finished.statistics.mode == "speculative"


def test_a_killed_supervisors_daemons_go_to_the_next_one_at_once(pair):
    pids = [service.pid for service in pair]
    with another(pair) as process:
        process.kill()
        process.wait()
        with attach(pair) as supervisor:
            supervisor.wait_ready()
            clients = [Client(supervisor, n).submit(PROMPT, 60) for n in (1, 2)]
            for client in clients:
                assert client.finish().tokens == text(60)
            assert supervisor.describe().num_target_restarts == 0
    assert [service.pid for service in pair] == pids


@pytest.mark.parametrize("stopped", [False, True], ids=["at-work", "stopped"])
def test_a_living_supervisors_daemons_are_refused_with_its_pid(pair, stopped):
    with another(pair) as process:
        if stopped:  # hung, and alive: nobody may take its daemons from it
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(NotTheDriver, match=f"driven by process {process.pid}"), attach(pair):
            pass
        assert process.poll() is None
        second = subprocess.run(
            (sys.executable, str(ATTACHED), *(str(service.run_dir) for service in pair)),
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        )
        assert second.returncode == 75
        assert re.search(rf"driven by process {process.pid}\n", second.stdout)
        os.kill(process.pid, 0)


def test_daemons_that_come_after_the_supervisor_are_found(runtime_dir, tmp_path):
    target = Service.of_models("target", target_config(runtime_dir / "t"), tmp_path)
    with Supervisor(attach_plan(target.run_dir)) as supervisor:
        client = Client(supervisor, 1).submit(PROMPT, 60)
        supervisor.step(0.05)
        assert supervisor.describe().target.stage == "loading"
        target.start()
        client.finish()
        assert client.tokens == text(60)
        assert client.finished.statistics.mode == "autoregressive"
        target.end()


def test_a_request_whose_target_never_comes_is_refused(runtime_dir):
    plan = attach_plan(runtime_dir / "none", deadlines=msgspec.structs.replace(DEADLINES, load=0.3))
    with Supervisor(plan) as supervisor:
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
    assert client.refused.code == "daemon_absent"
    assert "answered within 0.3 s" in client.refused.detail


def test_a_supervisor_that_ends_leaves_a_living_pair_and_removes_what_a_dead_one_left(pair):
    target, draft = pair
    with attach(pair) as supervisor:
        supervisor.wait_ready()
        target.kill(signal.SIGTERM)
        draft.kill()
    until(lambda: not target.run_dir.exists())
    assert not draft.run_dir.exists()


def test_a_folder_that_others_can_enter_is_no_daemons(runtime_dir, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionRefused, match="mode 0700"), Supervisor(attach_plan(tmp_path)):
        pass


def test_a_pair_that_somebody_else_drives_meanwhile_is_had_again_when_he_is_gone(pair):
    """As when a service manager removes a daemon's folder, and the lock with it."""
    _, draft = pair
    with attach(pair) as supervisor, ExitStack() as other:
        supervisor.wait_ready()
        draft.kill(signal.SIGTERM)
        shutil.rmtree(draft.run_dir)
        draft.start().until_ready()
        holder = (sys.executable, str(HOLDER), str(draft.run_dir), "1")
        process = other.enter_context(
            subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        other.callback(process.kill)
        assert process.stdout.readline() == b"held\n"
        supervisor.run_until(lambda: f"process {process.pid}" in supervisor.describe().draft.reason)
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
        process.kill()
        supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready")
        again = Client(supervisor, 2).submit(PROMPT, 60).finish()
    assert client.tokens == again.tokens == text(60)
    assert again.finished.statistics.mode == "speculative"
