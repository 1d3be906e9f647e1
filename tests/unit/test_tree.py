"""Which path of a tree is kept, on logits made by hand; and what no Verify may carry."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drive import pack, prefill, unpack
from support.plain_host import PlainHost
from support.targets import load, prompt
from support.tiny_target import write_tiny_target
from support.trees import random_tree, tree_item

from protocol.errors import OutOfMemory, PromptTooLong, ProtocolError, UsageError
from protocol.messages import CloseItem, OpenItem, Sampling, VerifyItem
from target_daemon.checks import Limits
from target_daemon.columns import Columns
from target_daemon.engine import Engine
from target_daemon.verify.base import Block, Rules
from target_daemon.verify.tree import STRATEGY, tree_block

VOCAB = 20
# 7 -> 3 -> 4 -> 5, 7 -> 8 -> 9, 3 -> 6; rows in the order of the parents.
IDS, PARENTS = (7, 3, 4, 5, 8, 9, 6), (0, 1, 2, 0, 4, 1)


def judge(chosen, *, budget=100, stops=(), sampling=None):
    """`chosen` maps rows to what the target chooses there; elsewhere it is 19."""
    logits = torch.zeros(len(IDS), VOCAB)
    for row in range(len(IDS)):
        logits[row, chosen.get(row, 19)] = 1.0
    rules = Rules(sampling or Sampling(), frozenset(stops), budget, torch.arange(11))
    return STRATEGY.judge(Block(10, IDS, torch.tensor(IDS), PARENTS), logits, rules)


@pytest.mark.parametrize(
    ("chosen", "path", "emitted"),
    [
        ({0: 2}, (0,), (2,)),
        ({0: 3, 1: 2}, (0, 1), (3, 2)),
        ({0: 3, 1: 4, 2: 5, 3: 1}, (0, 1, 2, 3), (3, 4, 5, 1)),
        ({0: 8, 4: 9, 5: 1}, (0, 4, 5), (8, 9, 1)),
        ({0: 3, 1: 6, 6: 1}, (0, 1, 6), (3, 6, 1)),
        ({0: 8, 4: 4}, (0, 4), (8, 4)),
    ],
)
def test_the_path_that_the_target_chooses_is_kept(chosen, path, emitted):
    kept = judge(chosen)
    assert (kept.path, kept.emitted, kept.chosen, kept.finish) == (path, emitted, emitted, "")


DEEP = {0: 8, 4: 9, 5: 1}


@pytest.mark.parametrize(
    ("options", "emitted", "finish"),
    [
        ({"budget": 1}, (8,), "length"),
        ({"budget": 2}, (8, 9), "length"),
        ({"budget": 3}, (8, 9, 1), "length"),
        ({"stops": {8}}, (8,), "stop"),
        ({"stops": {9}}, (8, 9), "stop"),
        ({"stops": {1}}, (8, 9, 1), "stop"),
        ({"budget": 2, "stops": {9}}, (8, 9), "stop"),
        ({"budget": 2, "stops": {1}}, (8, 9), "length"),
        ({"stops": {3, 4, 5}}, (8, 9, 1), ""),
    ],
)
def test_every_end_cuts_a_path_as_it_cuts_a_chain(options, emitted, finish):
    kept = judge(DEEP, **options)
    assert (kept.emitted, kept.finish) == (emitted, finish)
    assert kept.path == (0, 4, 5)[: len(emitted)]


def test_a_row_is_judged_with_its_own_path_as_history():
    # With a penalty for what was said, row 5 may not repeat what its own branch said (9), while
    # what other branches say (3) costs nothing.
    logits = torch.zeros(len(IDS), VOCAB)
    logits[0, 8], logits[4, 9] = 9.0, 9.0
    logits[5, 9], logits[5, 3] = 5.0, 4.5
    rules = Rules(Sampling(presence_penalty=1.0), frozenset(), 100, torch.tensor([7] * 11))
    kept = STRATEGY.judge(Block(10, IDS, torch.tensor(IDS), PARENTS), logits, rules)
    assert kept.emitted == (8, 9, 3)


# --- through the engine ----------------------------------------------------------------------

ROWS, CHUNK, PROMPT = 10, 16, tuple(prompt(21).tolist())
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2)


@dataclass
class Setting:
    folder: object
    exact: bool = False
    rollback: str = "fast"

    def engine(self):
        host = PlainHost()
        target = load(self.folder, host, block_size=ROWS, prefill_chunk=CHUNK, exact=self.exact)
        return Engine(target, Limits(CHUNK, ROWS, self.rollback), host.ring), target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("tiny"), "llama3", eos_token_id=96)


@pytest.fixture(scope="module")
def engine(folder):
    return Setting(folder, exact=True).engine()[0]


def generate(engine, sequence, count, sampling, propose):
    """Rounds of `propose(text so far, tokens left)` -> (ids, parents) for the rows after row 0."""
    engine.open(OpenItem(sequence=sequence, sampling=sampling))
    text, rounds = [prefill(engine, sequence, PROMPT, CHUNK).token], 0
    finish = ""
    while not finish:
        rounds += 1
        ids, parents = propose(text, count - len(text))
        item = VerifyItem(
            sequence=sequence,
            round=rounds,
            base_pos=len(PROMPT) + len(text) - 1,
            tokens=pack([text[-1], *ids]),
            parents=pack(parents),
            budget=count - len(text),
        )
        verdict = engine.verify(item)
        text += unpack(verdict.tokens)
        finish = verdict.finish
        assert verdict.committed == len(PROMPT) + len(text) - 1
    engine.close(CloseItem(sequence=sequence))
    return text, rounds, finish


numbers = iter(range(1, 1 << 30))


@given(
    seed=st.integers(0, 1 << 20),
    sampling=st.sampled_from([Sampling(), SAMPLED]),
    count=st.integers(2, 40),
)
@settings(max_examples=15, deadline=None)
def test_any_trees_give_the_text_of_plain_decoding(engine, seed, sampling, count):
    source = random.Random(seed)
    plain, steps, _ = generate(engine, next(numbers), 40, sampling, lambda *_: ((), ()))
    assert steps == 39

    def propose(text, left):
        return random_tree(source, plain[len(text) :][:left], source.randrange(1, ROWS + 1), 97)

    text, rounds, finish = generate(engine, next(numbers), count, sampling, propose)
    assert (text, finish) == (plain[:count], "length")
    assert rounds <= count - 1


def test_a_side_branch_is_accepted_and_the_replay_way_gives_the_same(folder):
    plain, _, _ = generate(Setting(folder).engine()[0], 1, 30, Sampling(), lambda *_: ((), ()))

    def propose(text, left):
        wrong = [(token + 1) % 97 for token in plain[len(text) :][:3]]
        right = plain[len(text) :][:3]
        chain = list(range(len(wrong)))
        side = [0, *range(len(wrong) + 1, len(wrong) + len(right))][: len(right)]
        return [*wrong, *right], [*chain, *side]

    for rollback in ("fast", "replay"):
        engine, target = Setting(folder, rollback=rollback).engine()
        text, rounds, _ = generate(engine, 1, 30, Sampling(), propose)
        assert text == plain
        assert rounds == 8
        assert engine.rollback == rollback
    assert target.supports_tree_verify


def started(folder, **changes):
    engine, target = Setting(folder, **changes).engine()
    engine.open(OpenItem(sequence=1))
    return engine, target, prefill(engine, 1, PROMPT, CHUNK).token


@pytest.mark.parametrize(
    ("ids", "parents", "error", "words"),
    [
        ([1, 2], [0], ProtocolError, "1 parents for a tree of 3 rows"),
        ([1], [1], ProtocolError, "row 1 of a tree follows row 1"),
        ([1, 1], [0, 0], ProtocolError, "more than once"),
        ([1] * 10, [0] * 10, ProtocolError, "block of 11 rows"),
        ([97], [0], ProtocolError, "outside the vocabulary"),
    ],
)
def test_what_is_no_tree_is_refused_and_changes_nothing(folder, ids, parents, error, words):
    engine, _, first = started(folder)
    with pytest.raises(error, match=words):
        engine.verify(tree_item([first, *ids], parents, base=len(PROMPT)))
    verdict = engine.verify(tree_item([first, 1, 2], [0, 0], base=len(PROMPT)))
    assert verdict.committed > len(PROMPT)
    # A repeated round is answered as it was.
    again = engine.verify(tree_item([first, 1, 2], [0, 0], base=len(PROMPT)))
    assert again == verdict


def test_a_tree_may_be_wider_than_what_is_left_but_not_deeper(folder):
    host = PlainHost()
    target = load(folder, host, block_size=ROWS, prefill_chunk=CHUNK, max_positions=23)
    engine = Engine(target, Limits(CHUNK, ROWS), host.ring)
    engine.open(OpenItem(sequence=1))
    first = prefill(engine, 1, PROMPT, CHUNK).token
    with pytest.raises(PromptTooLong, match="tree of depth 2 at 21"):
        engine.verify(tree_item([first, 1, 2], [0, 1], base=21, budget=2))
    verdict = engine.verify(tree_item([first, *range(8)], [0] * 8, base=21, budget=2))
    assert len(unpack(verdict.path)) == len(unpack(verdict.tokens))


def test_rows_without_an_exact_place_are_left_out_and_the_path_names_those_asked_for(folder):
    engine, target, first = started(folder)
    plain = unpack(engine.verify(tree_item([first, 1], [0], base=len(PROMPT))).tokens)[0]
    engine, target, first = started(folder)
    base = len(PROMPT)
    target._columns = Columns(16, (base + 16,))
    ids = [first, (plain + 1) % 97, (plain + 2) % 97, plain]
    verdict = engine.verify(tree_item(ids, [0, 0, 0], base=base))
    assert (unpack(verdict.tokens), unpack(verdict.path)) == ([plain], [0])
    # A sibling that comes first has the place.
    engine, target, first = started(folder)
    target._columns = Columns(16, (base + 16,))
    ids = [first, plain, (plain + 1) % 97, (plain + 2) % 97]
    verdict = engine.verify(tree_item(ids, [0, 0, 1], base=base))
    assert unpack(verdict.tokens)[0] == plain
    assert unpack(verdict.path)[:2] == [0, 1]
    # The others are left out before the forward, and named by their own numbers after it.
    block = Block(base, tuple(ids), torch.tensor(ids))
    block = tree_block(target, block, (0, 0, 1))
    assert (block.rows, block.parents, block.ids) == ((0, 1, 3), (0, 1), (ids[0], ids[1], ids[3]))


def test_a_target_without_trees_says_why(folder):
    engine, target, first = started(folder)
    target._columns = None
    with pytest.raises(UsageError, match="no tree can be verified: attention depends"):
        engine.verify(tree_item([first, 1], [0], base=len(PROMPT)))


def test_a_tree_that_fails_is_undone_and_tried_as_one_row(folder):
    engine, target, first = started(folder)
    plain, *_ = started(folder)
    forward = target.verify_tree

    def fail(*arguments):
        forward(1, torch.tensor([5, 6]), len(PROMPT), [0])
        raise MemoryError

    target.verify_tree = fail
    verdict = engine.verify(tree_item([first, 1, 2], [0, 0], base=len(PROMPT)))
    alone = plain.verify(
        VerifyItem(sequence=1, round=1, base_pos=len(PROMPT), tokens=pack([first]), budget=50)
    )
    assert (verdict.tokens, unpack(verdict.path)) == (alone.tokens, [0])
    target.verify_batch = fail
    with pytest.raises(OutOfMemory):
        engine.verify(tree_item([*unpack(verdict.tokens), 1], [0], base=len(PROMPT) + 1, number=2))


def test_a_tree_that_cannot_be_moved_together_is_replayed(folder):
    engine, target, first = started(folder)
    plain, *_ = started(folder)
    target.rollback_to_tree = lambda *_: False
    alone, item = [first], None
    for number in range(1, 5):
        item = VerifyItem(
            sequence=1,
            round=number,
            base_pos=len(PROMPT) + number - 1,
            tokens=pack(alone[-1:]),
            budget=50,
        )
        alone += unpack(plain.verify(item).tokens)
    ids = [first, (alone[1] + 1) % 97, alone[1], alone[2]]
    verdict = engine.verify(tree_item(ids, [0, 0, 2], base=len(PROMPT)))
    assert unpack(verdict.path) == [0, 2, 3]
    assert unpack(verdict.tokens) == alone[1:4]
    step = engine.verify(
        VerifyItem(
            sequence=1, round=2, base_pos=verdict.committed, tokens=pack(alone[3:4]), budget=50
        )
    )
    assert unpack(step.tokens) == alone[4:5]
