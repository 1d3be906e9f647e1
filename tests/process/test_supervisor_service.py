"""`dflashd supervisor` below a service manager: what it says, and what its daemons do not hear."""

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import ISOLATED
from support.manager import manager
from support.tiny_text import write_speaking_pair
from support.waiting import until

from launch.remote import Remote

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

WATCHDOG = 0.5
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ARGUMENTS = ("--threads", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_speaking_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def managed(runtime_dir, tmp_path, *words):
    """(process, manager, run directory) of a supervisor that a manager has started."""
    place = runtime_dir / "s"
    with manager(str(tmp_path / "notify"), watchdog=WATCHDOG) as listening:
        process = subprocess.Popen(
            [*ISOLATED, "supervisor", "--run-dir", str(place), *ARGUMENTS, *words],
            env=os.environ | ONE_THREAD | listening.environment,
            stderr=subprocess.PIPE,
        )
        try:
            yield process, listening, place
        finally:
            process.kill()
            process.communicate(timeout=60)


def _environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.fault
def test_a_supervisor_tells_its_start_each_change_its_life_and_its_end(runtime_dir, tmp_path, pair):
    target, draft = map(str, pair)
    words = ("--model", target, "--draft", draft)
    with managed(runtime_dir, tmp_path, *words) as (process, listening, place):
        told = listening.await_told("READY=1", seconds=60)
        assert told[told.index("READY=1") + 1] == "STATUS=serving, speculative"
        before = told[: told.index("READY=1")]
        assert [line for line in before if line.startswith("STATUS=target: ready; draft: ")]
        assert "EXTEND_TIMEOUT_USEC=120000000" in before
        assert "WATCHDOG=1" not in before
        listening.await_told("WATCHDOG=1", times=3, seconds=60)
        with Remote(place / "dflash.sock") as remote:
            status = remote.status()
        for pid in (status.target.pid, status.draft.pid):
            assert b"NOTIFY_SOCKET" not in _environment(pid)
            assert b"WATCHDOG_USEC" not in _environment(pid)
        os.kill(status.draft.pid, signal.SIGKILL)
        until(lambda: _statuses(listening)[-1] != "STATUS=serving, speculative", seconds=60)
        assert _statuses(listening)[-1].startswith("STATUS=serving, autoregressive: ")
        until(lambda: _statuses(listening)[-1] == "STATUS=serving, speculative", seconds=60)
        process.send_signal(signal.SIGTERM)
        told = listening.await_told("STOPPING=1", seconds=60)
        assert process.wait(30) == 0
        assert (told.count("READY=1"), told.count("STOPPING=1")) == (1, 1)


def _statuses(listening):
    return [line for line in listening.told if line.startswith("STATUS=serving")]


def test_a_supervisor_whose_target_cannot_load_never_says_ready(runtime_dir, tmp_path, pair):
    broken = shutil.copytree(pair[0], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 99)
    words = ("--model", str(broken), "--draft", "none")
    with managed(runtime_dir, tmp_path, *words) as (process, listening, _):
        assert process.wait(60) == 78
        assert "READY=1" not in listening.await_told("STOPPING=1")
