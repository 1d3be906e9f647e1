"""config.json of a target: what is read, what is refused, and how it is said."""

import json

import pytest
from support.tiny_target import BASE, FAMILIES

from protocol.checkpoints.json_file import MAX_JSON_BYTES
from protocol.checkpoints.target_config import parse_model_config, read_model_config
from protocol.errors import CheckpointError, UnsupportedModel

LLAMA = FAMILIES["llama2"]


def parse(**overrides):
    raw = {key: value for key, value in (LLAMA | overrides).items() if value != "absent"}
    return parse_model_config(raw, {}, where="config.json")


def test_every_fact_is_read_under_the_names_of_the_file():
    model = parse(torch_dtype="bfloat16", unknown_but_harmless=3)
    assert (model.model_type, model.hidden_size, model.intermediate_size) == ("llama", 32, 48)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (4, 4, 4, 8)
    assert (model.vocab_size, model.max_positions, model.rms_norm_eps) == (97, 512, 1e-5)
    assert (model.rope_theta, model.rope_scaling, model.tied) == (10000.0, {}, False)
    assert (model.eos_token_ids, model.dtype) == ((2,), "bfloat16")
    assert (model.sliding_window, model.states_sliding_window) == (None, False)


def test_absent_optional_keys_have_the_meaning_of_the_format():
    model = parse(
        num_key_value_heads="absent",
        tie_word_embeddings="absent",
        eos_token_id="absent",
        torch_dtype="absent",
        rope_theta="absent",
    )
    assert model.num_kv_heads == 4
    assert not model.tied
    assert model.eos_token_ids == ()
    assert model.dtype is None
    assert model.rope_theta is None  # never a silent default


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_stored_type_that_nobody_knows_is_refused(key):
    with pytest.raises(CheckpointError, match=f"key `{key}` is 'float7'; expected one of bfloat16"):
        parse(**{key: "float7"})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_theta": "absent",
            "rope_parameters": {"rope_theta": 5e5, "type": "linear", "factor": 2.0},
        },
        {
            "rope_theta": 5e5,
            "rope_parameters": {
                "rope_theta": 5e5,
                "type": "linear",
                "factor": 2.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ],
)
def test_both_spellings_of_rope_are_read(keys):
    model = parse(**keys)
    assert model.rope_theta == 5e5
    assert model.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_scaling_without_its_factor_is_refused_by_name(kind):
    with pytest.raises(CheckpointError, match="`factor` is missing"):
        parse(rope_scaling={"rope_type": kind})


def test_default_scaling_is_none():
    assert parse(rope_scaling={"rope_type": "default"}).rope_scaling == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("quantization_config", {"quant_method": "gptq", "padding": "x" * 100}),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.2),
        ("num_local_experts", 8),
        ("clip_qkv", 8.0),
    ],
)
def test_a_key_that_changes_the_arithmetic_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedModel, match=f"`{key}`") as caught:
        parse(**{key: value})
    assert len(str(caught.value)) < 160


def test_code_of_the_checkpoint_is_refused_and_its_tokenizer_is_not():
    parse(auto_map={"AutoTokenizer": "tok.Tok"})
    with pytest.raises(UnsupportedModel, match="`auto_map`"):
        parse(auto_map={"AutoModelForCausalLM": "mine.Model"})


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"hidden_size": "absent"}, CheckpointError, "`hidden_size` is missing"),
        ({"model_type": "absent"}, CheckpointError, "`model_type` is missing"),
        ({"rms_norm_eps": "absent"}, CheckpointError, "`rms_norm_eps` is missing"),
        ({"hidden_size": "wide"}, CheckpointError, "`hidden_size` is 'wide'; expected an integer"),
        ({"hidden_size": True}, CheckpointError, "`hidden_size` is True"),
        ({"hidden_size": 1 << 40}, CheckpointError, "`hidden_size` is 1099511627776"),
        ({"num_hidden_layers": 0}, CheckpointError, r"`num_hidden_layers` is 0; .* in 1\.\.4096"),
        ({"num_key_value_heads": 3}, CheckpointError, "no multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, CheckpointError, "no `head_dim`"),
        ({"head_dim": 7}, CheckpointError, "head_dim 7 is odd"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "`rms_norm_eps` is nan"),
        ({"rope_theta": -1}, CheckpointError, "`rope_theta` is -1; expected a positive number"),
        ({"rope_theta": [1]}, CheckpointError, "`rope_theta`"),
        ({"rope_scaling": 3}, CheckpointError, "`rope_scaling` is 3; expected an object"),
        ({"rope_parameters": {"rope_theta": 2.0}}, CheckpointError, "which one"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 2.0}}},
            UnsupportedModel,
            "differ by layer type",
        ),
        (
            {"rope_scaling": {"partial_rotary_factor": 0.25}},
            UnsupportedModel,
            "partial_rotary_factor",
        ),
        ({"tie_word_embeddings": 1}, CheckpointError, "`tie_word_embeddings` is 1"),
        ({"model_type": 3}, CheckpointError, "`model_type` is 3; expected a string"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "1 entries for 4 layers"),
        ({"layer_types": "full"}, CheckpointError, "`layer_types`"),
        ({"eos_token_id": 97}, CheckpointError, r"token ids in 0\.\.96"),
        ({"eos_token_id": [True]}, CheckpointError, "`eos_token_id`"),
        ({"model_type": ["x" * 100]}, CheckpointError, r"\.\.\.; expected a string"),
    ],
)
def test_a_missing_or_mistyped_key_is_named(keys, error, words):
    with pytest.raises(error, match=words):
        parse(**keys)


def test_generation_config_decides_what_ends_a_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "llama"}))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_model_config(tmp_path).eos_token_ids == (5, 6)


def test_a_folder_without_a_config_says_which_file_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder or file"):
        read_model_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object, found list"),
        ("[" * 200_000, "not valid JSON"),
        ("\xff\xfe{", "not valid JSON"),
    ],
)
def test_bad_json_is_said_to_be_bad_json(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=words):
        read_model_config(tmp_path)


def test_a_huge_config_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="larger than"):
        read_model_config(tmp_path)
