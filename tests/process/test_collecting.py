"""The collecting process: its lines, its shards, and every way in which it ends."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.collecting import FULL, many_asks, sequences
from support.collecting_process import PATIENCE, CollectingProcess
from support.tiny_target import write_tiny_target
from support.waiting import until

from protocol.checkpoints.shards import map_features, read_shard, shard_numbers
from protocol.training import Problem, Written

pytestmark = pytest.mark.process

TAPS = (0, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("model"))


def test_a_killed_process_leaves_whole_shards(model, tmp_path):
    folder = tmp_path / "data"
    with CollectingProcess(tmp_path, model, folder, **FULL) as child:
        child.ask(*many_asks(0, 30))
        child.until_written(1)
        assert child.end(signal.SIGKILL) == -signal.SIGKILL
    told = {number for line in child.of(Written) for number in line.ids}
    assert told <= sequences(folder).keys()
    for number in shard_numbers(folder):
        shard = read_shard(folder, number)
        assert map_features(folder, number, shard, TAPS) is not None


def test_a_process_that_is_told_to_end_writes_what_is_complete(model, tmp_path):
    folder = tmp_path / "data"
    with CollectingProcess(tmp_path, model, folder) as child:
        child.ask(*many_asks(0, 4))
        child.until_answered(4)
        assert shard_numbers(folder) == ()
        assert child.end(signal.SIGTERM) == 0
    assert sorted(sequences(folder)) == [0, 1, 2, 3]
    assert [line.ids for line in child.of(Written)]
    assert child.of(Problem) == []


def test_a_process_whose_parent_is_killed_ends_too_with_its_shard_written(model, tmp_path):
    folder, config = tmp_path / "data", tmp_path / "config.json"
    settings = {"model": str(model), "folder": str(folder), "taps": [], "max_positions": 96}
    config.write_text(json.dumps(settings | {"slots": 2, "threads": 1}))
    line = {"type": "Ask", "id": 5, "tokens": [3, 4], "max_tokens": 8, "kept": {"task": "t"}}
    # The parent keeps the pipe to its child open, says who it is, passes lines on, and waits.
    parent = """if True:
        import subprocess, sys
        command = [sys.executable, "-I", "-m", "target_daemon.collecting", sys.argv[1]]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdin.write(sys.argv[2].encode() + bytes([10]))
        child.stdin.flush()
        print(child.pid, flush=True)
        for line in child.stdout:
            if b"Answered" in line:
                print("answered", flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(config), json.dumps(line)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == b"answered\n"
        handle = os.pidfd_open(pid)
        process.kill()
    try:
        until(lambda: shard_numbers(folder) == (0,), seconds=PATIENCE, what="the shard")
        until(lambda: _is_ended(handle), seconds=PATIENCE, what="the end of the child")
    finally:
        os.close(handle)


def _is_ended(handle):
    """Whether a pidfd's process has ended: only then is it readable."""
    import select

    return bool(select.select([handle], [], [], 0)[0])
