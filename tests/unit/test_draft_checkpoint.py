"""Loading a draft's tensors: nothing missing, nothing misshapen, nothing unaccounted for."""

import re

import pytest
import torch
from support.tiny_draft import SPECULATORS, Z_LAB, merged, random_tensors, write_draft

from draft_daemon.checkpoint import load_draft
from protocol.errors import CheckpointError, UnsupportedModel

REDUCED = merged(SPECULATORS, draft_vocab_size=4)


def own_head(d2t, rows=4):
    return {"lm_head.weight": torch.ones(rows, 32), "d2t": torch.tensor(d2t)}


def flags(*ids):
    found = torch.zeros(96, dtype=torch.bool)
    found[list(ids)] = True
    return {"t2d": found}


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


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.g_proj.weight",  # Laguna's gate
        "layers.0.self_attn.qkv_proj.weight",
        "aux_hidden_norms.0.weight",
        "layers.0.self_attn.sinks",  # MiMo's attention sinks and mask
        "mask_embedding",
        "encoder.fc.weight",  # Muse's encoder
        "markov_head.markov_w1.weight",
        "candidate_selector.successor_codebook",
        "prefix_gru.weight_ih_l0",
    ],
)
def test_a_tensor_that_the_network_has_not_is_refused_by_its_name(tmp_path, name):
    with pytest.raises(UnsupportedModel, match=re.escape(f"tensor {name} is not part")):
        load(tmp_path, extra={name: torch.zeros(32, 32)})


def test_a_reduced_vocabulary_brings_its_own_head_and_map(tmp_path):
    draft = load(tmp_path, REDUCED, extra=own_head([5, 6, 6, 92]) | flags(5, 7, 8, 95))
    assert draft.own_head.target_ids.tolist() == [5, 7, 8, 95]
    assert not {"lm_head.weight", "t2d", "d2t"} & set(draft.ignored)


def test_flags_alone_say_which_ids_the_head_scores(tmp_path):
    extra = {"lm_head.weight": torch.ones(4, 32)} | flags(95, 8, 7, 5)
    assert load(tmp_path, REDUCED, extra=extra).own_head.target_ids.tolist() == [5, 7, 8, 95]


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [((5, 7, 8), "t2d: expected 4 ids, found 3"), ((5, 7, 8, 94), "expected the ids of t2d")],
)
def test_flags_that_contradict_are_refused(tmp_path, ids, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, REDUCED, extra=own_head([5, 6, 6, 92]) | flags(*ids))


@pytest.mark.parametrize("d2t", [[0, 0, 0, 93], [-1, 0, 0, 0], [3, 2, 0, 0]])
def test_a_map_outside_the_vocabulary_or_with_doubles_is_refused(tmp_path, d2t):
    with pytest.raises(CheckpointError, match=r"d2t: expected different ids in 0\.\.95"):
        load(tmp_path, REDUCED, extra=own_head(d2t))


def test_a_reduced_vocabulary_without_its_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path, REDUCED, extra={"d2t": torch.zeros(4, dtype=torch.int64)})
