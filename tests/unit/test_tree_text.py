"""Chain, tree and plain decoding have one text: on an exact tiny target, with any draft."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alternatives import (
    CHUNK,
    COLD,
    PROMPT,
    TOKENS,
    VOCAB,
    WARM,
    WIDEST,
    pair_over,
    tree,
)
from support.targets import features
from support.tiny_target import write_tiny_target

from launch.events import TargetFacts
from launch.policy import AUTO, FULL
from launch.token_ids import unpack_ids
from protocol.errors import UsageError
from protocol.messages import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("tiny"), "llama3", eos_token_id=96)


@pytest.fixture(scope="module")
def pair(folder):
    return pair_over(folder)


@pytest.fixture(scope="module")
def fresh(folder):
    """Another target of the same weights, which has seen nothing."""
    return pair_over(folder).target


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    first=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    among=st.sampled_from([0.0, 0.5, 1.0]),
    sampling=st.sampled_from([COLD, WARM]),
    tokens=st.integers(1, TOKENS),
    budget=st.integers(1, WIDEST - 1),
    verify=st.sampled_from(["tree", "auto", "chain"]),
    block_width=st.sampled_from([AUTO, 1, 2, 4, FULL]),
    ngram=st.sampled_from(("auto", "always", "never")),
    hints=st.dictionaries(st.integers(0, TOKENS), st.integers(0, VOCAB - 1), max_size=3),
    right=st.sets(st.integers(0, TOKENS - 1), max_size=6),
)
def test_the_text_is_the_targets_own_whatever_is_verified(  # noqa: PLR0913, PLR0917 - all at once
    pair, seed, first, among, sampling, tokens, budget, verify, block_width, ngram, hints, right
):
    text = pair.alone(sampling)
    result = pair.run(
        tree(text, seed=seed, first=first, among=among),
        tokens=tokens,
        sampling=sampling,
        verify=verify,
        tree_budget=budget,
        block_width=block_width,
        ngram=ngram,
        hint_tokens=hints | {at: text[at] for at in right},
    )
    assert list(result.token_ids) == text[:tokens]
    assert result.finish_reason == "length"
    figures = result.statistics
    emitted = figures.num_rounds + sum(
        at * rounds for at, rounds in enumerate(figures.acceptance_histogram)
    )
    assert emitted == tokens - 1
    accepted = figures.num_accepted_tokens + figures.num_accepted_ngram_tokens
    assert accepted + figures.num_accepted_hint_tokens == emitted - figures.num_rounds
    assert figures.num_trees <= figures.num_drafts
    assert figures.num_tree_nodes <= budget * figures.num_trees or figures.num_trees == 0


@pytest.mark.parametrize("sampling", [COLD, WARM])
def test_a_tree_accepts_what_its_chain_does_and_what_stands_beside_it(pair, sampling):
    text = pair.alone(sampling)
    luck = {"first": 0.4, "among": 0.6}
    rounds = {}
    for verify in ("chain", "tree"):
        result = pair.run(tree(text, **luck), sampling=sampling, verify=verify, block_width=4)
        assert list(result.token_ids) == text[:TOKENS]
        rounds[verify] = result.statistics.num_rounds
        assert result.statistics.verify == verify
    assert rounds["tree"] < rounds["chain"]
    figures = result.statistics
    assert figures.num_trees
    assert figures.num_tree_nodes > figures.num_trees
    assert figures.num_draft_tokens >= figures.num_tree_nodes


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("how", ["budget", "stop token", "stop text", "eos"])
def test_every_end_inside_an_accepted_path_leaves_the_state_of_a_fresh_prefill(
    pair, fresh, at, how
):
    text = pair.alone()
    end = text.index(text[at - 1]) + 1  # the token may come earlier, too
    options = {"tokens": at if how == "budget" else TOKENS}
    sampling, reason = COLD, "stop"
    if how == "stop token":
        sampling = Sampling(stop_token_ids=(text[at - 1],))
    elif how == "eos":
        sampling = Sampling(eos_token_ids=(text[at - 1],))
    elif how == "stop text":
        seen = []

        def find_stop(tokens):
            seen.extend(tokens)
            first = len(seen) - len(tokens)
            return end - first if len(seen) >= end else None

        options["find_stop"] = find_stop
    else:
        end, reason = at, "length"
    result = pair.run(
        tree(text, first=0.2, among=0.8), sampling=sampling, verify="tree", retain=True, **options
    )
    assert (list(result.token_ids), result.finish_reason) == (text[:end], reason)
    kept = [*PROMPT, *text[: end - 1]]
    left = pair.engine._sequences.retained.items()
    (slot,) = [slot for slot, one in left if one.number == pair.sequence]
    got = state(pair.target, slot, len(kept))
    for one, other in zip(got, run_fresh(fresh, kept), strict=True):
        assert torch.equal(one, other)


def state(target, slot, length):
    keys_values = target.key_values.save(slot, 0, length)
    return keys_values, features(target, slot, 0, length)


def run_fresh(target, kept):
    """K/V and feature rows of `kept`, run as a prompt and then token by token."""
    start = len(PROMPT)
    for at in range(0, start, CHUNK):
        target.verify_batch(0, torch.tensor(kept[at : min(at + CHUNK, start)]), at, "none")
    for at in range(start, len(kept)):
        target.verify_batch(0, torch.tensor(kept[at : at + 1]), at, "all")
    return state(target, 0, len(kept))


@pytest.mark.parametrize("least", [0, 3, 9])
def test_no_end_comes_before_the_least_number_of_tokens(pair, least):
    eager = Sampling(logit_bias=((5, 100.0),), stop_token_ids=(5,), min_tokens=least)
    plain = pair.run(sampling=eager)
    result = pair.run(tree(plain.token_ids, first=0.3, among=0.7), sampling=eager, verify="tree")
    assert result.token_ids == plain.token_ids
    assert len(plain.token_ids) == least + 1
    assert 5 not in result.token_ids[:least]


@pytest.mark.parametrize("lives", [0, 1, 3])
def test_a_draft_that_dies_in_the_middle_changes_no_token(pair, lives):
    text = pair.alone(WARM)
    draft = tree(text, first=0.3, among=0.5, lives=lives)
    result = pair.run(draft, sampling=WARM, verify="tree", block_width=FULL)
    assert list(result.token_ids) == text[:TOKENS]
    assert "it died" in result.statistics.mode_reason


def test_log_probabilities_are_those_of_plain_decoding(pair):
    sampling = Sampling(logprobs=3)
    text = pair.alone(sampling)
    found = {}
    for verify, draft in (("chain", None), ("tree", tree(text, first=0.2, among=0.8))):
        pieces = []
        pair.run(draft, sampling=sampling, verify=verify, on_piece=pieces.append)
        found[verify] = [entry for piece in pieces for entry in piece.logprobs]
    assert found["tree"] == found["chain"]
    tree_pieces = [piece for piece in pieces if piece.parents]
    assert tree_pieces
    for piece in tree_pieces:
        path = unpack_ids(piece.path)
        proposed = unpack_ids(piece.proposed)
        assert [proposed[row - 1] for row in path[1:]] == list(unpack_ids(piece.tokens)[:-1])
        assert piece.width == len(proposed) + 1


def test_a_pair_without_trees_refuses_one_by_name_and_says_why_with_auto(folder):
    pair = pair_over(folder)
    pair.target._columns = None
    facts = pair.facts
    pair.facts = TargetFacts(
        1, VOCAB, facts.max_positions, CHUNK, facts.ring_capacity, WIDEST, tree_detail="too odd"
    )
    text = pair.alone()
    with pytest.raises(UsageError, match="--verify tree: too odd"):
        pair.run(tree(text), verify="tree")
    result = pair.run(tree(text), verify="auto", block_width=FULL)
    assert list(result.token_ids) == text[:TOKENS]
    assert (result.statistics.verify, result.statistics.verify_reason) == ("chain", "too odd")


@pytest.mark.parametrize("verify", ["tree", "auto"])
def test_where_every_round_was_one_token_the_reason_for_no_tree_says_so(pair, verify):
    text = pair.alone()
    for draft, width in ((tree(text), 1), (None, FULL)):
        figures = pair.run(draft, verify=verify, block_width=width).statistics
        assert (figures.verify, figures.num_trees) == ("chain", 0)
        assert "no round had a draft's chain" in figures.verify_reason
    assert pair.run(tree(text), block_width=1).statistics.verify_reason == ""  # chains, as asked


def test_what_no_tree_can_be_is_refused_with_the_numbers(pair):
    with pytest.raises(UsageError, match=r"a tree of 12 nodes is a forward of 13 rows; .* 12"):
        pair.run(tree([]), verify="tree", tree_budget=WIDEST)


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_a_request_that_bans_every_token_fails_by_name_and_the_next_one_is_served(
    pair, verify, heat
):
    banned = Sampling(stop_token_ids=tuple(range(VOCAB)), min_tokens=1, temperature=heat)
    with pytest.raises(UsageError, match=f"no token can be chosen at position {len(PROMPT)}"):
        pair.run(tree([]), sampling=banned, verify=verify)
    text = pair.alone()
    assert list(pair.run(tree(text), verify=verify).token_ids) == text[:TOKENS]
