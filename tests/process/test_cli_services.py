"""`dflashd target`, `draft` and `supervisor --attach` as a user runs them: our own daemons."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from support.command import ISOLATED, dflashd
from support.services import Service
from support.supervised import DEADLINES, Client, attach_plan
from support.tiny_text import write_speaking_pair
from support.waiting import until

from launch.remote import Remote
from launch.supervisor import Supervisor
from protocol.instances import daemon_directory, find, named_directory

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROMPT = list(range(5, 45))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SMALL = ("--threads", "1", "--dtype", "float32")
LONG = 300
AT = ("--attach-target",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_speaking_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(folders, runtime_dir, tmp_path, monkeypatch):
    """Both verbs as services of the pair ``a``, serving; they are ended at the end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target, draft = map(str, folders)
    words = {
        "target": ("target", "--model", target, "--draft", draft),
        "draft": ("draft", "--draft", draft),
    }
    with ExitStack() as stack:
        services = []
        for role, more in words.items():
            run_dir = daemon_directory(role, "a", None)
            command = (*ISOLATED, *more, "--instance", "a", *SMALL)
            services.append(Service(role, run_dir, tmp_path / f"{role}.log", command))
            stack.callback(services[-1].end)
            services[-1].start()
        yield [service.until_ready() for service in services]
        assert all(service.kill(signal.SIGTERM) == 0 for service in services)
        assert list(runtime_dir.iterdir()) == []


@contextmanager
def attached(model):
    """`dflashd supervisor --attach`, named ``a``, once it drives both daemons."""
    command = (*ISOLATED, "supervisor", "--attach", "--instance", "a", "--model", str(model))
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT) as process:
        try:
            until((named_directory("a") / "dflash.sock").is_socket, seconds=60)
            until(lambda: state().draft.stage == "ready", seconds=60)
            yield process
        finally:
            process.terminate()


def state():
    with Remote(find("a")) as remote:
        return remote.status()


@contextmanager
def background(*arguments):
    """A command whose supervisor goes away."""
    command = (*ISOLATED, *arguments)
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdout=quiet, stderr=quiet, env=os.environ | ENVIRONMENT
    ) as process:
        try:
            yield
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()


def generated(*more):
    command = (
        "generate",
        "Say something.",
        "--json",
        "--block-width",
        "6",
        "--max-tokens",
        "60",
        *more,
    )
    done = dflashd(*command, env=ENVIRONMENT)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_kill_of_any_of_the_three_in_mid_text_changes_no_token(folders, pair):
    target, draft = pair
    model = str(folders[0])
    pids = [service.pid for service in pair]
    with attached(model) as supervisor:
        first = generated("--connect", "a")
        refused = dflashd("supervisor", "--model", model, *AT, str(target.run_dir), env=ENVIRONMENT)
        assert refused.code == 75
        assert f"driven by process {supervisor.pid}" in refused.err
        with background("generate", "Say something.", "--connect", "a", "--max-tokens", "9000"):
            until(lambda: state().running == 1, seconds=60)
            supervisor.kill()
            supervisor.wait()
    assert [service.process.poll() for service in pair] == [None, None]
    plan = attach_plan(target.run_dir, draft.run_dir, deadlines=DEADLINES)
    with Supervisor(plan) as supervisor:
        supervisor.wait_ready()
        status = supervisor.describe()
        assert [status.target.pid, status.draft.pid] == pids
        whole = Client(supervisor, 1).submit(PROMPT, LONG).finish()
        for number, victim in enumerate(pair, start=2):
            client = Client(supervisor, number).submit(PROMPT, LONG)
            supervisor.run_until(lambda client=client: len(client.tokens) >= 20)
            assert not client.done
            victim.kill()
            victim.start()
            client.finish()
            assert client.tokens == whole.tokens
            assert client.finished.statistics.num_replay_mismatches == 0
            supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready")
        status = supervisor.describe()
    assert status.num_target_restarts >= 1
    assert status.num_draft_restarts >= 1
    assert whole.finished.statistics.mode == first["mode"] == "speculative"
    with attached(model) as supervisor:
        assert generated("--connect", "a")["text"] == first["text"]
        supervisor.terminate()
        assert supervisor.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("draft", "--draft", "none"), "nothing to run"),
        (("draft", "--model", "some/other"), "name one with --draft"),
        (("draft", "--instance", "a", "--run-dir", "/x"), "--instance chooses a run directory"),
        (("supervisor", "--attach", "--exact"), "--exact: said when the daemons are started"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, told):
    done = dflashd(*words, env=ENVIRONMENT)
    assert done.code in (2, 78)
    assert told in done.err
    assert done.err.count("\n") == 1
