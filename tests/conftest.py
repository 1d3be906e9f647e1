"""Every test runs in places of its own, and fails if it leaves anything behind."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import settings
from support import leaks, proof_report

# Workers share the cores; what a test starts has the number of threads that the test says.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // WORKERS)))

# The same examples every time, so that a commit which passed does not fail elsewhere; new ones are
# looked for on purpose: HYPOTHESIS_PROFILE=explore.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def _base_temp(tmp_path_factory):
    """Fix pytest's own folder before a test's TMPDIR could move it."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def runtime_dir(_base_temp, monkeypatch, request):
    """Give the test a runtime and a temporary folder, and check afterwards that it left nothing.

    Fails the test if there remains: a process it started, at whatever depth; a descriptor,
    mapping or thread in this process; a socket, run directory or any other file in the runtime
    folder; a socket or one of our folders in TMPDIR; a segment in /dev/shm.
    """
    # Short, since a Unix socket's path has at most 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="dft-", dir="/tmp"))
    runtime, temporary = place / "run", place / "tmp"
    runtime.mkdir(mode=0o700)
    temporary.mkdir(mode=0o700)
    marker = uuid.uuid4().hex
    monkeypatch.setenv(leaks.MARKER, marker)
    monkeypatch.setenv("DFLASH_RUNTIME", str(runtime))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("DFLASHD_CONFIG", os.devnull)  # not what this machine's user has set
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    processes, before = leaks.processes(), leaks.take()
    yield runtime
    found = leaks.left_processes(marker, processes)
    found += leaks.left_in_this_process(before)
    found += [f"in the runtime folder: {name}" for name in leaks.left_files(runtime)]
    found += [
        f"in TMPDIR: {name}"
        for name in leaks.left_files(temporary)
        if name.startswith("socket") or "dflash" in name
    ]
    shutil.rmtree(place, ignore_errors=True)
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


def pytest_terminal_summary(terminalreporter):
    """Not a failure: the full proofs take minutes, and a commit need not wait for them."""
    reports = [each for some in terminalreporter.stats.values() for each in some]
    proofs = [each for each in reports if getattr(each, "nodeid", "").startswith("tests/proof/")]
    if proofs and (reason := proof_report.stale()):
        terminalreporter.write_line(f"note: docs/{reason}")
