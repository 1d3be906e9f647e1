"""Named tensors of folders: one file, shards, and damage of every kind."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_target import write_tiny_target

from protocol.checkpoints.folder import INDEX, MAX_INDEX_BYTES
from protocol.checkpoints.tensors import SINGLE, open_tensors
from protocol.errors import CheckpointError

EMBED = "model.embed_tokens.weight"


def test_one_file_and_shards_hold_the_same_tensors(tmp_path):
    one = write_tiny_target(tmp_path / "one", dtype=torch.bfloat16)
    many = write_tiny_target(tmp_path / "many", dtype=torch.bfloat16, shards=3)
    expected = load_file(one / SINGLE)
    for folder in (one, many):
        with open_tensors(folder) as source:
            assert source.names() == frozenset(expected)
            assert source.shape(EMBED) == (97, 24)
            assert all(torch.equal(source.get(name), expected[name]) for name in expected)
            assert source.expect(EMBED, (97, 24)).dtype == torch.bfloat16


def test_a_tensor_outlives_its_source(tmp_path):
    folder = write_tiny_target(tmp_path)
    with open_tensors(folder) as source:
        kept = source.get(EMBED)
    assert torch.equal(kept, load_file(folder / SINGLE)[EMBED])


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    with open_tensors(write_tiny_target(tmp_path)) as source:
        for ask in (source.get, source.shape):
            with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
                ask("lm_head.weight")
        with pytest.raises(CheckpointError, match=r"expected shape \[97, 25\], found \[97, 24\]"):
            source.expect(EMBED, (97, 25))


def test_an_empty_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(CheckpointError, match=f"neither {SINGLE} nor {INDEX}"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_said_to_be_damaged(tmp_path, keep):
    file = write_tiny_target(tmp_path) / SINGLE
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=f"{SINGLE}.*damaged or truncated"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 8], "data_offsets": [0, 4]}}',
    ],
)
def test_a_hostile_header_is_said_to_be_damaged(tmp_path, header):
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        open_tensors(tmp_path)


def test_a_lost_shard_is_named(tmp_path):
    folder = write_tiny_target(tmp_path, shards=2)
    lost = folder / "model-00002-of-00002.safetensors"
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{lost.name}"):
        open_tensors(folder)


def test_a_shard_that_lacks_what_the_index_promises_is_named(tmp_path):
    folder = write_tiny_target(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="promises tensor ghost"):
        open_tensors(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object, found list"),
        ('{"weight_map": {}}', "`weight_map` is missing"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file name"),
        ('{"weight_map": {"a": ".."}}', "not a file name"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, index, words):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=words):
        open_tensors(tmp_path)


def test_a_huge_index_is_not_read(tmp_path):
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(CheckpointError, match="larger than"):
        open_tensors(tmp_path)
