"""A draft that comes, goes, is late, refuses or talks nonsense, event by event."""

import msgspec
import pytest
from support.session_steps import PROMPT, answered, names, until, world
from support.session_world import SEQUENCE

from launch.answers import ingest_defect
from launch.attached import FAR_SICK, SICK, leave_messages
from launch.draft_side import MOST_STARVED
from launch.events import DraftUp, Finish
from launch.far import Far
from launch.peer import Peer
from protocol.errors import DeadlineExceeded, ProtocolError, Unavailable
from protocol.messages import (
    CloseItem,
    IngestedItem,
    IngestItem,
    ProposeItem,
)


def test_a_draft_that_dies_in_a_round_leaves_the_request_alive_and_its_reason():
    made = answered(6)
    assert made.pieces
    made.kill_draft()
    made.drain()
    assert made.tokens == made.setting.text[0]
    assert made.session.mode == ("autoregressive", "it was killed")


def test_a_draft_that_comes_up_in_the_middle_joins():
    made = answered(8, draft=False, max_tokens=40)
    emitted = len(made.tokens)
    made.start_draft()
    made.drain()
    assert made.session.tally.num_drafts > 0
    assert made.session.mode == ("speculative", f"draft joined after {emitted} tokens")


def test_a_draft_that_comes_back_says_that_it_was_lost():
    made = answered(6, max_tokens=40)
    made.kill_draft()
    emitted = len(made.tokens)
    made.start_draft()
    made.drain()
    reason = f"draft was lost and joined again after {emitted} tokens"
    assert made.session.mode == ("speculative", reason)


@pytest.mark.parametrize(
    ("role", "cause", "said"),
    [
        ("draft", "parked", "draft was parked and joined again"),
        ("draft", "swapped", "another draft took over"),
        ("target", "parked", "target was parked; draft joined again"),
        ("target", "swapped", "another draft took over"),
    ],
)
def test_what_somebody_asked_for_is_no_loss_and_no_restart(role, cause, said):
    made = answered(6, max_tokens=40)
    emitted = len(made.tokens)
    if role == "draft":
        made.kill_draft(cause)
    else:
        made.kill_target(cause=cause)
        made.start_target()
    made.start_draft()
    made.drain()
    assert made.session.mode == ("speculative", f"{said} after {emitted} tokens")
    tally = made.session.tally
    assert (tally.num_draft_restarts, tally.num_target_restarts) == (0, 0)


def test_a_restart_under_way_at_the_end_is_counted():
    made = answered(6, max_tokens=40)
    made.kill_draft()
    made.drain()
    assert made.ends == [Finish(made.setting.text[1])]
    assert made.session.tally.num_draft_restarts == 1
    waiting = answered(9)
    waiting.kill_target()
    waiting.cancel()
    assert waiting.session.tally.num_target_restarts == 1


def test_a_draft_that_joins_behind_many_rows_takes_them_in_first():
    made = answered(14, draft=False, prompt=[1 + i % 50 for i in range(40)], chunk=8)
    made.start_draft()
    made.drain()
    assert names(made.draft.calls)[:3] == ["Open", "Ingest", "Propose"]


def test_an_older_draft_life_does_not_join():
    made = answered(6)
    made.nonsense()
    made.draft_life -= 2
    made.start_draft()
    made.drain()
    assert made.session.mode[0] == "autoregressive"


def test_a_draft_that_is_known_already_does_not_join_twice():
    made = answered(6)
    assert made.session.handle(DraftUp(made.draft_facts)) == ()
    made.drain()
    assert made.session.tally.num_draft_restarts == 0


def test_a_late_draft_costs_one_round_and_speculation_goes_on():
    made = until("draft", ProposeItem)
    made.late()
    made.hold("draft")
    made.answer("target")
    made.answer("target")  # rounds of width 1, while its answer is due
    assert [piece.width for piece in made.pieces[-2:]] == [1, 1]
    drafted = made.session.tally.num_drafts
    made.release()
    made.drain()
    assert made.tokens == made.setting.text[0]
    tally = made.session.tally
    assert (tally.num_late_proposals, made.session.num_stale_replies) == (1, 0)
    assert tally.num_drafts > drafted
    assert made.session.mode == ("speculative", "")


def test_a_request_does_not_wait_for_a_late_draft_to_close():
    made = until("draft", ProposeItem)
    made.late()
    made.cancel()
    made.answer("target")
    made.answer("target")
    assert made.ends == [Finish("cancelled")]
    assert isinstance(made.asked["draft"][-1], CloseItem)


@pytest.mark.parametrize(
    ("code", "sick"),
    [("deadline", False), ("unavailable", False), ("feature_expired", False), ("internal", True)],
)
def test_a_draft_that_cannot_reach_its_target_is_paired_anew_and_not_asked_to_leave(code, sick):
    made = until("draft", ProposeItem)
    made.refuse("draft", code)
    assert [(one.role, one.sick) for one in made.accused] == [("draft", sick)]
    assert made.session.draft.stage == "absent"
    before = Peer("draft", 5, Far("tcp://127.0.0.1:1", ()), "tcp://127.0.0.1:1")
    before.hello = object()  # it was met
    before.error = (ProtocolError if sick else Unavailable)("refused in this test")
    for kinds in (SICK, FAR_SICK):
        assert [one.draft_life for one in leave_messages(before, kinds)] == ([5] if sick else [])
    before.error = DeadlineExceeded("silence")  # which may be the cable's
    assert [len(leave_messages(before, kinds)) for kinds in (SICK, FAR_SICK)] == [1, 0]


def test_late_nonsense_is_nonsense():
    made = until("draft", ProposeItem)
    made.late()
    made.nonsense()
    assert [accusation.role for accusation in made.accused] == ["draft"]


def test_a_round_whose_draft_is_busy_elsewhere_goes_on_without():
    made = until("draft", ProposeItem)
    made.withdraw()
    made.answer("target")
    assert made.pieces[-1].width == 1
    made.drain()
    assert made.tokens == made.setting.text[0]
    assert made.session.tally.num_drafts > 0


def test_an_ingest_that_cannot_be_asked_for_leaves_a_gap():
    made = until("draft", IngestItem, prompt=[1 + i % 50 for i in range(150)], context=150)
    made.withdraw()
    made.drain()
    assert made.tokens == made.setting.text[0]
    assert made.draft.gaps > 0


def test_a_draft_that_answers_nonsense_is_closed_and_not_asked_again():
    made = until("draft", ProposeItem)
    made.nonsense()
    made.drain()
    assert names(made.draft.calls)[-1] == "Close"
    assert made.tokens == made.setting.text[0]
    assert "nonsense" in made.session.mode[1]


def test_an_ingest_that_ends_elsewhere_is_nonsense():
    made = until("draft", IngestItem, prompt=[1 + i % 50 for i in range(150)], context=150)
    made.answer("draft", lambda item: msgspec.structs.replace(item, stop=item.stop - 1))
    made.drain()
    assert made.session.mode[0] == "autoregressive"
    assert made.tokens == made.setting.text[0]


def test_a_draft_that_refuses_is_named_in_the_reason():
    made = world()
    made.answer("target")
    made.refuse("draft")
    made.drain()
    assert made.session.mode == ("autoregressive", "the draft refused: refused in this test")


def test_a_draft_that_ends_before_the_text_does_is_left_and_lives_on():
    made = until("draft", ProposeItem)
    made.refuse("draft", "unsupported_model")
    made.drain()
    assert (made.tokens, made.accused) == (made.setting.text[0], [])
    assert names(made.draft.calls)[-1] == "Close"
    assert made.session.mode == ("autoregressive", "the draft refused: refused in this test")


def test_a_draft_without_memory_costs_one_round_and_is_asked_again():
    made = until("draft", ProposeItem)
    made.refuse("draft", "out_of_memory")
    (asked,) = made.asked["target"]
    assert len(asked.tokens) == 4  # the pending token alone
    made.drain()
    assert (made.tokens, made.accused) == (made.setting.text[0], [])
    assert made.session.tally.num_drafts > 1
    assert made.session.mode == ("speculative", "the draft had no memory for a block")


def test_an_ingest_that_there_is_no_memory_for_leaves_a_gap():
    made = until("draft", IngestItem, prompt=[1 + i % 50 for i in range(150)], context=150)
    made.refuse("draft", "out_of_memory")
    made.drain()
    assert (made.tokens, made.accused) == (made.setting.text[0], [])
    assert made.draft.gaps > 0
    assert made.session.tally.num_drafts > 0


def test_a_draft_that_never_has_memory_is_left_by_that_request_and_lives_on():
    made = until("draft", ProposeItem)
    while made.session.mode[0] == "speculative":
        if made.asked["draft"]:
            made.refuse("draft", "out_of_memory")
        made.answer("target")
    made.drain()
    assert (made.tokens, made.accused) == (made.setting.text[0], [])
    assert len(made.pieces) > MOST_STARVED
    assert names(made.draft.calls)[-1] == "Close"


def test_a_draft_is_left_at_its_last_position_with_both_numbers():
    made = world(draft_positions=31)
    made.drain()
    assert (made.tokens, made.accused) == (made.setting.text[0], [])
    stops = [
        call.base_pos + call.width for call in made.draft.calls if isinstance(call, ProposeItem)
    ]
    assert stops[-1] <= 31  # a block that fits is narrower, and none goes beyond
    assert max(piece.position for piece in made.pieces if piece.proposed) >= 27
    reason = "the text has come to position 30, and the draft takes 31 positions"
    assert made.session.mode == ("autoregressive", reason)
    assert names(made.draft.calls)[-1] == "Close"


def test_a_draft_that_takes_no_position_of_the_text_is_never_opened():
    made = world(draft_positions=len(PROMPT))
    made.drain()
    assert (made.tokens, made.draft.calls) == (made.setting.text[0], [])
    reason = "the text has come to position 19, and the draft takes 20 positions"
    assert made.session.mode == ("autoregressive", reason)


def test_a_late_draft_costs_one_deadline_and_its_answer_is_dropped():
    made = until("draft", ProposeItem)
    made.hold("draft")
    made.deadline("draft")
    made.release()
    made.drain()
    assert made.tokens == made.setting.text[0]
    assert made.session.num_stale_replies == 1
    assert made.session.mode[1] == "the draft did not answer Propose in time"


def test_prefill_waits_at_the_rings_end_for_a_draft_that_is_still_opening():
    made = world(prompt=[1 + i % 50 for i in range(150)], context=150)
    for _ in range(20):
        made.answer("target")
    assert len(made.target.tokens[SEQUENCE]) <= made.target.capacity
    made.drain()
    assert made.draft.gaps == 0
    assert made.tokens == made.setting.text[0]


def test_an_ingest_that_starts_behind_its_end_is_nonsense():
    asked = IngestItem(sequence=1, stop=9)
    answer = IngestedItem(sequence=1, start=10, stop=9, seconds=0.0)
    assert "10..9" in ingest_defect(asked, answer)
