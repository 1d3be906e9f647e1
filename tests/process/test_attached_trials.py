"""A random service is killed, stopped or made to lie at a random phase: no text differs."""

import pytest
from support.attached_trials import run_attached_trials
from support.model_pair import local_token, model_text
from support.trials import TOKENS, TRIAL

pytestmark = [pytest.mark.process, pytest.mark.fault, pytest.mark.slow]
SHORT = {"verify": 0.5, "prefill": 0.5, "replay": 0.5, "hard_least": 0.4, "heartbeat": 0.3}


@pytest.mark.timeout(600)
def test_faults_of_services_change_no_text(tmp_path, runtime_dir, monkeypatch):
    monkeypatch.setenv(TRIAL, str(tmp_path / "trial"))
    trials = run_attached_trials(tmp_path, runtime_dir, 12, **SHORT)
    print(trials.report())
    for prompt, text in trials.expected.items():
        assert text == model_text(list(prompt), TOKENS, -1, local_token)[0]
    assert list(runtime_dir.iterdir()) == []
