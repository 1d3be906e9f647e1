"""Daemons that take turns must not keep the cores from each other while they wait."""

import sys

import pytest

from launch.idle_threads import SETTINGS, VARIABLES, spin_settings
from launch.process import Child
from protocol.config import Deadlines

SHOW = f"import os; print({{name: os.environ.get(name) for name in {VARIABLES}}})"


def log_of_child():
    with Child([sys.executable, "-c", SHOW], deadlines=Deadlines()) as child:
        while child.exited is None:
            for fd in child.fds:
                child.on_readable(fd)
        return child.log


def test_a_daemon_gets_settings_for_its_idle_threads(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert str({name: SETTINGS.get(name) for name in VARIABLES}) in log_of_child()


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_is_left_alone(monkeypatch, name):
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "7")
    assert spin_settings({name: "7"}) == {}
    assert str({other: "7" if other == name else None for other in VARIABLES}) in log_of_child()
