"""A thousand random faults. Each half writes its counts to the file $DFLASH_RELIABILITY names."""

import pytest
from support.reliability import record
from support.trials import TRIAL, run_trials

pytestmark = pytest.mark.soak
CASES = {
    "model": (800, {"verify": 0.5, "prefill": 0.5, "replay": 0.5, "hard_least": 0.4}),
    "real": (200, {"verify": 3.0, "prefill": 3.0, "replay": 3.0, "hard_least": 1.0}),
}


@pytest.mark.parametrize("pair", CASES)
def test_a_thousand_faults_change_no_text(pair, tmp_path, runtime_dir, monkeypatch):
    count, deadlines = CASES[pair]
    monkeypatch.setenv(TRIAL, str(tmp_path / "trial"))
    trials = run_trials(tmp_path, pair, count, **deadlines)
    record(f"trials over {pair} daemons", trials.report())
    assert list(runtime_dir.iterdir()) == []
