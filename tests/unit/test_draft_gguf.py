"""Drafts in GGUF files of both producers: the same draft as its folder, or refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.draft_cases import CASES, hidden_states
from support.gguf_drafts import Q8, write_llama_cpp, write_lucebox
from support.gguf_files import TinyGGUF
from support.tiny_draft import SPECULATORS, Z_LAB, merged, write_draft

from draft_daemon.checkpoint import load_draft
from launch.drafts import find_draft
from protocol.checkpoints.draft_config import read_draft_config, shipped_draft
from protocol.errors import CheckpointError, ModelNotFound, UnsupportedModel

WRITERS = {"gguf-llama.cpp": write_llama_cpp, "gguf-lucebox": write_lucebox}
LIKE_THE_FILE = {"ignored": (), "num_target_layers": 0}  # what no GGUF file says


@pytest.fixture
def folder(tmp_path):
    return write_draft(tmp_path / "draft", CASES["sliding"])


def apart(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("producer", WRITERS)
@pytest.mark.parametrize("case", ["full", "sliding", "one_layer"])
def test_a_file_is_the_draft_that_it_was_made_of(tmp_path, producer, case):
    source = write_draft(tmp_path / "draft", CASES[case])
    path = WRITERS[producer](source, tmp_path / "draft.gguf")
    ours, theirs = load_draft(path, torch.float32), load_draft(source, torch.float32)
    assert ours.config.dialect == producer
    alike = replace(ours.config, **LIKE_THE_FILE, dialect="", rms_norm_eps=1e-6)
    assert alike == replace(theirs.config, **LIKE_THE_FILE, dialect="")
    assert ours.config.rms_norm_eps == pytest.approx(1e-6)
    assert apart(hidden_states(ours), hidden_states(theirs)) < 1e-6


def test_the_installed_draft_is_itself_in_a_file_of_either_producer(tmp_path):
    source = shipped_draft("smollm2-135m-dflash")
    theirs = load_draft(source, torch.float32)
    exact = load_draft(write_lucebox(source, tmp_path / "f32.gguf"), torch.float32)
    assert exact.config.target_layer_ids == theirs.config.target_layer_ids
    assert apart(hidden_states(exact), hidden_states(theirs)) < 1e-6
    close = load_draft(write_llama_cpp(source, tmp_path / "q8.gguf", kind=Q8), torch.float32)
    assert 0 < apart(hidden_states(close), hidden_states(theirs)) < 0.5  # of values up to 6


def test_quantised_weights_follow_the_folders(tmp_path, folder):
    ours = load_draft(write_llama_cpp(folder, tmp_path / "q8.gguf", kind=Q8), torch.float32)
    theirs = load_draft(folder, torch.float32)
    assert 0 < apart(hidden_states(ours), hidden_states(theirs)) < 0.1


def test_llama_cpps_map_of_a_small_vocabulary_holds_the_targets_ids(tmp_path):
    head = torch.arange(128.0).view(4, 32)
    extra = {"lm_head.weight": head, "d2t": torch.tensor([5, 6, 6, 92])}
    source = write_draft(tmp_path / "draft", merged(SPECULATORS, draft_vocab_size=4), extra=extra)
    draft = load_draft(write_llama_cpp(source, tmp_path / "d.gguf"), torch.float32)
    assert draft.own_head.target_ids.tolist() == [5, 7, 8, 95]


@pytest.mark.parametrize("stated", [None, False, True])
def test_llama_cpps_file_says_causality_and_anchor_where_its_source_did(tmp_path, folder, stated):
    keys = {"dflash.attention.causal": stated, "dflash.sample_from_anchor": stated}
    config = read_draft_config(write_llama_cpp(folder, tmp_path / "d.gguf", extra=keys))
    causal = [True, False] if stated is None else [stated, stated]
    assert [rule.causal for rule in config.layers] == causal
    assert config.sample_from_anchor == bool(stated)


@pytest.mark.parametrize(
    ("source", "extra", "vocab"),
    [
        ({"vocab_size": 96}, {"dflash.vocab_size": 96, "tokenizer.ggml.tokens": None}, 96),
        ({}, {}, 96),
        ({}, {"tokenizer.ggml.tokens": None}, None),
    ],
)
def test_the_vocabulary_is_what_the_file_says_and_never_guessed(tmp_path, source, extra, vocab):
    folder = write_draft(tmp_path / "draft", merged(Z_LAB, **source))
    path = write_llama_cpp(folder, tmp_path / "d.gguf", extra=extra)
    if vocab is None:
        with pytest.raises(CheckpointError, match="vocabulary"):
            read_draft_config(path)
    else:
        assert read_draft_config(path).vocab_size == vocab


def test_a_copy_of_the_targets_table_tells_its_size_and_is_left_out(tmp_path, folder):
    table = {"token_embd.weight": np.zeros((96, 32), np.float32)}
    facts = {"tokenizer.ggml.tokens": None}
    draft = load_draft(
        write_llama_cpp(folder, tmp_path / "d.gguf", extra=facts, tensors=table), torch.float32
    )
    assert draft.config.vocab_size == 96
    assert draft.ignored == ("embed_tokens.weight",)


SINK = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
GATE = {"blk.1.attn_gate.weight": np.zeros((4, 32), np.float32)}
SECOND = {"dflash_fc.weight": np.zeros((32, 96), np.float32)}


@pytest.mark.parametrize(
    ("write", "changes", "sentence"),
    [
        (write_llama_cpp, {"dflash.hyper_connection_count": 4}, "hyper_connection_count"),
        (write_llama_cpp, {"dflash.rope.dimension_sections": [2, 1, 1, 0]}, "several kinds"),
        (write_llama_cpp, {"dflash.attention.value_length": 16}, "value_length is 16"),
        (write_llama_cpp, {"tensors": SINK}, "attn_sinks"),
        (write_lucebox, {"tensors": GATE}, "attn_gate"),
        (write_lucebox, {"dflash-draft.dflash.domino.enabled": 1}, "Domino head with biases"),
        (write_lucebox, {"dflash-draft.dflash.context_kv_layer_norm": True}, "context keys"),
        (write_lucebox, {"dflash-draft.dflash.strange": 1}, "dflash.strange"),
        (write_lucebox, {"arch": "gemma4-dflash-draft"}, "these are: dflash, dflash-draft, qwen35"),
    ],
)
def test_what_is_not_run_is_refused_by_name(tmp_path, folder, write, changes, sentence):
    options = {key: changes[key] for key in ("tensors", "arch") if key in changes}
    extra = {key: value for key, value in changes.items() if key not in options}
    with pytest.raises(UnsupportedModel, match=sentence):
        load_draft(write(folder, tmp_path / "d.gguf", extra=extra, **options), torch.float32)


@pytest.mark.parametrize(
    ("write", "changes", "sentence"),
    [
        (write_llama_cpp, {"dflash.conv_kernel_size": 2}, "`conv_group_size` is missing"),
        (write_llama_cpp, {"dflash.rope.freq_base": None}, "freq_base"),
        (write_llama_cpp, {"dflash.target_layers": None}, "target_layers"),
        (write_llama_cpp, {"dflash.target_layers": [0, 2]}, "target_layers"),
        (write_llama_cpp, {"tokenizer.ggml.mask_token_id": None}, "mask_token_id"),
        (write_llama_cpp, {"dflash.attention.sliding_window_pattern": None}, "no pattern"),
        (write_llama_cpp, {"dflash.attention.sliding_window_pattern": [True]}, "1 for 2 layers"),
        (write_lucebox, {"dflash-draft.dflash.target_layer_ids": None}, "never guessed"),
        (write_lucebox, {"tensors": SECOND}, "two names"),
    ],
)
def test_what_is_missing_or_wrong_is_a_checkpoint_error(tmp_path, folder, write, changes, sentence):
    options = {key: changes[key] for key in ("tensors",) if key in changes}
    extra = {key: value for key, value in changes.items() if key not in options}
    with pytest.raises(CheckpointError, match=sentence):
        load_draft(write(folder, tmp_path / "d.gguf", extra=extra, **options), torch.float32)


def test_a_file_that_shrinks_while_its_ids_are_read_is_told(tmp_path):
    extra = {"lm_head.weight": torch.ones(4, 32), "d2t": torch.tensor([5, 6, 6, 92])}
    source = write_draft(tmp_path / "draft", merged(SPECULATORS, draft_vocab_size=4), extra=extra)
    path = write_llama_cpp(source, tmp_path / "d.gguf")
    from protocol.checkpoints.gguf_draft import GGUFDraft

    draft = GGUFDraft(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="shrank"):
        draft.integers("d2t")


def test_a_targets_file_is_no_draft(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"'llama' is no draft"):
        read_draft_config(TinyGGUF().write(tmp_path / "target.gguf"))


def test_a_gguf_draft_is_found_by_its_path_or_its_folders(tmp_path, folder):
    (tmp_path / "files").mkdir()
    path = write_lucebox(folder, tmp_path / "files" / "one.gguf")
    for name in (path, path.parent):
        found = find_draft(str(name))
        assert (found.name, found.path, found.source) == ("one", path, "gguf")
    with pytest.raises(ModelNotFound, match=r"a draft is a folder with config\.json, or a \.gguf"):
        find_draft(str(folder / "config.json"))
    write_lucebox(folder, path.with_name("two.gguf"))
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        find_draft(str(path.parent))
