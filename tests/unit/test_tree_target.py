"""Trees on tiny dense targets: each row is what decoding its own path would give.

And what is kept of them is what a prefill of the accepted tokens leaves, in K/V and feature rows.
"""

import random
from dataclasses import replace

import pytest
import torch
from support.targets import features, load, prompt
from support.tiny_target import write_tiny_target
from support.trees import path_of, random_parents

from protocol.errors import UnsupportedModel
from target_daemon.columns import Columns

NEAR = {"atol": 1e-4, "rtol": 0.0}
WIDTH, CHUNK = 12, 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = write_tiny_target(tmp_path_factory.mktemp("tiny") / family, family)
        return made[family]

    return get


def prefilled(folder, ids, **settings):
    """A target that holds `ids` in slot 1."""
    target = load(folder, **({"block_size": WIDTH, "prefill_chunk": CHUNK} | settings))
    for start in range(0, len(ids), CHUNK):
        target.verify_batch(1, ids[start : start + CHUNK], start, "none")
    return target


def state(target, length):
    """K/V [.., length, ..] and feature rows of slot 1."""
    return target.key_values.save(1, 0, length), features(target, 1, max(0, length - 64), length)


def decoded(target, tokens, base):
    """Logits of `tokens` run one by one, as decoding alone would."""
    return torch.cat(
        [target.verify_batch(1, tokens[i : i + 1], base + i, "all") for i in range(len(tokens))]
    )


@pytest.mark.parametrize(
    ("family", "base"),
    [("smollm2", 1), ("llama3", 70), ("mistral-window", 20), ("qwen3-window", 70)],
)
def test_every_row_is_what_its_own_path_gives(folders, family, base):
    ids, source = prompt(base), random.Random(base)
    target, alone = (prefilled(folders(family), ids) for _ in range(2))
    for seed in range(2):
        parents = random_parents(source, WIDTH)
        tokens = prompt(WIDTH, seed=seed)
        assert target.tree_rows(base, parents) == tuple(range(WIDTH))
        logits = target.verify_tree(1, tokens, base, parents)
        for row in range(WIDTH):
            path = path_of(row, parents)
            last = decoded(alone, tokens[path], base)[-1]
            torch.testing.assert_close(logits[row], last, **NEAR)


@pytest.mark.parametrize("family", ["smollm2", "llama-biased", "mistral-window", "qwen3-window"])
def test_what_is_kept_is_the_state_of_a_prefill_of_the_accepted_tokens(folders, family):
    base, source = 50, random.Random(1)
    ids = prompt(base)
    for seed in range(2):
        target = prefilled(folders(family), ids, ring_window=40)
        parents = random_parents(source, WIDTH)
        tokens = prompt(WIDTH, seed=seed)
        path = path_of(source.randrange(1, WIDTH), parents)
        target.verify_tree(1, tokens, base, parents)
        assert target.rollback_to_tree(1, base, path)
        whole = torch.cat((ids, tokens[path]))
        fresh = prefilled(folders(family), whole, ring_window=40)
        for one, other in zip(state(target, len(whole)), state(fresh, len(whole)), strict=True):
            torch.testing.assert_close(one[-30:], other[-30:], **NEAR)
        follow = prompt(8, seed=9)
        after = [one.verify_batch(1, follow, len(whole), "all") for one in (target, fresh)]
        torch.testing.assert_close(*after, **NEAR)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("smollm2", "float32"), ("qwen3-window", "float32"), ("llama3", "bfloat16")],
)
def test_where_rows_are_exact_a_trees_are_the_same_bits(folders, family, dtype):
    settings = {"exact": True, "dtype": dtype}
    source = random.Random(4)
    checked = moved = 0
    for base in (3, 60, 200, 240, 250, 300):
        ids = prompt(base)
        target, alone = (prefilled(folders(family), ids, **settings) for _ in range(2))
        assert target.supports_tree_verify
        tokens, parents = prompt(WIDTH, seed=base), random_parents(source, WIDTH)
        rows = target.tree_rows(base, parents)
        kept = {row: index for index, row in enumerate(rows)}
        tokens = tokens[list(rows)]
        parents = [kept[parents[row - 1]] for row in rows[1:]]
        logits = target.verify_tree(1, tokens, base, parents)
        for row in range(len(rows)):
            path = path_of(row, parents)
            moved += path != list(range(len(path)))
            assert torch.equal(logits[row], decoded(alone, tokens[path], base)[-1])
            checked += 1
        assert target.rollback_to_tree(1, base, path)
        for one, other in zip(
            state(target, base + len(path)), state(alone, base + len(path)), strict=True
        ):
            assert torch.equal(one, other)
    assert checked > 50
    assert moved > 10


def test_a_chain_written_as_a_tree_is_the_chain(folders):
    ids, base = prompt(20), 20
    target, alone = (prefilled(folders("llama3"), ids) for _ in range(2))
    tokens = prompt(WIDTH, seed=3)
    logits = target.verify_tree(1, tokens, base, range(WIDTH - 1))
    assert torch.equal(logits, alone.verify_batch(1, tokens, base, "all"))
    assert target.rollback_to_tree(1, base, range(5))
    assert torch.equal(state(target, 25)[1], state(alone, 25)[1])


def test_a_tree_wider_than_a_pass_is_cut_and_gives_the_same(folders):
    ids, base, rows = prompt(40), 40, 30
    exact = prefilled(folders("llama3"), ids, exact=True, block_size=rows)
    exact.widths = replace(exact.widths, narrow=8, wide=(8,))
    assert len(exact.widths.passes(rows)) == 4
    plain = prefilled(folders("llama3"), ids, block_size=rows)
    tokens, parents = prompt(rows, seed=3), random_parents(random.Random(2), rows)
    assert exact.tree_rows(base, parents) == tuple(range(rows))
    one, other = (target.verify_tree(1, tokens, base, parents) for target in (exact, plain))
    torch.testing.assert_close(one, other, **NEAR)


def test_only_the_last_tree_of_a_slot_can_be_kept(folders):
    target = prefilled(folders("llama3"), prompt(8))
    assert not target.rollback_to_tree(1, 8, [0])
    target.verify_tree(1, prompt(3), 8, [0, 0])
    assert not target.rollback_to_tree(0, 8, [0])
    assert not target.rollback_to_tree(1, 7, [0])
    assert target.rollback_to_tree(1, 8, [0, 2])


def test_what_a_failed_tree_left_cannot_reach_the_next_forward(folders):
    target = prefilled(folders("llama3"), prompt(8), exact=True)
    snapshot = target.snapshot_kv(1, 8, 4)
    target.verify_tree(1, prompt(4), 8, [0, 0, 0])
    written = target.key_values.layers(1)
    assert any(rows[:, :, 8 + 16 :].any() for rows in written)
    target.restore_kv(1, snapshot)
    assert not any(rows[:, :, 8:].any() for rows in written)


def test_a_target_whose_attention_moves_with_its_columns_refuses(folders):
    target = load(folders("llama3"))
    target._columns = None
    assert not target.supports_tree_verify
    assert "exact" in target.tree_detail
    with pytest.raises(UnsupportedModel, match="no trees"):
        target.verify_tree(0, prompt(2), 0, [0])


def test_a_row_that_has_no_exact_place_is_never_run(folders):
    target = prefilled(folders("llama3"), prompt(8))
    target._columns = Columns(16, (16,))
    assert target.tree_rows(8, [0, 0, 1]) == (0, 1, 3)
    with pytest.raises(ValueError, match="leaves out"):
        target.verify_tree(1, prompt(4), 8, [0, 0, 1])
