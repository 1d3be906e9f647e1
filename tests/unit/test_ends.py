"""After any end both engines hold the state of a fresh prefill of the prompt and all but one token.

At chain, at tree and one token at a time. Where the pair is exact, equal means bit for bit: K/V and
feature rows of the target, and, once both go on with the same tokens, the draft's K/V, its
proposals and the text. Elsewhere it means within 1e-4, and the same text for 32 tokens more.
"""

import itertools
from dataclasses import dataclass

import msgspec
import pytest
import torch
from support.kept_pair import LONG, PIECE, held, kept_pair, last_slot

from draft_daemon.engine import Engine
from launch.token_ids import pack_ids, unpack_ids
from protocol.messages import Sampling

PROMPT, MOST, MORE = LONG[:37], 24, 32
SAMPLINGS = {
    "greedy": Sampling(),
    "warm": Sampling(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.4),
}


@dataclass
class Knowing:
    """The pair's own draft, with the text's next token as its second id at every other slot."""

    draft: Engine
    text: tuple[int, ...]

    def __getattr__(self, name):
        return getattr(self.draft, name)

    def propose(self, item):
        made = self.draft.propose(item)
        few, ids = item.top_k, list(unpack_ids(made.top_ids))
        if not few:
            return made
        at = item.base_pos + 1 - len(PROMPT)
        for slot, token in enumerate(self.text[at : at + item.width - 1]):
            first, rank = slot * few, (at + slot) % 2
            others = [one for one in ids[first : first + few] if one != token]
            ids[first : first + few] = [*others[:rank], token, *others[rank:]][:few]
        changed = {"tokens": pack_ids(ids[::few]), "top_ids": pack_ids(ids)}
        return msgspec.structs.replace(made, **changed)


# How many tokens a round gets, and in what shape: hints make blocks of accepted tokens, and of a
# tree the right token is now the chain's, now a branch.
SHAPES = {
    "chain": lambda pair, text: {"hint_tokens": dict(enumerate(text))},
    "tree": lambda pair, text: {
        "draft": Knowing(pair.draft, text),
        "verify": "tree",
        "top_k": 3,
        "tree_budget": pair.target.max_width - 1,
        "block_width": 3,
    },
    "": lambda pair, text: {},  # one token at a time
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with kept_pair(tmp_path_factory.mktemp("ends") / "pair") as made:
        yield made


@pytest.fixture(scope="module")
def loose(tmp_path_factory):
    """A pair whose rows may depend on how many are computed together."""
    with kept_pair(tmp_path_factory.mktemp("ends") / "pair", exact=False) as made:
        yield made


def budget(text, end):
    return end, {}, {}


def stop_token(text, end):
    return MOST, {"stop_token_ids": (text[end - 1],)}, {}


def eos(text, end):
    return MOST, {"eos_token_ids": (text[end - 1],)}, {}


def stop_string(text, end):
    seen = []

    def find_stop(ids):
        left = end - len(seen)
        seen.extend(ids)
        return left if left <= len(ids) else None

    return MOST, {}, {"find_stop": find_stop}


def cancel(text, end):
    calls = itertools.count(1)  # to open twice, and 10 chunks, come before the first round
    return MOST, {}, {"is_cancelled": lambda: next(calls) > 12 + min(end, 4)}


ENDS = {"budget": budget, "stop_token": stop_token, "eos": eos}
ENDS |= {"stop_string": stop_string, "cancel": cancel}
REASONS = {"budget": "length", "cancel": "cancelled"}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("greedy", "chain"), ("warm", "chain"), ("greedy", "tree"), ("warm", "tree"), ("warm", "")],
)
@pytest.mark.parametrize("end", [1, 2, 5, 9])
@pytest.mark.parametrize("how", ENDS)
def test_after_any_end_the_state_of_both_is_that_of_a_fresh_prefill(pair, how, end, kind, shape):
    """Rounds accept several tokens, so that ends fall anywhere inside them."""
    ended, text = decoded_to_its_end(pair, how, end, kind, shape)
    got = ended.token_ids
    assert got == text[: len(got)]
    if how != "cancel":  # which takes effect behind the round that is under way
        first = text.index(text[end - 1]) + 1 if how in ("stop_token", "eos") else end
        assert len(got) == first
    for one, fresh in zip(*states_of(pair, got), strict=True):
        assert torch.equal(one, fresh)
    ends, prefilled = gone_on(pair, got)
    assert (ends.token_ids, ends.rounds, ends.proposed) == (
        prefilled.token_ids,
        prefilled.rounds,
        prefilled.proposed,
    )
    for one, fresh in zip(ends.state, prefilled.state, strict=True):
        assert torch.equal(one, fresh)


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("how", ENDS)
def test_where_rows_are_not_exact_it_is_within_1e_4_and_the_next_32_tokens_are_the_same(
    loose, how, kind, shape
):
    ended, _ = decoded_to_its_end(loose, how, 7, kind, shape)
    for one, fresh in zip(*states_of(loose, ended.token_ids), strict=True):
        torch.testing.assert_close(one, fresh, atol=1e-4, rtol=0)
    ends, prefilled = gone_on(loose, ended.token_ids)
    assert len(ends.token_ids) == MORE == 32
    assert ends.token_ids == prefilled.token_ids
    for one, fresh in zip(ends.state, prefilled.state, strict=True):
        torch.testing.assert_close(one, fresh, atol=1e-4, rtol=0)


def decoded_to_its_end(pair, how, end, kind, shape):
    """A run that ended so, and the text that the target has without one."""
    sampling = SAMPLINGS[kind]
    text = pair.run(PROMPT, MOST, speculative=False, sampling=sampling).token_ids
    tokens, choice, options = ENDS[how](text, end)
    ended = pair.run(
        PROMPT,
        tokens,
        speculative=bool(shape),
        sampling=msgspec.structs.replace(sampling, **choice),
        retain=True,
        **SHAPES[shape](pair, text),
        **options,
    )
    if shape and end > 2:
        assert max(ended.rounds) > 1
        assert any(ended.parents) == (shape == "tree")
    assert ended.finish == REASONS.get(how, "stop")
    return ended, text


def states_of(pair, got):
    """K/V and feature rows that the last run left, and those of a prefill of all but one token."""
    length = len(PROMPT) + len(got) - 1
    mine = held(pair, last_slot(pair), length)[:2]
    assert pair.run([*PROMPT, *got][:length], 1, speculative=True, retain=True).kept == 0
    return mine, held(pair, last_slot(pair), length)[:2]


@dataclass
class GoneOn:
    token_ids: tuple[int, ...]
    rounds: list[int]
    proposed: list[bytes]
    slot: int
    state: tuple[torch.Tensor, ...]


def gone_on(pair, got):
    """32 tokens more behind the end, and then behind the fresh prefill, each in its own slot."""
    length, found = len(PROMPT) + len(got) - 1, []
    for _ in range(2):
        on = pair.run([*PROMPT, *got], MORE, speculative=True, base_pos=length, retain=True)
        assert on.kept >= length - PIECE
        slot = last_slot(pair)
        state = held(pair, slot, length + MORE)
        found.append(GoneOn(on.token_ids, on.rounds, on.proposed, slot, state))
    assert found[0].slot != found[1].slot
    return found


def test_a_cancel_in_the_prompt_leaves_what_was_run(pair):
    calls, other = itertools.count(), LONG[45:82]
    options = {"retain": True, "is_cancelled": lambda: next(calls) >= 6}
    ended = pair.run(other, MOST, speculative=False, **options)
    assert (ended.token_ids, ended.finish) == ((), "cancelled")
    on = pair.run(other, MOST, speculative=True, base_pos=len(other))
    assert on.kept == 5 * PIECE
    assert on.token_ids == pair.run(other, MOST, speculative=False).token_ids
