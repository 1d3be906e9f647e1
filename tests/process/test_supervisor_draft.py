"""The supervisor and a draft that dies, hangs, is late, lies or does not come."""

import os
import signal

import pytest
from support.supervised import (
    Client,
    model_command,
    plan_for,
    starter,
    text,
)
from support.tiny_pair import write_pair

from launch.supervisor import Supervisor
from protocol.errors import (
    DraftMismatch,
)

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def start(folders, monkeypatch):
    return starter(folders, monkeypatch)


@pytest.mark.fault
@pytest.mark.parametrize("verb", ["propose:3", "open:1", "close:1"])
def test_a_draft_that_dies_in_the_middle_changes_nothing_but_the_mode(start, verb):
    with start(f"draft:die:{verb}") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50)
        seen = []

        def is_over():
            seen.append(supervisor.describe())
            return client.done and seen[-1].num_draft_restarts == 1

        supervisor.run_until(is_over)
        after = Client(supervisor, 2).submit(PROMPT, 20).finish()
    assert client.tokens == text(PROMPT, 50)
    assert after.tokens == text(PROMPT, 20)
    assert "autoregressive" in {one.mode for one in seen if "SIGKILL" in one.mode_reason}
    figures = client.finished.statistics
    if verb != "close:1":
        assert "SIGKILL" in figures.mode_reason
        assert figures.num_drafts == (2 if verb == "propose:3" else 0)


@pytest.mark.fault
def test_a_draft_killed_from_outside_changes_nothing_but_the_mode(start):
    with start() as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 300)
        supervisor.run_until(lambda: len(client.pieces) > 3)
        os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
        client.finish()
    assert client.tokens == text(PROMPT, 300)
    assert client.finished.statistics.mode == "autoregressive"


@pytest.mark.fault
def test_without_a_target_the_reason_is_no_loss_of_the_draft_from_long_ago(start):
    seen = []
    with start(on_loading=lambda _: seen.append(supervisor.describe())) as supervisor:
        supervisor.wait_ready()
        os.kill(supervisor.describe().draft.pid, signal.SIGKILL)
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        seen.clear()
        os.kill(supervisor.describe().target.pid, signal.SIGKILL)
        supervisor.run_until(lambda: supervisor.describe().num_target_restarts == 1)
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
    reasons = {one.mode_reason for one in seen if one.mode == "autoregressive"}
    assert reasons == {"the draft waits for the target to be started again"}


@pytest.mark.fault
def test_a_draft_that_hangs_is_killed_at_its_deadline(start):
    steps = []
    with start("draft:hang:propose:2", propose=0.2, on_loading=steps.append) as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50).finish()
        # That it has no process is not always seen: it is started again in the same turn.
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
    assert client.tokens == text(PROMPT, 50)
    assert client.finished.statistics.mode_reason == "the draft did not answer Propose in time"
    assert any("within 0.2 s" in step.detail for step in steps if step.stage == "failed")


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["nonsense", "refuse", "garbage"])
def test_a_draft_that_answers_wrongly_is_not_asked_again(start, fault):
    with start(f"draft:{fault}:propose:2") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 50).finish()
    assert client.tokens == text(PROMPT, 50)
    assert client.finished.statistics.mode == "autoregressive"
    assert client.finished.statistics.num_drafts == 1
    assert client.finished.statistics.mode_reason


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("draft:load_error", "no tensor `x` in the draft"),
        ("draft:exit", "the draft daemon ended with exit code 9"),
        ("draft:die:pair:1", "the draft daemon was ended by SIGKILL"),
        ("draft:refuse:pair:1", "refused in this test"),
        ("draft:wrong:version:1", "wire version"),
        ("draft:wrong:taps:1", "the target captures layers (0, 2, 3)"),
    ],
)
def test_a_draft_that_cannot_serve_leaves_its_own_error_as_the_reason(start, fault, reason):
    with start(fault) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        assert supervisor.describe().draft.stage != "ready"
    assert client.tokens == text(PROMPT, 20)
    assert reason in client.finished.statistics.mode_reason


@pytest.mark.fault
def test_a_draft_that_does_not_load_in_time_is_given_up(start):
    with start("draft:load_hang", load=1.5) as supervisor:
        assert supervisor.wait_ready()
        assert "did not load within 1.5 s" in supervisor.describe().mode_reason


@pytest.mark.fault
def test_a_draft_that_dies_is_started_again_and_counted(start):
    with start("draft:die:propose:3") as supervisor:
        supervisor.wait_ready()
        client = Client(supervisor, 1)
        client.submit(PROMPT, 470)
        supervisor.run_until(lambda: supervisor.describe().num_draft_restarts == 1)
        client.finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 470)
    assert status.num_draft_restarts == 1


@pytest.mark.fault
def test_a_draft_that_is_late_holds_up_no_request_and_is_not_started_again(start):
    with start(soft_seed=0.05, hard_least=9.0) as supervisor:
        supervisor.wait_ready()
        clients = [Client(supervisor, n).submit(PROMPT[n:], 400) for n in (0, 1)]
        supervisor.run_until(lambda: all(len(client.pieces) > 3 for client in clients))
        pid = supervisor.describe().draft.pid
        os.kill(pid, signal.SIGSTOP)
        before = [len(client.pieces) for client in clients]
        supervisor.run_until(
            lambda: all(
                client.done or len(client.pieces) > number + 8
                for client, number in zip(clients, before, strict=True)
            )
        )
        os.kill(pid, signal.SIGCONT)
        for client in clients:
            client.finish()
        status = supervisor.describe()
    for client in clients:
        assert client.tokens == text(PROMPT[client.number :], 400)
    assert (status.draft.pid, status.num_draft_restarts, status.mode) == (pid, 0, "speculative")
    figures = [client.finished.statistics for client in clients]
    assert sum(each.num_late_proposals for each in figures) > 0


@pytest.mark.fault
def test_a_draft_that_keeps_failing_is_left_off_with_a_reason(start):
    with start("draft:die:propose:1:always", "draft:die:pair:1:always") as supervisor:
        supervisor.wait_ready()
        supervisor.run_until(lambda: supervisor._crew.is_given_up("draft"))
        client = Client(supervisor, 1).submit(PROMPT, 20).finish()
        status = supervisor.describe()
    assert client.tokens == text(PROMPT, 20)
    assert "SIGKILL" in client.finished.statistics.mode_reason
    assert status.num_draft_restarts == supervisor._plan.restarts.patience - 1


def test_a_draft_for_another_target_is_refused_before_anything_starts(folders, tmp_path):
    _, other = write_pair(tmp_path, block_size=4)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
    )
    with (
        pytest.raises(DraftMismatch, match="hidden size 48"),
        Supervisor(plan_for(folders[0], other), command=model_command),
    ):
        raise AssertionError("nothing may have started")
