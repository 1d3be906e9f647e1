"""A prompt continued where an earlier one left its state: as if it had been run whole."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drive import pack
from support.engines import CHUNK, PROMPT
from support.kept_pair import CONTEXT, LONG, WINDOW, forget, held, kept_pair, last_slot
from support.real_pair import Checkpoints, real_pair
from support.tiny_pair import VOCAB, write_pair
from support.tiny_text import edit_json
from support.toy_target import AttentionTarget, RecurrentTarget

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from protocol.errors import UsageError
from protocol.messages import CloseItem, OpenItem
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.prefix_identity import prefix_identity

TOKENS = 12


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with kept_pair(tmp_path_factory.mktemp("kept") / "pair", prefix_bytes=1 << 24) as made:
        yield made


@pytest.fixture
def pair(shared):
    forget(shared)
    return shared


CUTS = [0, 1, CONTEXT - 1, CONTEXT, 45, 70, len(LONG) - 1, len(LONG)]
OTHER = [(11 * i * i + 5 * i) % (VOCAB - 2) + 2 for i in range(120)]


@contextmanager
def counted(target):
    """The rows of every forward within: those of a prompt, and those of rounds."""
    prompt, rounds = [], []
    forward = target.verify_batch

    def count(slot, tokens, base_pos, logits):
        (rounds if logits == "all" else prompt).append((base_pos, len(tokens)))
        return forward(slot, tokens, base_pos, logits)

    target.verify_batch = count
    try:
        yield prompt, rounds
    finally:
        del target.verify_batch


def push_out(pair):
    """Two other texts take both slots."""
    for text in (OTHER[:30], OTHER[50:90]):
        pair.run(text, 1, speculative=True, retain=True)


@pytest.mark.parametrize("source", ["slot", "store"])
@pytest.mark.parametrize("rows", ["kept", "gone"])
@pytest.mark.parametrize("cut", CUTS)
def test_text_and_rounds_after_a_hit_equal_those_of_the_whole_run(pair, cut, rows, source):
    """The first prompt is another from `cut` on; the second begins like it up to there.

    Where it went on for long, the ring has lost the feature rows from before `cut`.
    """
    tail = OTHER[: len(LONG) - cut] if rows == "kept" else OTHER
    whole = pair.run(LONG, TOKENS, speculative=True)
    assert whole.kept == 0
    pair.run([*LONG[:cut], 1 + LONG[min(cut, 89)] % 60, *tail], 1, speculative=True, retain=True)
    if source == "store":
        push_out(pair)
    with counted(pair.target) as (computed, _):
        hit = pair.run(LONG, TOKENS, speculative=True, base_pos=len(LONG))
    window = len(LONG) - WINDOW  # where what the first block attends to begins
    expected = min(cut, len(LONG) - 1) if rows == "kept" else min(cut, window)
    assert hit.kept == expected
    assert computed[0][0] == expected
    assert sum(count for _, count in computed) == len(LONG) - expected
    assert (hit.token_ids, hit.rounds, hit.proposed) == (
        whole.token_ids,
        whole.rounds,
        whole.proposed,
    )


def test_a_conversation_runs_only_what_is_new(pair):
    first = pair.run(LONG[:40], TOKENS, speculative=True, retain=True)
    turn = [*LONG[:40], *first.token_ids, *LONG[50:70]]
    hit = pair.run(turn, TOKENS, speculative=True, base_pos=51)
    whole = pair.run(turn, TOKENS, speculative=True)
    assert hit.kept == 51
    assert (hit.token_ids, hit.rounds, hit.proposed) == (
        whole.token_ids,
        whole.rounds,
        whole.proposed,
    )


def test_a_draft_that_knows_nothing_reads_the_window_that_was_kept(pair):
    """Also after a restart of the draft: the feature rows were kept with the state."""
    pair.run(LONG[:60], 1, speculative=False, retain=True)
    hit = pair.run(LONG, TOKENS, speculative=True, base_pos=60)
    whole = pair.run(LONG, TOKENS, speculative=True)
    assert hit.kept == 60
    assert (hit.token_ids, hit.proposed) == (whole.token_ids, whole.proposed)


@pytest.mark.parametrize(("base", "kept"), [(30, 7), (47, 47), (45, 45)])
def test_the_state_after_a_hit_is_bit_for_bit_that_of_the_whole_run(pair, base, kept):
    text = pair.run(LONG, TOKENS, speculative=True, retain=True).token_ids
    length = len(LONG) + len(text) - 1
    expected = held(pair, last_slot(pair), length)
    pair.run(LONG[:48], 1, speculative=True, retain=True)  # in the other slot
    hit = pair.run(LONG, TOKENS, speculative=True, base_pos=base, retain=True)
    assert hit.kept == kept
    for one, other in zip(held(pair, last_slot(pair), length), expected, strict=True):
        assert torch.equal(one, other)


def test_another_text_shares_nothing(pair):
    pair.run(LONG, TOKENS, speculative=True, retain=True)
    assert pair.run(LONG[::-1], 3, speculative=True, base_pos=80).kept == 0


def test_without_a_store_the_oldest_state_gives_way_when_no_slot_is_empty(pair, monkeypatch):
    monkeypatch.setattr(pair.engine.kept.store, "_budget", 0)
    first, second, third = LONG[:40], LONG[40:80], LONG[50:]
    for prompt in (first, second):
        pair.run(prompt, 1, speculative=True, retain=True)
    pair.run(third, 1, speculative=True)
    assert pair.run(second, 1, speculative=True, base_pos=40).kept == 39
    assert pair.run(first, 1, speculative=True, base_pos=40).kept == 0


def test_what_two_texts_leave_is_kept_apart_from_the_slots_that_they_had(pair):
    texts = [LONG[start : start + 40] for start in (0, 10, 20, 30, 40, 50)]
    for text in texts:
        pair.run(text, 1, speculative=True, retain=True)
    assert len(list(pair.engine.kept.store)) == 4
    for text in texts:
        assert pair.run(text, TOKENS, speculative=True, base_pos=40, retain=True).kept == 39


@pytest.mark.parametrize("method", ["copy_state", "set_state"])
def test_a_state_that_cannot_be_copied_is_given_up(pair, monkeypatch, caplog, method):
    def fail(*_, **__):
        raise MemoryError(method)

    whole = pair.run(LONG, TOKENS, speculative=True)
    pair.run(LONG, 1, speculative=True, retain=True)
    monkeypatch.setattr(pair.target, method, fail)
    push_out(pair)
    again = pair.run(LONG, TOKENS, speculative=True, base_pos=len(LONG))
    assert (again.kept, again.token_ids) == (0, whole.token_ids)
    assert method in caplog.text


def test_in_a_new_life_no_sequence_is_taken_for_an_earlier_one_of_its_number(pair):
    """Its draft would take what it has of one for what the target kept of the other."""
    for text in (LONG[:40], OTHER[:40], LONG[50:]):
        pair.run(text, 1, speculative=True, retain=True)
    pair.engine.close_all()
    for text in (LONG[:40], OTHER[:40]):  # from the store, and from a slot
        opened = pair.engine.open(OpenItem(sequence=1000 + text[5], prefix=pack(text)))
        assert (opened.committed, opened.continues) == (40, -1)
        pair.engine.close(CloseItem(sequence=1000 + text[5]))


def test_a_text_that_leaves_another_early_does_not_cost_it_its_state(pair):
    first = LONG[:60]
    pair.run(first, 1, speculative=True, retain=True)
    pair.run([*first[:40], *OTHER[:5]], 1, speculative=True, base_pos=45)
    assert pair.run(first, 1, speculative=True, base_pos=60).kept == 59


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 24])
def test_what_one_process_has_left_is_gone_on_from_by_the_next(tmp_path, prefix_bytes):
    """Text and rounds are those of a whole run; a damaged file costs no more than that."""
    store = tmp_path / "store"
    with kept_pair(tmp_path / "pair", prefix_bytes, store) as pair:
        whole = pair.run(LONG, TOKENS, speculative=True)
        pair.run(LONG[:70], 1, speculative=True, retain=True)
        pair.run(OTHER[:40], 1, speculative=True, retain=True)
        pair.engine.kept.save_all(60)
    for damaged in (False, True):
        if damaged:
            for file in store.iterdir():
                data = bytearray(file.read_bytes())
                data[-50] ^= 1
                file.write_bytes(data)
        with kept_pair(tmp_path / "pair", prefix_bytes, store) as pair:
            hit = pair.run(LONG, TOKENS, speculative=True, base_pos=len(LONG))
        assert hit.kept == (0 if damaged else 70)
        assert (hit.token_ids, hit.rounds, hit.proposed) == (
            whole.token_ids,
            whole.rounds,
            whole.proposed,
        )


def test_what_the_last_one_used_is_saved_first_and_no_more_than_there_is_time_for(tmp_path):
    with kept_pair(tmp_path / "pair", 1 << 24, tmp_path / "store") as pair:
        for text in (LONG[:40], OTHER[:40], LONG[50:]):
            pair.run(text, 1, speculative=True, retain=True)
        pair.engine.kept.save_all(0)
        assert list((tmp_path / "store").iterdir()) == []
        pair.engine.kept.save_all(60)
        assert len(list((tmp_path / "store").iterdir())) == 3


def test_a_store_belongs_to_one_models_weights(tmp_path):
    folder = tmp_path / "pair"
    with kept_pair(folder) as pair:
        before = prefix_identity(pair.target, folder / "target")
        assert prefix_identity(pair.target, folder / "target") == before
        path = folder / "target" / "model.safetensors"
        weights = load_file(path)
        name = sorted(weights)[3]
        save_file(weights | {name: weights[name] * 1.01}, path)
        assert prefix_identity(pair.target, folder / "target") != before


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A pair for 8,192 positions, of which its draft attends to 512."""
    folder = tmp_path_factory.mktemp("roomy") / "pair"
    paths = write_pair(folder)
    for path in paths:
        edit_json(path / "config.json", max_position_embeddings=8192)
    settings = {"prefill_chunk": 256, "ring_window": 512, "slots": 2, "max_positions": 8192}
    options = {"dtype": "float32", "exact": False, "threads": 1, "prefix_bytes": 1 << 26}
    with real_pair(Checkpoints(*paths), context=512, **options, **settings) as made:
        yield made


def test_after_a_hit_on_8000_tokens_one_row_is_computed_before_the_first_token(roomy):
    """From the slot and from the store, whether the draft still has its context or reads rows."""
    text = [(7 * i * i + 3 * i) % (VOCAB - 2) + 1 for i in range(8000)]
    first = roomy.run(text, 6, speculative=True, retain=True)
    for source in ("slot", "store"):
        if source == "store":
            push_out(roomy)
        with counted(roomy.target) as (computed, _):
            hit = roomy.run(text, 6, speculative=True, base_pos=8000, retain=True)
        assert (hit.kept, computed) == (7999, [(7999, 1)]), source
        assert (hit.token_ids, hit.rounds, hit.proposed) == (
            first.token_ids,
            first.rounds,
            first.proposed,
        )


@pytest.mark.parametrize("base", [-1, len(PROMPT) + 1])
def test_a_base_outside_the_prompt_is_refused_with_both_numbers(base):
    target = Engine(AttentionTarget(), Limits(CHUNK, 8))
    with pytest.raises(UsageError, match=f"base_pos {base}; the prompt has 10 tokens"):
        run_spec_decode(target, None, PROMPT, 3, facts=FACTS, base_pos=base)


# --- targets that keep no row per position


FACTS = TargetFacts(1, 40, 96, CHUNK, 200, 8)


def continued(target, prompt, *, sequence, **options):
    engine = options.pop("engine", None) or Engine(target, Limits(CHUNK, 8, "replay"))
    settings = {"facts": FACTS, "sequence": sequence} | options
    return engine, run_spec_decode(engine, None, prompt, 10, **settings)


@pytest.mark.parametrize("base", [0, 3, 4, 9, len(PROMPT)])
def test_rows_of_positions_are_continued_from_any_position(base):
    target = AttentionTarget()
    engine, first = continued(target, PROMPT, sequence=1, retain=True)
    on = continued(target, PROMPT, engine=engine, sequence=2, base_pos=base)[1]
    assert on.token_ids == first.token_ids
    assert on.statistics.num_kept_tokens == min(base, len(PROMPT) - 1)


def test_a_recurrent_state_is_continued_where_it_ended_and_nowhere_else():
    target = RecurrentTarget()
    engine, first = continued(target, PROMPT, sequence=1, retain=True)
    turn = [*PROMPT, *first.token_ids, 3, 1, 4, 1, 5]
    cold = continued(RecurrentTarget(), turn, sequence=1)[1]
    _, hit = continued(target, turn, engine=engine, sequence=2, base_pos=len(turn), retain=True)
    assert hit.token_ids == cold.token_ids
    assert hit.statistics.num_kept_tokens == len(PROMPT) + 9  # all but the pending token
    _, again = continued(target, turn, engine=engine, sequence=3, base_pos=5)
    assert again.token_ids == cold.token_ids
    assert again.statistics.num_kept_tokens == 0


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("end", range(1, 9))
def test_a_stop_string_inside_the_last_forward_leaves_the_state_up_to_there(end, fast):
    """The forward's rows cannot be dropped one by one: its start is kept until the next message."""
    plain = continued(RecurrentTarget(), PROMPT, sequence=1)[1].token_ids
    hints = dict(enumerate(plain))
    seen = []

    def find_stop(ids):
        left = end - len(seen)
        seen.extend(ids)
        return left if left <= len(ids) else None

    target = RecurrentTarget(fast=fast)
    engine = Engine(target, Limits(CHUNK, 8))
    options = {"engine": engine, "hint_tokens": hints, "find_stop": find_stop, "retain": True}
    _, first = continued(target, PROMPT, sequence=1, **options)
    assert first.token_ids == plain[:end]
    state = target.now[0].clone()
    fresh = RecurrentTarget()
    known = torch.tensor([*PROMPT, *plain[: end - 1]])
    fresh.verify_batch(0, known, 0, "none")
    torch.testing.assert_close(state, fresh.now[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("error", [RuntimeError("gone"), None])
def test_a_state_that_cannot_be_cut_is_given_up(error, monkeypatch):
    target = RecurrentTarget()
    engine = Engine(target, Limits(CHUNK, 8))
    _, first = continued(target, PROMPT, engine=engine, sequence=1, retain=True)
    turn = [*PROMPT, *first.token_ids, 3]
    engine.open(OpenItem(sequence=2, prefix=b""))
    engine.close(CloseItem(sequence=2, keep=1, retain=True))  # more than it holds

    if error is not None:

        def cut(slot, length):
            raise error

        monkeypatch.setattr(target, "supports_cut", True)
        monkeypatch.setattr(target, "cut", cut)
    _, hit = continued(target, turn, engine=engine, sequence=3, base_pos=7)
    assert hit.statistics.num_kept_tokens == 0
    assert hit.token_ids == continued(RecurrentTarget(), turn, sequence=1)[1].token_ids
