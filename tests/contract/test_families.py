"""Every dense family against `transformers`, on random tiny checkpoints."""

import pytest
import torch
from support.targets import features, load, prompt, reference
from support.tiny_target import FAMILIES, write_tiny_target

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # that library's own

NEAR = {"atol": 1e-4, "rtol": 0.0}
COUNT = 60


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request, tmp_path_factory):
    """A checkpoint, its prompt, and the numbers of the other implementation."""
    folder = write_tiny_target(tmp_path_factory.mktemp("tiny") / request.param, request.param)
    ids = prompt(COUNT)
    return folder, ids, *reference(folder, ids)


def test_a_whole_prompt_gives_the_logits_and_taps_of_transformers(case):
    folder, ids, logits, taps = case
    target = load(folder, prefill_chunk=64)
    torch.testing.assert_close(target.verify_batch(0, ids, 0, "all"), logits, **NEAR)
    torch.testing.assert_close(features(target, 0, 0, COUNT), taps, **NEAR)


def test_chunks_and_single_tokens_give_the_same_as_the_whole(case):
    folder, ids, logits, taps = case
    target = load(folder)
    assert target.verify_batch(0, ids[:32], 0, "none") is None
    last = target.verify_batch(0, ids[32:50], 32, "last")
    torch.testing.assert_close(last, logits[49:50], **NEAR)
    for position in range(50, COUNT):
        step = target.verify_batch(0, ids[position : position + 1], position, "all")
        torch.testing.assert_close(step, logits[position : position + 1], **NEAR)
    torch.testing.assert_close(features(target, 0, 0, COUNT), taps, **NEAR)


@pytest.mark.parametrize("way", ["rollback", "restore"])
def test_rejected_rows_leave_no_trace(case, way):
    folder, ids, logits, taps = case
    target = load(folder)
    target.verify_batch(0, ids[:40], 0, "none")
    wrong = prompt(8, seed=5)
    wrong[:3] = ids[40:43]
    snapshot = target.snapshot_kv(0, 40, 8)
    target.verify_batch(0, wrong, 40, "all")
    if way == "rollback":
        assert target.supports_fast_rollback
        assert target.rollback_to(0, 40, 3)
    else:
        target.restore_kv(0, snapshot)
        target.verify_batch(0, ids[40:43], 40, "none")
    rest = target.verify_batch(0, ids[43:51], 43, "all")
    torch.testing.assert_close(rest, logits[43:51], **NEAR)
    torch.testing.assert_close(features(target, 0, 0, 51), taps[:51], **NEAR)


def test_slots_do_not_see_each_other(case):
    folder, ids, logits, _taps = case
    target = load(folder)
    target.verify_batch(1, prompt(50, seed=9), 0, "none")
    target.verify_batch(0, ids[:30], 0, "none")
    target.verify_batch(1, prompt(8, seed=10), 20, "none")
    torch.testing.assert_close(target.verify_batch(0, ids[30:38], 30, "all"), logits[30:38], **NEAR)


def test_exact_forwards_agree_bit_for_bit_and_with_transformers(case):
    folder, ids, logits, _taps = case
    target = load(folder, exact=True)
    assert target.exactness.kind in ("native", "padded")
    blocks = [target.verify_batch(0, ids[:32], 0, "all")]
    blocks += [target.verify_batch(0, ids[i : i + 7], i, "all") for i in range(32, COUNT, 7)]
    single = [target.verify_batch(1, ids[i : i + 1], i, "last") for i in range(COUNT)]
    assert torch.equal(torch.cat(blocks), torch.cat(single))
    torch.testing.assert_close(torch.cat(single), logits, **NEAR)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_16_bits_stay_within_their_rounding(family, tmp_path, dtype):
    short = getattr(torch, dtype)
    folder = write_tiny_target(tmp_path, family, dtype=short)
    ids = prompt(40)
    logits, taps = reference(folder, ids)
    theirs, _ = reference(folder, ids, dtype=short)
    target = load(folder, dtype=dtype)
    ours = target.verify_batch(0, ids, 0, "all")
    # As far from the fp32 numbers as the other implementation's short numbers are, within a factor.
    assert (ours - logits).abs().mean() <= 1.5 * (theirs - logits).abs().mean() + 1e-3
    assert target.ring.rows.dtype == short
    torch.testing.assert_close(features(target, 0, 0, 40).float(), taps, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_a_window_holds_far_beyond_the_kernels_own_block_of_keys(family, tmp_path):
    # Blocks of 512 keys then lie wholly outside the window of every row.
    folder = write_tiny_target(tmp_path, family, max_position_embeddings=1400)
    ids = prompt(1300)
    logits, _ = reference(folder, ids)
    target = load(folder, prefill_chunk=256, ring_window=300)
    for start in range(0, 1280, 256):
        target.verify_batch(0, ids[start : start + 256], start, "none")
    torch.testing.assert_close(
        target.verify_batch(0, ids[1280:1288], 1280, "all"), logits[1280:1288], **NEAR
    )


def test_the_ring_holds_the_newest_rows_when_it_wraps(tmp_path):
    folder = write_tiny_target(tmp_path)
    ids = prompt(200)
    _, taps = reference(folder, ids)
    target = load(folder, ring_window=20, prefill_chunk=32)
    capacity = target.ring.shape.capacity
    assert capacity == 52
    for start in range(0, 192, 32):
        target.verify_batch(1, ids[start : start + 32], start, "none")
    target.verify_batch(1, ids[192:], 192, "none")
    assert target.ring.written_high.tolist() == [0, 200]
    torch.testing.assert_close(
        features(target, 1, 200 - capacity, 200), taps[200 - capacity :], **NEAR
    )


def test_shards_and_one_file_are_the_same_model(tmp_path):
    one = load(write_tiny_target(tmp_path / "one", "llama3"))
    many = load(write_tiny_target(tmp_path / "many", "llama3", shards=3))
    ids = prompt(20)
    assert torch.equal(one.verify_batch(0, ids, 0, "all"), many.verify_batch(0, ids, 0, "all"))


def test_the_new_spelling_of_rope_gives_the_same_model(tmp_path):
    old = write_tiny_target(tmp_path / "old", "llama3")
    scaling = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = write_tiny_target(
        tmp_path / "new", "llama3", rope_parameters=scaling, rope_theta=None, rope_scaling=None
    )
    ids = prompt(40)
    first, second = (load(folder).verify_batch(0, ids, 0, "all") for folder in (old, new))
    assert torch.equal(first, second)
