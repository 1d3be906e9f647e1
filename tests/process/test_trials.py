"""A random daemon is killed, stopped or made to lie at a random phase: no text differs."""

import pytest
from support.model_pair import local_token, model_text
from support.trials import TOKENS, TRIAL, combinations, run_trials

pytestmark = [pytest.mark.process, pytest.mark.fault]
SHORT = {"verify": 0.5, "prefill": 0.5, "replay": 0.5, "hard_least": 0.4, "heartbeat": 0.3}
LONGER = {"verify": 3.0, "prefill": 3.0, "replay": 3.0, "hard_least": 1.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(TRIAL, str(tmp_path / "trial"))
    return tmp_path


@pytest.mark.timeout(180)
def test_fifty_faults_change_no_text(folder, runtime_dir):
    trials = run_trials(folder, "model", 50, **SHORT)
    print(trials.report())
    for prompt, text in trials.expected.items():
        assert text == model_text(list(prompt), TOKENS, -1, local_token)[0]
    assert len(trials.hits) == len(combinations())
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_our_own_daemons_change_no_text(folder, runtime_dir):
    print(run_trials(folder, "real", 12, **LONGER).report())
    assert list(runtime_dir.iterdir()) == []
