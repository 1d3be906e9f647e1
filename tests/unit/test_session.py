"""One request, event by event."""

import msgspec
import pytest
from support.session_steps import PROMPT, answered, names, until, world
from support.session_world import SEQUENCE, Setting, World

from launch.coupling import Couplings
from launch.events import CancelRequested, DeadlineExpired, Fail, Finish, Reply, Start
from protocol.messages import (
    CloseItem,
    IngestItem,
    OpenItem,
    Piece,
    PrefillItem,
    ProposeItem,
    Sampling,
    VerifyItem,
)


def test_the_order_is_open_prefill_in_fixed_chunks_then_propose_and_verify():
    made = world(chunk=8)
    made.drain()
    assert names(made.target.calls)[:4] == ["Open", "Prefill", "Prefill", "Prefill"]
    chunks = [call for call in made.target.calls if isinstance(call, PrefillItem)]
    assert [(call.start, call.last) for call in chunks] == [(0, False), (8, False), (16, True)]
    assert set(names(made.target.calls)[4:-1]) == {"Verify"}
    assert names(made.draft.calls)[:3] == ["Open", "Ingest", "Propose"]
    assert names(made.target.calls)[-1] == names(made.draft.calls)[-1] == "Close"


def test_the_draft_proposes_at_a_part_of_the_temperature_that_is_accepted():
    """A model draft heeds no temperature: what matters is what it is asked for."""
    sampling = Sampling(temperature=0.8, seed=4)
    coupling = Couplings().at(0.8)
    setting = Setting(PROMPT, 150, eos=-1, max_positions=400)
    made = World(setting, fields={"sampling": sampling}, coupling=coupling)
    made.feed(Start())
    made.drain()
    asked = [call for call in made.draft.calls if isinstance(call, ProposeItem)]
    assert {part for item in asked for part in item.temperatures} == {0.0, 0.4, 0.8}
    assert all(len(item.temperatures) in (0, item.width - 1) for item in asked)
    opened = next(call for call in made.draft.calls if isinstance(call, OpenItem))
    assert opened.sampling == sampling
    assert coupling._slots[0].reached == len(asked)
    assert coupling._slots[1].reached < len(asked)  # only where the first was right
    assert made.tokens == setting.text[0]


def test_at_temperature_0_the_best_ids_are_asked_for():
    made = until("draft", ProposeItem)
    assert made.asked["draft"][0].temperatures == ()


def test_the_draft_takes_the_slot_that_the_target_assigned():
    made = world()
    made.target.slots[99] = 0  # a sequence that is there already
    made.drain()
    opened = [call for call in made.draft.calls if isinstance(call, OpenItem)]
    assert [call.slot for call in opened] == [1]


def test_a_prompt_that_fits_the_ring_costs_no_ingest_before_the_first_token():
    made = world()
    made.drain()
    assert not [call for call in made.draft.calls if isinstance(call, IngestItem)]
    assert made.draft.gaps == 0


def test_a_long_prompt_is_taken_in_before_its_rows_are_overwritten():
    made = world(prompt=[1 + i % 50 for i in range(150)], context=150)
    made.drain()
    assert [call for call in made.draft.calls if isinstance(call, IngestItem)]
    assert made.draft.gaps == 0
    assert made.tokens == made.setting.text[0]


def test_rows_older_than_the_drafts_context_are_not_taken_in():
    made = world(prompt=[1 + i % 50 for i in range(150)], context=16, chunk=16)
    made.drain()
    assert not [call for call in made.draft.calls if isinstance(call, IngestItem)]
    assert made.draft.gaps == 0


def test_a_block_is_never_wider_than_the_tokens_still_wanted():
    made = world(max_tokens=4, block_size=9, luck=1000)
    made.drain()
    verified = [call for call in made.target.calls if isinstance(call, VerifyItem)]
    assert all(len(call.tokens) // 4 <= call.budget for call in verified)
    assert len(made.tokens) == 4


def test_every_verify_states_the_committed_position():
    made = world()
    made.drain()
    bases = [call.base_pos for call in made.target.calls if isinstance(call, VerifyItem)]
    assert bases == [piece.position - 1 for piece in made.pieces[1:]]


@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (30, "stop")])
def test_a_request_may_end_with_its_first_token(max_tokens, reason):
    prompt = PROMPT
    if reason == "stop":
        prompt = next([n] for n in range(1, 61) if Setting([n], 1).text[1] == "stop")
    made = world(prompt=prompt, max_tokens=max_tokens, eos=0)
    made.drain()
    assert made.ends == [Finish(reason)]
    assert not [call for call in made.target.calls if isinstance(call, VerifyItem)]


def test_the_end_of_the_context_is_an_end_by_length():
    made = world(max_positions=24, max_tokens=1000)
    made.drain()
    assert (made.ends, len(made.tokens)) == ([Finish("length")], 4)


def test_without_a_draft_every_round_is_one_row_wide_and_says_why():
    made = world(draft=False)
    made.drain()
    assert {piece.width for piece in made.pieces[1:]} == {1}
    assert made.session.mode == ("autoregressive", "none was given")


def test_progress_counts_prompt_positions():
    made = world(chunk=8)
    made.drain()
    assert made.marks == [(8, 20), (16, 20), (20, 20)]


def test_a_request_that_waits_for_the_target_can_be_cancelled():
    made = answered(9)
    made.kill_target()
    made.cancel()
    assert made.ends == [Finish("cancelled")]


def test_a_deadline_of_an_answered_request_changes_nothing():
    made = until("draft", ProposeItem)
    number = made.asked["draft"][0].round
    made.answer("draft")
    made.feed(DeadlineExpired("draft", number))
    made.drain()
    assert made.session.mode[0] == "speculative"


@pytest.mark.parametrize("steps", range(12))
def test_cancelling_closes_both_sides_wherever_it_comes(steps):
    made = answered(steps, max_tokens=200)
    made.cancel()
    for role in ("target", "draft"):
        kinds = {type(item) for item in made.asked[role]}
        assert CloseItem in kinds or made.ends or role == "draft"
    made.drain()
    assert made.ends == [Finish("cancelled")]
    assert made.target.tokens == {}
    assert made.draft.taken == {}


def test_a_request_that_never_began_is_cancelled_at_once():
    made = World(Setting(PROMPT, 5))
    made.cancel()
    assert made.ends == [Finish("cancelled")]


def test_the_computation_under_way_at_a_cancel_is_dropped_and_counted():
    made = until("draft", ProposeItem)
    made.cancel()
    emitted = list(made.tokens)
    made.drain()
    assert made.tokens == emitted
    assert made.session.num_stale_replies == 1


def test_a_target_without_a_slot_refuses_and_there_is_nothing_to_close():
    made = world()
    made.refuse("target")
    (end,) = made.ends
    assert isinstance(end, Fail)
    assert not made.asked["target"]


def test_every_piece_carries_its_rounds_trace():
    made = world()
    made.drain()
    first, *rounds = made.pieces
    assert (first.width, first.proposed, first.chosen) == (0, b"", b"")
    for piece in rounds:
        assert len(piece.chosen) == 4 * piece.width
        assert len(piece.proposed) == 4 * (piece.width - 1)
        assert piece.chosen.startswith(piece.tokens)
        assert piece.verify_seconds == 0.25
        assert piece.draft_seconds == (0.0625 if piece.width > 1 else 0.0)


def test_starting_twice_asks_once():
    made = world()
    assert made.session.handle(Start()) == ()


def test_a_reply_for_another_sequence_is_dropped_and_counted():
    made = world()
    item = made._compute("target").item
    other = msgspec.structs.replace(item, sequence=SEQUENCE + 1)
    assert made.session.handle(Reply("target", 3, 10, other)) == ()
    assert made.session.num_stale_replies == 1


def test_cancelling_twice_closes_once():
    made = answered(3)
    made.cancel()
    assert made.session.handle(CancelRequested()) == ()


def test_pieces_are_what_the_client_gets():
    made = world()
    made.drain()
    assert all(isinstance(piece, Piece) and piece.request == 1 for piece in made.pieces)
