"""Decode forwards in fixed shapes: what they give, when they are made, how many there are."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drive import generate
from support.plain_host import PlainHost
from support.tiny_target import write_tiny_target

from protocol.config import TargetConfig
from target_daemon import graphs
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.families.base import load_target
from target_daemon.graphs import Pool, length_class, width_class

FAMILIES = ["llama3", "qwen3", "qwen2", "mistral-window"]


def load(folder, *, static, **changes):
    settings = {
        "model": str(folder),
        "run_dir": "",
        "life": 0,
        "dtype": "float32",
        "taps": (0, 2),
        "block_size": 6,
        "prefill_chunk": 16,
        "ring_window": 32,
        "max_positions": 1500,
        "graphs": static,
    }
    return load_target(TargetConfig(**(settings | changes)), PlainHost())


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_state_and_features_are_those_of_the_plain_forward(tmp_path, family):
    folder = write_tiny_target(tmp_path, family)
    plain, static = load(folder, static=False), load(folder, static=True)
    ids = torch.randint(97, (700,), generator=torch.Generator().manual_seed(1))
    for start in range(0, 496, 16):
        for target in (plain, static):
            target.verify_batch(1, ids[start : start + 16], start, "none")
    at = 496  # blocks cross from one K length to the next, and wrap around the ring
    for width in itertools.islice(itertools.cycle((1, 6, 3, 5, 2, 4)), 30):
        block = ids[at : at + width]
        close(static.verify_batch(1, block, at, "all"), plain.verify_batch(1, block, at, "all"))
        rows = [position % plain.ring.shape.capacity for position in range(at - 26, at + width)]
        close(static.ring.rows[1, rows], plain.ring.rows[1, rows])
        close(static.key_values.save(1, 0, at + width), plain.key_values.save(1, 0, at + width))
        assert int(static.ring.written_high[1]) >= at + width
        at += max(1, width - 1)  # the last row was a rejected draft
    assert {key[2] for key in static.forwards.pool._held} == {512, 1024}


def test_a_whole_text_is_that_of_the_plain_engine(tmp_path):
    folder = write_tiny_target(tmp_path)
    texts = []
    for static in (False, True):
        target = load(folder, static=static)
        engine = Engine(target, Limits(16, 6), target.ring)

        def drafter(so_far, wanted):
            return [(so_far[-1] * 7 + step) % 97 for step in range(wanted)]

        text, _, _ = generate(engine, list(range(1, 30)), 60, chunk=16, width=6, drafter=drafter)
        texts.append(text)
    assert texts[0] == texts[1]


def test_the_load_time_probe_runs_through_it_and_leaves_nothing_recorded(tmp_path):
    target = load(write_tiny_target(tmp_path), static=True)
    assert target.exactness.kind in ("native", "padded", "no")
    assert len(target.forwards.pool) == 0
    assert not target.ring.written_high.any()
    assert not target.key_values.save(0, 0, 128).any()


def test_a_forward_is_recorded_once_and_run_again_with_other_numbers(tmp_path):
    target = load(write_tiny_target(tmp_path), static=True)
    recorded = []

    def record(work):
        runs = [0]
        recorded.append(runs)

        def again():
            runs[0] += 1
            return work()

        return again

    target.forwards._record = record
    for base in range(10):
        target.verify_batch(0, torch.tensor([base]), base, "all")
    target.verify_batch(0, torch.tensor([1, 2, 3]), 10, "all")
    target.verify_batch(0, torch.tensor([1, 2, 3, 4]), 10, "all")  # of the same class
    least = target.widths.least
    assert recorded == ([[10], [2]] if least == 1 else [[12]])
    target.verify_batch(0, torch.tensor([5]), 11, "last")  # a prompt's: not of a fixed shape
    assert len(recorded) == (2 if least == 1 else 1)


def test_the_result_of_a_run_outlives_the_next_one(tmp_path):
    target = load(write_tiny_target(tmp_path), static=True)
    first = target.verify_batch(0, torch.tensor([1]), 0, "all")
    kept = first.clone()
    target.verify_batch(0, torch.tensor([2]), 1, "all")
    assert torch.equal(first, kept)


def test_a_pool_holds_the_most_recent_and_no_more():
    made = []
    pool = Pool(lambda key: made.append(key) or key, most=2)
    for key in (1, 2, 1, 3, 1, 2):
        assert pool.get(key) == key
    assert made == [1, 2, 3, 2]
    assert len(pool) == 2
    pool.clear()
    assert len(pool) == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_width_classes_are_few_and_wide_enough(rows, widest):
    rows = min(rows, widest)
    found = width_class(rows, widest)
    assert rows <= found <= widest
    assert found == widest or found & (found - 1) == 0


@given(st.integers(1, 40_960))
def test_length_classes_are_few_and_long_enough(reach):
    assert reach <= length_class(reach, 40_960, 512) <= max(512, 2 * reach)
    assert len({length_class(each, 40_960, 512) for each in range(1, 40_961, 7)}) <= 8


def test_the_cpu_records_nothing_and_a_gpu_does():
    assert graphs.recorder(torch.device("cpu")) is graphs.eager
    assert graphs.recorder(torch.device("cuda", 0)) is graphs.captured
