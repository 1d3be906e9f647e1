"""A core file would keep what clients said: there is none, and one forced out holds no memory."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

CRASH = """
import os, resource, sys
from protocol.core_dumps import refuse_core_dumps
os.chdir(sys.argv[1])
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0x33")  # the kernel's own, whatever this process was started with
secret = "-".join(["what", "a", "client", "said"])  # no constant of this code
if sys.argv[2] == "refused":
    refuse_core_dumps()
if sys.argv[3] == "forced":
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
os.abort()
"""
SECRET = b"what-a-client-said"


def _core_of(folder, *arguments):
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", CRASH, str(folder), *arguments], check=False)
    assert done.returncode == -6
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_crash_leaves_no_core(tmp_path):
    assert _core_of(tmp_path / "a", "refused", "not forced") == b""


def test_a_core_that_is_taken_whatever_the_limit_holds_no_memory(tmp_path):
    pattern = Path("/proc/sys/kernel/core_pattern").read_text(encoding="ascii")
    if pattern.startswith(("|", "/")) or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip(f"cores are not written where this test could see them: {pattern.strip()}")
    assert SECRET in _core_of(tmp_path / "plain", "allowed", "forced")
    assert SECRET not in _core_of(tmp_path / "refused", "refused", "forced")
