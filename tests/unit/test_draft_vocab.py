"""A draft that proposes a part of the vocabulary: which ids, read and refused, and scored alone."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_draft import SPECULATORS, Z_LAB, merged, write_draft

from draft_daemon.checkpoint import load_draft
from draft_daemon.head import Borrowed
from draft_daemon.lexicon import Asked
from launch import drafts
from protocol.checkpoints.draft_vocab import LIST, read_vocab
from protocol.errors import CheckpointError, ConfigError

VOCAB, HIDDEN = 96, 32


@pytest.fixture
def folder(tmp_path):
    made = write_draft(tmp_path / "draft", Z_LAB)
    (made / LIST).write_text(json.dumps([9, 3, 70, 5, 1]))
    return made


def test_all_is_no_restriction(folder):
    assert read_vocab("all", folder) == ()
    assert load_draft(folder, torch.float32).vocabulary is None


def test_a_number_takes_the_first_of_the_drafts_list_in_the_order_of_ids(folder):
    assert read_vocab("3", folder) == (3, 9, 70)


@pytest.mark.parametrize("count", ["0", "6"])
def test_more_than_the_list_has_is_refused_with_both_numbers(folder, count):
    with pytest.raises(ConfigError, match=f"of {count} ids: .* has 1 to 5"):
        read_vocab(count, folder)


def test_a_draft_without_a_list_is_named_a_file_for(folder):
    (folder / LIST).unlink()
    with pytest.raises(ConfigError, match=f"no {LIST}"):
        read_vocab("3", folder)


@pytest.mark.parametrize(
    ("name", "tensor", "ids"),
    [
        ("t2d", torch.tensor([False, True, False, True]), (1, 3)),
        ("d2t", torch.tensor([4, 4, 7]), (4, 5, 9)),
        ("d2t", torch.tensor([4, 4, 7], dtype=torch.int32), (4, 5, 9)),
    ],
)
def test_a_checkpoints_map_says_which_ids(tmp_path, name, tensor, ids):
    path = tmp_path / "model.safetensors"
    save_file({name: tensor, "other": torch.zeros(2)}, path)
    assert read_vocab(str(path), tmp_path) == ids


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.zeros(2)}, "neither t2d nor d2t"),
        ({"t2d": torch.zeros(4, dtype=torch.bool)}, "no ids"),
        ({"t2d": torch.ones(4)}, "states no ids"),
        ({"d2t": torch.zeros(2, 2, dtype=torch.int64)}, "states no ids"),
        ({"d2t": torch.tensor([-1, 0])}, "negative"),
        ({"d2t": torch.tensor([1, 0])}, "1 ids are there twice"),
    ],
)
def test_a_map_that_states_no_ids_is_refused(tmp_path, tensors, message):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        read_vocab(str(path), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "not a JSON list"),
        ("[]", "not a JSON list"),
        ("[-1]", "not a JSON list"),
        ('["a"]', "not a JSON list"),
        ("[7, 7, 8]", "1 ids are there twice"),
    ],
)
def test_a_file_that_is_no_list_of_ids_is_refused(tmp_path, text, message):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_vocab(str(path), tmp_path)


@pytest.mark.parametrize("name", ["none.json", "none.safetensors"])
def test_a_file_that_is_not_there_is_refused_by_name(tmp_path, name):
    with pytest.raises(CheckpointError, match=name):
        read_vocab(str(tmp_path / name), tmp_path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_vocab(str(path), tmp_path)


def test_a_huge_list_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("protocol.checkpoints.draft_vocab.MAX_LIST_BYTES", 3)
    (tmp_path / "ids.json").write_text("[1,2]")
    with pytest.raises(CheckpointError, match="larger than 3 bytes"):
        read_vocab(str(tmp_path / "ids.json"), tmp_path)


def test_ids_that_the_draft_does_not_have_are_refused(folder):
    (folder / LIST).write_text(json.dumps([5, VOCAB]))
    with pytest.raises(ConfigError, match=f"id {VOCAB}; this draft's are below {VOCAB}"):
        load_draft(folder, torch.float32, vocab="2")


def test_a_draft_with_a_head_of_its_own_takes_no_other_vocabulary(tmp_path):
    ids = torch.arange(12)
    extra = {"lm_head.weight": torch.zeros(12, HIDDEN), "d2t": ids}
    made = write_draft(tmp_path / "own", merged(SPECULATORS, draft_vocab_size=12), extra=extra)
    (made / LIST).write_text("[1, 2]")
    with pytest.raises(ConfigError, match="a head of its own for 12 ids"):
        load_draft(made, torch.float32, vocab="2")


@pytest.mark.parametrize("layout", ["head_t", "head", "embed"])
def test_the_best_of_the_chosen_ids_is_proposed_and_no_other(folder, layout):
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    rows = torch.randn(7, HIDDEN, generator=generator)
    weights = {"embed": table}
    weights |= {"head_t": {"head_t": table.t().contiguous()}, "head": {"head": table}}.get(
        layout, {}
    )
    whole = load_draft(folder, torch.float32)
    chosen = load_draft(folder, torch.float32, vocab="5")
    ids = torch.tensor(sorted([9, 3, 70, 5, 1]))
    lexicon = Borrowed(chosen, weights, VOCAB)
    expected = ids[(rows @ table[ids].t()).argmax(dim=-1)]
    assert lexicon.best(rows).ids == tuple(expected.tolist())
    assert lexicon.head.weight.untyped_storage().nbytes() == 5 * HIDDEN * 4
    assert chosen.weight_bytes - whole.weight_bytes == 5 * HIDDEN * 4
    every = replace(whole, vocabulary=torch.arange(VOCAB))
    assert Borrowed(every, weights, VOCAB).best(rows) == Borrowed(whole, weights, VOCAB).best(rows)


def test_padding_of_the_target_is_never_proposed(folder):
    table = torch.ones(VOCAB, HIDDEN)
    table[70] = 100.0
    lexicon = Borrowed(load_draft(folder, torch.float32, vocab="5"), {"embed": table}, 70)
    assert lexicon.best(torch.ones(1, HIDDEN)).ids == (1,)


def test_a_target_that_scores_takes_no_vocabulary(folder):
    with pytest.raises(ConfigError, match="--draft-vocab is for a head that the draft has"):
        Asked(load_draft(folder, torch.float32, vocab="5"), None)


def test_what_is_said_comes_before_the_drafts_default(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text("[4]")
    assert drafts.draft_vocab(None, None) == drafts.draft_vocab("3", None) == "all"
    assert drafts.draft_vocab(None, folder) == "all"
    assert drafts.draft_vocab("3", folder) == "3"
    assert drafts.draft_vocab("ids.json", folder) == str(tmp_path / "ids.json")
    with pytest.raises(ConfigError, match=r"'none\.json': neither a number of ids, nor a file"):
        drafts.draft_vocab("none.json", folder)


def test_the_shipped_draft_has_a_list_and_a_default():
    shipped = drafts.shipped_draft("smollm2-135m-dflash")
    assert drafts.draft_vocab(None, shipped) == drafts.SHIPPED_VOCAB
    assert drafts.draft_vocab("all", shipped) == "all"
    ids = json.loads((shipped / LIST).read_text())
    assert len(ids) == len(set(ids)) == 1 << 14
    assert ids[0] in (0, 2)  # the ends of SmolLM2's text come first
