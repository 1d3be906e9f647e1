"""Parking a daemon: its process is gone, requests finish or are paused, and go on at unpark."""

import os

import pytest
from support.clients import serving
from support.model_pair import local_token, model_text
from support.tiny_pair import write_pair

from launch.parking import BEING_PARKED, TARGET_PARKED
from protocol.errors import CheckpointError, Parked, Unavailable, UsageError
from protocol.messages import Accepted, Cancel, Denied, Done, Park, Piece, Unpark

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))
LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def world(folders):
    with serving(*folders) as running:
        yield running


def text(limit, prompt=PROMPT):
    return model_text(prompt, limit, -1, local_token)[0]


def ask(world, message):
    """Send it over a connection of its own; what it is answered with, once it is."""
    client = world.client().send(message)
    return lambda: next(iter(client.all((Done, Denied))), None)


def done(world, message):
    answered = ask(world, message)
    answer = world.until(answered)
    assert isinstance(answer, Done), answer
    return answer.detail


def phases(world):
    return {one.request: one.phase for one in world.supervisor.describe().requests}


def begun(world, number=1, limit=LONG):
    """A client whose request is in the middle of its text."""
    client = world.client().submit(number, PROMPT, limit)
    world.until(lambda: len(client.all(Piece)) > 3)
    return client


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_parked_target_ends_when_its_requests_have_and_serves_again_at_unpark(world):
    running = begun(world)
    before = world.supervisor.describe()
    parked = ask(world, Park(role="target"))
    later = world.client().submit(1, PROMPT, 20)
    world.until(parked)
    assert parked().detail == "the target is parked"
    assert running.tokens(1) == text(LONG)
    assert running.answer(1).statistics.num_target_restarts == 0
    status = world.supervisor.describe()
    assert (status.target.stage, status.draft.stage) == ("parked", "parked")
    assert (status.target.pid, status.draft.pid) == (None, None)
    assert (status.mode_reason, status.transport_reason) == (TARGET_PARKED, TARGET_PARKED)
    assert later.all(Accepted)[0].waits in (BEING_PARKED, TARGET_PARKED)
    assert is_gone(before.target.pid)
    assert is_gone(before.draft.pid)
    assert phases(world) == {2: "waiting"}
    assert done(world, Unpark(role="target")) == "the target runs"
    world.until(lambda: later.answer(1))
    assert later.tokens(1) == text(20)
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    again = world.client().submit(1, PROMPT, 30)
    world.until(lambda: again.answer(1))
    assert again.answer(1).statistics.mode == "speculative"
    status = world.supervisor.describe()
    assert (status.num_target_restarts, status.num_draft_restarts) == (0, 0)


def test_a_request_that_is_paused_goes_on_where_it_was(world):
    clients = [begun(world), begun(world)]
    assert done(world, Park(role="target", now=True)) == "the target is parked"
    assert phases(world) == {1: "paused", 2: "paused"}
    reasons = {one.mode_reason for one in world.supervisor.describe().requests}
    assert reasons == {"the target is parked"}
    emitted = [client.tokens(1) for client in clients]
    assert all(0 < len(tokens) < LONG for tokens in emitted)
    done(world, Unpark(role="target"))
    world.until(lambda: all(client.answer(1) for client in clients))
    for client in clients:
        assert client.tokens(1) == text(LONG)
        figures = client.answer(1).statistics
        assert (figures.num_replay_mismatches, figures.mode) == (0, "speculative")
        assert "target was parked; draft joined again after " in figures.mode_reason
        assert (figures.num_target_restarts, figures.num_draft_restarts) == (0, 0)


def test_who_waits_too_long_for_a_parked_target_gets_a_typed_error(world):
    paused = begun(world)
    done(world, Park(role="target", now=True, within=0.3))
    queued = [world.client().submit(1, PROMPT, 5)]
    world.until(lambda: paused.answer(1))
    world.until(lambda: queued[0].answer(1))
    queued.append(world.client().submit(1, PROMPT, 5))
    world.until(lambda: queued[1].answer(1))
    for client in (paused, *queued):
        assert client.answer(1).code == Parked.code
        assert "within 0.3 s" in client.answer(1).detail
    assert paused.tokens(1) == text(LONG)[: len(paused.tokens(1))]
    done(world, Unpark(role="target"))
    after = world.client().submit(1, PROMPT, 5)
    world.until(lambda: after.answer(1))
    assert after.tokens(1) == text(5)


def test_a_paused_request_can_be_cancelled(world):
    client = begun(world)
    done(world, Park(role="target", now=True))
    done(world, Cancel(request=1))
    world.until(lambda: client.answer(1))
    assert client.answer(1).finish_reason == "cancelled"


def test_parking_with_now_stops_the_waiting_for_those_that_run(world):
    client = begun(world)
    first = ask(world, Park(role="target", within=0.4))
    assert done(world, Park(role="target", now=True)) == "the target is parked"
    world.until(first)
    assert isinstance(first(), Done)
    assert done(world, Park(role="target")) == "the target is parked"
    assert client.answer(1) is None


def test_a_parked_draft_leaves_requests_autoregressive_with_that_reason(world):
    running = begun(world)
    parked = ask(world, Park(role="draft"))
    meanwhile = world.client().submit(1, PROMPT, 20)
    world.until(lambda: meanwhile.answer(1))
    figures = meanwhile.answer(1).statistics
    assert figures.mode == "autoregressive"
    assert figures.mode_reason in ("the draft is being parked", "the draft is parked")
    world.until(parked)
    assert running.answer(1).statistics.mode == "speculative"
    status = world.supervisor.describe()
    assert (status.mode, status.mode_reason) == ("autoregressive", "the draft is parked")
    assert (status.draft.stage, status.draft.pid) == ("parked", None)
    alone = world.client().submit(1, PROMPT, 20)
    world.until(lambda: alone.answer(1))
    assert alone.tokens(1) == text(20)
    assert alone.answer(1).statistics.mode_reason == "the draft is parked"
    assert done(world, Unpark(role="draft")) == "the draft runs"
    after = world.client().submit(1, PROMPT, 20)
    world.until(lambda: after.answer(1))
    assert after.answer(1).statistics.mode == "speculative"
    assert world.supervisor.describe().num_draft_restarts == 0


def test_a_draft_that_is_parked_now_is_gone_from_the_middle_of_a_request_and_comes_back(world):
    client = begun(world)
    done(world, Park(role="draft", now=True))
    (request,) = world.supervisor.describe().requests
    assert (request.mode, request.mode_reason) == ("autoregressive", "the draft is parked")
    done(world, Unpark(role="draft"))
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)


def test_unparking_while_requests_still_finish_takes_the_parking_back(world):
    for role in ("target", "draft"):
        client = begun(world)
        parked = ask(world, Park(role=role))
        assert done(world, Unpark(role=role)) == f"the {role} runs"
        world.until(parked)
        assert parked().code == Unavailable.code
        world.until(lambda client=client: client.answer(1))
        assert client.answer(1).statistics.mode == "speculative"


def test_unparking_before_the_process_has_ended_starts_another(world):
    pid = world.supervisor.describe().target.pid
    parked = ask(world, Park(role="target", now=True))
    started = ask(world, Unpark(role="target"))
    world.until(lambda: parked() and started())
    assert isinstance(started(), Done)
    assert world.supervisor.describe().target.pid != pid
    client = world.client().submit(1, PROMPT, 20)
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(20)


def test_a_draft_stays_parked_or_not_while_its_target_is(world):
    done(world, Park(role="draft"))
    done(world, Park(role="target"))
    done(world, Unpark(role="target"))
    assert world.supervisor.describe().draft.stage == "parked"
    done(world, Park(role="target"))
    assert done(world, Unpark(role="draft")) == "the draft is started with the target"
    assert done(world, Park(role="draft")) == "the draft is parked"
    assert done(world, Unpark(role="draft")) == "the draft is started with the target"
    done(world, Unpark(role="target"))
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    assert done(world, Unpark(role="draft")) == "the draft runs"
    done(world, Park(role="target"))  # the draft goes with it, though nobody parked that
    assert done(world, Unpark(role="draft")) == "the draft is started with the target"


def test_a_target_that_cannot_be_started_again_says_why(world, monkeypatch):
    done(world, Park(role="target"))
    monkeypatch.setenv("DFLASH_TEST_FAULTS", "target:load_error")
    client = world.client().submit(1, PROMPT, 20)
    answered = ask(world, Unpark(role="target"))
    world.until(answered)
    assert (answered().code, answered().detail) == (
        CheckpointError.code,
        "no tensor `x` in the target",
    )
    world.until(lambda: client.answer(1))
    assert client.answer(1).code == CheckpointError.code
    done(world, Park(role="target"))
    monkeypatch.delenv("DFLASH_TEST_FAULTS")
    done(world, Unpark(role="target"))


def test_parking_again_while_it_starts_answers_who_waited_for_the_start(world):
    done(world, Park(role="draft"))
    started = ask(world, Unpark(role="draft"))
    parked = ask(world, Park(role="draft", now=True))
    world.until(lambda: started() and parked())
    assert isinstance(parked(), Done)


def test_daemons_that_are_parked_while_they_load_stay_parked(folders):
    with serving(*folders, ready=False) as world:
        for _ in range(3):
            done(world, Park(role="target", now=True))
            status = world.supervisor.describe()
            assert (status.target.stage, status.draft.stage) == ("parked", "parked")
            unparked = ask(world, Unpark(role="target"))
            world.until(lambda: world.supervisor.describe().target.stage != "parked")
        world.until(unparked)
        client = world.client().submit(1, PROMPT, 20)
        world.until(lambda: client.answer(1))
        assert client.tokens(1) == text(20)


def test_without_a_draft_there_is_none_to_park(folders):
    with serving(folders[0], None) as world:
        for message in (Park(role="draft"), Unpark(role="draft")):
            answered = ask(world, message)
            world.until(answered)
            assert answered().code == UsageError.code
