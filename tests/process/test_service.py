"""Clients at the supervisor's socket: answered, bounded, cancelled with their connection."""

import os
import resource
import struct
import time

import pytest
from support.clients import SocketClient, serving
from support.model_pair import local_token, model_text
from support.tiny_pair import write_pair

from launch import service as module
from protocol import connection as connection_module
from protocol.errors import Overloaded, ProtocolError, UsageError
from protocol.messages import (
    Accepted,
    Cancel,
    Denied,
    Done,
    Piece,
    Status,
    StatusReport,
    Watch,
    Welcome,
)

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def world(folders):
    with serving(*folders) as running:
        yield running


def text(prompt, limit):
    return model_text(prompt, limit, -1, local_token)[0]


def test_a_client_is_welcomed_and_gets_its_text(world, folders):
    client = world.client().submit(7, PROMPT, 50)
    world.until(lambda: client.answer(7))
    welcome, accepted = client.messages[:2]
    assert isinstance(welcome, Welcome)
    assert (welcome.model, welcome.draft) == tuple(map(str, folders))
    assert accepted == Accepted(asked=7, request=1)
    assert client.tokens(7) == text(PROMPT, 50)
    assert client.answer(7).finish_reason == "length"
    assert client.answer(7).statistics.mode == "speculative"


def test_two_clients_get_their_own_texts_though_they_use_the_same_numbers(world):
    clients = [world.client().submit(1, PROMPT[n:], 60) for n in (0, 1)]
    world.until(lambda: all(client.answer(1) for client in clients))
    assert [client.tokens(1) for client in clients] == [text(PROMPT[n:], 60) for n in (0, 1)]
    assert {client.number(1) for client in clients} == {1, 2}


@pytest.mark.parametrize("stage", ["waiting", "decoding"])
def test_a_client_that_is_gone_has_its_requests_cancelled(world, stage):
    others = [world.client().submit(1, PROMPT, 400) for _ in range(2 if stage == "waiting" else 1)]
    world.until(lambda: all(other.all(Piece) for other in others))
    leaver = world.client().submit(1, PROMPT[3:], 400)
    number = 3 if stage == "waiting" else 2

    def phases():
        return {one.request: one.phase for one in world.supervisor.describe().requests}

    world.until(lambda: phases().get(number) == stage)
    leaver.close()
    world.until(lambda: number not in phases())
    world.until(lambda: all(other.answer(1) for other in others))
    for other in others:
        assert other.tokens(1) == text(PROMPT, 400)
    assert world.supervisor.describe().finished == len(others) + 1


def test_another_client_can_cancel_a_request_by_its_number(world):
    client = world.client().submit(9, PROMPT, 400)
    world.until(lambda: client.all(Piece))
    other = world.client().send(Cancel(request=client.number(9), operation=5))
    world.until(lambda: client.answer(9) and other.all(Done))
    assert client.answer(9).finish_reason == "cancelled"
    assert client.tokens(9) == text(PROMPT, 400)[: len(client.tokens(9))]
    assert other.all(Done) == [Done(operation=5, detail="request 1 is cancelled")]
    other.send(Cancel(request=1, operation=6))
    world.until(lambda: other.all(Denied))
    assert [(one.operation, one.code) for one in other.all(Denied)] == [(6, UsageError.code)]


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_its_requests(world, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_OUTBOX_BYTES", 1000)
    slow = world.client()
    for number in range(40):
        slow.submit(number, PROMPT, 400)
    quick = world.client().submit(1, PROMPT, 300)
    world.until(lambda: world.supervisor.describe().waiting == 0, quick, seconds=50)
    world.until(lambda: world.supervisor.describe().running == 0, quick, seconds=50)
    assert quick.tokens(1) == text(PROMPT, 300)
    world.until(lambda: all(slow.answer(number) for number in range(40)))
    codes = [getattr(slow.answer(number), "code", "") for number in range(40)]
    assert codes[-1] == Overloaded.code
    for number in range(40):
        tokens = slow.tokens(number)
        assert tokens == text(PROMPT, 400)[: len(tokens)]


def test_a_client_that_asks_and_asks_without_reading_is_dismissed(world, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_OUTBOX_BYTES", 1000)
    deaf, reader = world.client(), world.client()
    world.until(lambda: reader.all(Welcome), reader)
    for _ in range(2000):
        deaf.send(Status())
    world.until(lambda: len(world.service._clients) == 1, reader)
    deaf.read()
    reader.send(Status())
    world.until(lambda: reader.all(StatusReport), reader)


def test_more_clients_or_requests_than_there_is_room_for_are_refused(world, monkeypatch):
    monkeypatch.setattr(module, "MAX_CLIENTS", 1)
    monkeypatch.setattr(module, "MAX_REQUESTS", 1)
    first = world.client().submit(1, PROMPT, 300).submit(2, PROMPT, 5)
    world.until(lambda: first.answer(2))
    assert (first.answer(2).code, first.answer(1)) == (Overloaded.code, None)
    second = world.client()
    world.until(lambda: second.connection.ended)
    assert [one.code for one in second.all(Denied)] == [Overloaded.code]
    first.send(Cancel(request=1))
    world.until(lambda: first.answer(1))


def test_what_is_no_message_ends_that_connection_alone(world):
    bad, good = world.client().submit(1, PROMPT, 400), world.client().submit(1, PROMPT, 30)
    world.until(lambda: bad.all(Piece))
    os.write(bad.connection.fd, struct.pack("<I", 2) + b"\xc1\xc1")
    world.until(lambda: bad.connection.ended)
    assert [one.code for one in bad.all(Denied)] == [ProtocolError.code]
    world.until(lambda: good.answer(1))
    assert good.tokens(1) == text(PROMPT, 30)
    world.until(lambda: world.supervisor.describe().running == 0)


def test_the_status_says_what_runs_and_how(world):
    client = world.client().submit(1, PROMPT, 400)
    world.until(lambda: len(client.all(Piece)) > 4)
    asker = world.client().send(Status())
    world.until(lambda: asker.all(StatusReport))
    (report,) = asker.all(StatusReport)
    assert (report.pid, report.mode, report.transport) == (os.getpid(), "speculative", "shm")
    assert (report.target.stage, report.draft.stage) == ("ready", "ready")
    (request,) = report.requests
    assert (request.request, request.phase, request.max_tokens) == (1, "decoding", 400)
    assert request.prompt_tokens == request.prefilled_tokens == 40
    assert 0 < request.completion_tokens <= 400
    assert request.num_rounds > 0
    client.send(Cancel(request=1))
    world.until(lambda: client.answer(1))
    asker.send(Status())
    world.until(lambda: len(asker.all(StatusReport)) == 2)
    after = asker.all(StatusReport)[1]
    assert (after.requests, after.finished) == ((), 1)
    assert after.completion_tokens == len(client.tokens(1))
    assert 0 < after.num_accepted_tokens <= after.num_draft_tokens


def test_who_watches_is_told_again_and_again_until_it_is_gone(world):
    watcher = world.client().send(Watch(seconds=3600.0)).send(Watch(seconds=0.1))
    world.until(lambda: len(watcher.all(StatusReport)) >= 4)
    watcher.close()
    world.until(lambda: not world.service._clients)


def test_a_stop_string_is_found_by_the_supervisor(folders):
    asked = []

    def find_stop(submit):
        asked.append(submit.stops)
        return (lambda ids: 1) if submit.stops else None

    with serving(*folders, find_stop) as world:
        client = world.client().submit(1, PROMPT, 50, stops=("x",)).submit(2, PROMPT, 5)
        world.until(lambda: client.answer(1) and client.answer(2))
        assert client.answer(1).finish_reason == "stop"
        assert client.tokens(1) == text(PROMPT, 1)
    assert asked == [("x",), ()]


def test_when_it_ends_every_client_has_its_answer_and_the_socket_is_gone(folders):
    with serving(*folders) as world:
        path = world.supervisor.run_dir
        client = SocketClient(path / "dflash.sock").submit(1, PROMPT, 400)
        world.until(lambda: client.all(Piece), client)
    client.read()
    assert client.answer(1).code == "unavailable"
    client.read()
    assert client.connection.ended
    client.close()
    assert not path.exists()


def test_without_descriptors_a_client_waits_and_the_loop_does_not_spin(world):
    late = world.client()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.connection.fd, before[1]))
    try:
        steps, deadline = 0, time.monotonic() + 0.5
        while time.monotonic() < deadline:
            world.supervisor.step(0.1)
            steps += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert steps < 100
    late.read()
    assert not late.all(Welcome)
    world.until(lambda: late.all(Welcome))
