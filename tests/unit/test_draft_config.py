"""Draft configs: two dialects, one canonical form, and refusals that name the key."""

import json
import subprocess
import sys

import pytest
from support.published_drafts import EXPECTED, PUBLISHED
from support.tiny_draft import HEADS, SPECULATORS, Z_LAB, merged

from protocol.checkpoints.draft_config import (
    TargetFacts,
    canonical,
    check_pair,
    read_draft_config,
    shipped_draft,
)
from protocol.checkpoints.draft_facts import LayerRule
from protocol.checkpoints.draft_networks import published
from protocol.errors import (
    CheckpointError,
    DraftMismatch,
    InternalError,
    ModelNotFound,
    UnsupportedModel,
)

SLIDING, FULL = "sliding_attention", "full_attention"
TARGET = TargetFacts(hidden_size=32, num_layers=6, vocab_size=96)


def z_lab(**changes):
    return canonical(merged(Z_LAB, **changes), "config.json")


def speculators(**changes):
    return canonical(merged(SPECULATORS, **changes), "config.json")


def test_the_shipped_draft_is_found_without_importing_its_package():
    script = (
        "import sys; from protocol.checkpoints.draft_config import *\n"
        "folder = shipped_draft('smollm2-135m-dflash'); config = read_draft_config(folder)\n"
        "assert not {'draft_daemon', 'torch'} & sys.modules.keys()\n"
        "assert (folder / 'model.safetensors').is_file()\n"
        "print(config.target_layer_ids, config.mask_token_id, config.block_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "(1, 8, 14, 21, 27) 4 8"


def test_an_unknown_shipped_draft_is_named():
    with pytest.raises(ModelNotFound, match="no-such-draft"):
        shipped_draft("no-such-draft")


def test_the_z_lab_dialect_is_read():
    config = z_lab()
    assert config.dialect == "z-lab"
    assert config.target_layer_ids == (0, 2, 5)
    assert (config.block_size, config.mask_token_id, config.max_proposals) == (6, 3, 5)
    assert config.layers == (LayerRule(causal=False, window=0),) * 2
    assert (config.rope_theta, dict(config.rope_scaling)) == (50000.0, {})
    assert config.feature_width == 96
    assert not config.reduced_vocabulary
    assert "auto_map" in config.ignored


def test_the_speculators_dialect_counts_layer_inputs():
    config = speculators(aux_hidden_state_layer_ids=[2, 4, 6])
    assert config.dialect == "speculators"
    assert config.target_layer_ids == (1, 3, 5)
    assert {"speculators_version", "model_type"} <= set(config.ignored)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_as_it_is_published_is_read(name):
    config = canonical(PUBLISHED[name], "config.json")
    assert (
        config.network,
        config.target_layer_ids,
        config.block_size,
        config.max_proposals,
        config.first_slot,
        config.rope_theta,
    ) == EXPECTED[name]
    assert not set(config.ignored) & {"block_size", "mask_token_id", "rope_parameters"}


def test_nemotron_ids_count_layer_inputs_as_well():
    nested = {"target_layer_ids": None}
    config = z_lab(dflash_config=nested, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    assert config.target_layer_ids == (0, 2, 5)
    assert z_lab(eagle_aux_hidden_state_layer_ids=[1, 3, 6]).target_layer_ids == (0, 2, 5)
    with pytest.raises(CheckpointError, match=r"eagle_aux.*\(1, 2, 5\)"):
        z_lab(eagle_aux_hidden_state_layer_ids=[2, 3, 6])


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, (18,)), (5, (1, 9, 17, 25, 33)), (3, (1, 17, 33))]
)
def test_absent_layer_ids_follow_the_published_rule(layers, expected):
    config = z_lab(
        num_hidden_layers=layers, num_target_layers=36, dflash_config={"target_layer_ids": None}
    )
    assert config.target_layer_ids == expected


def test_absent_layer_ids_need_the_number_of_target_layers():
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        z_lab(num_target_layers=None, dflash_config={"target_layer_ids": None})


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_a_key_may_stand_at_either_level(place):
    inner = {} if place == "top" else {"block_size": 7}
    outer = None if place == "nested" else 7
    assert z_lab(block_size=outer, dflash_config=inner).block_size == 7


def test_two_levels_must_agree():
    with pytest.raises(CheckpointError, match="`block_size` is 6, but dflash_config says 7"):
        z_lab(dflash_config={"block_size": 7})


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_what_cannot_be_guessed_must_be_there(key):
    with pytest.raises(CheckpointError, match=f"`{key}` is missing"):
        z_lab(block_size=None if key == "block_size" else 6, dflash_config={key: None})


MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(False, 0), (False, 0)]),
        (MIXED, [(True, 8), (False, 0)]),
        (MIXED | {"is_causal": False}, [(False, 8), (False, 0)]),
        (MIXED | {"is_causal": True}, [(True, 8), (True, 0)]),
        (MIXED | {"dflash_config": {"causal": False}}, [(False, 8), (False, 0)]),
        (MIXED | {"dflash_config": {"causal": True}}, [(True, 8), (True, 0)]),
        (MIXED | {"is_causal": False, "dflash_config": {"causal": True}}, [(False, 8), (False, 0)]),
        (MIXED | {"dflash_config": {"swa_window_size": 5}}, [(True, 5), (False, 0)]),
        (MIXED | {"use_sliding_window": False}, [(True, 0), (False, 0)]),
        (MIXED | {"dflash_config": {"use_swa": True}}, [(True, 8), (False, 0)]),
        ({"sliding_window": 8}, [(False, 0), (False, 0)]),
    ],
)
def test_causality_and_window_are_resolved_per_layer(changes, expected):
    assert [(rule.causal, rule.window) for rule in z_lab(**changes).layers] == expected


@pytest.mark.parametrize(
    ("flag", "expected"), [(False, [(True, 8), (False, 0)]), (True, [(False, 8), (False, 0)])]
)
def test_speculators_say_causality_of_sliding_layers_alone(flag, expected):
    config = speculators(transformer_layer_config=MIXED, sliding_window_non_causal=flag)
    assert [(rule.causal, rule.window) for rule in config.layers] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [SLIDING, FULL]},
        {"layer_types": [FULL]},
        MIXED | {"dflash_config": {"use_swa": False}},
        {"dflash_config": {"use_swa": True}},
    ],
)
def test_windows_that_contradict_are_refused(changes):
    with pytest.raises(CheckpointError, match=r"sliding|layer_types"):
        z_lab(**changes)


def test_a_rotary_base_is_never_guessed():
    with pytest.raises(CheckpointError, match="rope_theta"):
        z_lab(rope_theta=None)
    assert z_lab(rope_theta=None, rope_parameters={"rope_theta": 1e7}).rope_theta == 1e7
    with pytest.raises(CheckpointError, match="rope_theta"):
        z_lab(rope_parameters={"rope_theta": 1e7})


def test_rotary_scaling_is_kept_or_refused():
    config = z_lab(rope_scaling={"type": "linear", "factor": 2.0})
    assert dict(config.rope_scaling) == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="yarn"):
        z_lab(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(CheckpointError, match="factor"):
        z_lab(rope_scaling={"rope_type": "linear"})
    with pytest.raises(UnsupportedModel, match="partial"):
        z_lab(rope_parameters={"rope_theta": 50000.0, "partial_rotary_factor": 0.25})


@pytest.mark.parametrize("where", ["top", "nested"])
def test_sampling_from_the_anchor_proposes_one_token_more(where):
    given = {"sample_from_anchor": True}
    config = z_lab(**(given if where == "top" else {"dflash_config": given}))
    assert (config.sample_from_anchor, config.max_proposals) == (True, 6)
    assert speculators(sample_from_anchor=True).max_proposals == 6
    assert speculators().max_proposals == 5


def test_a_reduced_vocabulary_is_told():
    assert speculators(draft_vocab_size=40).reduced_vocabulary
    with pytest.raises(CheckpointError, match="draft_vocab_size"):
        speculators(draft_vocab_size=97)


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"architectures": ["EagleModel"]}, "`architectures` 'EagleModel' is no draft network"),
        (
            {"dflash_config": {"projector_type": "jet"}},
            "`dflash_config.projector_type` 'jet' is no",
        ),
        ({"dflash_config": {"enable_confidence_head": True}}, "DSpark's confidence head"),
        ({"dflash_config": {"shift_label": True}}, "Domino's shifted labels"),
        ({"dflash_config": {"markov_rank": 8, "selector_rank": 8}}, "several networks at once"),
        (
            {"architectures": ["DFlash2DraftModel", "ExampleDraftModel"]},
            "'ExampleDraftModel' is no",
        ),
        ({"dflash_config": {"attention_sink_bias": True}}, "sinks"),
        ({"dflash_config": {"attention_mode": "kda"}}, "softmax"),
        ({"n_routed_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"dflash_config": {"never_heard_of": 1}}, "never_heard_of"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"is_neox_style": False}, "interleaved"),
        ({"hidden_act": "gelu"}, "SiLU"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_a_variant_is_refused_by_what_it_needs(changes, needs):
    with pytest.raises(UnsupportedModel, match=needs):
        z_lab(**changes)


def test_a_factor_of_the_drafts_own_scores_is_kept_under_any_of_its_names():
    config = z_lab(dflash_config={"output_multiplier": 0.5, "final_logit_softcapping": 20.0})
    assert (config.logit_scale, config.logit_softcap) == (0.5, 20.0)
    assert z_lab(logit_scale=0.5, dflash_config={"output_multiplier": 0.5}).logit_scale == 0.5
    assert (z_lab().logit_scale, z_lab().logit_softcap) == (1.0, 0.0)
    assert z_lab(dflash_config={"final_logit_softcapping": 0.0}).logit_softcap == 0.0
    with pytest.raises(CheckpointError, match=r"both 0\.5 and 2\.0"):
        z_lab(logit_scale=2.0, dflash_config={"output_multiplier": 0.5})
    with pytest.raises(CheckpointError, match=r"output_multiplier.*from 0 on"):
        z_lab(dflash_config={"output_multiplier": -1.0})


def test_neutral_values_of_such_keys_are_let_pass():
    neutral = {"attention_sink_bias": False, "output_multiplier": 1.0, "projector_type": "dflash"}
    assert z_lab(dflash_config=neutral, is_neox_style=True) == z_lab(is_neox_style=True)


@pytest.mark.parametrize("name", HEADS)
def test_a_network_is_told_by_its_keys_and_each_of_them_is_needed(name):
    named = merged(HEADS[name], architectures=["DFlashDraftModel"])
    named["dflash_config"].pop("projector_type", None)
    config = canonical(HEADS[name], "config.json")
    assert canonical(named, "config.json") == config
    assert config.network == name
    for key in published()[name].integers:
        with pytest.raises(CheckpointError, match=f"`{key}` is missing"):
            canonical(merged(HEADS[name], dflash_config={key: None}), "config.json")
        # At top level as well, where it must agree.
        value = HEADS[name]["dflash_config"][key]
        flat = merged(HEADS[name], **{key: value, "dflash_config": {key: None}})
        assert canonical(flat, "config.json").options == config.options
        with pytest.raises(CheckpointError, match=f"`{key}` is {value}, and elsewhere {value + 1}"):
            canonical(merged(HEADS[name], **{key: value + 1}), "config.json")


def test_a_speculators_file_may_call_itself_what_z_lab_does():
    named = {"architectures": ["DFlashDraftModel"], "speculators_model_type": None}
    assert speculators(**named) == speculators()


@pytest.mark.parametrize(
    ("kind", "tokens", "stated", "anchored"),
    [
        ("dspark", 5, None, False),
        ("dspark", 6, None, True),
        ("dspark", 3, None, True),
        ("dspark", None, None, True),
        ("dspark", 5, True, True),
        ("dflash", 6, None, True),
        ("dflash", 5, None, False),
        ("dflash", None, None, False),
    ],
)
def test_whether_the_pending_row_predicts_is_told_by_how_much_is_proposed(
    kind, tokens, stated, anchored
):
    methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}, "nonsense"]
    head = {"markov_rank": 8} if kind == "dspark" else {}
    config = speculators(
        architectures=["DFlashDraftModel"],
        speculators_model_type=kind,
        speculators_config={"proposal_methods": methods[:: 1 if tokens else -1]},
        sample_from_anchor=stated,
        **head,
    )
    assert (config.network, config.sample_from_anchor) == (kind, anchored)


def test_speculators_say_the_kinds_of_layers_at_either_level():
    inner = speculators(transformer_layer_config=MIXED)
    assert speculators(**MIXED).layers == inner.layers
    assert speculators(transformer_layer_config={"sliding_window": None}, **MIXED) == speculators(
        **MIXED
    )
    both = {"transformer_layer_config": {"sliding_window": 9}}
    with pytest.raises(CheckpointError, match=r"`sliding_window` is 8, but .* says 9"):
        speculators(**both, **MIXED)


def test_speculators_variants_are_refused():
    with pytest.raises(UnsupportedModel, match="`speculators_model_type` 'eagle3' is no"):
        speculators(speculators_model_type="eagle3")
    with pytest.raises(UnsupportedModel, match=r"networks at once: dflash2, dspark"):
        speculators(speculators_model_type="dspark", architectures=["DFlash2Speculator"])
    with pytest.raises(UnsupportedModel, match="target_hidden_size 64"):
        speculators(target_hidden_size=64)
    with pytest.raises(UnsupportedModel, match="hyper-connections"):
        speculators(transformer_layer_config={"hc_mult": 4})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "pairs"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 1]}}, "different layers"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": True}}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 4096}, "block_size"),
        ({"hidden_size": "32"}, "hidden_size"),
    ],
)
def test_a_number_out_of_bounds_names_its_key(changes, key):
    with pytest.raises(CheckpointError, match=key):
        z_lab(**changes)


def test_a_speculators_tap_of_the_embedding_is_refused():
    with pytest.raises(CheckpointError, match="aux_hidden_state_layer_ids"):
        speculators(aux_hidden_state_layer_ids=[0, 2])


def test_a_draft_for_this_target_is_taken():
    check_pair(z_lab(), TARGET)
    check_pair(speculators(), TARGET)
    check_pair(z_lab(), TargetFacts(hidden_size=32, num_layers=0, vocab_size=96))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (TargetFacts(64, 6, 96), "hidden size 32, the target's is 64"),
        (TargetFacts(32, 6, 97), "vocabulary 96, the target's is 97"),
        (TargetFacts(32, 8, 96), "made for 6 layers, the target has 8"),
        (TargetFacts(32, 5, 96), "taps layer 5, the target's last is 4"),
        (TargetFacts(32, 6, 3), "mask id 3, the target's table has 3 rows"),
    ],
)
def test_a_draft_for_another_target_is_refused_with_both_values(target, sentence):
    with pytest.raises(DraftMismatch, match=sentence):
        check_pair(z_lab(), target)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "expected an object, found list"),
        (b" " * ((16 << 20) + 1), "larger than"),
    ],
)
def test_a_file_that_is_no_config_is_a_checkpoint_error(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        read_draft_config(tmp_path)


def test_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Z_LAB))
    assert read_draft_config(tmp_path).hidden_size == 32


def test_what_a_network_says_of_itself_wrongly_is_a_defect(monkeypatch):
    monkeypatch.setattr("protocol.plugins.literal", lambda *_: {"nmes": ("x",)})
    with pytest.raises(InternalError, match="PUBLISHED"):
        published()


def test_a_file_that_two_dialects_claim_is_a_defect(monkeypatch):
    monkeypatch.setattr("protocol.plugins.names", lambda *_: ("z_lab", "z_lab"))
    with pytest.raises(InternalError, match="z-lab"):
        canonical(Z_LAB, "config.json")
