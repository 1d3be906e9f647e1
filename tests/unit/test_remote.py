"""A command's own loop over one connection: what it waits for, and what it refuses."""

import os
import threading
from types import SimpleNamespace

import msgspec
import pytest
from support.waiting import until

from launch.commands import ps, status_text
from launch.commands.output import ProgressLine
from launch.commands.receiver import Receiver
from launch.commands.running_pair import RunningPair
from launch.interrupts import Interrupts
from launch.remote import OPERATION, Remote
from launch.token_ids import pack_ids
from protocol.config import Deadlines
from protocol.connection import accept, listen
from protocol.errors import (
    DeadlineExceeded,
    InternalError,
    Overloaded,
    Unavailable,
    UsageError,
    WireMismatch,
)
from protocol.instances import Instance
from protocol.messages import (
    WIRE_VERSION,
    Accepted,
    Cancel,
    DaemonStatus,
    Denied,
    Done,
    Refused,
    RequestStatus,
    StatusReport,
    Submit,
    Welcome,
)
from protocol.state import CLIENT_REQUESTS

WELCOME = Welcome(
    wire_version=WIRE_VERSION, pid=1, model="/m", draft="", max_positions=9, vocab_size=9
)
SOON = Deadlines(client=0.3)


@pytest.fixture
def path(runtime_dir):
    return runtime_dir / "dflash.sock"


@pytest.fixture
def host(path):
    """Serve one connection at `path`: send these messages (or bytes), then answer one request."""
    threads = []

    def make(*first, answers=(), stay=True):
        listener = listen(path)

        def run():
            connection = until(lambda: accept(listener, CLIENT_REQUESTS))
            for message in first:
                if isinstance(message, bytes):
                    os.write(connection.fd, message)
                else:
                    connection.send(message)
            if answers:
                until(connection.receive)
                for message in answers:
                    connection.send(message)
            if stay:
                until(lambda: connection.receive() or connection.ended)
            connection.close()
            listener.close()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield make
    for thread in threads:
        thread.join()
    path.unlink(missing_ok=True)


def _met(path):
    with Remote(path, SOON) as remote:
        return remote.welcome


def test_it_is_entered_with_what_the_supervisor_serves(path, host):
    host(WELCOME)
    assert _met(path) == WELCOME
    with pytest.raises(InternalError):
        _ = Remote(path).welcome


def test_another_wire_version_is_refused_with_both(path, host):
    host(msgspec.structs.replace(WELCOME, wire_version=77))
    with pytest.raises(WireMismatch, match=f"version 77, this command {WIRE_VERSION}"):
        _met(path)


def test_what_cannot_be_read_may_be_another_version(path, host):
    host(b"\x02\0\0\0\xc1\xc1")
    with pytest.raises(WireMismatch, match="or is none"):
        _met(path)


def test_one_that_says_nothing_is_waited_for_until_the_deadline(path, host):
    host()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
        _met(path)


def test_a_connection_that_is_refused_is_the_supervisors_own_error(path, host):
    host(Denied(operation=0, code="overloaded", detail="32 clients"))
    with pytest.raises(Overloaded, match="32 clients"):
        _met(path)


def test_an_end_in_the_middle_is_unavailable(path, host):
    host(WELCOME, stay=False)
    with Remote(path, SOON) as remote, pytest.raises(Unavailable, match="ended the connection"):
        remote.status()


def test_an_operation_is_answered_by_its_own_number(path, host):
    others = (Done(operation=9, detail="another"), Denied(operation=8, code="usage", detail="no"))
    host(WELCOME, answers=(*others, Done(operation=OPERATION, detail="it is done")))
    with Remote(path) as remote:
        assert remote.operate(Cancel(request=1, operation=OPERATION)) == "it is done"


def test_an_operation_that_is_denied_is_its_error(path, host):
    host(WELCOME, answers=(Denied(operation=OPERATION, code="usage", detail="no such"),))
    with Remote(path) as remote, pytest.raises(UsageError, match="no such"):
        remote.operate(Cancel(request=1, operation=OPERATION))


def test_who_waits_for_an_operation_can_be_told_to_stop(path, host):
    host(WELCOME)
    with Remote(path) as remote:
        assert remote.operate(Cancel(request=1, operation=OPERATION), lambda: True) is None


def test_a_pair_whose_supervisor_went_away_looks_for_one_in_its_place(path, host):
    submit = Submit(request=1, prompt=pack_ids([1]), max_tokens=1)
    line, stream = ProgressLine(shown=False), SimpleNamespace(finish=str)

    def run(pair):
        receiver = Receiver(stream, None, None, line)
        with Interrupts() as interrupts:
            pair.run(submit, None, receiver, interrupts)
        return receiver

    host(WELCOME)
    with RunningPair(lambda: path, line) as pair:
        with pytest.raises(Unavailable, match="ended the connection after 0 tokens"):
            run(pair)
        path.unlink()
        with pytest.raises(Unavailable):  # nobody is there
            run(pair)
        host(msgspec.structs.replace(WELCOME, model="/other"))
        with pytest.raises(UsageError, match="serves /other now"):
            run(pair)
        path.unlink()
        refusal = Refused(request=1, code="overloaded", detail="busy")
        host(WELCOME, answers=(Accepted(asked=1, request=1), refusal))
        assert isinstance(run(pair).error, Overloaded)


def test_a_supervisor_that_does_not_answer_is_listed_with_the_reason(path):
    listed = ps._ask(Instance("a", path.parent, 5))
    assert (listed.status, listed.why_not) == (None, "serves one command, and no clients")
    listen(path).close()
    assert ps._ask(Instance("a", path.parent, 5)).why_not.startswith("no supervisor answers")
    path.unlink()


def test_the_lines_for_people_say_reasons_restarts_and_acceptance():
    daemon = DaemonStatus(stage="ready", reason="", life=3, pid=77)
    request = RequestStatus(
        request=4,
        phase="decoding",
        prompt_tokens=8,
        prefilled_tokens=8,
        completion_tokens=5,
        max_tokens=9,
        mode="speculative",
        mode_reason="draft joined",
        num_rounds=2,
        num_draft_tokens=10,
        num_accepted_tokens=3,
        seconds=1.5,
    )
    waiting = msgspec.structs.replace(
        request, phase="waiting", mode="autoregressive", mode_reason="it has not begun"
    )
    report = StatusReport(
        pid=1,
        seconds=60.0,
        mode="autoregressive",
        mode_reason="the draft\nis gone",
        transport="none",
        transport_reason="",
        target=daemon,
        draft=DaemonStatus(stage="failed", reason="ended", life=0, pid=None),
        target_facts=None,
        draft_facts=None,
        running=1,
        waiting=0,
        finished=2,
        refused=0,
        num_stale_replies=0,
        num_draft_restarts=6,
        num_target_restarts=0,
        load_seconds=2.0,
        completion_tokens=0,
        num_rounds=0,
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        requests=(request, msgspec.structs.replace(request, num_draft_tokens=0), waiting),
    )
    lines = list(status_text.full(report))
    assert "mode: autoregressive (the draft is gone)" in lines
    assert "target: ready, pid 77, life 3" in lines
    assert "draft: failed (ended)" in lines
    assert any("3 of 10 accepted (30%)" in line for line in lines)
    assert any("draft 6" in line for line in lines)
    (line,) = (line for line in lines if ": waiting," in line)
    assert "autoregressive" not in line  # how it will be served is not known yet
