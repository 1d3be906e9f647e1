"""The native Qwen3.5 against `transformers`, and what only a recurrent target can get wrong."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.foreign_target import edit_config, own_answers, write_foreign_target
from support.plain_host import PlainHost
from support.proven_targets import FAMILIES, load_adapted
from support.targets import features, load, prompt

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from protocol.config import TargetConfig
from protocol.errors import (
    CheckpointError,
    ConfigError,
    InsufficientMemory,
    InternalError,
    UnsupportedModel,
)
from protocol.memory import Available
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.families import qwen3_5
from target_daemon.families.base import load_target
from target_daemon.prefix_folder import PrefixFolder
from target_daemon.prefixes import Prefix
from target_daemon.rollback import settle

pytest.importorskip("transformers")
# That library warns.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

NEAR = {"atol": 1e-4, "rtol": 0.0}
COUNT, SEED = 150, 1
GAIN = 0.75  # with more, float32 itself is further from float64 than these comparisons allow
TAPS = (0, 2)
PLAIN = FAMILIES["qwen3_5"] | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
# Grouped differently, larger heads of which less is rotated, a longer convolution, a tied head,
# layers by interval.
OTHER = PLAIN | {
    "layer_types": None,
    "full_attention_interval": 3,
    "head_dim": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_conv_kernel_dim": 5,
    "tie_word_embeddings": True,
}
SHAPES = {"plain": PLAIN, "other": {k: v for k, v in OTHER.items() if v is not None}}


@pytest.fixture(scope="module", params=sorted(SHAPES))
def case(request, tmp_path_factory):
    """A checkpoint, its prompt, and the library's logits and taps."""
    folder = tmp_path_factory.mktemp("hybrid") / request.param
    write_foreign_target(folder, SHAPES[request.param], seed=SEED, gain=GAIN)
    ids = prompt(COUNT)
    return folder, ids, *own_answers(folder, ids, TAPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_foreign_target(tmp_path_factory.mktemp("plain"), PLAIN, seed=SEED)


def loaded(folder, **settings):
    return load(folder, taps=TAPS, **({"prefill_chunk": 256} | settings))


def test_a_whole_prompt_gives_the_librarys_logits_and_taps(case):
    folder, ids, logits, taps = case
    target = loaded(folder)
    assert type(target) is qwen3_5.HybridTarget
    torch.testing.assert_close(target.verify_batch(0, ids, 0, "all"), logits, **NEAR)
    torch.testing.assert_close(features(target, 0, 0, COUNT), taps, **NEAR)


def test_chunks_blocks_and_single_rows_give_the_same(case):
    folder, ids, logits, taps = case
    target = loaded(folder)
    for start in range(0, 100, 50):
        assert target.verify_batch(0, ids[start : start + 50], start, "none") is None
    at = 100
    while at < COUNT:
        for rows in (8, 1, 3, 5):
            found = target.verify_batch(0, ids[at : at + rows], at, "all")
            torch.testing.assert_close(found, logits[at : at + rows], **NEAR)
            at += rows
            if at >= COUNT:
                break
    torch.testing.assert_close(features(target, 0, 0, COUNT), taps, **NEAR)


@pytest.mark.parametrize("kept", range(9))
def test_any_number_of_the_last_rows_can_be_dropped(case, kept):
    folder, ids, logits, _ = case
    target = loaded(folder)
    target.prepare_rollback("fast")
    target.verify_batch(0, ids[:60], 0, "none")
    wrong = prompt(8, seed=5)
    wrong[:kept] = ids[60 : 60 + kept]
    target.verify_batch(0, wrong, 60, "all")
    if kept:
        assert target.rollback_to(0, 60, kept)
    at = 60 + kept  # a forward at its base goes back by itself
    found = target.verify_batch(0, ids[at : at + 6], at, "all")
    torch.testing.assert_close(found, logits[at : at + 6], **NEAR)


def test_exact_forwards_agree_bit_for_bit_and_with_the_library(case):
    folder, ids, logits, _ = case
    target = loaded(folder, exact=True, prefill_chunk=32)
    assert target.exactness.kind in ("native", "padded")
    blocks = [target.verify_batch(0, ids[:32], 0, "all")]
    blocks += [target.verify_batch(0, ids[i : i + 7], i, "all") for i in range(32, COUNT, 7)]
    single = [target.verify_batch(1, ids[i : i + 1], i, "last") for i in range(COUNT)]
    assert torch.equal(torch.cat(blocks), torch.cat(single))
    torch.testing.assert_close(torch.cat(single), logits, **NEAR)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_stay_within_their_rounding(tmp_path, dtype):
    short = getattr(torch, dtype)
    folder = write_foreign_target(tmp_path, PLAIN, seed=SEED, dtype=short)
    ids = prompt(60)
    logits, _ = own_answers(folder, ids, TAPS)
    theirs, _ = own_answers(folder, ids, TAPS, dtype=short)
    target = loaded(folder, dtype=dtype)
    ours = target.verify_batch(0, ids, 0, "all")
    assert (ours - logits).abs().mean() <= 1.5 * (theirs - logits).abs().mean() + 1e-3
    assert target.ring.rows.dtype == short


def test_the_text_of_a_model_that_also_sees_is_read_from_its_part(folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {"model.visual.blocks.0.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = {"model_type": "qwen3_5", "text_config": raw, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    ids = prompt(40)
    one, other = (loaded(each).verify_batch(0, ids, 0, "all") for each in (folder, tmp_path))
    assert torch.equal(one, other)


def test_embedding_head_and_scores_are_those_of_the_adapter(folder):
    host = PlainHost()
    ours = load(folder, host, taps=TAPS)
    theirs = load_adapted(folder, taps=TAPS, block_size=8)
    ids, hidden = prompt(9), torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ours.embed_tokens(ids), theirs.embed_tokens(ids))
    torch.testing.assert_close(
        ours.project_hidden_to_topk(hidden, 3)[0],
        theirs.project_hidden_to_topk(hidden, 3)[0],
        **NEAR,
    )
    best = theirs.project_hidden_to_tokens(hidden)
    assert torch.equal(ours.project_hidden_to_tokens(hidden), best)
    assert ours.weights.embed.data_ptr() == host.weights["embed"].data_ptr()


# --- state ---------------------------------------------------------------------------------------


def test_slots_and_copies_do_not_see_each_other(case):
    folder, ids, logits, _ = case
    target = loaded(folder)
    target.verify_batch(1, prompt(50, seed=9), 0, "none")
    target.verify_batch(0, ids[:60], 0, "none")
    size = target.state_bytes(0, 60)
    copy, seen = target.copy_state(0, 60), target.copy_state(0, 60, shared=True)
    assert copy.bytes == seen.bytes == size > 0
    assert all(torch.equal(each, seen.tensors[name]) for name, each in copy.tensors.items())
    assert target.state_bytes(0, 59) == 0
    target.verify_batch(0, prompt(8, seed=4), 60, "none")
    target.verify_batch(1, prompt(8, seed=10), 50, "none")
    target.reset(1)
    target.set_state(1, copy, 60)
    for slot in (1, 0):
        if slot == 0:
            target.reset(0)
            target.verify_batch(0, ids[:60], 0, "none")
        found = target.verify_batch(slot, ids[60:68], 60, "all")
        torch.testing.assert_close(found, logits[60:68], **NEAR)


@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_a_kept_prefix_is_continued_as_if_it_had_been_run_again(folder, rollback):
    """From the slot where a text ended, and from the store, also at the prompt's last chunk."""
    target = loaded(folder)
    engine = Engine(target, Limits(4, 6, rollback, prefix_bytes=1 << 24), target.ring)
    facts = TargetFacts(1, 97, target.max_positions, 4, target.ring.shape.capacity, 6)
    numbers, start = itertools.count(1), prompt(14, seed=3).tolist()

    def run(ids, **options):
        return run_spec_decode(engine, None, ids, 8, facts=facts, sequence=next(numbers), **options)

    first = run(start, retain=True).token_ids
    turn, again = [*start, *first, 5, 6, 7], [*start[:13], 7]
    on = run(turn, base_pos=len(turn))
    assert (on.token_ids, on.statistics.num_kept_tokens) == (run(turn).token_ids, 21)
    run(start, retain=True)
    for other in (9, 11):
        run([other] * 10, retain=True)
    back = run(again, base_pos=len(again))
    assert (back.token_ids, back.statistics.num_kept_tokens) == (run(again).token_ids, 12)


def test_a_copy_comes_back_from_a_file_bit_for_bit(folder, tmp_path):
    target, ids = loaded(folder), prompt(30)
    target.verify_batch(0, ids[:20], 0, "none")
    kept = Prefix(ids[:20], target.copy_state(0, 20, shared=True), torch.zeros(0, 0), 1)
    expected = target.verify_batch(0, ids[20:21], 20, "all")
    store = PrefixFolder.open(tmp_path / "store", "one", 1 << 24)
    store.save(kept, cuttable=False)
    target.set_state(1, store.load(store.entries[0]).state, 20)
    assert torch.equal(target.verify_batch(1, ids[20:21], 20, "all"), expected)


def test_a_copy_of_another_model_is_refused(folder, tmp_path):
    import dataclasses

    other = loaded(write_foreign_target(tmp_path, SHAPES["other"]))
    other.verify_batch(0, prompt(20), 0, "none")
    target, copy = loaded(folder), other.copy_state(0, 20)
    for wrong, length in (
        (copy, 20),
        (copy, 19),
        (dataclasses.replace(copy, tensors={}), 20),
        (dataclasses.replace(copy, facts={}), 20),
    ):
        with pytest.raises(ValueError, match=r"no (recurrent )?state|no rows"):
            target.set_state(0, wrong, length)
    own = loaded(folder)
    own.verify_batch(0, prompt(20), 0, "none")
    short = own.copy_state(0, 20)
    less = {name: each for name, each in short.tensors.items() if name != "0"}
    with pytest.raises(ValueError, match="no recurrent state"):
        target.set_state(0, dataclasses.replace(short, tensors=less), 20)


def test_positions_that_no_forward_reached_are_refused(folder):
    target, ids = loaded(folder), prompt(30)
    target.prepare_rollback("replay")
    target.verify_batch(0, ids[:20], 0, "none")
    for position in (21, 15):
        with pytest.raises(InternalError, match=f"position {position}; 20 rows were run"):
            target.verify_batch(0, ids[:1], position, "all")
    assert not target.rollback_to(0, 12, 3)
    assert target.rollback_to(0, 12, 8)
    with pytest.raises(TypeError, match="not a snapshot"):
        target.restore_kv(0, "nothing")
    target.prepare_rollback("fast")
    target.verify_batch(0, ids[20:24], 20, "all")
    assert not target.rollback_to(0, 10, 2)
    assert not target.rollback_to(1, 20, 2)


def test_the_probe_leaves_no_trace(folder):
    target = loaded(folder)
    assert not target.ring.rows.any()
    assert not target.key_values.save(0, 0, 200).any()
    assert [held.length for held in target.states.slots] == [0, 0]
    assert not any(each.any() for each in target.states.copies(0))


def test_which_way_back_is_used_is_measured(folder):
    way = settle(loaded(folder), "auto")
    assert way.kind in ("fast", "replay")
    assert "the states of its last 8 rows are kept" in way.detail
    assert "takes fast" in way.detail


# --- what is refused -----------------------------------------------------------------------------


def test_where_the_states_of_each_row_do_not_fit_it_is_replayed(folder, monkeypatch):
    whole = loaded(folder, block_size=64)
    slots = 4 * whole.states.bytes
    assert whole.states.step_bytes > 2 * slots
    monkeypatch.setattr(qwen3_5, "available", lambda: Available(2 * slots, "a test"))
    target = loaded(folder, block_size=64)
    assert settle(target, "auto").kind == "replay"
    with pytest.raises(ConfigError, match=r"--rollback fast: the states of 64 rows take .* left"):
        settle(target, "fast")
    exact = loaded(folder, exact=True, prefill_chunk=32, block_size=64).exactness
    monkeypatch.undo()
    assert exact == loaded(folder, exact=True, prefill_chunk=32, block_size=64).exactness
    monkeypatch.setattr(qwen3_5, "available", lambda: Available(100, "a test"))
    with pytest.raises(InsufficientMemory, match=r"2 slots and two copies .* 100 are left \(a"):
        loaded(folder)


@pytest.fixture
def copied(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModel, "`hidden_act` is 'gelu'"),
        ({"attn_output_gate": False}, UnsupportedModel, "`attn_output_gate`"),
        ({"num_experts": 8}, UnsupportedModel, "`num_experts`"),
        ({"attention_bias": True}, UnsupportedModel, "`attention_bias`"),
        ({"linear_key_head_dim": None}, CheckpointError, "`linear_key_head_dim` is missing"),
        ({"linear_num_value_heads": 3}, CheckpointError, "no whole groups"),
        ({"layer_types": ["conv"] * 4}, CheckpointError, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, UnsupportedModel, "full_attention"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            UnsupportedModel,
            "'yarn' is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
            CheckpointError,
            "3 of 8 dimensions",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, CheckpointError, "`rope_theta` is missing"),
        ({"linear_value_head_dim": 16}, CheckpointError, "conv1d.weight: expected"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused_by_its_key(copied, keys, error, words):
    edit_config(copied, **keys)
    with pytest.raises(error, match=words):
        loaded(copied)


def test_tensors_that_nobody_reads_and_recorded_forwards_are_refused(copied):
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"model.layers.0.extra": torch.ones(1)}, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra"):
        loaded(copied)
    with pytest.raises(UnsupportedModel, match="--graphs: the recurrent state of qwen3_5_text"):
        loaded(copied, graphs=True)
    with pytest.raises(UnsupportedModel, match="--target-weights int8: a qwen3_5_text model has"):
        loaded(copied, weights="int8")
    config, device = TargetConfig(model=str(copied), run_dir="", life=1), torch.device("cpu")
    with pytest.raises(UnsupportedModel, match="--target-devices: a qwen3_5_text model is on one"):
        load_target(config, PlainHost(), others=(device,))
