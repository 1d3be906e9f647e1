"""Forwards that fail: undone, tried at width 1, and typed."""

import pytest
import torch
from support.drive import generate, pack, unpack
from support.engines import CHUNK, PROMPT, WIDTH, block, chunk, engine_over, oracle, ready
from support.reference_loop import greedy
from support.toy_target import AttentionTarget, FailingTarget

from protocol import errors
from protocol.messages import CloseItem, OpenItem, ReplayItem

NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")


@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError(), RuntimeError("shape mismatch")])
@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_a_failed_verify_is_undone_and_tried_at_width_1(error, rollback):
    text = greedy(AttentionTarget(), PROMPT, 20)
    target = FailingTarget()
    target.failures = {4: error}  # three chunks of prompt, a good round, then this one
    engine = engine_over(target, rollback=rollback)
    got, rounds, _ = generate(
        engine, PROMPT, 20, chunk=CHUNK, width=WIDTH, drafter=oracle(text, PROMPT, right=5)
    )
    assert got == text
    assert rounds == [6, 1, 6, 6]
    assert target.failures == {}


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (NO_MEMORY, errors.OutOfMemory, "no memory for a forward of 1 rows at position 10"),
        (MemoryError(), errors.OutOfMemory, "no memory"),
        (RuntimeError("0xdeadbeef"), errors.InternalError, "the daemon's log says why"),
    ],
)
def test_a_verify_that_fails_at_width_1_too_fails_alone_and_leaves_the_state(error, kind, sentence):
    text = greedy(AttentionTarget(), PROMPT, 20)
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: error, 4: error}
    with pytest.raises(kind, match=sentence):
        engine.verify(block([first, *text[1:4]]))
    assert not torch.isnan(target.state(0, len(PROMPT))).any()
    verdict = engine.verify(block([first, *text[1:4]]))
    assert unpack(verdict.tokens) == text[1:5]


def test_an_error_of_cuda_is_not_tried_again_in_the_same_process():
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: RuntimeError("CUDA error: an illegal memory access was encountered")}
    with pytest.raises(errors.DeviceLost, match="the GPU failed in a forward of 2 rows"):
        engine.verify(block([first, 1]))
    assert target.failures == {}


def test_a_defect_undoes_the_round_and_is_not_hidden():
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: KeyError("a defect")}
    with pytest.raises(KeyError):
        engine.verify(block([first, 1]))
    assert not torch.isnan(target.keys).any()
    assert unpack(engine.verify(block([first])).tokens) == greedy(AttentionTarget(), PROMPT, 2)[1:]


def test_a_failed_chunk_is_undone_and_can_be_sent_again():
    target = FailingTarget()
    engine = engine_over(target)
    engine.open(OpenItem(sequence=1))
    engine.prefill(chunk(0, PROMPT[:4]))
    target.failures = {1: NO_MEMORY, 3: NO_MEMORY}  # the chunk, then the second of its rows
    with pytest.raises(errors.OutOfMemory):
        engine.prefill(chunk(4, PROMPT[4:8]))
    assert target.failures == {}
    engine.prefill(chunk(4, PROMPT[4:8]))
    token = engine.prefill(chunk(8, PROMPT[8:], last=True)).token
    assert [token] == greedy(AttentionTarget(), PROMPT, 1)


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_chunk_without_memory_is_tried_row_by_row(failed):
    text = greedy(AttentionTarget(), PROMPT, 12)
    target = FailingTarget()
    target.failures = {failed: NO_MEMORY}
    engine = engine_over(target)
    got, *_ = generate(engine, PROMPT, 12, chunk=CHUNK)
    assert (got, target.failures) == (text, {})


def test_a_replay_without_memory_is_tried_row_by_row():
    text = greedy(AttentionTarget(), PROMPT, 20)
    target = FailingTarget()
    engine, _, _ = ready(target)
    target.failures = {4: NO_MEMORY}  # the second part of the replay
    item = ReplayItem(sequence=1, round=9, base_pos=len(PROMPT), tokens=pack(text[:15]))
    answer = engine.replay(item)
    assert (answer.committed, answer.mismatches, target.failures) == (len(PROMPT) + 14, 0, {})
    verdict = engine.verify(block(text[14:18], base=answer.committed, number=10))
    assert unpack(verdict.tokens) == text[15:19]


def test_a_replay_without_memory_for_one_row_is_refused():
    text = greedy(AttentionTarget(), PROMPT, 5)
    target = FailingTarget()
    engine, _, _ = ready(target)
    target.failures = {3: NO_MEMORY, 4: NO_MEMORY}
    with pytest.raises(errors.OutOfMemory):
        engine.replay(ReplayItem(sequence=1, base_pos=len(PROMPT), tokens=pack(text[:3])))
    target.failures = {5: NO_MEMORY}
    with pytest.raises(errors.OutOfMemory, match="1 rows"):
        engine.replay(ReplayItem(sequence=1, base_pos=len(PROMPT), tokens=pack(text[:2])))


def test_a_sequence_whose_state_cannot_be_restored_never_computes_again():
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: RuntimeError("x"), 4: RuntimeError("x")}
    target.restore_fails = True
    with pytest.raises(errors.InternalError):
        engine.verify(block([first, 1, 2]))
    assert len(target.forwards) == 4  # no second try on a state that is lost
    target.restore_fails, target.failures = False, {}
    with pytest.raises(errors.InternalError, match="lost its state"):
        engine.verify(block([first]))
    engine.close(CloseItem(sequence=1))
    text, *_ = generate(engine, PROMPT, 5, chunk=CHUNK, sequence=2)
    assert text == greedy(AttentionTarget(), PROMPT, 5)


def test_a_target_without_logits_is_an_internal_error(monkeypatch):
    engine, target, first = ready()
    monkeypatch.setattr(target, "verify_batch", lambda *_: None)
    with pytest.raises(errors.InternalError):
        engine.verify(block([first]))


def test_engine_seconds_are_positive_and_within_the_wall_time():
    engine, _, first = ready()
    verdict = engine.verify(block([first]))
    assert 0 < verdict.seconds < 5
