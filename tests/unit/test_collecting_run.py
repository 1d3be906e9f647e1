"""The collecting process from its first line to its last, run within this one."""

import errno
import os
import stat

import numpy as np
import pytest
import torch
from support.collecting import (
    DEFAULTS,
    FULL,
    WIDTH,
    ask,
    encoded,
    many_asks,
    of,
    run,
    sequences,
)
from support.targets import prompt
from support.tiny_target import write_tiny_target

from protocol.checkpoints.shards import map_features, read_shard, shard_numbers
from protocol.training import MAX_LINE, Answered, Problem, Report, Written
from target_daemon.collecting import collector

TAPS = DEFAULTS["taps"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("model"))


def test_everything_asked_is_answered_and_kept_and_a_restart_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "REPORT_SECONDS", 0.0)
    folder = tmp_path / "data"
    others = (ask(99, prompt(4), keep=False), ask(100, []))
    code, lines = run(tmp_path, model, folder, (*many_asks(0, 7), *others), **FULL)
    assert code == 0
    answers = {line.id: line for line in of(Answered, lines)}
    assert sorted(answers) == [*range(7), 99, 100]
    assert answers[100].finish_reason == "refused"
    assert "prompt of 0 tokens" in answers[100].detail
    first = sequences(folder)
    assert sorted(first) == list(range(7))
    for number, tokens in first.items():
        assert tokens[4 + number % 5 :] == list(answers[number].tokens)
    loads = [line for line in of(Report, lines) if line.stage == "load"]
    assert loads[-1].done == loads[-1].total > 0
    assert any("keys and values" in line.detail for line in loads)
    counts = [line.done for line in of(Report, lines) if line.stage == "answer"]
    assert counts == sorted(counts)
    assert counts[-1] == sum(len(line.tokens) for line in answers.values())
    written = of(Written, lines)
    assert [line.shard for line in written] == list(shard_numbers(folder))
    assert written[-1].tokens == sum(len(tokens) for tokens in first.values())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / ".shard-00009.safetensors.123").write_bytes(b"half")
    (folder / "features-00077.safetensors").write_bytes(b"of no shard")

    code, lines = run(tmp_path, model, folder, many_asks(7, 1), **FULL)
    assert code == 0
    (last,) = of(Written, lines)
    assert (last.shard, last.ids) == (len(written), (7,))
    assert last.tokens == written[-1].tokens + len(sequences(folder)[7])
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert len(list(folder.iterdir())) == 2 * len(shard_numbers(folder))


def test_features_lie_beside_the_shards_until_the_budget_is_spent_and_can_be_made_again(
    model, tmp_path
):
    folder = tmp_path / "data"
    settings = {"shard_tokens": 60, "feature_bytes": 100 * WIDTH}
    code, lines = run(tmp_path, model, folder, many_asks(0, 12, temperature=1.0), **settings)
    assert code == 0
    there = [line.features for line in of(Written, lines)]
    assert there == [True] + [False] * (len(there) - 1)
    assert len(there) > 2
    shard = read_shard(folder, 0)
    generated = _features(folder, 0)
    assert generated.shape == (len(shard.tokens), 72)
    assert (shard.temperatures == 1.0).all()
    for number in (0, 1):
        code, lines = run(tmp_path, model, folder, b"", "--features", str(number))
        assert code == 0
        (written,) = of(Written, lines)
        assert (written.shard, written.features) == (number, True)
        assert written.ids == tuple(read_shard(folder, number).ids.tolist())
    torch.testing.assert_close(_features(folder, 0), generated, atol=2e-2, rtol=1e-2)
    assert _features(folder, 1).shape == (len(read_shard(folder, 1).tokens), 72)
    assert not np.any(_features(folder, 0)[read_shard(folder, 0).starts[1:] - 1].numpy())


def _features(folder, number):
    bits = map_features(folder, number, read_shard(folder, number), TAPS)
    return torch.from_numpy(bits).view(torch.bfloat16).float()


@pytest.mark.parametrize(
    ("settings", "arguments", "code", "told", "exit_code"),
    [
        ({"taps": (0, 9)}, (), "config", "distinct layers in 0..3", 78),
        ({"model": "/nowhere"}, (), "checkpoint", "/nowhere", 78),
        ({"slots": 4000, "max_positions": 512}, (), "insufficient_memory", "notes", 75),
        ({}, ("--features", "3"), "checkpoint", "shard-00003.safetensors", 78),
        ({"taps": ()}, ("--features", "3"), "config", "without taps", 78),
        ({}, ("--feature",), "usage", "--features NUMBER", 2),
        ({"folder": "/proc/nothing"}, (), "unavailable", "/proc/nothing", 69),
    ],
)
def test_what_cannot_be_done_is_one_problem(
    model, tmp_path, settings, arguments, code, told, exit_code
):
    if code == "insufficient_memory":
        settings = settings | {"feature_bytes": 1, "taps": (0, 1, 2, 3), "likeliest": 1 << 29}
    given = {"model": model, "folder": tmp_path / "data"} | settings
    model, folder = given.pop("model"), given.pop("folder")
    found, lines = run(tmp_path, model, folder, b"", *arguments, **given)
    assert found == exit_code
    (problem,) = of(Problem, lines)
    assert problem.code == code
    assert told in problem.detail


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (b'{"type": "Ask", "id": -1}\n', "not an ask: "),
        (b"\xff\n", "not an ask: "),
        (b'{"type": "Ask"', "the last line ends after 14 bytes"),
        (b"[" * (MAX_LINE + 70000), "a line of more than 16,777,216 bytes"),
    ],
)
def test_a_line_that_is_no_ask_ends_it_with_what_is_complete_on_the_disk(
    model, tmp_path, wrong, told
):
    folder = tmp_path / "data"
    asks = encoded(many_asks(0, 4))
    code, lines = run(tmp_path, model, folder, asks + wrong)
    assert code == 70
    (problem,) = of(Problem, lines)
    assert problem.code == "protocol"
    assert told in problem.detail
    done = {line.id for line in of(Answered, lines)}
    assert done < {0, 1, 2, 3}
    assert sequences(folder).keys() == done


def test_a_full_disk_is_a_problem_and_leaves_whole_shards(model, tmp_path, monkeypatch):
    folder, sync = tmp_path / "data", os.fsync

    def full(descriptor):
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file and shard_numbers(folder) == (0, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, lines = run(tmp_path, model, folder, many_asks(0, 30), shard_tokens=60)
    assert code == 69
    (problem,) = of(Problem, lines)
    assert (problem.code, problem.detail) == (
        "unavailable",
        f"cannot write shard 2 to {folder}: No space left on device",
    )
    assert [line.shard for line in of(Written, lines)] == [0, 1]
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]


def test_features_that_cannot_be_made_again_are_a_problem(model, tmp_path, monkeypatch):
    folder, one = tmp_path / "data", (b"", "--features", "0")
    assert run(tmp_path, model, folder, many_asks(0, 3))[0] == 0
    code, lines = run(tmp_path, model, folder, *one, max_positions=12)
    assert (code, of(Problem, lines)[0].code) == (78, "config")
    assert "a sequence of 18 tokens; `max_positions` is 12" in of(Problem, lines)[0].detail

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, lines = run(tmp_path, model, folder, *one)
    assert (code, of(Problem, lines)[0].code) == (69, "unavailable")
    assert [path.name for path in folder.iterdir()] == ["shard-00000.safetensors"]
