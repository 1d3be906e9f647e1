"""A random daemon is killed, stopped or corrupted at a random phase: no text differs."""

import os
import random

import pytest
from support.model_pair import local_token, model_text
from support.supervised import DEADLINES, Client, plan_for
from support.tiny_pair import write_pair
from support.trials import PHASES, Trials, combinations, command_for

from launch.restart import Restarts
from launch.supervisor import Supervisor

pytestmark = [pytest.mark.process, pytest.mark.fault]

# So many failures in a minute are the point here.
RESTARTS = Restarts(first=0.01, longest=0.01, patience=1000)
PROMPTS = [[1 + (n * 7 + i) % 59 for i in range(length)] for n, length in enumerate((40, 70, 130))]
TOKENS = 120


def trials_over(folder, pair, monkeypatch, count, deadlines):
    target, draft = write_pair(folder / "pair")
    trial = folder / "trial"
    monkeypatch.setenv("DFLASH_TRIAL", str(trial))
    times = {name: getattr(DEADLINES, name) for name in DEADLINES.__struct_fields__} | deadlines
    plan = plan_for(target, draft, restarts=RESTARTS, deadlines=type(DEADLINES)(**times))
    with Supervisor(plan, command=command_for(pair)) as supervisor:
        supervisor.wait_ready()
        expected = {}
        for number, prompt in enumerate(PROMPTS):
            client = Client(supervisor, 10_000 + number).submit(prompt, TOKENS).finish()
            expected[tuple(prompt)] = client.tokens
        trials = Trials(supervisor, trial, PROMPTS, expected, TOKENS, random.Random(count))
        trials.run(count)
        status = supervisor.describe()
        pids = [status.target.pid, status.draft.pid]
    print(f"\n{pair}: {count} trials, {trials.missed} missed, {dict(trials.hits)}")
    assert trials.differences == []
    assert trials.mismatches == 0
    assert {phase for _, _, phase in trials.hits} == set(PHASES)
    assert status.num_target_restarts > 0
    assert status.num_draft_restarts > 0
    assert (status.running, status.waiting, status.refused) == (0, 0, 0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return expected, trials


@pytest.mark.timeout(180)
def test_fifty_faults_change_no_text(tmp_path, runtime_dir, monkeypatch):
    deadlines = {"verify": 0.5, "prefill": 0.5, "replay": 0.5, "hard_least": 0.4, "heartbeat": 0.3}
    expected, trials = trials_over(tmp_path, "model", monkeypatch, 50, deadlines)
    for prompt, text in expected.items():
        assert text == model_text(list(prompt), TOKENS, -1, local_token)[0]
    assert set(trials.hits.values()) <= {1, 2, 3}
    assert len(trials.hits) == len(combinations())
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_our_own_daemons_change_no_text(tmp_path, runtime_dir, monkeypatch):
    deadlines = {"verify": 3.0, "prefill": 3.0, "replay": 3.0, "hard_least": 1.0}
    trials_over(tmp_path, "real", monkeypatch, len(combinations()), deadlines)
    assert list(runtime_dir.iterdir()) == []
