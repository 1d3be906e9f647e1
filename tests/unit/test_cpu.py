"""How many threads a daemon takes."""

import pytest

from protocol import cpu
from protocol.errors import ConfigError


def test_threads_are_as_many_as_cores_or_as_asked_up_to_four_a_core(monkeypatch):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 2)
    assert [cpu.threads_of(asked) for asked in (0, 1, 3, 8)] == [2, 1, 3, 8]
    with pytest.raises(ConfigError, match="--threads 9: this process may use 2 cores; at most 8"):
        cpu.threads_of(9)
