"""Models that only `transformers` knows, run as targets: same numbers, same text, no trace."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from support.drive import generate
from support.engines import CHUNK, WIDTH, engine_over, guesser, oracle
from support.foreign_target import FAMILIES, own_answers, own_text, write_foreign_target
from support.plain_host import PlainHost
from support.targets import features, load, prompt

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from protocol.errors import ExactUnavailable, InternalError
from target_daemon.adapter.parts import passing
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.prefix_folder import PrefixFolder
from target_daemon.prefixes import Prefix
from target_daemon.target import StateCopy

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # that library's own

NEAR = {"atol": 1e-3, "rtol": 0.0}
COUNT, NEW = 40, 16
TAPS = (0, 2)  # hidden_states hold the last layer behind the final norm alone
FAST = {"gpt2", "gpt_neox", "gemma2", "lfm2"}
PROMPT = prompt(14, seed=3).tolist()


@dataclass
class Case:
    family: str
    folder: object
    host: PlainHost
    target: object
    ids: torch.Tensor
    logits: torch.Tensor
    taps: torch.Tensor

    def text(self, **options):
        """Generate `NEW` tokens over a new engine."""
        rollback = options.pop("rollback", "fast")
        engine = engine_over(self.target, rollback=rollback, ring=self.target.ring)
        return generate(engine, PROMPT, NEW, chunk=CHUNK, **options)


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - {"mamba2"}))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / request.param
    write_foreign_target(folder, request.param)
    ids, host = prompt(COUNT), PlainHost()
    target = load(folder, host, taps=TAPS, block_size=WIDTH, prefill_chunk=32)
    return Case(request.param, folder, host, target, ids, *own_answers(folder, ids, TAPS))


@pytest.fixture(scope="module")
def plain_text(case):
    """The target's own text, one token at a time."""
    return case.text()[0]


def test_chunks_and_single_tokens_give_the_librarys_logits_and_hidden_states(case):
    target, ids = case.target, case.ids
    target.reset(0)
    assert target.verify_batch(0, ids[:32], 0, "none") is None
    last = target.verify_batch(0, ids[32:36], 32, "last")
    torch.testing.assert_close(last, case.logits[35:36], **NEAR)
    for position in range(36, COUNT):
        step = target.verify_batch(0, ids[position : position + 1], position, "all")
        torch.testing.assert_close(step, case.logits[position : position + 1], **NEAR)
    torch.testing.assert_close(features(target, 0, 0, COUNT), case.taps, **NEAR)


def test_logits_are_computed_for_the_rows_that_are_asked_for(case):
    target, ids = case.target, case.ids
    target.reset(0)
    with passing(target._head, entering=True) as scored:
        target.verify_batch(0, ids[:32], 0, "none")
        target.verify_batch(0, ids[32:36], 32, "all")
    rows = [seen.reshape(-1, 32).shape[0] for seen in scored]
    assert rows == ([1] * 5 if target.stepwise else [1, 4])


def test_the_text_is_the_librarys_own_greedy_text(case, plain_text):
    assert plain_text == own_text(case.folder, PROMPT, NEW)
    assert len(set(plain_text)) > 3


@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_speculation_gives_the_same_text_by_both_ways_back(case, plain_text, rollback):
    for drafter in (
        oracle(plain_text, PROMPT, right=WIDTH),
        oracle(plain_text, PROMPT, right=2),
        guesser(7, plain_text, PROMPT),
    ):
        text, rounds, _ = case.text(width=WIDTH, drafter=drafter, rollback=rollback)
        assert text == plain_text
        assert len(rounds) < NEW - 1


def test_the_way_back_in_use_is_what_the_model_can_do(case):
    assert case.target.supports_fast_rollback == (case.family in FAST)
    assert engine_over(case.target).rollback == ("fast" if case.family in FAST else "replay")
    # The library's Mamba starts from nothing whenever it is given several rows.
    assert case.target.stepwise == (case.family == "mamba")


def test_a_kept_prefix_is_continued_as_if_it_had_been_run_again(case):
    """Where every layer keeps all rows, from any position on; else where the first text ended."""
    engine = engine_over(case.target, ring=case.target.ring)
    positions = case.target.max_positions
    facts = TargetFacts(1, 97, positions, CHUNK, case.target.ring.shape.capacity, WIDTH)
    numbers = itertools.count(1)

    def run(ids, **options):
        return run_spec_decode(engine, None, ids, 8, facts=facts, sequence=next(numbers), **options)

    first = run(PROMPT, retain=True).token_ids
    turn, other = [*PROMPT, *first, 5, 6, 7], [*PROMPT[:9], 5, 6, 7]
    on = run(turn, base_pos=len(turn), retain=True)
    back = run(other, base_pos=9)
    assert (on.token_ids, back.token_ids) == (run(turn).token_ids, run(other).token_ids)
    kept = (on.statistics.num_kept_tokens, back.statistics.num_kept_tokens)
    assert kept == ((21, 9) if case.family in {"gpt2", "gpt_neox"} else (21, 0))


def test_a_prefix_of_the_store_is_continued_with_the_text_and_rounds_of_a_whole_run(
    case, plain_text
):
    """What other texts pushed out of both slots, at the end and at the last chunk of the prompt."""
    engine = Engine(case.target, Limits(CHUNK, WIDTH, prefix_bytes=1 << 24), case.target.ring)
    numbers = itertools.count(1)
    facts = TargetFacts(
        1, 97, case.target.max_positions, CHUNK, case.target.ring.shape.capacity, WIDTH
    )

    def run(ids, **options):
        """Text and the rounds' sizes, with hints that are right for some tokens."""
        seen, hints = [], dict(enumerate(plain_text[:3]))
        result = run_spec_decode(
            engine,
            None,
            ids,
            8,
            facts=facts,
            sequence=next(numbers),
            hint_tokens=hints,
            ngram="never",  # which go by the clock, as soon as the hints are used up
            on_piece=lambda piece: seen.append((piece.width, len(piece.tokens))),
            **options,
        )
        return (result.token_ids, seen), result.statistics.num_kept_tokens

    first = run(PROMPT, retain=True)[0][0]
    turn, again = [*PROMPT, *first, 5, 6, 7], [*PROMPT[:13], 7]
    for other in (9, 11):
        run([other] * 10, retain=True)
    (on, kept), (back, boundary) = (run(ids, base_pos=len(ids)) for ids in (turn, again))
    assert (on, back) == (run(turn)[0], run(again)[0])
    assert (kept, boundary) == ((21, 13) if case.family in {"gpt2", "gpt_neox"} else (21, 12))


def test_a_copy_of_the_state_comes_back_from_a_file_bit_for_bit(case, tmp_path):
    """Hybrids too: recurrent and convolution states, windows, and the facts beside them."""
    target, ids = case.target, case.ids
    target.reset(0)
    target.verify_batch(0, ids[:20], 0, "none")
    kept = Prefix(ids[:20], target.copy_state(0, 20, shared=True), torch.zeros(0, 0), 1)
    expected = target.verify_batch(0, ids[20:21], 20, "all")
    folder = PrefixFolder.open(tmp_path / "store", "one", 1 << 24)
    folder.save(kept, cuttable=False)
    target.reset(1)
    target.set_state(1, folder.load(folder.entries[0]).state, 20)
    assert torch.equal(target.verify_batch(1, ids[20:21], 20, "all"), expected)


def test_a_copy_of_another_models_state_is_refused_and_leaves_none(case):
    target, ids = case.target, case.ids
    target.reset(0)
    target.verify_batch(0, ids[:20], 0, "none")
    state = target.copy_state(0, 20)
    target.reset(0)
    for facts in ({}, state.facts | {"layers": []}, state.facts | {"fields": {"plain": 1}}):
        with pytest.raises(ValueError, match="no state of this model"):
            target.set_state(0, StateCopy(state.tensors, facts), 20)
        target.reset(0)


def test_a_restored_snapshot_leaves_no_trace_and_can_be_restored_again(case):
    target, ids = case.target, case.ids
    target.reset(0)
    target.verify_batch(0, ids[:20], 0, "none")
    snapshot = target.snapshot_kv(0, 20, 8)
    for seed in (5, 6):
        target.verify_batch(0, prompt(8, seed=seed), 20, "all")
        target.restore_kv(0, snapshot)
    rest = target.verify_batch(0, ids[20:28], 20, "all")
    torch.testing.assert_close(rest, case.logits[20:28], **NEAR)
    torch.testing.assert_close(features(target, 0, 0, 28), case.taps[:28], **NEAR)


def test_rolled_back_rows_leave_no_trace_also_behind_a_window(case):
    target, ids = case.target, case.ids
    target.reset(0)
    target.verify_batch(0, ids[:20], 0, "none")
    wrong = prompt(8, seed=5)
    wrong[:3] = ids[20:23]
    target.verify_batch(0, wrong, 20, "all")
    if not target.supports_fast_rollback:
        assert not target.rollback_to(0, 20, 3)
        assert target.rollback_to(0, 20, 8)
        with pytest.raises(InternalError, match="no state at position 23; 28 rows were run"):
            target.verify_batch(0, ids[23:24], 23, "all")
        return
    assert target.rollback_to(0, 20, 3)
    rest = target.verify_batch(0, ids[23:31], 23, "all")
    torch.testing.assert_close(rest, case.logits[23:31], **NEAR)
    torch.testing.assert_close(features(target, 0, 0, 31), case.taps[:31], **NEAR)


def test_a_forward_that_fails_between_two_layers_is_undone(case, plain_text):
    failures = []

    def fail_once(_module, args):
        if not failures and args[0].shape[1] > 1 and case.target.caches.lengths[0] >= len(PROMPT):
            failures.append(args)
            raise RuntimeError("a fault of the test")

    def fail_in_a_block(_module, args):
        # One row at a time: the block's third row.
        if not failures and case.target.caches.lengths[0] == len(PROMPT) + 2:
            failures.append(args)
            raise RuntimeError("a fault of the test")

    hook = fail_in_a_block if case.target.stepwise else fail_once
    handle = case.target._layers[2].register_forward_pre_hook(hook)
    try:
        drafter = oracle(plain_text, PROMPT, right=WIDTH)
        text, rounds, _ = case.text(width=WIDTH, drafter=drafter)
    finally:
        handle.remove()
    assert (len(failures), text) == (1, plain_text)
    assert rounds[0] == 1


def test_slots_do_not_see_each_other(case):
    target, ids = case.target, case.ids
    target.reset(0)
    target.reset(1)
    target.verify_batch(1, prompt(25, seed=9), 0, "none")
    target.verify_batch(0, ids[:30], 0, "none")
    target.verify_batch(1, prompt(4, seed=10), 25, "none")
    torch.testing.assert_close(
        target.verify_batch(0, ids[30:36], 30, "all"), case.logits[30:36], **NEAR
    )


def test_embedding_and_head_lie_in_memory_that_a_draft_can_map(case):
    shared, target = case.host.weights, case.target
    assert target._embedding.weight.data_ptr() == shared["embed"].data_ptr()
    assert ("head" in shared) != target.tied
    head = shared["embed"] if target.tied else shared["head"]
    assert target._head.weight.data_ptr() == head.data_ptr()
    rows = target.embed_tokens(case.ids[:5])
    torch.testing.assert_close(rows, target._embedding(case.ids[:5]))
    assert target.embedding_scale == pytest.approx(32**0.5 if case.family == "gemma2" else 1.0)


def test_hidden_rows_are_projected_as_the_model_does_it(case):
    with passing(case.target._head, entering=True) as seen:
        logits = case.target.run_bare(case.ids)
    ids, scores = logits.argmax(dim=-1), logits.log_softmax(dim=-1)
    assert torch.equal(case.target.project_hidden_to_tokens(seen[0][0]), ids)
    best, found = case.target.project_hidden_to_topk(seen[0][0], 3)
    torch.testing.assert_close(best, scores.topk(3, dim=-1).values, **NEAR)
    assert torch.equal(found[:, 0], ids)


def test_the_probe_leaves_no_trace(case):
    target = load(case.folder, taps=TAPS)
    assert target.ring.written_high.tolist() == [0, 0]
    assert not target.ring.rows.any()
    assert target.caches.lengths == [0, 0]
    assert target.caches.constant_bytes(0) == 0


def test_exact_is_what_was_measured(case):
    exactness = case.target.exactness
    if exactness.kind == "native":
        assert load(case.folder, exact=True).exactness == exactness
        return
    assert exactness.kind == "no"
    with pytest.raises(ExactUnavailable, match=r"rows at width . differ from width 1"):
        load(case.folder, exact=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_16_bits_stay_within_their_rounding(family, tmp_path, dtype):
    short = getattr(torch, dtype)
    folder, ids = write_foreign_target(tmp_path, family, dtype=short), prompt(COUNT)
    logits, _ = own_answers(folder, ids, TAPS)
    theirs, _ = own_answers(folder, ids, TAPS, dtype=short)
    target = load(folder, taps=TAPS, dtype=dtype, prefill_chunk=64)
    ours = target.verify_batch(0, ids, 0, "all")
    assert (ours - logits).abs().mean() <= 1.5 * (theirs - logits).abs().mean() + 1e-3
    assert target.ring.rows.dtype == short
