import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import run_directory_owner
from support.children import events_until
from support.waiting import until

from launch.process import Child, Exited
from protocol.config import Deadlines
from protocol.errors import ConfigError, PermissionRefused, TemporaryFailure, Unavailable
from protocol.run_directory import (
    MEMBERS_LOCK,
    OWNER_LOCK,
    Member,
    RunDirectory,
    _owner_is_dead,
    remove_if_orphaned,
    sweep_orphans,
)
from protocol.status import Ready


@contextmanager
def another_owner(path):
    """A real process that owns `path` and is killed at the end."""
    command = (sys.executable, "-I", run_directory_owner.__file__, str(path))
    with Child(command, deadlines=Deadlines()) as child:
        events_until(child, Ready)
        try:
            yield child.pid
        finally:
            child.kill()
            events_until(child, Exited)


def test_the_folder_is_private_fits_a_socket_and_is_gone_afterwards(runtime_dir):
    with RunDirectory() as run:
        assert run.path.parent == runtime_dir
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert len(os.fsencode(run.path / "target.sock")) <= 107
        assert (run.path / OWNER_LOCK).read_text() == f"{os.getpid()}\n"
        (run.path / "config.json").touch()
        path = run.path
    assert not path.exists()
    with pytest.raises(ConfigError):
        _ = run.path


def test_two_owners_get_two_folders():
    with RunDirectory() as one, RunDirectory() as other:
        assert one.path != other.path


def test_a_live_owner_is_refused_with_its_pid(runtime_dir):
    path = runtime_dir / "named"
    with another_owner(path) as pid:
        with pytest.raises(TemporaryFailure, match=str(pid)), RunDirectory(path):
            pass
        assert not remove_if_orphaned(path)
        assert sweep_orphans() == 0
    remove_if_orphaned(path)


def test_a_dead_owners_folder_is_free_at_once_and_emptied(runtime_dir):
    path = runtime_dir / "named"
    with another_owner(path):
        (path / "stale.json").touch()
        (path / "stale").mkdir()
    with RunDirectory(path) as run:
        assert {entry.name for entry in run.path.iterdir()} == {OWNER_LOCK, MEMBERS_LOCK}


def test_a_folder_whose_daemons_are_still_ending_is_a_temporary_failure(runtime_dir):
    path = runtime_dir / "named"
    with another_owner(path):
        pass
    with Member(path), pytest.raises(TemporaryFailure, match="still ending"), RunDirectory(path):
        pass


def test_the_last_daemon_out_removes_a_dead_owners_folder(runtime_dir):
    path = runtime_dir / "named"
    with another_owner(path):
        pass
    with Member(path) as last:
        with Member(path):
            pass
        assert path.exists()
        last.leave()
        assert not path.exists()


def test_a_daemon_that_knows_its_owner_dead_waits_for_the_lock_of_the_dying(runtime_dir):
    path = runtime_dir / "named"
    with another_owner(path) as pid, Member(path) as last:
        dying = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        dying.start()
        last.leave(orphaned=True)
        assert not path.exists()
        dying.join()


def test_the_last_daemon_out_leaves_a_live_owners_folder():
    with RunDirectory() as run:
        with Member(run.path):
            pass
        assert run.path.exists()


def test_a_daemon_whose_folder_is_gone_says_so(runtime_dir):
    with pytest.raises(Unavailable, match="gone"), Member(runtime_dir / "nothing"):
        pass


def test_a_daemon_that_comes_while_the_folder_is_removed_says_so():
    with RunDirectory() as run:
        fd = os.open(run.path / MEMBERS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(TemporaryFailure), Member(run.path):
            pass
        os.close(fd)


def test_the_sweep_removes_orphans_and_nothing_else(runtime_dir):
    prefix = f"dflashd-{os.getuid()}-"
    orphan, foreign, bare = (runtime_dir / name for name in (f"{prefix}1", "other", f"{prefix}2"))
    for path in (orphan, foreign, bare):
        path.mkdir(mode=0o700)
    for path in (orphan, foreign):
        (path / OWNER_LOCK).touch()
    with RunDirectory() as live:
        assert sweep_orphans() == 1
        assert not orphan.exists()
        assert foreign.exists()
        assert bare.exists()  # its owner may be just about to lock it
        assert live.path.exists()
    (foreign / OWNER_LOCK).unlink()
    foreign.rmdir()
    bare.rmdir()


def test_a_folder_that_others_can_enter_is_refused(runtime_dir):
    path = runtime_dir / "open"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(PermissionRefused, match="private"), RunDirectory(path):
        pass
    path.rmdir()


def test_a_link_in_the_folders_place_is_refused(runtime_dir, tmp_path):
    path = runtime_dir / "link"
    tmp_path.chmod(0o700)
    path.symlink_to(tmp_path)
    with pytest.raises(PermissionRefused), RunDirectory(path):
        pass
    path.unlink()


def test_a_base_that_is_not_there_is_unavailable(runtime_dir, monkeypatch):
    monkeypatch.setenv("DFLASH_RUNTIME", str(runtime_dir / "nothing"))
    with pytest.raises(Unavailable, match="nothing"), RunDirectory():
        pass


def test_a_base_that_is_too_long_for_sockets_is_refused_with_both_numbers(runtime_dir, monkeypatch):
    monkeypatch.setenv("DFLASH_RUNTIME", str(runtime_dir / ("x" * 100)))
    with pytest.raises(ConfigError, match=r"bytes.*107.*DFLASH_RUNTIME"), RunDirectory():
        pass


def test_a_runtime_folder_that_is_too_long_or_not_private_is_passed_over(runtime_dir, monkeypatch):
    monkeypatch.delenv("DFLASH_RUNTIME")
    temporary = runtime_dir.parent / "tmp"
    too_long = runtime_dir / ("x" * 100)
    too_long.mkdir(mode=0o700)
    for unfit in (too_long, Path("/"), runtime_dir / "nothing"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(unfit))
        with RunDirectory() as run:
            assert run.path.parent == temporary
    too_long.rmdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    with RunDirectory() as run:
        assert run.path.parent == runtime_dir


def test_an_owner_waits_out_a_sweeper(runtime_dir):
    path = runtime_dir / "named"
    path.mkdir(mode=0o700)
    fd = os.open(path / OWNER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def sweep():
        (path / OWNER_LOCK).unlink()
        path.rmdir()
        os.close(fd)

    sweeper = threading.Timer(0.05, sweep)
    sweeper.start()
    with RunDirectory(path) as run:
        assert (run.path / OWNER_LOCK).exists()
    sweeper.join()


def test_an_owner_that_is_dying_but_holds_its_lock_still_counts_as_dead(runtime_dir):
    with RunDirectory() as run:
        assert not _owner_is_dead(run.path)
        with subprocess.Popen(["true"]) as child:
            # Not waited for yet: ended, and not gone, as a killed process with threads is.
            stat_file = Path(f"/proc/{child.pid}/stat")
            until(lambda: stat_file.read_text().rpartition(")")[2].split()[0] == "Z")
            (run.path / OWNER_LOCK).write_text(f"{child.pid}\n")
            assert _owner_is_dead(run.path)
        (run.path / OWNER_LOCK).unlink()
        assert _owner_is_dead(run.path)
