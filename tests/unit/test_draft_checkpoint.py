"""Loading a draft's tensors: nothing missing, nothing misshapen, nothing unaccounted for."""

import pytest
import torch
from support.tiny_draft import SPECULATORS, Z_LAB, merged, random_tensors, write_draft

from draft_daemon.checkpoint import load_draft
from protocol.errors import CheckpointError, UnsupportedModel

REDUCED = merged(SPECULATORS, draft_vocab_size=4)


def own_head(d2t, rows=4):
    return {"lm_head.weight": torch.ones(rows, 32), "d2t": torch.tensor(d2t)}


def load(folder, raw=Z_LAB, **options):
    return load_draft(write_draft(folder, raw, **options), torch.float32)


def test_every_wanted_byte_is_counted(tmp_path):
    draft = load(tmp_path, dtype=torch.bfloat16)
    tensors = random_tensors(draft.config, dtype=torch.bfloat16)
    assert draft.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert draft.network.dtype == torch.float32


def test_a_missing_tensor_is_named(tmp_path):
    name = "layers.1.self_attn.k_norm.weight"
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, without=(name,))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    with pytest.raises(CheckpointError, match=r"fc\.weight.*\[32, 96\].*\[32, 64\]"):
        load(tmp_path, extra={"fc.weight": torch.zeros(32, 64)})


def test_a_tensor_of_integers_is_no_weight(tmp_path):
    with pytest.raises(CheckpointError, match=r"norm\.weight: expected float32.*found int64"):
        load(tmp_path, extra={"norm.weight": torch.ones(32, dtype=torch.int64)})


def test_copies_of_the_targets_tensors_are_left_out_and_listed(tmp_path):
    extra = {name: torch.zeros(96, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    draft = load(tmp_path, extra=extra)
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(draft.ignored)
    assert "auto_map" in draft.ignored
    assert draft.own_head is None


def test_a_tensor_that_nobody_knows_is_refused(tmp_path):
    extra = {"layers.0.self_attn.g_proj.weight": torch.zeros(32, 32)}
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn\.g_proj\.weight"):
        load(tmp_path, extra=extra)


def test_a_reduced_vocabulary_brings_its_own_head_and_map(tmp_path):
    extra = own_head([5, 6, 6, 92]) | {"t2d": torch.zeros(96, dtype=torch.bool)}
    draft = load(tmp_path, REDUCED, extra=extra)
    assert draft.own_head.target_ids.tolist() == [5, 7, 8, 95]
    assert "t2d" in draft.ignored
    assert "lm_head.weight" not in draft.ignored


@pytest.mark.parametrize("d2t", [[0, 0, 0, 93], [-1, 0, 0, 0], [3, 2, 0, 0]])
def test_a_map_outside_the_vocabulary_or_with_doubles_is_refused(tmp_path, d2t):
    with pytest.raises(CheckpointError, match=r"d2t: expected different ids in 0\.\.95"):
        load(tmp_path, REDUCED, extra=own_head(d2t))


def test_a_reduced_vocabulary_without_its_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path, REDUCED, extra={"d2t": torch.zeros(4, dtype=torch.int64)})
