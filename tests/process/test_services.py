"""Daemons as services of their own: who may drive them, and how they end."""

import signal
from contextlib import contextmanager

import pytest
from support.services import Service, model_services, target_config
from support.waiting import until

from protocol.client import Poller
from protocol.driving import DriverLock
from protocol.messages import (
    WIRE_VERSION,
    Close,
    CloseItem,
    DraftHello,
    Failed,
    Hello,
    ItemFailed,
    Leave,
    Open,
    Opened,
    OpenItem,
    TargetHello,
)
from protocol.state import DRAFT_REPLIES, TARGET_REPLIES

pytestmark = pytest.mark.process


@pytest.fixture
def target(runtime_dir):
    with model_services(runtime_dir, roles=("target",)) as (service,):
        yield service


@contextmanager
def driving(service, life):
    """A supervisor's right to drive, and its link."""
    lock = DriverLock(service.run_dir)
    lock.take(life)
    try:
        with linked(service) as ask:
            yield ask
    finally:
        lock.release()


@contextmanager
def linked(service):
    """Sends one message and returns its answer."""
    replies = TARGET_REPLIES if service.role == "target" else DRAFT_REPLIES
    with Poller() as poller:
        link = poller.connect(f"ipc://{service.socket}", replies)

        def answer():
            poller.poll(0.05)
            return link.receive()

        def ask(message):
            link.send(message)
            return until(answer, what=f"the answer to {type(message).__name__}")[0]

        ask.link, ask.poller = link, poller
        yield ask


def hello(life):
    return Hello(target_life=life, wire_version=WIRE_VERSION, nonce=5)


def opening(life, *sequences):
    return Open(target_life=life, items=tuple(OpenItem(sequence=number) for number in sequences))


def leave(life):
    return Leave(target_life=life, reason="sick in this test")


def failures(answer):
    return [item.code for item in answer.results if isinstance(item, ItemFailed)]


def test_a_service_serves_whoever_holds_its_lock(target):
    with driving(target, 100) as ask:
        answer = ask(hello(100))
        assert isinstance(answer, TargetHello)
        assert answer.host.pid == target.pid
        assert failures(ask(opening(100, 1))) == []


@pytest.mark.parametrize("life", [0, 100])
def test_a_supervisor_without_the_lock_is_refused(target, life):
    with linked(target) as ask:
        assert ask(hello(life)).code == "not_the_driver"
        assert ask(opening(life, 1)).code == "stale"
        assert ask(leave(life)).code == "stale"


def test_a_second_supervisor_is_refused_and_changes_nothing(target):
    with driving(target, 100) as ask, linked(target) as ask_too:
        ask(hello(100))
        ask(opening(100, 1))
        refusal = ask_too(hello(101))
        assert isinstance(refusal, Failed)
        assert refusal.code == "not_the_driver"
        assert "driven by process" in refusal.detail
        assert ask_too(opening(101, 2)).code == "stale"
        assert ask_too(Close(target_life=100, items=(CloseItem(sequence=1),))).code == "protocol"
        assert failures(ask(Close(target_life=100, items=(CloseItem(sequence=1),)))) == []


def test_a_new_driver_finds_all_slots_free_and_the_old_one_can_change_nothing(target):
    with driving(target, 100) as ask:
        ask(hello(100))
        assert failures(ask(opening(100, 1, 2, 3))) == ["overloaded"]
        old = ask
        lock = DriverLock(target.run_dir)
        with pytest.raises(Exception, match="driven by process"):
            lock.take(101)
    with driving(target, 101) as ask, linked(target) as old:
        ask(hello(101))
        assert failures(ask(opening(101, 1, 2))) == []
        assert old(opening(100, 3)).code == "stale"
        assert old(hello(100)).code == "not_the_driver"
        assert isinstance(ask(opening(101, 3)), Opened)


def test_a_draft_takes_its_life_from_its_driver_too(runtime_dir):
    with model_services(runtime_dir, roles=("draft",)) as (draft,), driving(draft, 55) as ask:
        answer = ask(Hello(target_life=4, draft_life=55, wire_version=WIRE_VERSION, nonce=5))
        assert isinstance(answer, DraftHello)
        assert answer.draft_life == 55


def test_a_sick_daemon_that_is_asked_to_leave_ends_with_exit_code_75(target):
    with driving(target, 100) as ask:
        ask(hello(100))
        with linked(target) as ask_too:  # as a supervisor's next link would
            ask_too.link.send(leave(100))
            until(lambda: ask_too.poller.poll(0.05) or target.process.poll() is not None)
            assert target.wait() == 75
    assert "sick in this test" in target.said()
    assert not target.socket.exists()


def test_a_request_to_leave_that_is_for_an_earlier_life_is_refused(target):
    with driving(target, 100) as ask:
        ask(hello(100))
        assert ask(leave(99)).code == "stale"
        assert isinstance(ask(hello(100)), TargetHello)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_is_told_to_end_leaves_nothing(target, number):
    assert target.kill(number) == 0
    assert not target.run_dir.exists()


def test_a_service_that_ends_leaves_the_lock_to_its_living_driver(target):
    with driving(target, 100) as ask:
        ask(hello(100))
        target.kill(signal.SIGTERM)
        assert not target.socket.exists()
        target.start().until_ready()
        with linked(target) as ask_too:
            assert ask_too(hello(101)).code == "not_the_driver"


def test_two_daemons_never_share_a_run_directory(target):
    first = target.process
    try:
        target.start()
        assert target.wait() == 75
        said = f"dflashd: {target.run_dir} is in use by process {first.pid}"
        assert target.said().splitlines()[-1] == said  # one sentence, as of any command
        assert "temporary" not in target.said()
    finally:
        target.process = first


def test_a_killed_service_can_be_started_again_at_once(target):
    target.kill()
    assert target.socket.exists()
    target.start().until_ready()
    with driving(target, 100) as ask:
        assert isinstance(ask(hello(100)), TargetHello)


def test_a_service_that_cannot_load_says_why_in_its_log(runtime_dir, tmp_path):
    config = target_config(runtime_dir / "t")
    target = Service.of_models("target", config, tmp_path, "target:load_error").start()
    assert target.wait() == 78
    assert target.said().splitlines()[-1] == "dflashd: no tensor `x` in the target"
    assert "ERROR" not in target.said()
    assert not target.run_dir.exists()
