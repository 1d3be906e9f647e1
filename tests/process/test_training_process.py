"""The training process as `dflashd train` runs it: real signals, pipes and ranks."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.learnable import tiny_config, write_answers, write_learnable_target

from draft_daemon.training.data import Corpus, Place
from draft_daemon.training.features import FOLDER, Maker
from draft_daemon.training.journal import read_journal
from draft_daemon.training.ranks import Ranks
from draft_daemon.training.run import run
from draft_daemon.training.state import STATE
from launch.interrupts import Interrupts
from launch.training import teaching
from launch.training.bars import Stages
from launch.training.watch import Watch
from protocol.config import write_config
from protocol.ending import EndingSignals
from protocol.errors import CheckpointError, ModelNotFound, ProtocolError
from protocol.training import (
    DATA_FOLDER,
    STEPS_FILE,
    CollectConfig,
    Problem,
    Report,
    Trained,
    TrainLine,
    Validated,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
LISTENING, LOOPBACK = "0A", "0100007F"  # in /proc: a state, and 127.0.0.1
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learnable")
    model = write_learnable_target(folder / "target")
    write_answers(model, folder / "answers", trained=16, held_out=2)
    return model, folder / "answers"


@pytest.fixture
def fresh(made, tmp_path):
    """A config over a copy of the data, and the file that holds it."""
    model, answers = made

    def make(name="out", **changes):
        shutil.copytree(answers, tmp_path / name)
        config = tiny_config(model, tmp_path / name, **({"steps": 1 << 20} | changes))
        file = tmp_path / f"{name}.json"
        write_config(config, file)
        return config, file

    return make


def spawn(file, **options):
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "draft_daemon.training", str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ONE_THREAD,
        **options,
    )


def lines_of(stream):
    for line in stream:
        yield msgspec.json.decode(line, type=TrainLine)


def in_process(config):
    """What follows in this process, to the end."""
    before = torch.get_num_threads()
    lines = []
    try:
        with EndingSignals() as endings:
            return run(config, Ranks(), endings, lines.append), lines
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["signal", "parent"])
def test_an_ended_process_leaves_a_state_that_is_gone_on_from(fresh, how):
    config, file = fresh()
    with spawn(file) as process:
        lines = lines_of(process.stdout)
        # The first report of a step: training is under way, and far from its end.
        assert any(isinstance(line, Report) and line.stage == "train" for line in lines)
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
            process.stdin = None
        rest = list(lines)
        assert process.wait() == 0
    assert not any(isinstance(line, Trained | Problem) for line in rest)
    done = [line.step for line in read_journal(file.with_suffix("") / STEPS_FILE)[1:]]
    steps = done[-1] + 2
    trained, lines = in_process(msgspec.structs.replace(config, steps=steps))
    assert trained.steps == steps
    assert [line.step for line in lines if isinstance(line, Validated)][-1] == steps


def test_what_is_wrong_is_one_line_and_an_exit_code(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model": "m", "folder": "f", "taps": [1], "mask_token_id": 1, "stepz": 1}')
    with spawn(file) as process:
        (problem,) = lines_of(process.stdout)
        assert process.wait() == 78
    assert problem.code == "config"
    assert "did you mean `steps`?" in problem.detail


def addresses(process):
    """Where a process listens, as the kernel spells it."""
    sockets = set()
    for each in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed since they were listed
            sockets.add(str(each.readlink()))
    lines = (process / "net/tcp").read_text() + (process / "net/tcp6").read_text()
    rows = [row for row in map(str.split, lines.splitlines()) if row[3] == LISTENING]
    return {row[1].split(":")[0] for row in rows if f"socket:[{row[9]}]" in sockets}


class Listening(Stages):
    """Notes on which addresses the children of this process listen, at every report of a step."""

    def __init__(self):
        self.found = set()

    def report(self, told):
        if told.stage == "train":
            own = os.getpid()
            for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
                self.found |= addresses(Path("/proc", child))


def compare(alone, together):
    """Every step's loss, counts and accuracy, and the weights at the end."""
    one, two = (read_journal(folder / STEPS_FILE) for folder in (alone, together))
    assert [line.step for line in one] == [line.step for line in two] == [0, 0, 1, 2, 3, 4]
    for ours, theirs in zip(one[1:-1], two[1:-1], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.tokens == theirs.tokens
        assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.02)
    ours, theirs = (load_file(folder / STATE) for folder in (alone, together))
    weights = [name for name in ours if name.startswith("weights.")]
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in weights)
    assert worst < 1e-3, worst


def test_two_ranks_have_the_loss_and_the_weights_of_one(fresh, tmp_path, monkeypatch):
    changes = {"steps": 4, "sequences": 4, "validate_every": 100}
    alone, _ = fresh("alone", **changes)
    _, file = fresh("together", **changes)
    in_process(alone)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    places, stages = teaching.places(2, tmp_path / "meeting"), Listening()
    with Interrupts() as interrupts:
        watch = Watch(interrupts, stages)
        told = teaching.teach(teaching.command(file), places, watch, lambda: None)
    assert told.steps == 4
    assert stages.found == {LOOPBACK}  # no other host can speak to the ranks
    assert not (tmp_path / "meeting").exists()
    compare(tmp_path / "alone", tmp_path / "together")


def test_torchrun_starts_ranks_that_have_the_loss_and_the_weights_of_one(fresh, tmp_path):
    changes = {"steps": 4, "sequences": 4, "validate_every": 100}
    alone, _ = fresh("alone", **changes)
    _, file = fresh("together", **changes)
    in_process(alone)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2")
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    subprocess.run(
        [sys.executable, *torchrun, *meeting, "-m", "draft_daemon.training", str(file)],
        env=ONE_THREAD | {"GLOO_SOCKET_IFNAME": teaching.LOOPBACK},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=200,
    )
    compare(tmp_path / "alone", tmp_path / "together")


@pytest.fixture
def collecting(fresh, tmp_path):
    """A training config by which missing features are made."""
    config, _ = fresh()
    data = tmp_path / "out" / DATA_FOLDER
    collect = CollectConfig(
        model=config.model, folder=str(data), taps=config.taps, dtype="float32", threads=1
    )
    write_config(collect, tmp_path / "collect.json")
    return msgspec.structs.replace(config, collect=str(tmp_path / "collect.json"))


def test_features_that_are_missing_are_made_by_the_target_and_leave_no_file(collecting, tmp_path):
    data, said = tmp_path / "out" / DATA_FOLDER, []
    with Corpus(data, collecting.taps, 97, None) as corpus:
        before = [corpus.text(Place(1, at)).features.copy() for at in range(3)]
    (data / "features-00001.safetensors").unlink()
    with (
        EndingSignals() as endings,
        Maker(collecting, 0, endings, said.append) as maker,
        Corpus(data, collecting.taps, 97, maker.make) as corpus,
    ):
        made = [corpus.text(Place(1, at)).features.copy() for at in range(3)]
        assert not (tmp_path / "out" / FOLDER.format(0)).exists()
    for old, new in zip(before, made, strict=True):
        ours, theirs = (torch.from_numpy(each).view(torch.bfloat16).float() for each in (old, new))
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert {(line.stage, line.detail) for line in said} == {("features", "shard 1")}
    there = [f"{name}.safetensors" for name in ("features-00000", "shard-00000", "shard-00001")]
    assert sorted(os.listdir(data)) == there


def test_why_features_cannot_be_made_is_told(collecting, tmp_path):
    other, known = tmp_path / "nowhere.json", (tmp_path / "collect.json").read_bytes()
    collect = msgspec.json.decode(known, type=CollectConfig)
    write_config(msgspec.structs.replace(collect, model=str(tmp_path / "no")), other)
    config = msgspec.structs.replace(collecting, collect=str(other))
    data = tmp_path / "out" / DATA_FOLDER
    with EndingSignals() as endings, Maker(config, 0, endings, print) as maker:
        with (
            Corpus(data, config.taps, 97, None) as corpus,
            pytest.raises((ModelNotFound, CheckpointError)),
        ):
            maker.make(0, corpus.shard(0))
        with pytest.raises(ProtocolError, match="not a line"):
            maker._hear(b"nonsense", 0)
    assert not (tmp_path / "out" / FOLDER.format(0)).exists()
