"""Shards of training data: what is written is read again, and what is damaged is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.shards import kept, write_made_shard

from protocol.checkpoints import shards
from protocol.checkpoints.shards import (
    LAYOUT,
    join,
    map_features,
    read_shard,
    shard_numbers,
    write_features,
    write_shard,
)
from protocol.errors import CheckpointError

TAPS = (0, 2, 3)


def _sequences(count=3):
    return [kept(n, prompt=2 + n, task=("b", "a")[n % 2], held_out=n == 1) for n in range(count)]


def _written(folder, **changes):
    """A shard whose tensors are those of a good one, but for `changes`."""
    write_shard(folder, 0, replace(join(_sequences()), **changes))


def test_a_shard_is_read_as_it_was_written(tmp_path):
    made = write_made_shard(tmp_path, 7, _sequences())
    read = read_shard(tmp_path, 7, vocab=97)
    for name in LAYOUT:
        assert np.array_equal(getattr(read, name), getattr(made, name)), name
    assert read.task_names == ("a", "b")
    assert [read.task(index) for index in range(read.sequences)] == ["b", "a", "b"]
    assert np.array_equal(read.tokens[read.rows(1)], _sequences()[1].tokens)


def test_other_programs_read_it_too(tmp_path):
    made = write_made_shard(tmp_path, 0, _sequences(), taps=TAPS, width=5)
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("tokens"), torch.from_numpy(made.tokens))
        assert file.get_tensor("top_logprobs").dtype == torch.float16
    with safe_open(tmp_path / "features-00000.safetensors", framework="pt") as file:
        theirs = file.get_tensor("features")
    ours = torch.from_numpy(map_features(tmp_path, 0, made, TAPS)).view(torch.bfloat16)
    assert torch.equal(ours, theirs)
    assert ours.shape == (len(made.tokens), 15)
    assert not ours[made.starts[1:] - 1].any()


def test_numbers_are_those_of_whole_shards(tmp_path):
    assert shard_numbers(tmp_path / "absent") == ()
    for number in (3, 0, 123456):
        write_made_shard(tmp_path, number, _sequences())
    for other in (
        "shard-1.safetensors",
        ".shard-00009.safetensors.77",
        "shard-0000007.safetensors",
    ):
        (tmp_path / other).write_bytes(b"")
    assert shard_numbers(tmp_path) == (0, 3, 123456)
    with pytest.raises(CheckpointError, match="cannot read"):
        shard_numbers(tmp_path / "shard-1.safetensors")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"starts": np.array([0, 8, 6, 27])}, "ascend"),
        ({"starts": np.array([0, 8, 17, 26])}, "ascend"),
        ({"starts": np.array([0, (1 << 63) - 1, -(1 << 63) + 9, 27])}, "ascend"),
        ({"starts": np.array([0, 8, 17])}, "lists of"),
        ({"prompts": np.array([2, 0, 4], np.int32)}, "prompt"),
        ({"prompts": np.array([8, 3, 4], np.int32)}, "prompt"),
        ({"tasks": np.array([0, 1, 2], np.int32)}, "task"),
        ({"held_out": np.array([0, 2, 0], np.uint8)}, "can be"),
        ({"ids": np.array([0, -1, 2])}, "can be"),
        ({"temperatures": np.array([0, np.nan, 1], np.float32)}, "finite"),
        ({"top_logprobs": np.full((27, 3), -np.inf, np.float16)}, "finite"),
        ({"top_logprobs": np.full((27, 3), np.nan, np.float16)}, "finite"),
        ({"top_logprobs": np.full((27, 3), 0.5, np.float16)}, "above 0"),
        ({"tokens": np.full(27, 97, np.int32)}, "outside 0..96"),
        ({"tokens": np.zeros(27, np.int64)}, "tensor tokens is I64"),
        ({"top_ids": np.zeros((27, 2), np.int32)}, "beside 27"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(tmp_path, changes, told):
    _written(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=told):
        read_shard(tmp_path, 0, vocab=97)


@pytest.mark.parametrize("value", [-65504.0, -0.0, 6e-8])
def test_the_least_log_probability_and_one_that_was_rounded_are_sound(tmp_path, value):
    _written(tmp_path, top_logprobs=np.full((27, 3), value, np.float16))
    assert float(read_shard(tmp_path, 0).top_logprobs[0, 0]) == np.float16(value)


def test_a_damaged_or_foreign_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors"):
        read_shard(tmp_path, 0)
    write_made_shard(tmp_path, 0, _sequences(), taps=TAPS, width=5)
    file = tmp_path / "shard-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        read_shard(tmp_path, 0)
    file.write_bytes((tmp_path / "features-00000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no shard"):
        read_shard(tmp_path, 0)
    file.write_bytes(whole.replace(b'"tasks":"[', b'"tasks":"{'))
    with pytest.raises(CheckpointError, match="`tasks`"):
        read_shard(tmp_path, 0)
    monkeypatch.setattr(shards, "MAX_BYTES", 99)
    with pytest.raises(CheckpointError, match="at most 99"):
        read_shard(tmp_path, 0)


def test_features_of_another_shard_or_other_taps_are_refused(tmp_path):
    made = write_made_shard(tmp_path, 0, _sequences(), taps=TAPS, width=5)
    assert map_features(tmp_path, 1, made, TAPS) is None
    with pytest.raises(CheckpointError, match="taps"):
        map_features(tmp_path, 0, made, (0, 2, 1))
    with pytest.raises(CheckpointError, match="8 rows"):
        map_features(tmp_path, 0, join(_sequences(1)), TAPS)
    write_shard(tmp_path, 1, made)
    (tmp_path / "shard-00001.safetensors").rename(tmp_path / "features-00001.safetensors")
    with pytest.raises(CheckpointError, match="one tensor"):
        map_features(tmp_path, 1, made, TAPS)
    (tmp_path / "features-00001.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        map_features(tmp_path, 1, made, TAPS)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_made_shard(tmp_path, 0, _sequences(), taps=TAPS, width=5)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Full:
        dtype, shape = np.dtype("int32"), (27,)

        def __array__(self, dtype=None, copy=None):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        _written(tmp_path, tokens=Full())
    with pytest.raises(ValueError, match="20 rows of features for 27"):
        write_features(tmp_path, 0, 27, TAPS, [np.zeros((20, 3), np.uint16)])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
