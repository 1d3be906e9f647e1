"""What rounds cost, learned: interpolated over rows, carried over to other contexts."""

import pytest

from launch.acceptance import Acceptance
from launch.costs import OLD, CostCurve, Costs, bucket_of, rising


def seed(curve, *times):
    for rows, seconds in times:
        curve.note(rows, 0, seconds)


def test_buckets_double():
    assert [bucket_of(n) for n in (0, 255, 256, 511, 512, 1023, 1024)] == [0, 0, 1, 1, 2, 2, 3]


def test_nothing_known_costs_nothing_that_could_be_compared():
    assert CostCurve().upto(3, 0) == []
    assert Costs().alone(3, 0) == []
    assert Costs().asking(3, 0) == [0.0, 0.0, 0.0]


def test_rows_that_were_not_run_lie_between_their_neighbours():
    curve = CostCurve()
    seed(curve, (1, 1.0), (5, 3.0))
    assert curve.upto(7, 0) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert curve.upto(3, 0) == [1.0, 1.5, 2.0]


def test_another_context_begins_with_the_one_before_and_is_scaled_by_what_is_seen():
    curve = CostCurve()
    seed(curve, (1, 1.0), (8, 2.0))
    assert curve.upto(8, 1000)[-1] == 2.0
    curve.note(1, 1000, 1.5)
    assert curve.upto(8, 1000)[-1] == 3.0
    assert curve.upto(8, 0)[-1] == 2.0
    assert curve.upto(8, 300)[-1] == 2.0


def test_a_context_below_all_that_was_seen_costs_what_the_least_one_did():
    curve = CostCurve()
    curve.note(1, 5000, 1.5)
    assert curve.upto(1, 0)[-1] == 1.5


def test_real_times_are_taken_in_and_a_hiccup_is_cut():
    curve = CostCurve()
    seed(curve, (1, 1.0))
    for _ in range(40):
        curve.note(1, 0, 2.0)
    assert curve.upto(1, 0)[-1] == pytest.approx(2.0, rel=0.02)
    curve.note(1, 0, 1000.0)
    assert curve.upto(1, 0)[-1] < 3.0
    for _ in range(2):
        curve.note(1, 0, 10.0)
    assert curve.upto(1, 0) == [10.0]


def test_a_wide_round_pays_for_the_draft_and_two_hand_overs():
    costs = Costs()
    seed(costs.verify, (1, 1.0), (8, 2.0))
    seed(costs.draft, (8, 0.5))
    seed(costs.ingest, (1, 0.125), (8, 0.25))
    for _ in range(2):
        costs.note_hand_over("target", 0.0625)
        costs.note_hand_over("draft", 0.03125)
    assert costs.alone(8, 0)[0] == 1.0625
    assert costs.alone(8, 0)[7] == 2.0625
    assert costs.asking(8, 0)[0] == 0.0
    usual = 0.125 + (0.25 - 0.125) / 7  # two feature rows
    assert costs.asking(8, 0)[7] == pytest.approx(0.5 + usual + 0.03125)


def test_a_slot_of_which_nothing_is_known_is_like_the_one_before():
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.note(1, 2)
    one, two, three = acceptance.tokens(4)[1:]
    assert one == pytest.approx(2.0, abs=0.01)
    assert two == pytest.approx(2.0, abs=0.05)
    assert three - two < 0.01


def test_a_change_of_the_text_is_noticed_by_what_it_brings():
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.note(7, 7)
    for _ in range(6):
        acceptance.note(0, 7)
    assert acceptance.tokens(8)[-1] < 3.0


def test_first_tokens_that_turn_wrong_are_a_change_though_lengths_vary_too_much_to_tell():
    """Three of 0 among runs of 1 and 7 are within what such lengths do by themselves."""
    acceptance = Acceptance()
    for at in range(200):
        acceptance.note(7 if at % 4 == 0 else 1, 7)
    for _ in range(3):
        acceptance.note(0, 7)
    assert acceptance.count < 10
    for _ in range(5):
        acceptance.note(0, 7)
    assert acceptance.tokens(2)[-1] < 1.4


def test_first_tokens_that_turn_right_are_learned_round_by_round():
    acceptance = Acceptance()
    for at in range(200):
        acceptance.note(at % 2, 1)
    for _ in range(4):
        acceptance.note(1, 1)
    assert acceptance.count > 50


def test_a_copy_learns_alone():
    acceptance = Acceptance()
    twin = acceptance.copy()
    twin.note(0, 7)
    assert twin.tokens(2) != acceptance.tokens(2)


def test_what_was_measured_long_ago_is_worth_no_more_than_one_new_time():
    curve = CostCurve()
    seed(curve, *[(1, 2.0)] * 20, (3, 1.5))
    assert not curve.is_old(1, 0)
    for _ in range(OLD):
        curve.note(3, 0, 1.5)
    assert curve.is_old(1, 0)
    assert not curve.is_old(3, 0)
    assert not curve.is_old(7, 0)  # never run
    curve.note(1, 0, 1.0)
    assert curve.upto(3, 0) == [1.0, 1.25, 1.5]


def test_what_was_measured_long_ago_counts_for_half_of_a_longer_time():
    curve = CostCurve()
    seed(curve, *[(1, 1.0)] * 20, (3, 4.0))
    for expected in (1.5, 1.75, 1.875):
        for _ in range(OLD):
            curve.note(3, 0, 4.0)
        curve.note(1, 0, 2.0)
        assert curve.upto(1, 0) == pytest.approx([expected])


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_of_the_first_few_times_the_least_is_believed(slow):
    curve = CostCurve()
    for at in range(3):
        curve.note(8, 0, 0.75 if at == slow else 0.05)
    assert 0.05 <= curve.upto(8, 0)[-1] < 0.13  # by a tenth of what is longer


def test_what_another_process_remembered_gives_way_to_the_first_time_that_is_shorter():
    curve = CostCurve()
    curve.restore([(0, 1, 0.02, 50), (0, 8, 0.75, 50)])
    assert curve.is_old(8, 0)
    curve.note(8, 0, 0.05)
    assert curve.upto(8, 0)[-1] == pytest.approx(0.05)
    assert not curve.is_old(8, 0)
    curve.note(1, 0, 0.03)
    assert curve.upto(1, 0)[0] == pytest.approx(0.025)  # a longer one may be a hiccup
    curve.note(1, 0, 0.03)
    assert curve.upto(1, 0)[0] == pytest.approx(0.0255)


def test_fewer_rows_cost_no_more_than_more_rows_do():
    curve = CostCurve()
    seed(curve, (1, 3.0), (2, 1.0), (4, 2.0))  # the machine was slower when one row was run
    assert curve.upto(4, 0) == [1.0, 1.0, 1.5, 2.0]


def test_more_rows_cost_no_less_than_fewer_do_by_the_newer_time():
    curve = CostCurve()
    seed(curve, (1, 1.0), (8, 2.0), (4, 15.0))  # the machine was faster when eight were run
    assert curve.upto(8, 0)[3:] == [15.0] * 5
    assert curve.upto(8, 0)[0] == 1.0
    assert rising({1: (3, 5.0), 2: (9, 2.0), 3: (4, 1.0), 4: (9, 3.0)}) == [
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
        (4, 3.0),
    ]


def test_a_time_is_old_where_none_was_taken_of_late_in_any_context():
    curve = CostCurve()
    curve.note(1, 0, 1.0)
    for _ in range(OLD):
        curve.note(3, 300, 1.5)
    assert not curve.is_old(1, 600)
    curve.note(3, 600, 1.5)
    assert curve.is_old(1, 600)
    curve.note(1, 600, 1.0)
    assert not curve.is_old(1, 600)
    assert not curve.is_old(1, 300)
    assert curve.is_old(1, 0)  # it is known there, and was taken long ago
