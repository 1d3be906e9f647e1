"""A random daemon is killed, stopped, starved, parked or made to lie at a random phase."""

import pytest
from support.model_pair import local_token, model_text
from support.supervised import Client, plan_for
from support.tiny_pair import write_pair
from support.trials import (
    PLACES,
    PROMPTS,
    STARVED,
    STARVED_TARGET,
    TOKENS,
    TRIAL,
    combinations,
    command_for,
    run_trials,
)

from launch.supervisor import Supervisor

pytestmark = [pytest.mark.process, pytest.mark.fault]
SHORT = {"verify": 0.5, "prefill": 0.5, "replay": 0.5, "hard_least": 0.4, "heartbeat": 0.3}
LONGER = {"verify": 3.0, "prefill": 3.0, "replay": 3.0, "hard_least": 1.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(TRIAL, str(tmp_path / "trial"))
    return tmp_path


@pytest.mark.timeout(400)
def test_fifty_faults_change_no_text(folder, runtime_dir):
    trials = run_trials(folder, "model", 50, **SHORT)
    print(trials.report())
    for prompt, text in trials.expected.items():
        assert text == model_text(list(prompt), TOKENS, -1, local_token)[0]
    assert len(trials.hits) == len(combinations("model"))
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_our_own_daemons_change_no_text(folder, runtime_dir):
    print(run_trials(folder, "real", len(PLACES), **LONGER).report())
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.timeout(400)
def test_an_allocation_that_fails_restarts_neither_daemon_and_changes_no_text(folder):
    """Of our own daemons, in every kind of work; that round alone is one row wide."""
    pair, trial, texts = write_pair(folder / "pair"), folder / "trial", []
    with Supervisor(plan_for(*pair), command=command_for("real")) as supervisor:
        supervisor.wait_ready()
        before = supervisor.describe()
        texts.append(Client(supervisor, 1).submit(PROMPTS[2], 40).finish().tokens)
        for number, place in enumerate((STARVED | STARVED_TARGET).values(), start=2):
            role, verb, moment = place
            trial.write_text(f"{role} starve {verb} 1 {moment}")
            client = Client(supervisor, number).submit(PROMPTS[2], 40).finish()
            assert not trial.exists(), place
            assert client.finished.statistics.mode == "speculative", place
            texts.append(client.tokens)
        after = supervisor.describe()
    assert texts == texts[:1] * 5
    assert (after.target.pid, after.draft.pid) == (before.target.pid, before.draft.pid)
    assert (after.num_target_restarts, after.num_draft_restarts) == (0, 0)
