"""Soft and hard deadlines, learned from what a draft took."""

import pytest

from launch.patience import ENOUGH, Patience
from protocol.config import Deadlines
from protocol.messages import (
    Close,
    CloseItem,
    Ingest,
    IngestItem,
    Propose,
    ProposeItem,
    Replay,
    ReplayItem,
    Verify,
    VerifyItem,
)

LIVES = {"target_life": 1, "draft_life": 2}
LIMITS = Deadlines(
    propose=10.0, ingest=30.0, verify=60.0, target_least=8.0, soft_seed=0.25, hard_least=2.0
)


def propose(base=10, width=8, sequence=1):
    item = ProposeItem(sequence=sequence, base_pos=base, pending=1, width=width)
    return Propose(items=(item,), **LIVES)


def learned(*seconds, message=None):
    patience = Patience(LIMITS)
    patience.note("draft", message or propose(), 0.0)  # its rows are taken in
    for each in seconds:
        patience.note("draft", message or propose(), each)
    return patience


def verify(base=0, width=1):
    item = VerifyItem(sequence=1, base_pos=base, tokens=b"\0" * 4 * width, budget=width)
    return Verify(items=(item,), **LIVES)


@pytest.mark.parametrize(
    ("seconds", "hard"), [(0.05, 8.0), (0.5, 20.0), (5.0, 60.0)], ids=["fast", "slow", "slowest"]
)
def test_a_target_that_hangs_is_known_from_what_its_rounds_took(seconds, hard):
    patience = Patience(LIMITS)
    for _ in range(ENOUGH):
        assert patience.allow("target", verify()).hard == 60.0
        patience.note("target", verify(), seconds)
    allowed = patience.allow("target", verify())
    assert (allowed.soft, allowed.hard) == (None, hard)
    assert patience.allow("target", verify(width=8)).hard == 60.0
    assert patience.allow("target", verify(base=4000)).hard == 60.0


def test_nothing_is_learned_of_what_is_replayed():
    item = ReplayItem(sequence=1, base_pos=0, tokens=b"\0" * 8)
    patience, message = Patience(LIMITS), Replay(items=(item,), **LIVES)
    for _ in range(2 * ENOUGH):
        patience.note("target", message, 0.001)
    assert patience.allow("target", message).hard == LIMITS.replay


def test_before_anything_is_known_the_seed_is_generous():
    patience = Patience(LIMITS)
    assert patience.allow("draft", propose()).soft == 0.25
    assert patience.allow("draft", propose()).hard == 2.0
    patience.seed(0.3)
    assert patience.allow("draft", propose()).hard == pytest.approx(6.0)
    patience.seed(30.0)
    assert patience.allow("draft", propose()).hard == 10.0


def test_the_seed_of_an_ingest_is_proportional_to_its_rows():
    patience = Patience(LIMITS)
    patience.seed(0.2)
    small, large = (Ingest(items=(IngestItem(sequence=1, stop=n),), **LIVES) for n in (256, 1024))
    assert patience.allow("draft", large).hard == pytest.approx(
        4 * patience.allow("draft", small).hard
    )


def test_learned_deadlines_are_multiples_of_the_95th_percentile():
    patience = learned(*[0.01] * 18, 0.2, 0.2)
    assert patience.allow("draft", propose()).soft == pytest.approx(0.8)
    assert patience.allow("draft", propose()).hard == pytest.approx(4.0)


def test_one_slow_answer_in_many_changes_nothing():
    patience = learned(*[0.01] * 40, 9.0)
    assert patience.allow("draft", propose()).soft == pytest.approx(0.04)
    assert patience.allow("draft", propose()).hard == 2.0


def test_the_soft_deadline_is_never_below_its_least():
    patience = learned(*[0.001] * 40)
    assert patience.allow("draft", propose()).soft == 0.02


def test_few_answers_teach_nothing():
    patience = learned(*[0.001] * (ENOUGH - 2))
    assert patience.allow("draft", propose()).soft == 0.25


def test_other_widths_and_rows_are_learned_apart():
    patience = learned(*[0.001] * 40)
    assert patience.allow("draft", propose(width=2)).soft == 0.25
    assert patience.allow("draft", propose(base=2000)).soft == 0.25
    assert patience.allow("draft", propose(width=9)).soft == 0.02


@pytest.mark.parametrize(
    "forget",
    [
        lambda p: p.note("draft", Close(items=(CloseItem(sequence=1),), **LIVES), 0.0),
        lambda p: p.forget_all(),
    ],
    ids=["one", "all"],
)
def test_what_a_draft_had_taken_in_is_forgotten_with_it(forget):
    patience = learned(*[0.001] * 40)
    forget(patience)
    assert patience.allow("draft", propose(base=2000)).soft == 0.25
    assert patience._rows(propose(base=2000)) == 2000


def test_closing_has_deadlines_too():
    close = Close(items=(CloseItem(sequence=1),), **LIVES)
    assert Patience(LIMITS).allow("draft", close).soft == 0.25
