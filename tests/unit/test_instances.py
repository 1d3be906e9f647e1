"""Which supervisors run here, and which one a name, a folder or a socket means."""

import os
import socket

import pytest

from protocol.errors import Unavailable, UsageError
from protocol.instances import find, instances, named_directory
from protocol.run_directory import RunDirectory


@pytest.fixture
def service(runtime_dir):
    """Make the run directory of an instance, with or without a socket for clients."""
    entered, sockets = [], []

    def make(name, *, clients=True):
        directory = RunDirectory(named_directory(name)).__enter__()
        entered.append(directory)
        if clients:
            one = socket.socket(socket.AF_UNIX)
            one.bind(str(directory.path / "dflash.sock"))
            sockets.append(one)
        return directory.path

    yield make
    for one in sockets:
        one.close()
    for directory in entered:
        directory.__exit__(None, None, None)


def test_those_that_run_are_listed_by_name_with_their_pid(service):
    service("b")
    service("a", clients=False)
    assert [(one.name, one.pid, one.is_service) for one in instances()] == [
        ("a", os.getpid(), False),
        ("b", os.getpid(), True),
    ]


def test_one_whose_process_is_gone_is_not_listed(service):
    (service("a") / "owner.lock").write_text("999999999\n")
    (service("b") / "owner.lock").write_text("nonsense\n")
    (service("c") / "owner.lock").write_bytes(b"\xff")
    (service("d") / "owner.lock").unlink()
    assert instances() == []


def test_without_a_name_it_is_the_only_service(service):
    with pytest.raises(Unavailable, match=r"0 supervisors run here \(none\)"):
        find("")
    path = service("a")
    service("one-shot", clients=False)
    assert find("") == path / "dflash.sock"
    service("b")
    with pytest.raises(Unavailable, match=r"2 supervisors run here \(a, b\): name"):
        find("")


def test_a_name_a_folder_and_a_socket_mean_the_same(service):
    path = service("a")
    service("b")
    for named in ("a", str(path), str(path / "dflash.sock")):
        assert find(named) == path / "dflash.sock"


def test_one_that_does_not_run_is_unavailable_and_says_what_does(service):
    service("b")
    for named in ("a", "/nowhere/else"):
        with pytest.raises(Unavailable, match=f"{named}; running: b"):
            find(named)
    for named in ("what is this?", "x" * 40):
        with pytest.raises(UsageError, match="no name of an instance"):
            find(named)
