"""How a daemon starts, fails and ends; and that nothing outlives a supervisor that is killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import counting_daemon, problem_supervisor
from support.children import events_until
from support.waiting import until

from launch.process import Child, Exited
from protocol import daemon_main
from protocol.config import Deadlines, TargetConfig, write_config
from protocol.errors import UsageError
from protocol.run_directory import OWNER_LOCK, RunDirectory
from protocol.standing import StatusStream
from protocol.status import LoadFailed, Loading, Ready

pytestmark = pytest.mark.process


@contextmanager
def daemon(problem, *, arguments=None, **config):
    with RunDirectory() as run:
        path = run.path / "target.json"
        settings = {"model": problem, "run_dir": str(run.path), "life": 1, **config}
        write_config(TargetConfig(**settings), path)
        command = (sys.executable, "-I", counting_daemon.__file__, *(arguments or [str(path)]))
        with Child(command, deadlines=Deadlines(terminate=5.0)) as child:
            yield child


def test_a_daemon_tells_its_progress_then_that_it_is_ready():
    with daemon("serve") as child:
        progress = [Loading(done=1, total=2), Loading(done=2, total=2)]
        assert events_until(child, Ready) == [*progress, Ready()]


def test_a_failed_load_is_the_daemons_own_error_and_its_exit_code():
    with daemon("load_error") as child:
        failed, exited = events_until(child, Exited)
        assert failed == LoadFailed(code="checkpoint", detail="no tensor `x`")
        assert exited.code == 78


def test_a_defect_while_loading_is_internal_with_its_traceback_in_the_log():
    with daemon("load_defect") as child:
        failed, exited = events_until(child, Exited)
        assert failed.code == "internal"
        assert "secret" not in failed.detail
        assert exited.code == 70
        assert "ZeroDivisionError: secret" in exited.log


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [(["/no/such/config.json"], "config", 78), (["a", "b"], "usage", 2)],
)
def test_a_daemon_without_a_config_says_so(arguments, code, exit_code):
    with daemon("serve", arguments=arguments) as child:
        failed, exited = events_until(child, Exited)
        assert (failed.code, exited.code) == (code, exit_code)


def test_a_run_directory_that_is_gone_is_unavailable():
    with daemon("serve", run_dir="/no/such/folder") as child:
        failed, exited = events_until(child, Exited)
        assert (failed.code, exited.code) == ("unavailable", 69)


def test_a_daemon_that_is_told_to_end_while_it_loads_ends_without_an_error():
    with daemon("load_slowly") as child:
        events_until(child, Loading)
        child.terminate()
        events = events_until(child, Exited)
        assert not any(isinstance(event, LoadFailed) for event in events)
        assert events[-1].code == 0


def test_what_libraries_print_is_log_and_not_status():
    with daemon("print") as child:
        assert events_until(child, Ready)[-1] == Ready()
        until(lambda: (child.on_readable(child.fds[1]), "a library says hello" in child.log)[1])


def test_only_a_daemons_config_is_served():
    with pytest.raises(UsageError):
        daemon_main._serve("target", Deadlines(), ("x", ()), None, None, None)


def test_a_parent_that_does_not_read_misses_lines_and_blocks_nobody(capfd):
    reader, writer = os.pipe()
    kept = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    status = StatusStream()
    try:
        os.close(reader)
        status.write(Ready())
    finally:
        status.close()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def supervised(target_problem, draft_problem):
    """A supervisor in a process of its own: (process, run directory, pids of its daemons)."""
    command = [sys.executable, problem_supervisor.__file__, target_problem, draft_problem]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        path, *pids = process.stdout.readline().decode().split()
        yield process, Path(path), [int(pid) for pid in pids]
        process.kill()


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.fault
def test_kill_9_of_the_supervisor_leaves_nothing_behind():
    with supervised("serve", "serve") as (supervisor, path, pids):
        assert len(alive(pids)) == 2
        assert sorted(entry.name for entry in path.glob("*.sock")) == ["draft.sock", "target.sock"]
        supervisor.kill()
        until(lambda: not alive(pids) and not path.exists(), seconds=60, what="the end of all")


@pytest.mark.fault
def test_one_daemon_that_is_killed_as_well_does_not_keep_the_folder():
    with supervised("serve", "serve") as (supervisor, path, pids):
        os.kill(pids[0], signal.SIGKILL)
        supervisor.kill()
        until(lambda: not alive(pids) and not path.exists(), seconds=60, what="the end of all")


def test_a_supervisor_that_ends_in_order_leaves_nothing_behind():
    with supervised("serve", "serve") as (supervisor, path, pids):
        supervisor.stdin.close()
        assert supervisor.wait(60) == 0
        assert not alive(pids)
        assert not path.exists()


HANGING = """
import os, sys, time
from pathlib import Path
from protocol.lifeline import Lifeline
from protocol.run_directory import Member
member = Member(Path(sys.argv[1]))
with Lifeline(grace=0.2, last_act=member.leave), member:
    os.write(1, b"armed")
    while True:
        time.sleep(60)
"""


@pytest.mark.fault
def test_a_process_that_hangs_without_its_parent_removes_the_folder_and_is_killed(runtime_dir):
    orphaned = runtime_dir / "orphaned"
    orphaned.mkdir(mode=0o700)
    (orphaned / OWNER_LOCK).touch()
    command = [sys.executable, "-c", HANGING, str(orphaned)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout.read(5) == b"armed"
        process.send_signal(signal.SIGTERM)  # noted, and the hanging call goes on
        assert process.poll() is None
        start = time.monotonic()
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL
        assert time.monotonic() - start >= 0.2
    assert not orphaned.exists()


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""

CHILD = """
import os, time
from protocol.lifeline import Lifeline
with Lifeline(grace=60) as lifeline:
    os.write(1, b"armed\\n")
    while not lifeline.reason:
        time.sleep(0.01)
"""


@pytest.mark.fault
def test_the_parents_death_is_a_signal_even_while_the_pipe_is_held_open():
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        said = {parent.stdout.readline(), parent.stdout.readline()}
        [pid] = [int(line) for line in said if line.strip().isdigit()]
        assert b"armed\n" in said
        parent.kill()
        until(lambda: not alive([pid]), what="the child's end")  # our end of its stdin is open


def test_a_real_daemon_counts_in_the_coverage_also_when_started_isolated(tmp_path, monkeypatch):
    """The coverage gate means nothing if isolated children are not measured."""
    settings = tmp_path / "coveragerc"
    data = tmp_path / "data"
    settings.write_text(f"[run]\nparallel = true\nsource_pkgs = protocol\ndata_file = {data}/c\n")
    data.mkdir()
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # of a run that measures us
    environment = {"COVERAGE_PROCESS_START": str(settings)}
    with RunDirectory() as run:
        path = run.path / "target.json"
        write_config(TargetConfig(model="serve", run_dir=str(run.path), life=1), path)
        command = (sys.executable, "-I", counting_daemon.__file__, str(path))
        child = Child(command, deadlines=Deadlines(terminate=20.0), environment=environment)
        with child:
            events_until(child, Ready)
    assert child.exited.code == 0
    assert list(data.glob("c.*"))
