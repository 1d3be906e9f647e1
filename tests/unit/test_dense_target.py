"""Facts, shared weights, head and refusals of a loaded dense target."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import TinyGGUF
from support.plain_host import PlainHost
from support.targets import load, prompt
from support.tiny_target import write_tiny_target

from protocol.checkpoints.gguf import GGUFModel
from protocol.checkpoints.target_config import read_model_config
from protocol.checkpoints.tensors import open_tensors
from protocol.errors import CheckpointError, ConfigError, UnsupportedModel
from target_daemon.dense.layout import Rules, resolve


def edit(folder, change):
    """Apply `change` to the tensors of a tiny checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )


def test_facts_are_those_of_the_config(tmp_path):
    target = load(write_tiny_target(tmp_path, "qwen3"), mask_token_id=7, max_positions=100)
    assert (target.model_type, target.num_layers, target.hidden_size) == ("qwen3", 4, 32)
    assert (target.vocab_size, target.padded_vocab_size, target.max_positions) == (97, 97, 100)
    assert (target.eos_token_ids, target.mask_token_id) == ((2,), 7)
    assert target.is_eos(2)
    assert not target.is_eos(3)
    assert (target.tied, target.rope_theta, target.capture_layer_ids) == (False, 1e6, (0, 2, 3))
    assert target.max_width == 8


@pytest.mark.parametrize(
    ("family", "stored", "compute", "names"),
    [
        ("smollm2", torch.bfloat16, "float32", {"embed": "bfloat16", "head_t": "float32"}),
        ("smollm2", torch.bfloat16, "bfloat16", {"embed": "bfloat16"}),
        ("llama3", torch.bfloat16, "bfloat16", {"embed": "bfloat16", "head": "bfloat16"}),
        ("llama3", torch.float32, "float32", {"embed": "float32", "head_t": "float32"}),
    ],
)
def test_embedding_and_head_lie_in_memory_of_the_host(tmp_path, family, stored, compute, names):
    host = PlainHost()
    folder = write_tiny_target(tmp_path, family, dtype=stored)
    target = load(folder, host, dtype=compute)
    found = {name: str(value.dtype).removeprefix("torch.") for name, value in host.weights.items()}
    assert found == names
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    assert torch.equal(host.weights["embed"], embed)
    head = tensors.get("lm_head.weight", embed)
    if "head_t" in names:
        assert torch.equal(host.weights["head_t"], head.t().float())
    if "head" in names:
        assert torch.equal(host.weights["head"], head)
    ids = prompt(5)
    assert torch.equal(target.embed_tokens(ids), embed[ids].to(target.dtype))


def test_projections_use_the_head_without_the_final_norm(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3")
    target = load(folder)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    scores = hidden @ head.t()
    assert torch.equal(target.project_hidden_to_tokens(hidden), scores.argmax(dim=-1))
    values, ids = target.project_hidden_to_topk(hidden, 4)
    expected = scores.log_softmax(dim=-1).topk(4, dim=-1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values, expected.values)


def test_weight_bytes_count_every_weight_once(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3")
    size = sum(value.nbytes for value in load_file(folder / "model.safetensors").values())
    assert load(folder).weight_bytes == size


def test_a_tied_checkpoint_may_store_its_head_as_well(tmp_path):
    folder = write_tiny_target(tmp_path)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 24)}))
    assert load(folder).verify_batch(0, prompt(4), 0, "all").abs().max() > 0


def test_a_missing_tensor_is_named(tmp_path):
    folder = write_tiny_target(tmp_path)
    edit(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    folder = write_tiny_target(tmp_path)
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(23)}))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight: expected shape \[24\], found \[23\]"
    ):
        load(folder)


def test_unknown_tensors_are_refused_and_derived_buffers_are_not(tmp_path):
    folder = write_tiny_target(tmp_path)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({buffer: torch.ones(4)}))
    load(folder)
    extra = {f"model.layers.{index}.surprise.weight": torch.ones(1) for index in range(7)}
    edit(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.surprise\.weight.* and 2 more"):
        load(folder)


def test_an_architecture_that_nobody_knows_is_refused_by_name(tmp_path):
    folder = write_tiny_target(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "unheard_of"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="'unheard_of' has no native family"):
        load(folder)


@pytest.mark.parametrize("taps", [(4,), (-1,), (1, 1)])
def test_taps_must_be_distinct_layers(tmp_path, taps):
    with pytest.raises(ConfigError, match=r"distinct layers in 0\.\.3"):
        load(write_tiny_target(tmp_path), taps=taps)


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="mask token id 97"):
        load(write_tiny_target(tmp_path), mask_token_id=97)


def test_without_taps_the_ring_has_no_columns(tmp_path):
    target = load(write_tiny_target(tmp_path), taps=())
    assert target.verify_batch(0, prompt(4), 0, "last").shape == (1, 97)
    assert target.ring.shape.row_width == 0
    target.restore_kv(0, target.snapshot_kv(0, 4, 4))


def test_what_a_failed_forward_left_cannot_reach_the_next_one(tmp_path):
    target, ids = load(write_tiny_target(tmp_path)), prompt(12)
    expected = target.verify_batch(0, ids, 0, "all")[8:]
    target.verify_batch(0, ids[:8], 0, "none")
    snapshot = target.snapshot_kv(0, 8, 4)
    for rows in target.key_values.writers(0, 8, 4):
        rows.fill_(float("nan"))
    target.restore_kv(0, snapshot)
    assert not any(rows.any() for rows in target.key_values.writers(0, 8, 4))
    one = target.verify_batch(0, ids[8:9], 8, "all")  # what is behind it lies in its padded K
    torch.testing.assert_close(one, expected[:1], atol=1e-4, rtol=0)


def test_a_snapshot_holds_no_copy_of_the_cache(tmp_path):
    target = load(write_tiny_target(tmp_path))
    snapshot = target.snapshot_kv(0, 4, 32)
    held = [getattr(snapshot, name) for name in snapshot.__dataclass_fields__]
    assert held == [4, 32]


def test_only_snapshots_of_a_target_can_be_restored(tmp_path):
    with pytest.raises(TypeError, match="not a snapshot"):
        load(write_tiny_target(tmp_path)).restore_kv(0, "nothing")


def test_the_probe_leaves_no_trace(tmp_path):
    target = load(write_tiny_target(tmp_path), exact=True)
    assert target.ring.written_high.tolist() == [0, 0]
    assert not target.ring.rows.any()
    assert not any(rows.any() for rows in target.key_values.readers(0, 512))


def test_a_context_shorter_than_the_probe_is_probed_as_well(tmp_path):
    target = load(write_tiny_target(tmp_path), max_positions=6, exact=True)
    assert target.exactness.kind in ("native", "padded")
    assert target.verify_batch(0, prompt(6), 0, "all").shape == (6, 97)


@pytest.mark.parametrize("dim", [64, 128])
def test_exact_rows_are_the_same_at_every_width_with_heads_of_real_size(dim, tmp_path):
    """At 11 rows of 3 heads a group, one row is left over behind the kernel's block of 32."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": dim}
    folder = write_tiny_target(tmp_path, "qwen3", num_hidden_layers=2, **heads)
    target, ids = load(folder, exact=True, block_size=35, taps=(0, 1)), prompt(110)
    assert target.exactness.kind in ("native", "padded")
    rows = [target.verify_batch(0, ids[at : at + 8], at, "all").clone() for at in range(0, 104, 8)]
    expected = torch.cat(rows)
    for width in range(1, 36):
        for base in (40, 57):
            got = target.verify_batch(0, ids[base : base + width], base, "all")
            assert got.equal(expected[base : base + width]), (width, base)


def test_the_whole_context_can_be_filled_with_padding_on(tmp_path):
    folder = write_tiny_target(tmp_path)
    exact, plain = load(folder, exact=True), load(folder)
    ids = prompt(512)
    for target in (exact, plain):
        for start in range(0, 512, 32):
            last = target.verify_batch(0, ids[start : start + 32], start, "last")
        target.last = last
    torch.testing.assert_close(exact.last, plain.last, atol=1e-4, rtol=0)
    step = exact.verify_batch(0, ids[511:], 511, "all")
    torch.testing.assert_close(step, plain.last, atol=1e-4, rtol=0)


QWEN = Rules(qkv_bias="always", output_bias="never", qk_norm=False, window="switched")
LLAMA = Rules(qkv_bias="never", output_bias="never", qk_norm=False, window="none")
MISTRAL = Rules(
    qkv_bias="never", output_bias="never", qk_norm=False, window="stated", absent_window=5
)


def model(tmp_path, family="qwen2", **overrides):
    return read_model_config(write_tiny_target(tmp_path, family, **overrides))


def test_an_absent_window_means_what_the_family_says(tmp_path):
    folder = write_tiny_target(tmp_path, "mistral")
    config = json.loads((folder / "config.json").read_text())
    assert resolve(read_model_config(folder), MISTRAL).windows == (None,) * 4
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve(read_model_config(folder), MISTRAL).windows == (5,) * 4


def test_windows_follow_the_layer_types_or_the_first_windowed_layer(tmp_path):
    on = {"use_sliding_window": True, "sliding_window": 9}
    by_layer = model(tmp_path, max_window_layers=3, **on)
    assert resolve(by_layer, QWEN).windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert resolve(model(tmp_path, layer_types=types, **on), QWEN).windows == (9, None, None, 9)


@pytest.mark.parametrize(
    ("rules", "overrides", "error", "words"),
    [
        (LLAMA, {"sliding_window": 9}, UnsupportedModel, "`sliding_window` is 9"),
        (
            LLAMA,
            {"sliding_window": None, "attention_bias": True},
            UnsupportedModel,
            "`attention_bias`",
        ),
        (QWEN, {"rope_theta": None}, CheckpointError, "`rope_theta`"),
        (
            QWEN,
            {"use_sliding_window": True, "max_window_layers": None},
            CheckpointError,
            "`max_window_layers`",
        ),
        (QWEN, {"layer_types": ["sliding_attention"] * 4}, UnsupportedModel, "`layer_types`"),
        (QWEN, {"layer_types": ["chunked_attention"] * 4}, UnsupportedModel, "chunked_attention"),
        (
            MISTRAL,
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
            UnsupportedModel,
            "`layer_types` vary",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_key(tmp_path, rules, overrides, error, words):
    with pytest.raises(error, match=words):
        resolve(model(tmp_path, **overrides), rules)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_gguf_file_is_the_same_model_as_the_folder_of_its_tensors(tmp_path, arch):
    file = TinyGGUF(arch=arch, pre="smollm" if arch == "llama" else "qwen2").write(
        tmp_path / "tiny.gguf"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GGUFModel(file).config()))
    with open_tensors(file) as source:
        names = source.names()
        tensors = {name: source.get(name) for name in names}
        assert all(source.shape(name) == tuple(tensors[name].shape) for name in names)
        with pytest.raises(CheckpointError, match="ghost is missing"):
            source.get("ghost")
    assert all(value.dtype == torch.bfloat16 for value in tensors.values())
    save_file(tensors, folder / "model.safetensors")
    ids = prompt(12)
    one, other = (load(path, taps=(0, 1)).verify_batch(0, ids, 0, "all") for path in (file, folder))
    assert torch.equal(one, other)
