"""The check that every other test runs under finds what it promises to find."""

import mmap
import os
import socket
import subprocess
import sys
import threading
import uuid

import pytest
from support import leaks


def _sleeper(marker, *, detach):
    code = "import time; print('up', flush=True); time.sleep(60)"
    if detach:  # a grandchild whose parent is gone, in a session of its own
        code = (
            "import subprocess, sys;"
            f"p = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True,"
            " stdout=subprocess.PIPE);"
            "p.stdout.readline(); print(p.pid, flush=True); p.stdout.close()"
        )
    env = {**os.environ, leaks.MARKER: marker}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("detach", [False, True], ids=["child", "orphan"])
def test_a_process_that_outlives_its_test_is_found_and_killed(detach, monkeypatch):
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.1)
    before, marker = leaks.processes(), uuid.uuid4().hex
    with _sleeper(marker, detach=detach) as process:
        said = process.stdout.readline().strip()
        if detach:
            process.wait()
        found = leaks.left_processes(marker, before)
        pid = int(said) if detach else process.pid
        assert any(f"process {pid}" in line for line in found)
        assert leaks.left_processes(marker, leaks.processes()) == []


def test_an_open_descriptor_and_a_memfd_are_found():
    before = leaks.take()
    reader, writer = os.pipe()
    memfd = os.memfd_create("leak-test")
    os.ftruncate(memfd, 4096)
    mapping = mmap.mmap(memfd, 4096)
    found = " ".join(leaks.left_in_this_process(before))
    assert f"descriptor {reader} -> pipe:" in found
    assert "/memfd:leak-test" in found
    assert "mapped /memfd:leak-test" in found
    mapping.close()
    for descriptor in (reader, writer, memfd):
        os.close(descriptor)
    assert leaks.left_in_this_process(before) == []


def test_a_thread_that_still_runs_is_found():
    before, end = leaks.take(), threading.Event()
    thread = threading.Thread(target=end.wait, name="left-behind")
    thread.start()
    assert leaks.left_in_this_process(before) == ["thread left-behind"]
    end.set()
    thread.join()
    assert leaks.left_in_this_process(before) == []


def test_a_segment_is_found_unless_another_process_holds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(leaks, "SHM", tmp_path)
    monkeypatch.setattr(leaks, "UNLINK_SECONDS", 0.1)
    before, segment = leaks.take(), tmp_path / "dflash-left"
    left = [f"segment {segment}"]
    code = "import sys; print(flush=True); sys.stdin.read()"
    with segment.open("w") as file:
        holder = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
    with holder:
        holder.stdout.readline()
        assert leaks.take().segments == {segment.name}
        assert set(left).isdisjoint(leaks.left_in_this_process(before))
    assert leaks.left_in_this_process(before) == left
    segment.unlink()
    assert leaks.left_in_this_process(before) == []


def test_a_segment_that_this_process_maps_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(leaks, "SHM", tmp_path)
    monkeypatch.setattr(leaks, "UNLINK_SECONDS", 0.1)
    before, segment = leaks.take(), tmp_path / "psm_left"
    segment.write_bytes(bytes(4096))
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert f"segment {segment}" in leaks.left_in_this_process(before)
    segment.unlink()
    assert leaks.left_in_this_process(before) == []


def test_socket_files_and_run_folders_are_found(runtime_dir):
    (runtime_dir / "abc").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime_dir / "abc" / "t.sock"))
        assert leaks.left_files(runtime_dir) == ["file abc", "socket abc/t.sock"]
    (runtime_dir / "abc" / "t.sock").unlink()
    (runtime_dir / "abc").rmdir()
    assert leaks.left_files(runtime_dir) == []
