"""What is refused before anything is queued, and one answer that cannot be true."""

import pytest
from support.model_pair import VOCAB

from launch.admission import check_hints, check_prompt, check_tree, positions
from launch.answers import proposal_defect, verdict_defect
from launch.desk import Desk
from launch.events import DraftFacts, TargetFacts
from launch.token_ids import pack_ids
from protocol.errors import PromptTooLong, UsageError
from protocol.messages import (
    ProposedItem,
    ProposeItem,
    Refused,
    Submit,
    TokenLogprobs,
    Verdict,
    VerifyItem,
)


@pytest.mark.parametrize("hint", [(0, VOCAB), (-1, 1), (3, -1)])
def test_a_hint_that_no_target_could_choose_is_refused_with_the_range(hint):
    with pytest.raises(UsageError, match=f"ids are 0 to {VOCAB - 1}"):
        check_hints(((0, 1), hint), VOCAB)


def test_prompts_are_refused_with_the_numbers():
    check_prompt(9, 1, 10)
    for tokens, wanted, error in ((0, 1, UsageError), (5, 0, UsageError), (10, 1, PromptTooLong)):
        with pytest.raises(error):
            check_prompt(tokens, wanted, 10)


def test_more_positions_than_the_model_takes_are_refused_and_not_cut_down():
    assert (positions(0, 8192), positions(100, 8192), positions(8192, 8192)) == (8192, 100, 8192)
    with pytest.raises(UsageError, match="8,193 is more than the model takes: 8,192"):
        positions(8193, 8192)


def test_a_request_with_an_impossible_hint_is_answered_and_nothing_is_sent():
    sent, told = [], []
    desk = Desk(lambda role, item: sent.append((role, item)), lambda *_: None, max_waiting=8)
    submit = Submit(request=4, prompt=pack_ids([1, 2]), max_tokens=5, hints=((0, VOCAB),))
    desk.submit(submit, told.append)
    desk.admit(TargetFacts(1, VOCAB, 100, 8, 64, 8), 2, None, "no draft")
    desk.deliver()
    (refusal,) = told
    assert isinstance(refusal, Refused)
    assert (refusal.request, refusal.code, sent) == (4, "usage", [])


@pytest.mark.parametrize(("entries", "possible"), [(0, True), (2, True), (1, False), (3, False)])
def test_a_verdict_has_log_probabilities_for_all_its_tokens_or_none(entries, possible):
    asked = VerifyItem(sequence=1, base_pos=5, tokens=pack_ids([7, 8]), budget=9)
    answer = Verdict(
        sequence=1,
        accepted=1,
        tokens=pack_ids([8, 9]),
        chosen=pack_ids([8, 9]),
        committed=7,
        finish="",
        seconds=0.0,
        logprobs=(TokenLogprobs(logprob=-1.0),) * entries,
    )
    defect = verdict_defect(asked, answer, VOCAB)
    assert defect == ("" if possible else f"{entries} log-probabilities for 2 tokens")


ASKED = ProposeItem(sequence=1, base_pos=5, pending=3, width=3, top_k=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"top_ids": b"", "top_logprobs": ()}, ""),
        ({"top_ids": pack_ids([7, 8]), "top_logprobs": (-1.0, -1.0)}, ""),
        ({"top_ids": pack_ids([7, 1, 8])}, "3 ids and 4 log-probabilities"),
        ({"top_logprobs": (-1.0,)}, "4 ids and 1 log-probabilities for 2 at each of 2 slots"),
        ({"top_ids": b""}, "0 ids and 4 log-probabilities"),
        ({"top_ids": pack_ids([7, 1, 2, 8, 1, 2]), "top_logprobs": (-1.0,) * 6}, "6 ids"),
        ({"top_ids": pack_ids([7, 7, 8, 2])}, "alternatives that differ"),
        ({"top_ids": pack_ids([7, VOCAB, 8, 2])}, "alternatives that differ"),
        ({"top_ids": pack_ids([1, 7, 8, 2])}, "not the proposed ones"),
        ({"confidences": (0.0, 1.0)}, ""),
        ({"confidences": (0.5,)}, "1 confidences for 2 ids"),
    ],
)
def test_alternatives_are_the_targets_ids_and_the_proposed_one_is_their_first(changes, words):
    fields = {"top_ids": pack_ids([7, 1, 8, 2]), "top_logprobs": (-0.5, -1.0, -0.5, -2.0)}
    answer = ProposedItem(
        sequence=1,
        tokens=pack_ids([7, 8]),
        context_rows=5,
        draft_seconds=0.0,
        ingest_seconds=0.0,
        **(fields | changes),
    )
    defect = proposal_defect(ASKED, answer, VOCAB)
    assert words in defect
    assert bool(defect) == bool(words)


# Pending 3; 7 and 8 follow it, 9 follows 8.
TREE = VerifyItem(
    sequence=1, base_pos=5, tokens=pack_ids([3, 7, 8, 9]), parents=pack_ids([0, 0, 2]), budget=9
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"path": pack_ids([0, 2, 1])}, "no path of 3"),
        ({"path": pack_ids([0, 2])}, "no path of 3"),
        ({"path": b""}, "no path of 3"),
        ({"tokens": pack_ids([7, 9, 4]), "chosen": pack_ids([7, 9, 4])}, "not the block's drafts"),
        ({"committed": 7}, "committed 7"),
    ],
)
def test_a_trees_verdict_names_a_path_and_its_tokens(changes, words):
    fields = {
        "accepted": 2,
        "tokens": pack_ids([8, 9, 4]),
        "chosen": pack_ids([8, 9, 4]),
        "committed": 8,
        "finish": "",
        "seconds": 0.0,
        "path": pack_ids([0, 2, 3]),
    }
    defect = verdict_defect(TREE, Verdict(sequence=1, **(fields | changes)), VOCAB)
    assert words in defect
    assert bool(defect) == bool(words)


def test_a_path_through_a_chain_is_a_defect():
    asked = VerifyItem(sequence=1, base_pos=5, tokens=pack_ids([7, 8]), budget=9)
    fields = {"accepted": 0, "tokens": pack_ids([9]), "chosen": pack_ids([9, 1]), "committed": 6}
    answer = Verdict(sequence=1, finish="", seconds=0.0, path=pack_ids([0]), **fields)
    assert "no tree" in verdict_defect(asked, answer, VOCAB)


def test_trees_asked_for_by_name_need_a_pair_that_has_them():
    able = TargetFacts(1, VOCAB, 100, 8, 64, 16, tree_verify=True)
    draft = DraftFacts(1, 8, 32, top_k=4)
    check_tree("tree", 15, able, draft)
    check_tree("tree", 15, able, None)
    check_tree("auto", 99, TargetFacts(1, VOCAB, 100, 8, 64, 16), DraftFacts(1, 8, 32))
    with pytest.raises(UsageError, match="one token for each slot"):
        check_tree("tree", 15, able, DraftFacts(1, 8, 32))
    with pytest.raises(UsageError, match="chains only"):
        check_tree("tree", 15, TargetFacts(1, VOCAB, 100, 8, 64, 16), draft)
    with pytest.raises(UsageError, match=r"16 nodes is a forward of 17 rows; .* 16"):
        check_tree("tree", 16, able, draft)
