"""Which supervisors run here, and which one a name, a folder or a socket means."""

import json
import os
import socket

import pytest

from launch.cli import main
from protocol.driving import DriverLock
from protocol.errors import Unavailable, UsageError
from protocol.instances import daemon_directory, daemons, find, instances, named_directory
from protocol.run_directory import RunDirectory, living_owner, read_pid, say_address


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
    with pytest.raises(Unavailable, match="no supervisor runs here"):
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


def test_services_are_listed_with_the_supervisor_that_drives_them(service, capsys):
    folders = [daemon_directory(role, "a", None) for role in ("draft", "target")]
    with RunDirectory(folders[0]), RunDirectory(folders[1]):
        lock = DriverLock(folders[1])
        lock.take(1)
        me = os.getpid()
        found = [(one.instance, one.role, one.pid, one.driver) for one in daemons()]
        assert found == [("a", "draft", me, 0), ("a", "target", me, me)]
        assert instances() == []
        assert main(["ps"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "no supervisor runs",
            f"draft of a  pid {me}  nobody drives it",
            f"target of a  pid {me}  driven by process {me}",
        ]
        assert main(["ps", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["services"]
        assert [one["driver"] for one in listed] == [None, me]
        lock.release()
    assert daemons() == []


def test_a_daemon_that_listens_for_other_hosts_is_listed_with_its_address(runtime_dir, capsys):
    folder = daemon_directory("draft", "a", None)
    with RunDirectory(folder):
        say_address(folder, "tcp://127.0.0.1:7001")
        assert main(["ps"]) == 0
        line = f"draft of a  pid {os.getpid()}  listens at tcp://127.0.0.1:7001"
        assert capsys.readouterr().out.splitlines() == ["no supervisor runs", line]
        for nothing in (b"", b"\xff", b"tcp://a\nb"):
            (folder / "address").write_bytes(nothing)
            assert [one.listens for one in daemons()] == [""]


@pytest.mark.parametrize("text", [b"\xff", b"", b"12345678901", b"-4", b"1 2"])
def test_a_lock_file_that_names_no_process_names_nobody(tmp_path, text):
    (tmp_path / "owner.lock").write_bytes(text)
    assert read_pid(tmp_path / "owner.lock") == 0
    assert living_owner(tmp_path) == 0
