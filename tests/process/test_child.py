import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support import problem_child
from support.children import events_until
from support.waiting import until

from launch.process import Child, Exited, daemon_command
from protocol.config import Deadlines
from protocol.errors import InternalError, Unavailable
from protocol.status import LoadFailed, Loading, Ready

pytestmark = pytest.mark.process

QUICK = Deadlines(terminate=0.3, kill=2.0)


def problem(mode, *arguments, deadlines=QUICK, environment=None):
    command = (sys.executable, "-I", problem_child.__file__, mode, *arguments)
    return Child(command, deadlines=deadlines, environment=environment)


def test_a_child_reports_its_progress_and_is_ready():
    with problem("serve") as child:
        assert events_until(child, Ready) == [Loading(done=1, total=2), Ready()]
        assert child.exited is None


def test_a_child_that_exits_at_once_is_reported_with_its_code_and_its_words():
    with problem("exit_at_once") as child:
        [exited] = events_until(child, Exited)
        assert exited == Exited(code=3, signal="", log="no such weights")
        assert str(exited) == "ended with exit code 3: no such weights"
        assert child.fds == ()


def test_the_childs_own_error_comes_before_its_exit():
    with problem("fail_with_a_code") as child:
        failed, exited = events_until(child, Exited)
        assert failed == LoadFailed(code="checkpoint", detail="no tensor `x`")
        assert exited.code == 78


def test_a_child_that_dies_after_ready_is_reported_with_its_signal():
    with problem("die_after_ready") as child:
        ready, exited = events_until(child, Exited)
        assert ready == Ready()
        assert (exited.code, exited.signal) == (None, "SIGKILL")
        assert str(exited) == "was ended by SIGKILL: about to die"


def test_garbage_on_standard_output_goes_to_the_log_and_does_no_harm():
    with problem("print_garbage") as child:
        assert events_until(child, Ready) == [Ready()]
        assert "hello" in child.log
        assert "\0" not in child.log


def test_a_long_log_is_read_and_only_its_end_is_kept():
    with problem("flood_the_log") as child:
        [exited] = events_until(child, Exited)
        assert "line 19999" in exited.log
        assert "line 19000" not in exited.log
        assert "\x1b" not in exited.log
        assert len(exited.log) < 50_000


def test_a_child_that_ignores_sigterm_is_killed_after_the_deadline():
    with problem("ignore_sigterm") as child:
        events_until(child, Ready)
        start = time.monotonic()
        child.terminate()
        first_deadline = child.deadline
        child.terminate()
        assert child.deadline == first_deadline
        [exited] = events_until(child, Exited)
        assert exited.signal == "SIGKILL"
        assert QUICK.terminate <= time.monotonic() - start < QUICK.terminate + QUICK.kill
        assert child.deadline is None


def test_a_child_that_ends_when_asked_is_not_killed():
    with problem("serve", deadlines=Deadlines(terminate=30.0)) as child:
        events_until(child, Ready)
        child.terminate()
        [exited] = events_until(child, Exited)
        assert exited.signal == "SIGTERM"


def test_a_stopped_child_ends_when_asked():
    with problem("stop_itself", deadlines=Deadlines(terminate=30.0)) as child:
        events_until(child, Ready)
        until(lambda: ") T " in Path(f"/proc/{child.pid}/stat").read_text())
        start = time.monotonic()
        assert child.close().signal == "SIGTERM"
        assert time.monotonic() - start < 10.0


def test_what_the_child_started_ends_with_it():
    with problem("leave_a_grandchild") as child:
        events = events_until(child, Exited)
        grandchild = int(re.search(r"\d+", events[-1].log).group())
        until(lambda: _has_ended(grandchild), what="the grandchild's end")


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_child_without_streams_is_still_watched_and_ended():
    with problem("close_its_streams") as child:
        until(lambda: (_read_all(child), len(child.fds) == 1)[1])
        assert child.exited is None
    assert child.exited.signal == "SIGTERM"


def _read_all(child):
    for fd in child.fds[:-1]:
        child.on_readable(fd)


def test_leaving_the_block_ends_and_reaps_the_child():
    with problem("ignore_sigterm") as child:
        events_until(child, Ready)
        pid = child.pid
    assert child.exited.signal == "SIGKILL"
    assert not Path(f"/proc/{pid}").exists()
    assert child.close() is child.exited
    child.kill()


def test_the_child_gets_a_clean_environment_and_a_group_of_its_own(monkeypatch):
    supervisors = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "CREDENTIALS_DIRECTORY")
    for name in supervisors:
        monkeypatch.setenv(name, "7")
    asked = (*supervisors, "OMP_NUM_THREADS", "DFLASHD_PARENT")
    extra = {"OMP_NUM_THREADS": "1"}
    with problem("show_its_surroundings", *asked, environment=extra) as child:
        [exited] = events_until(child, Exited)
    facts = json.loads(exited.log.removeprefix("facts "))
    assert facts["environment"] == {**extra, "DFLASHD_PARENT": str(os.getpid())}
    assert facts["group"] == facts["pid"]
    assert facts["isolated"] == 1
    assert set(facts["descriptors"]) <= {0, 1, 2, 3}


def test_a_program_that_is_not_there_is_unavailable():
    with pytest.raises(Unavailable, match="/no/such/program"):
        Child(("/no/such/program",), deadlines=QUICK).start()


def test_looking_at_a_descriptor_that_is_not_ready_changes_nothing():
    with problem("serve") as child:
        events_until(child, Ready)
        for fd in (*child.fds, 99):
            assert child.on_readable(fd) == []
        assert child.on_deadline() == []
        assert child.exited is None
    assert child.exited.signal == "SIGTERM"


def test_a_child_that_was_not_started_says_so():
    child = Child(("true",), deadlines=QUICK)
    assert child.fds == ()
    with pytest.raises(InternalError):
        _ = child.pid


def test_a_daemon_is_started_isolated():
    assert daemon_command("target_daemon", Path("/x/c.json")) == (
        sys.executable,
        "-I",
        "-m",
        "target_daemon",
        "/x/c.json",
    )


def test_a_child_that_does_not_even_end_when_killed_is_given_up():
    # Nothing that a test can start resists SIGKILL: the deadline passes before anyone looks.
    with problem("ignore_sigterm", deadlines=Deadlines(terminate=1e-6, kill=1e-6)) as child:
        events_until(child, Ready)
        child.terminate()
        until(lambda: time.monotonic() > child.deadline)
        assert child.on_deadline() == []
        until(lambda: time.monotonic() > child.deadline)
        [exited] = child.on_deadline()
        assert str(exited) == "did not end when it was killed"
        assert child.fds == ()
    assert child._process.wait() == -signal.SIGKILL
