"""A target that is lost or says what cannot be true, event by event."""

import msgspec
import pytest
from support.model_pair import VOCAB, next_token
from support.session_steps import PROMPT, answered, until, world
from support.session_world import SEQUENCE, Setting, World

from launch.events import Fail, Finish, Start
from launch.token_ids import pack_ids
from protocol.errors import DaemonDied, InternalError, ProtocolError
from protocol.messages import (
    ItemFailed,
    PrefillItem,
    ReplayItem,
    VerifyItem,
)

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


def test_a_target_that_dies_while_the_request_ends_changes_nothing():
    made = answered(9)
    made.cancel()
    made.kill_target()
    assert made.ends == [Finish("cancelled")]


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
