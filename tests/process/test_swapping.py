"""Another draft takes over while requests go on; one that cannot leaves the one before serving."""

import json
import os
import shutil

import pytest
from support.clients import serving
from support.model_pair import local_token, model_text
from support.tiny_pair import write_pair
from support.tiny_text import edit_json

from protocol.errors import (
    CheckpointError,
    DraftMismatch,
    InsufficientMemory,
    InternalError,
    TemporaryFailure,
    Unavailable,
    UnsupportedModel,
)
from protocol.messages import Denied, Done, Park, Piece, Swap, Unpark, Welcome

pytestmark = pytest.mark.process

FAULTS = "DFLASH_TEST_FAULTS"
PROMPT = list(range(1, 41))
LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def other(folders, tmp_path):
    """A draft with the same taps."""
    return shutil.copytree(folders[1], tmp_path / "other")


@pytest.fixture
def elsewhere(other):
    """A draft with other taps."""
    config = json.loads((other / "config.json").read_text())["dflash_config"]
    edit_json(other / "config.json", dflash_config=config | {"target_layer_ids": [0, 1, 3]})
    return other


@pytest.fixture
def world(folders):
    with serving(*folders) as running:
        yield running


def text(limit):
    return model_text(PROMPT, limit, -1, local_token)[0]


def begun(world):
    client = world.client().submit(1, PROMPT, LONG)
    world.until(lambda: len(client.all(Piece)) > 3)
    return client


def ask(world, message):
    client = world.client().send(message)
    return lambda: next(iter(client.all((Done, Denied))), None)


def swapped(world, draft):
    """Swap, and what it is answered with."""
    return world.until(ask(world, Swap(draft=str(draft))), what="an answer", seconds=60)


def check_serving(world, *, drafts=1):
    """A new request is speculative, and its text the target's own."""
    client = world.client().submit(9, PROMPT, 30)
    world.until(lambda: client.answer(9))
    assert client.tokens(9) == text(30)
    assert client.answer(9).statistics.mode == "speculative"
    assert world.supervisor.describe().draft.stage == "ready"


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_another_draft_takes_over_inside_a_request_and_the_text_is_unchanged(world, other):
    client = begun(world)
    before = world.supervisor.describe()
    answer = swapped(world, other)
    assert answer == Done(operation=0, detail=f"the draft is {other} now")
    assert client.answer(1) is None
    after = world.supervisor.describe()
    assert after.draft.life > before.draft.life
    assert after.target == before.target
    world.until(lambda: is_gone(before.draft.pid))
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)
    figures = client.answer(1).statistics
    assert "another draft took over after " in figures.mode_reason
    assert (figures.mode, figures.num_draft_restarts, figures.num_target_restarts) == (
        "speculative",
        0,
        0,
    )
    check_serving(world)
    assert world.supervisor.describe().num_draft_restarts == 0
    newcomer = world.client()
    world.until(lambda: newcomer.all(Welcome))
    assert newcomer.all(Welcome)[0].draft == str(other)


def test_a_draft_with_other_taps_has_the_target_started_again_and_requests_replayed(
    world, elsewhere
):
    client = begun(world)
    before = world.supervisor.describe()
    assert isinstance(swapped(world, elsewhere), Done)
    after = world.supervisor.describe()
    assert after.target.life > before.target.life
    assert after.target_facts.taps == after.draft_facts.target_layer_ids == (0, 1, 3)
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)
    assert client.answer(1).statistics.num_replay_mismatches == 0
    check_serving(world)
    status = world.supervisor.describe()
    assert (status.num_draft_restarts, status.num_target_restarts) == (0, 0)


def test_drafts_can_be_swapped_to_and_fro_and_a_swapped_one_is_started_again(world, other, folders):
    assert isinstance(swapped(world, other), Done)
    assert isinstance(swapped(world, folders[1]), Done)
    assert isinstance(swapped(world, other), Done)
    pid = world.supervisor.describe().draft.pid
    os.kill(pid, 9)
    world.until(lambda: world.supervisor.describe().num_draft_restarts == 1)
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    check_serving(world)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("draft:load_error", CheckpointError),
        ("draft:refuse:hello:1:always", InternalError),
        ("draft:refuse:pair:1:always", InternalError),
        ("draft:wrong:taps:1:always", DraftMismatch),
    ],
    ids=["load", "hello", "pair", "other taps than its config's"],
)
def test_a_draft_that_cannot_serve_leaves_the_one_before(world, other, monkeypatch, fault, error):
    client = begun(world)
    before = world.supervisor.describe()
    monkeypatch.setenv(FAULTS, fault)
    answer = swapped(world, other)
    assert (type(answer), answer.code) == (Denied, error.code)
    assert answer.detail
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    after = world.supervisor.describe()
    assert (after.draft.life, after.target.life) == (before.draft.life, before.target.life)
    assert after.num_draft_restarts == 0
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)
    check_serving(world)
    monkeypatch.delenv(FAULTS)
    assert isinstance(swapped(world, other), Done)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("target:other_taps", InsufficientMemory),
        ("draft:refuse:pair:1:always", InternalError),
    ],
    ids=["the target cannot", "the draft cannot"],
)
def test_a_draft_with_other_taps_that_cannot_serve_gives_the_target_its_own_back(
    world, elsewhere, monkeypatch, fault, error
):
    client = begun(world)
    monkeypatch.setenv(FAULTS, fault)
    answer = swapped(world, elsewhere)
    assert (type(answer), answer.code) == (Denied, error.code)
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    status = world.supervisor.describe()
    assert status.target_facts.taps == (0, 2, 3)
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)
    check_serving(world)


def test_a_draft_for_another_target_is_refused_at_sight(world, other, folders):
    edit_json(other / "config.json", hidden_size=64)
    answer = swapped(world, other)
    assert (type(answer), answer.code) == (Denied, DraftMismatch.code)
    answer = swapped(world, folders[0])
    assert (type(answer), answer.code) == (Denied, UnsupportedModel.code)
    check_serving(world)


def test_one_swap_at_a_time_and_none_while_something_is_parked(world, other):
    first = ask(world, Swap(draft=str(other)))
    second, parked = ask(world, Swap(draft=str(other))), ask(world, Park(role="draft"))
    world.until(lambda: first() and second() and parked())
    assert isinstance(first(), Done)
    assert (second().code, parked().code) == (Unavailable.code, Unavailable.code)
    for role, code in (("draft", Unavailable.code), ("target", TemporaryFailure.code)):
        world.until(ask(world, Park(role=role)))
        assert swapped(world, other).code == code
        world.until(ask(world, Unpark(role=role)))
        world.until(lambda: world.supervisor.describe().mode == "speculative")
    check_serving(world)


def test_swapping_and_parking_again_and_again_leaves_no_descriptor_behind(world, other, folders):
    def cycle():
        for draft in (other, folders[1]):
            assert isinstance(swapped(world, draft), Done)
        for role in ("draft", "target"):
            for message in (Park(role=role), Unpark(role=role)):
                world.until(ask(world, message))
        world.until(lambda: world.supervisor.describe().mode == "speculative")
        for client in world.clients:
            client.close()
        world.clients.clear()
        world.until(lambda: not world.service._clients)
        world.until(lambda: all(one.has_ended for one in leaving()))
        return len(os.listdir("/proc/self/fd"))

    def leaving():
        return world.supervisor._crew._lives.understudy.leaving

    first, second = cycle(), cycle()
    assert second == first


def test_the_end_of_the_supervisor_in_the_middle_of_a_swap_leaves_nothing(world, other):
    ask(world, Swap(draft=str(other)))
    world.until(lambda: world.supervisor._crew._lives.candidate is not None)


def test_a_pair_without_a_draft_gets_one(folders):
    with serving(folders[0], None) as world:
        client = world.client().submit(1, PROMPT, LONG)
        world.until(lambda: len(client.all(Piece)) > 3)
        assert isinstance(swapped(world, folders[1]), Done)
        world.until(lambda: client.answer(1))
        assert client.tokens(1) == text(LONG)
        check_serving(world)


def test_a_pair_without_a_draft_stays_without_one_that_cannot_serve(folders, monkeypatch):
    with serving(folders[0], None) as world:
        monkeypatch.setenv(FAULTS, "draft:refuse:pair:1:always")
        assert swapped(world, folders[1]).code == InternalError.code
        world.until(lambda: world.supervisor.describe().target.stage == "ready")
        client = world.client().submit(1, PROMPT, 20)
        world.until(lambda: client.answer(1))
        assert client.tokens(1) == text(20)
        assert client.answer(1).statistics.mode == "autoregressive"


def test_the_loss_of_the_present_draft_or_the_target_does_not_stop_a_swap(world, other):
    client = begun(world)
    answered = ask(world, Swap(draft=str(other)))
    world.until(lambda: world.supervisor._crew._lives.candidate is not None)
    os.kill(world.supervisor.describe().draft.pid, 9)
    world.until(answered)
    assert isinstance(answered(), Done)
    answered = ask(world, Swap(draft=str(other)))
    world.until(lambda: world.supervisor._crew._lives.candidate is not None)
    os.kill(world.supervisor.describe().target.pid, 9)
    world.until(answered)
    world.until(lambda: client.answer(1))
    assert client.tokens(1) == text(LONG)
    world.until(lambda: world.supervisor.describe().mode == "speculative")
    check_serving(world)
