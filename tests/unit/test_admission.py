"""What is refused before anything is queued, and one answer that cannot be true."""

import pytest
from support.model_pair import VOCAB

from launch.admission import check_hints, check_prompt
from launch.answers import verdict_defect
from launch.desk import Desk
from launch.events import TargetFacts
from launch.token_ids import pack_ids
from protocol.errors import PromptTooLong, UsageError
from protocol.messages import Refused, Submit, TokenLogprobs, Verdict, VerifyItem


@pytest.mark.parametrize("hint", [(0, VOCAB), (-1, 1), (3, -1)])
def test_a_hint_that_no_target_could_choose_is_refused_with_the_range(hint):
    with pytest.raises(UsageError, match=f"ids are 0 to {VOCAB - 1}"):
        check_hints(((0, 1), hint), VOCAB)


def test_prompts_are_refused_with_the_numbers():
    check_prompt(9, 1, 10)
    for tokens, wanted, error in ((0, 1, UsageError), (5, 0, UsageError), (10, 1, PromptTooLong)):
        with pytest.raises(error):
            check_prompt(tokens, wanted, 10)


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
