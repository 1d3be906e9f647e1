"""A daemon that a service manager has started: what it says of its start, its life and its end."""

import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import counting_daemon
from support.manager import manager
from support.waiting import until

from launch.process import Child
from protocol.client import Poller
from protocol.config import Deadlines, TargetConfig, write_config
from protocol.messages import WIRE_VERSION, Hello, Open, OpenItem
from protocol.run_directory import RunDirectory
from protocol.state import TARGET_REPLIES

pytestmark = pytest.mark.process

WATCHDOG = 0.4
LIFE = 1


@contextmanager
def notifying(problem, **environment):
    """A daemon below a manager: (child, manager, run directory)."""
    with RunDirectory() as run, manager(str(run.path / "notify"), watchdog=WATCHDOG) as listening:
        path = run.path / "target.json"
        write_config(TargetConfig(model=problem, run_dir=str(run.path), life=LIFE), path)
        command = (sys.executable, "-I", counting_daemon.__file__, str(path))
        told = {**listening.environment, **environment}
        with Child(command, deadlines=Deadlines(terminate=10.0), environment=told) as child:
            yield child, listening, run.path


def test_ready_comes_after_the_load_signs_of_life_while_it_serves_and_stopping_at_the_end():
    with notifying("serve") as (child, listening, _):
        told = listening.await_told("WATCHDOG=1", times=3)
        assert told[:4] == [
            *("EXTEND_TIMEOUT_USEC=120000000", "STATUS=loading: 1 of 2"),
            *("EXTEND_TIMEOUT_USEC=120000000", "STATUS=loading: 2 of 2"),
        ]
        assert told[4:6] == ["READY=1", "STATUS=the target is loaded"]
        child.terminate()
        told = listening.await_told("STOPPING=1")
        assert told.count("READY=1") == 1


def test_a_load_that_fails_never_says_ready():
    with notifying("load_error") as (_, listening, _):
        assert "READY=1" not in listening.await_told("STOPPING=1")


@pytest.mark.fault
def test_a_loop_that_hangs_in_a_call_gives_no_sign_of_life():
    with notifying("hang") as (child, listening, run_dir), Poller() as poller:
        listening.await_told("READY=1")
        link = poller.connect(f"ipc://{run_dir / 'target.sock'}", TARGET_REPLIES)
        lives = {"target_life": LIFE, "draft_life": 0}
        link.send(Hello(**lives, wire_version=WIRE_VERSION, nonce=5))
        until(lambda: link in poller.poll(0.01), what="the answer to Hello")
        assert list(link.receive())
        link.send(Open(**lives, items=(OpenItem(sequence=1),)))
        poller.poll(0.0)
        _await_silence(listening)
        child.kill()


def _await_silence(listening):
    """For longer than the manager waits no sign came: on a busy machine, tried again."""

    def silent():
        before = len(listening.told)
        try:
            until(lambda: len(listening.told) > before, seconds=2 * WATCHDOG)
        except AssertionError:
            return True
        return False

    until(silent, seconds=60, what="silence")


def test_a_manager_that_cannot_be_reached_by_name_is_a_config_error():
    with notifying("serve", NOTIFY_SOCKET="vsock:1:2") as (child, _, _):
        until(lambda: (child.on_readable(child.fds[-1]), child.exited)[1], seconds=10)
        assert child.exited.code == 78


def test_a_daemon_refuses_core_dumps():
    with notifying("serve") as (child, listening, _):
        listening.await_told("READY=1")
        proc = Path(f"/proc/{child.pid}")
        [line] = [x for x in (proc / "limits").read_text().splitlines() if "core file" in x]
        assert line.split()[4] == "0"
        assert int((proc / "coredump_filter").read_text(), 16) == 0


def test_what_the_manager_says_to_one_process_is_not_passed_on(monkeypatch):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/nowhere")
    code = "import os; print(sorted(n for n in os.environ if os.environ[n] == '/nowhere'))"
    with Child((sys.executable, "-c", code), deadlines=Deadlines()) as child:
        until(lambda: (_read(child), "[]" in child.log)[1], seconds=10)
        assert "NOTIFY_SOCKET" not in child.log


def _read(child):
    for fd in child.fds:
        child.on_readable(fd)


def test_a_signal_while_it_loads_is_an_end_that_is_told():
    with notifying("load_slowly") as (child, listening, _):
        until(lambda: "EXTEND_TIMEOUT_USEC=120000000" in listening.told, seconds=10)
        child._signal(signal.SIGTERM)
        assert "READY=1" not in listening.await_told("STOPPING=1")
