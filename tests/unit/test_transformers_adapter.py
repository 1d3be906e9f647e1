"""What the adapter refuses, and what it must never let the library do."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import proven_targets
from support.foreign_target import edit_config, own_answers, write_foreign_target
from support.targets import load, prompt
from torch import nn

from protocol.checkpoints.target_config import (
    DENSE_TYPES,
    UNSTATED_POSITIONS,
    parse_model_config,
    read_model_config,
)
from protocol.config import TargetConfig
from protocol.errors import (
    CheckpointError,
    ConfigError,
    InsufficientMemory,
    InternalError,
    UnsupportedModel,
)
from protocol.memory import Available
from target_daemon.adapter import parts
from target_daemon.adapter.caches import SlotCaches
from target_daemon.adapter.library import import_library
from target_daemon.adapter.probe import settle
from target_daemon.dense.model import DenseFamily
from target_daemon.families import base, transformers_model
from target_daemon.memory_plan import plan

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # that library's own


@pytest.fixture
def neox(tmp_path):
    return write_foreign_target(tmp_path / "neox", "gpt_neox")


# --- the config, without the library -------------------------------------------------------------


def test_general_facts_are_read_under_every_name_in_use():
    raw = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 77,
        "vocab_size": 50,
        "eos_token_id": 7,
    }
    model = parse_model_config(raw, {}, where="config.json")
    assert (model.hidden_size, model.num_layers, model.max_positions) == (32, 3, 77)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 4, 8)
    assert (model.eos_token_ids, model.dense, model.rope_theta) == ((7,), False, None)


def test_of_a_model_with_parts_the_text_counts():
    text = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 9, "dtype": "bfloat16"}
    raw = {"model_type": "qwen3_5", "hidden_size": 99, "text_config": text}
    model = parse_model_config(raw, {}, where="config.json")
    assert (model.model_type, model.hidden_size, model.dtype) == ("qwen3_5", 16, "bfloat16")
    assert (model.num_heads, model.head_dim) == (0, 0)
    assert model.max_positions == UNSTATED_POSITIONS


BARE = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"hidden_size": None}, CheckpointError, "`hidden_size` is missing"),
        ({"num_hidden_layers": None}, CheckpointError, "`num_hidden_layers` is missing"),
        ({"vocab_size": "many"}, CheckpointError, "`vocab_size` is 'many'"),
        ({"eos_token_id": 9}, CheckpointError, r"token ids in 0\.\.8"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "`quantization_config`"),
        ({"text_config": {"quantization_config": {}}}, UnsupportedModel, "`quantization_config`"),
        ({"is_encoder_decoder": True}, UnsupportedModel, "`is_encoder_decoder` is true"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, UnsupportedModel, "never run"),
        ({"auto_map": {"AutoConfig": "m.C"}}, UnsupportedModel, "never run"),
        ({"text_config": {"auto_map": {"AutoConfig": "m.C"}}}, UnsupportedModel, "never run"),
    ],
)
def test_what_cannot_be_read_or_run_is_refused_by_name(keys, error, words):
    raw = {key: value for key, value in (BARE | keys).items() if value is not None}
    with pytest.raises(error, match=words):
        parse_model_config(raw, {}, where="config.json")


def test_strictly_read_types_are_those_of_the_dense_families():
    dense = {name for name, each in base.known_families().items() if isinstance(each, DenseFamily)}
    assert dense == DENSE_TYPES


# --- the library ---------------------------------------------------------------------------------


def test_without_the_library_its_extra_is_named(neox, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox' .*dflash-daemons\[transformers\]"):
        load(neox)


def test_native_families_do_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "llama" in base.known_families()


def test_a_gguf_file_of_an_unknown_type_is_refused_with_the_known_ones(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.touch()
    model = parse_model_config(BARE, {}, where="x")
    monkeypatch.setattr(base, "read_model_config", lambda _path: model)
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        load(path)


def test_kernels_named_in_a_config_are_not_fetched(neox):
    edit_config(neox, attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    target = load(neox)
    assert target._model.config._attn_implementation in ("sdpa", "eager")


def test_code_beside_a_checkpoint_is_not_run(neox):
    (neox / "modeling_mine.py").write_text("raise SystemExit('run')\n")
    load(neox)
    edit_config(neox, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(UnsupportedModel, match="never run"):
        load(neox)


def test_pickled_weights_are_not_read(neox):
    tensors = load_file(neox / "model.safetensors")
    torch.save(tensors, neox / "pytorch_model.bin")
    (neox / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(neox)


def test_an_adapter_is_refused(neox):
    (neox / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UnsupportedModel, match="merge it first"):
        load(neox)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("embed_out.weight"), "missing keys: (embed_out|lm_head)"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "unexpected keys: extra"),
        (
            lambda tensors: tensors.update({"embed_out.weight": torch.ones(97, 31)}),
            "embed_out.weight|cannot load it",
        ),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_tensors_that_do_not_fit_are_named(neox, change, words):
    path = neox / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        load(neox)


def test_a_config_that_the_library_refuses_is_a_checkpoint_error(neox):
    edit_config(neox, num_attention_heads="four", head_dim=8)
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        load(neox)
    edit_config(neox, num_attention_heads=4, layer_norm_eps="tiny")
    with pytest.raises(CheckpointError, match=r"cannot load it.*layer_norm_eps"):
        load(neox)
    edit_config(neox, layer_norm_eps=1e-5, hidden_act="nonsense")
    with pytest.raises(CheckpointError, match="cannot load it"):
        load(neox)


def test_an_infinity_is_read_as_the_library_writes_it(tmp_path):
    folder = write_foreign_target(tmp_path, "mamba2")
    assert "__float__" in (folder / "config.json").read_text()
    target, ids = load(folder), prompt(30)
    logits, _ = own_answers(folder, ids, ())
    ours = target.verify_batch(0, ids, 0, "all")
    torch.testing.assert_close(ours, logits, atol=1e-3, rtol=0)


def test_a_type_without_a_causal_model_is_refused(neox):
    edit_config(neox, model_type="vit")
    with pytest.raises(UnsupportedModel, match="no causal LM for 'vit'"):
        load(neox)


def test_a_head_smaller_than_the_vocabulary_is_refused(neox, monkeypatch):
    model = read_model_config(neox)
    import msgspec

    larger = msgspec.structs.replace(model, vocab_size=98)
    monkeypatch.setattr(base, "read_model_config", lambda _path: larger)
    with pytest.raises(CheckpointError, match="vocab_size is 98; the embedding has 97"):
        load(neox)


@pytest.mark.parametrize("taps", [(4,), (1, 1)])
def test_taps_must_be_distinct_layers(neox, taps):
    with pytest.raises(ConfigError, match=r"distinct layers in 0\.\.3"):
        load(neox, taps=taps)


def test_a_mask_token_outside_the_vocabulary_is_refused(neox):
    with pytest.raises(ConfigError, match="mask token id 97"):
        load(neox, mask_token_id=97)


def test_a_model_whose_rows_or_logits_no_draft_could_use_is_refused(neox, monkeypatch):
    first = parts.first
    monkeypatch.setattr(parts, "first", lambda output: first(output)[..., :5])
    with pytest.raises(UnsupportedModel, match="no one row of 32"):
        load(neox)
    monkeypatch.undo()
    kind = transformers_model.TransformersTarget
    monkeypatch.setattr(kind, "_scores", lambda _self, hidden: torch.zeros(len(hidden), 97))
    with pytest.raises(UnsupportedModel, match="no scaled, capped product"):
        load(neox)
    assert load(neox, taps=()).ring.shape.row_width == 0


# --- state ---------------------------------------------------------------------------------------


def test_positions_that_were_not_run_are_refused_and_position_0_starts_again(neox):
    target, ids = load(neox), prompt(8)
    first = target.verify_batch(0, ids, 0, "all")
    with pytest.raises(InternalError, match="no state at position 9; 8 rows were run"):
        target.verify_batch(0, ids, 9, "all")
    assert torch.equal(target.verify_batch(0, ids, 0, "all"), first)
    with pytest.raises(TypeError, match="not a snapshot"):
        target.restore_kv(0, "nothing")


def test_a_recurrent_state_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    folder = write_foreign_target(tmp_path, "mamba")
    monkeypatch.setattr(transformers_model, "available", lambda: Available(100, "a test"))
    with pytest.raises(InsufficientMemory, match=r"2 slots and a copy .* 100 are left \(a test\)"):
        load(folder)


def test_the_plan_counts_the_weights_as_they_lie_in_the_file(neox):
    model = read_model_config(neox)
    config = TargetConfig(model=str(neox), run_dir="", life=1, slots=3, max_positions=50)
    sizes = {line.name: line.size for line in plan(model, config, "bfloat16").lines}
    tensors = load_file(neox / "model.safetensors").values()
    assert sizes["weights"] == 2 * sum(tensor.numel() for tensor in tensors)
    assert sizes["keys and values"] == 3 * 50 * (2 * 4 + 2) * 32 * 2
    tight = plan(model, replace_config(config, max_positions=256), "bfloat16")
    with pytest.raises(InsufficientMemory, match="keys and values"):
        tight.check(Available(1000, "a test"))


def replace_config(config, **changes):
    import msgspec

    return msgspec.structs.replace(config, **changes)


# --- parts and probe -----------------------------------------------------------------------------


class Stateless(nn.Module):
    def forward(self, input_ids):
        return input_ids


def test_a_model_without_a_cache_layers_or_head_is_refused():
    library = import_library("any")
    with pytest.raises(UnsupportedModel, match="Stateless takes none of cache, past_key_values"):
        SlotCaches(library, Stateless(), 1)
    with pytest.raises(UnsupportedModel, match="no list of 3 layers"):
        parts.layers(Stateless(), 3)
    model = Stateless()
    model.get_input_embeddings = lambda: nn.Embedding(3, 2)
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnsupportedModel, match="no plain head"):
        parts.ends(model)


class Forgetful:
    """Answers as if every forward were the first."""

    stepwise = False

    class caches:  # noqa: N801 - stands for an attribute
        save = restore = staticmethod(lambda *_: None)

    def run(self, tokens, base):
        return nn.functional.one_hot(tokens, 50).cumsum(0).float()

    def run_bare(self, tokens):
        return self.run(tokens, 0)


def test_a_cache_that_does_not_continue_is_found_out():
    with pytest.raises(UnsupportedModel, match="does not continue from the cache"):
        settle(Forgetful(), vocab=50, positions=100, block=6, dtype=torch.float32, exact=False)


def test_a_crop_that_raises_means_replay(neox, monkeypatch):
    def refuse(_self, _count):
        raise RuntimeError("not this cache")

    monkeypatch.setattr(transformers.DynamicCache, "crop", refuse)
    target = load(neox)
    assert not target.supports_fast_rollback
    assert not target.caches.recording


def test_in_bf16_a_row_that_went_to_other_experts_is_no_lost_state():
    rows = torch.ones(4, 3)
    for wrong, alike in ((0, True), (1, True), (2, True), (3, False)):
        found = rows.clone()
        found[:wrong] += 1.0
        assert parts.alike(found, rows, torch.bfloat16) == alike
        assert parts.alike(found, rows, torch.float16) == alike
        assert parts.alike(found, rows, torch.float32) == (wrong == 0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_experts_load_in_bf16(family, tmp_path):
    settings = proven_targets.FAMILIES[family]
    for seed in range(2):
        folder = write_foreign_target(tmp_path / str(seed), settings, seed=seed)
        target = load(folder, taps=(0,), dtype="bfloat16")
        assert target.supports_fast_rollback == (family != "qwen3_next")
