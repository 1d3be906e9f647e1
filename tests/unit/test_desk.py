"""Requests between clients and sessions."""

from support.model_pair import VOCAB

from launch.desk import Desk
from launch.events import DraftDown, TargetFacts, TargetUp
from launch.policy import FixedWidth
from launch.token_ids import pack_ids
from protocol.errors import DaemonDied, Unavailable
from protocol.messages import CloseItem, OpenItem, Refused, Submit

FACTS = TargetFacts(1, VOCAB, 100, 8, 64, 8)


def request(number):
    return Submit(request=number, prompt=pack_ids([1, 2, 3]), max_tokens=5)


def desk_with(*numbers, slots=2):
    sent, told = [], []
    desk = Desk(lambda role, item: sent.append((role, item)), lambda *_: None, max_waiting=8)
    for number in numbers:
        desk.submit(request(number), told.append)
    desk.admit(FACTS, slots, None, "no draft")
    return desk, sent, told


def test_sequences_are_never_repeated():
    _, sent, _ = desk_with(1, 2)
    assert [item.sequence for _, item in sent] == [1, 2]
    assert all(isinstance(item, OpenItem) for _, item in sent)


def test_clients_are_told_in_deliver_alone():
    desk, _, told = desk_with(1)
    desk.lose_target(DaemonDied("it died"), (), for_good=True)
    assert told == []
    assert desk.has_news
    desk.deliver()
    assert told == [Refused(request=1, code="daemon_died", detail="it died")]
    assert not desk.has_news


def test_an_event_for_a_request_that_has_ended_is_counted():
    desk, _, _ = desk_with(1)
    desk.lose_target(DaemonDied("it died"), (), for_good=True)
    desk.handle(1, DraftDown("late"))
    assert desk.num_stale_replies == 1


def test_whoever_has_no_answer_at_the_end_is_refused_once():
    desk, _, told = desk_with(1, 2, 3)
    assert (desk.running, desk.waiting) == (2, 1)
    desk.abandon(Unavailable("ending"))
    desk.deliver()
    assert sorted(message.request for message in told) == [1, 2, 3]
    assert {message.code for message in told} == {"unavailable"}


def test_cancelling_closes_what_was_opened():
    desk, sent, _ = desk_with(1)
    desk.cancel(1)
    desk.cancel(99)
    assert isinstance(sent[-1][1], CloseItem)


def test_only_who_is_alone_at_two_deaths_without_having_come_further_is_failed():
    desk, _, told = desk_with(1, 2)
    died = DaemonDied("it died")
    for _ in range(3):  # together: nobody is to blame
        desk.lose_target(died, (1, 2), for_good=False)
    desk.lose_target(died, (1,), for_good=False)
    desk.lose_target(died, (2,), for_good=False)
    assert desk.running == 2
    desk.broadcast(TargetUp(FACTS))
    desk.lose_target(died, (1,), for_good=False)
    desk.deliver()
    assert told == [Refused(request=1, code="daemon_died", detail="it died")]
    assert desk.running == 1


def test_a_request_of_the_supervisors_own_is_counted_nowhere():
    desk, _, told = desk_with()
    desk.submit(request(9), told.append, None, FixedWidth(1))
    desk.admit(FACTS, 2, None, "no draft")
    assert (desk.running, desk.requests) == (0, ())
    desk.abandon(Unavailable("ending"))
    desk.deliver()
    assert [message.request for message in told] == [9]
    assert (desk.finished, desk.refused) == (0, 0)
