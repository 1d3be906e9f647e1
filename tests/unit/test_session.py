"""One request, event by event."""

import msgspec
import pytest
from support.model_pair import VOCAB, next_token
from support.session_world import SEQUENCE, Setting, World

from launch.answers import ingest_defect
from launch.attached import FAR_SICK, SICK, leave_messages
from launch.coupling import Couplings
from launch.draft_side import MOST_STARVED
from launch.events import CancelRequested, DeadlineExpired, DraftUp, Fail, Finish, Reply, Start
from launch.far import Far
from launch.peer import Peer
from launch.token_ids import pack_ids
from protocol.errors import DaemonDied, DeadlineExceeded, InternalError, ProtocolError, Unavailable
from protocol.messages import (
    CloseItem,
    IngestedItem,
    IngestItem,
    ItemFailed,
    OpenItem,
    Piece,
    PrefillItem,
    ProposeItem,
    ReplayItem,
    Sampling,
    VerifyItem,
)

PROMPT = list(range(1, 21))


def world(**changes):
    fields = {"prompt": PROMPT, "max_tokens": 30, "eos": -1} | changes
    return World(Setting(**fields)).start()


def answered(steps, **changes):
    """A world in which `steps` requests were answered, the target's before the draft's."""
    made = world(**changes)
    for _ in range(steps):
        for role in ("target", "draft"):
            made.answer(role)
    return made


def until(role, kind, **changes):
    """A world in which `role` has been asked for `kind` and has not answered."""
    made = world(**changes)
    while True:
        for name in ("draft", "target"):
            first = made.asked[name][0] if made.asked[name] else None
            if name == role and isinstance(first, kind):
                return made
            made.answer(name)


def names(calls):
    return [type(call).__name__.removesuffix("Item") for call in calls]


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


LOSSES = {
    "death": World.kill_target,
    "deadline": lambda made: made.deadline("target"),
    "lost answer": lambda made: (made.lose("target"), made.deadline("target")),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6, 9, 14])
def test_a_new_life_of_the_target_goes_on_where_the_old_one_was(loss, steps):
    made = answered(steps, chunk=8, max_tokens=30, luck=2)
    before = list(made.tokens)
    LOSSES[loss](made)
    assert made.tokens == before
    made.drain()
    assert made.tokens == made.setting.text[0]
    tally = made.session.tally
    assert (tally.num_target_restarts, tally.num_replay_mismatches) == (1, 0)
    assert made.session.mode[0] == "speculative"


def test_a_replay_emits_nothing_and_takes_the_prompt_in_the_same_chunks():
    made = answered(14, chunk=8, draft=False, max_tokens=30)
    emitted, first = len(made.tokens), list(made.target.calls)
    made.kill_target()
    made.start_target()
    while made.asked["target"] and not isinstance(made.asked["target"][0], VerifyItem):
        made.answer("target")
    assert len(made.tokens) == emitted
    calls = made.target.calls

    def chunks(seen):
        return [(c.start, c.tokens, c.last) for c in seen if isinstance(c, PrefillItem)]

    assert chunks(calls) == chunks(first)
    assert len(made.target.tokens[SEQUENCE]) == len(made.setting.prompt) + emitted - 1
    made.drain()
    assert made.tokens == made.setting.text[0]


def test_a_long_text_is_replayed_in_parts():
    made = answered(150, draft=False, max_tokens=180, max_positions=400, eos=-1)
    made.kill_target()
    made.drain()
    parts = [call for call in made.target.calls if isinstance(call, ReplayItem)]
    assert len(parts) == 2
    assert sum(len(part.tokens) // 4 - 1 for part in parts) == parts[-1].base_pos + len(
        parts[-1].tokens
    ) // 4 - 1 - len(PROMPT)
    assert made.tokens == made.setting.text[0]


def test_what_a_new_life_would_choose_otherwise_is_counted_and_the_journal_wins():
    made = answered(9, draft=False, max_tokens=20)
    emitted = list(made.tokens)
    made.kill_target()
    made.start_target()
    made.target.model = lambda history, _: 1 + next_token(history, -1) % (VOCAB - 1)
    made.drain()
    assert made.tokens[: len(emitted)] == emitted
    assert made.session.tally.num_replay_mismatches == len(emitted)


def test_a_kept_prefix_is_asked_for_in_every_life_and_only_the_first_counts():
    made = World(Setting(PROMPT, 5), fields={"base_pos": 15})
    made.feed(Start())
    made.answer("target", lambda item: msgspec.structs.replace(item, committed=15, oldest=3))
    assert made.asked["draft"][0].committed == 15
    assert made.asked["draft"][0].oldest == 3
    chunk = made.asked["target"][0]
    assert (chunk.start, len(chunk.tokens) // 4) == (15, 5)
    made.kill_target()
    made.start_target()
    assert made.asked["target"][0].prefix == pack_ids(PROMPT[:15])
    made.drain()
    assert made.tokens == made.setting.text[0]
    assert made.session.tally.num_kept_tokens == 15


@pytest.mark.parametrize("answer", [{"committed": 21}, {"committed": 5, "oldest": 6}])
def test_an_opening_that_cannot_be_true_ends_that_life(answer):
    made = World(Setting(PROMPT, 5), fields={"base_pos": 20})
    made.feed(Start())
    made.answer("target", lambda item: msgspec.structs.replace(item, **answer))
    assert [accusation.role for accusation in made.accused] == ["target"]
    made.drain()
    assert made.tokens == made.setting.text[0]


def test_a_request_that_waits_for_the_target_can_be_cancelled():
    made = answered(9)
    made.kill_target()
    made.cancel()
    assert made.ends == [Finish("cancelled")]


def test_a_target_that_dies_while_the_request_ends_changes_nothing():
    made = answered(9)
    made.cancel()
    made.kill_target()
    assert made.ends == [Finish("cancelled")]


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


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (lambda made: made.kill_target(fatal=True), DaemonDied),
        (lambda made: made.refuse("target"), InternalError),
    ],
)
def test_losing_the_target_for_good_fails_the_request_with_its_own_error(happens, error):
    made = until("target", VerifyItem)
    happens(made)
    made.drain()
    (end,) = made.ends
    assert isinstance(end, Fail)
    assert type(end.error) is error


DEFECTS = {
    "committed": lambda item: {"committed": item.committed + 1},
    "too many": lambda item: {"accepted": item.accepted + 1},
    "torn": lambda item: {"tokens": item.tokens + b"\x01"},
    "not the target's": lambda item: {"chosen": pack_ids([VOCAB - 1]) + item.chosen[4:]},
    "vocabulary": lambda item: {
        "tokens": item.tokens[:-4] + pack_ids([VOCAB]),
        "chosen": item.tokens[:-4] + pack_ids([VOCAB]),
    },
    "ended early": lambda item: {"finish": "length"},
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_verdict_that_cannot_be_true_twice_fails_the_request_and_emits_nothing(defect):
    made = until("target", VerifyItem)
    emitted = list(made.tokens)
    changes = DEFECTS[defect]

    def spoil(item):
        return msgspec.structs.replace(item, **changes(item))

    made.answer("target", spoil)
    assert made.tokens == emitted
    assert [accusation.role for accusation in made.accused] == ["target"]
    made.start_target()
    while not isinstance(made.asked["target"][0], VerifyItem):
        made.answer("target")
    made.answer("target", spoil)
    made.drain()
    assert made.tokens == emitted
    (end,) = made.ends
    assert isinstance(end, Fail)
    assert type(end.error) is ProtocolError


def test_a_verdict_that_keeps_other_drafts_than_the_blocks_ends_that_life():
    made = until("target", VerifyItem, luck=1000)

    def swap(item):
        first = pack_ids([1]) if item.tokens[:4] != pack_ids([1]) else pack_ids([2])
        tokens = first + item.tokens[4:]
        return msgspec.structs.replace(item, tokens=tokens, chosen=tokens)

    made.answer("target", swap)
    assert "drafts" in made.accused[0].reason
    made.drain()
    assert made.tokens == made.setting.text[0]


def test_a_target_whose_gpu_is_lost_is_started_again_and_no_request_fails():
    made = until("target", VerifyItem)
    asked = made.asked["target"][0]
    lost = ItemFailed(
        sequence=asked.sequence, round=asked.round, code="device_lost", detail="a GPU"
    )
    made.answer("target", lambda _item: lost)
    assert "a GPU" in made.accused[0].reason
    made.drain()
    assert made.tokens == made.setting.text[0]


def test_a_target_that_answered_for_its_first_row_alone_is_believed():
    made = until("target", VerifyItem, luck=1000)
    item = made.asked["target"][0]
    made.asked["target"][0] = msgspec.structs.replace(item, tokens=item.tokens[:4])
    made.answer("target")
    assert len(made.pieces[-1].chosen) == 4 < 4 * made.pieces[-1].width
    made.drain()
    assert made.tokens == made.setting.text[0]


PREFILL_DEFECTS = {
    "committed": lambda item: {"committed": item.committed + 1},
    "early": lambda item: {"token": 5},
    "length": lambda item: {"finish": "length"},
    "vocabulary": lambda item: {"token": VOCAB},
}


@pytest.mark.parametrize("defect", PREFILL_DEFECTS)
def test_a_prefill_answer_that_cannot_be_true_ends_that_life(defect):
    made = world(chunk=8 if defect != "vocabulary" else 16)
    made.answer("target")
    if defect == "vocabulary":
        made.answer("target")
    changes = PREFILL_DEFECTS[defect]
    made.answer("target", lambda item: msgspec.structs.replace(item, **changes(item)))
    assert made.tokens == []
    assert [accusation.role for accusation in made.accused] == ["target"]
    made.drain()
    assert made.tokens == made.setting.text[0]


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
