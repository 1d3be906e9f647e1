"""Any request, in any way, is what the target alone makes of it: ids, text, log-probabilities.

The target is exact and tiny; the draft knows the text and has each token in first place, in
another, or nowhere, and may die.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.alternatives import BLOCK, PROMPT, TOKENS, VOCAB, WIDEST, pair_over, tree
from support.samplings import samplings
from support.tiny_target import write_tiny_target

from launch.policy import AUTO, FULL
from launch.stream import TextStream, stop_finder
from launch.token_ids import unpack_ids
from protocol import choice
from protocol.messages import Sampling
from target_daemon import engine
from target_daemon.verify import chain
from target_daemon.verify import tree as tree_verify

# A penalty keeps most ids of the text apart, so that they can be given bytes of their own.
VARIED = Sampling(temperature=0.9, presence_penalty=2.0, repetition_penalty=1.5, seed=1)
CUT = ("é", "日", "😀")  # characters of several tokens
WAYS = {
    "alone": {},
    "chain": {"verify": "chain", "block_width": FULL},
    "narrow chain": {"verify": "chain", "block_width": 2},
    "tree": {"verify": "tree", "block_width": 4},
    "auto": {"verify": "auto", "block_width": AUTO},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = write_tiny_target(tmp_path_factory.mktemp("tiny"), "llama3", eos_token_id=VOCAB - 1)
    return pair_over(folder)


@pytest.fixture(scope="module")
def letters(pair):
    """(bytes of each id, the text's ids): every character of `CUT` is cut by tokens of the text."""
    ids = pair.alone(VARIED)[:TOKENS]
    table = {token: bytes([97 + token % 26]) for token in range(VOCAB)}
    at = 1
    for character in CUT:
        parts = character.encode()
        while not _once(ids, at, len(parts)):
            at += 1
        table |= {ids[at + part]: parts[part : part + 1] for part in range(len(parts))}
        at += len(parts) + 1
    return table, ids


def _once(ids, at, count):
    return all(ids.count(one) == 1 for one in ids[at : at + count]) and at + count < len(ids)


def decoded(table):
    return lambda ids: b"".join(table[one] for one in ids).decode("utf-8", "replace")


def run(pair, way, text, *, luck=0, stops=(), table=None, **options):
    """The result of one way, and what its client reads."""
    table = table or dict.fromkeys(range(VOCAB), b"x")
    streams = [TextStream(decoded(table), stops=stops) for _ in range(2)]
    if stops:
        options["find_stop"] = stop_finder(streams[0])
    read, entries = [], []

    def take(piece):
        entries.extend(piece.logprobs)
        read.append(streams[1].push(unpack_ids(piece.tokens)))

    draft = None if way == "alone" else tree(text, seed=luck, first=0.5, among=0.5)
    options = {"draft": draft} | WAYS[way] | options
    result = pair.run(on_piece=take, **options)
    return result, "".join([*read, streams[1].finish()]), entries


@pytest.mark.parametrize("way", WAYS)
def test_characters_that_tokens_cut_are_whole_whatever_a_round_brings(pair, letters, way):
    table, ids = letters
    for tokens in range(1, TOKENS, 3):  # ends inside a character among them
        result, text, _ = run(pair, way, ids, table=table, sampling=VARIED, tokens=tokens)
        assert list(result.token_ids) == ids[:tokens]
        assert text == decoded(table)(ids[:tokens])
        assert bool(result.statistics.num_trees) == (way == "tree" and tokens > 3) or way == "auto"
        assert result.statistics.num_rounds < tokens - 1 or way in ("alone", "auto") or tokens < 8
    assert all(character in decoded(table)(ids) for character in CUT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", [2, 5, 8, 13])
def test_a_stop_across_tokens_and_rounds_ends_the_text_before_it(pair, letters, way, end):
    table, ids = letters
    whole = decoded(table)(ids)
    stop = whole[end : end + 4]
    before = whole[: whole.index(stop)]
    for luck in range(4):  # rounds are cut at other places
        given = {"table": table, "stops": (stop,), "sampling": VARIED, "luck": luck}
        result, text, _ = run(pair, way, ids, **given)
        assert result.finish_reason == "stop"
        assert text == before
        assert list(result.token_ids) == ids[: len(result.token_ids)]
        assert decoded(table)(result.token_ids).endswith(stop)
        assert stop not in decoded(table)(result.token_ids[:-1])


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1])
def test_a_seed_has_one_text_at_every_width_as_chain_and_tree_and_when_the_draft_dies(pair, seed):
    sampling = Sampling(temperature=1.0, top_k=20, seed=seed)
    text = pair.alone(sampling)
    for verify in ("chain", "tree"):
        for drafts in (0, 1, 3, 7):
            for lives in (2, 99):
                draft = tree(text, seed=drafts, first=0.4, among=0.4, lives=lives)
                shape = {"verify": verify, "block_width": drafts + 1, "block_size": 8}
                result = pair.run(draft, sampling=sampling, **shape)
                assert list(result.token_ids) == text[:TOKENS]


@pytest.mark.parametrize("way", WAYS)
def test_whatever_the_one_choice_function_says_is_the_text(pair, monkeypatch, way):
    """Behind the prompt, in a step, in a chain and in a tree: another function, another text."""

    def by_position(logits, position, sampling, history):
        assert len(history) == position
        return torch.arange(position, position + len(logits)) % VOCAB

    for module in (engine, chain, tree_verify):
        assert module.choose is choice.choose
        monkeypatch.setattr(module, "choose", by_position)
    text = [(len(PROMPT) + at) % VOCAB for at in range(TOKENS)]
    result, _, _ = run(pair, way, text)
    assert list(result.token_ids) == text
    assert (result.statistics.num_rounds < TOKENS - 1) == (way != "alone")


@settings(max_examples=200, deadline=None)
@given(
    sampling=samplings(VOCAB),
    way=st.sampled_from(["chain", "narrow chain", "tree"]),
    luck=st.integers(0, 1000),
)
def test_in_200_generated_combinations_the_ids_with_a_draft_are_those_without(
    pair, sampling, way, luck
):
    plain = pair.run(sampling=sampling, tokens=12)
    draft = tree(plain.token_ids, seed=luck, first=0.5, among=0.4)
    found = pair.run(draft, sampling=sampling, tokens=12, **WAYS[way])
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert found.statistics.num_drafts or len(plain.token_ids) < 3


@settings(max_examples=25, deadline=None)
@given(
    sampling=samplings(VOCAB),
    way=st.sampled_from(["chain", "tree", "auto"]),
    block_width=st.sampled_from([AUTO, 1, 2, 4, FULL]),
    budget=st.integers(1, WIDEST - 1),
    lives=st.sampled_from([0, 1, 2, 99]),
    hints=st.sampled_from(["none", "wrong everywhere", "some", "stops"]),
    ngram=st.sampled_from(("auto", "always", "never")),
    logprobs=st.sampled_from([-1, 0, 3]),
    stop=st.integers(0, TOKENS),
)
def test_no_combination_changes_a_token_a_log_probability_or_the_end(  # noqa: PLR0913, PLR0917 - all
    pair, sampling, way, block_width, budget, lives, hints, ngram, logprobs, stop
):
    sampling = replace(sampling, logprobs=logprobs)
    table = {token: bytes([97 + token % 26]) for token in range(VOCAB)}
    text = pair.alone(sampling)
    stops = (decoded(table)(text)[stop : stop + 2],) if stop + 2 <= len(text) else ()
    common = {"table": table, "stops": stops, "sampling": sampling}
    expected, read, entries = run(pair, "alone", text, **common)
    known = {
        "none": {},
        "wrong everywhere": {at: (token + 1) % VOCAB for at, token in enumerate(text)},
        "some": {at: text[at] for at in range(0, len(text), 2)},
        "stops": dict.fromkeys(range(TOKENS), (sampling.stop_token_ids or (VOCAB - 1,))[0]),
    }[hints]
    draft = tree([*text, *range(BLOCK)], seed=budget, first=0.5, among=0.4, lives=lives)
    asked = {"draft": draft, "block_width": block_width, "tree_budget": budget, "ngram": ngram}
    found = run(pair, way, text, **common, **asked, hint_tokens=known)
    assert found[0].token_ids == expected.token_ids
    assert found[0].finish_reason == expected.finish_reason
    assert found[1:] == (read, entries)
    figures = found[0].statistics
    assert figures.num_accepted_tokens <= figures.num_draft_tokens
    assert figures.num_accepted_hint_tokens <= figures.num_hint_tokens
