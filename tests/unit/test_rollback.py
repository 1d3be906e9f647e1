"""Which way back is taken, why, and what is said of it."""

from functools import partial

import pytest
from support.drive import pack
from support.engines import CHUNK, END, PROMPT, WIDTH, block, engine_over, ready
from support.reference_loop import greedy
from support.toy_target import AttentionTarget, RecurrentTarget

from launch.answers import verdict_defect
from launch.commands.report import build, summary
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from protocol.errors import ConfigError
from protocol.messages import Sampling, VerifyItem
from target_daemon.rollback import ASKED, ROUNDS, settle
from target_daemon.rollback import WIDTH as MEASURED


def clock(fast, replay):
    """Times in which each round of either way takes the given seconds."""
    now = 0.0
    for seconds in [fast] * ROUNDS + [replay] * ROUNDS:
        yield now
        now += seconds
        yield now


@pytest.mark.parametrize(("fast", "replay", "best"), [(1.0, 2.0, "fast"), (2.0, 1.0, "replay")])
def test_the_quicker_way_by_measurement_is_taken_and_the_times_are_told(fast, replay, best):
    target = RecurrentTarget()
    way = settle(target, "auto", partial(next, clock(fast, replay)))
    assert way.kind == best
    assert f"fast {fast * 1e3:.2f} ms, replay {replay * 1e3:.2f} ms" in way.detail
    assert not target.now.any()


def test_both_ways_are_measured_on_what_they_do():
    target = RecurrentTarget()
    settle(target, "auto")
    blocks = target.forwards[target.forwards.index(MEASURED) :]
    half = MEASURED // 2
    assert blocks.count(half) == ROUNDS  # the kept rows of replay, run again
    assert blocks[-2:] == [MEASURED, half]


def test_a_rollback_that_fails_is_measured_with_the_replay_that_it_costs(monkeypatch):
    target = RecurrentTarget()
    monkeypatch.setattr(target, "rollback_to", lambda *_: False)
    settle(target, "auto")
    assert target.forwards.count(MEASURED // 2) == 2 * ROUNDS


def test_rows_of_their_own_are_dropped_without_a_measurement():
    target = AttentionTarget()
    assert settle(target, "auto").kind == "fast"
    assert target.forwards == []


def test_where_there_is_no_fast_way_it_is_replayed_and_cannot_be_asked_for():
    target = RecurrentTarget(fast=False)
    assert settle(target, "auto").kind == settle(target, "replay").kind == "replay"
    with pytest.raises(ConfigError, match="--rollback fast: nothing is dropped"):
        settle(target, "fast")


def test_what_is_asked_for_is_done():
    for wanted in ("fast", "replay"):
        way = settle(RecurrentTarget(), wanted)
        assert (way.kind, way.detail[:8]) == (wanted, "as asked")


def test_a_replay_that_is_asked_for_is_not_given_the_reason_of_the_fast_way():
    target = RecurrentTarget()
    assert target.rollback_detail in settle(target, "fast").detail
    assert settle(target, "replay").detail == ASKED


def test_a_context_that_is_too_short_is_not_measured():
    target = RecurrentTarget(max_positions=MEASURED + ROUNDS * (MEASURED // 2))
    way = settle(target, "auto")
    assert (way.kind, target.forwards) == ("fast", [])
    assert "too short to measure" in way.detail


@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_a_target_is_told_which_way_is_used(rollback):
    told = []
    target = RecurrentTarget()
    target.prepare_rollback = told.append
    engine_over(target, rollback=rollback)
    assert told == [rollback]


@pytest.mark.parametrize(
    ("rollback", "works", "way", "replayed"),
    [("fast", True, "fast", 0), ("fast", False, "replay", 2), ("replay", True, "replay", 2)],
)
def test_a_verdict_says_how_rejected_rows_were_undone(rollback, works, way, replayed, monkeypatch):
    text = greedy(RecurrentTarget(), PROMPT, 8)
    engine, target, first = ready(RecurrentTarget(), rollback=rollback)
    if not works:
        monkeypatch.setattr(target, "rollback_to", lambda *_: False)
    wrong = (text[2] + 1) % 40
    verdict = engine.verify(block([first, text[1], wrong], number=1))
    assert (verdict.accepted, verdict.rollback, verdict.replayed) == (1, way, replayed)
    alone = engine.verify(block([text[2]], base=END + 2, number=2))
    whole = ("none", 0) if works else ("replay", 1)
    assert (alone.rollback, alone.replayed) == whole


@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_a_result_names_the_way_and_counts_its_use(rollback):
    text = greedy(RecurrentTarget(), PROMPT, 21)
    hints = {at: token if at % 5 else (token + 1) % 40 for at, token in enumerate(text)}
    engine = engine_over(RecurrentTarget(), rollback=rollback)
    facts = TargetFacts(1, 40, 96, CHUNK, 64, WIDTH, rollback=engine.rollback)
    result = run_spec_decode(engine, None, PROMPT, 21, facts=facts, hint_tokens=hints)
    assert list(result.token_ids) == text
    figures = result.statistics
    # Each wrong hint costs a round: 5 rows, of which the last is rejected.
    undone = (figures.num_fast_rollbacks, figures.num_replays, figures.num_replayed_tokens)
    assert figures.rollback == rollback
    assert undone[0 if rollback == "fast" else 1] >= 3
    assert undone[1 if rollback == "fast" else 0] == 0
    assert (undone[2] > 0) == (rollback == "replay")
    report = build(
        text="",
        token_ids=result.token_ids,
        finish_reason="length",
        statistics=figures,
        load_seconds=0.0,
        sampling=Sampling(),
    )
    counted = report.speculative_decoding
    assert report.rollback == rollback
    assert (counted.num_fast_rollbacks, counted.num_replays) == undone[:2]
    assert (f"{undone[1]} replays of {undone[2]} tokens" in summary(report)) == (undone[1] > 0)


def test_rows_that_cannot_have_run_again_are_a_defect():
    engine, _, first = ready(RecurrentTarget())
    asked = VerifyItem(sequence=1, round=1, base_pos=END, tokens=pack([first]), budget=5)
    verdict = engine.verify(asked)
    assert verdict_defect(asked, verdict, 40) == ""
    import msgspec

    for way, replayed in (("fast", 1), ("replay", 2)):
        odd = msgspec.structs.replace(verdict, rollback=way, replayed=replayed)
        assert "run again of 1 kept" in verdict_defect(asked, odd, 40)
