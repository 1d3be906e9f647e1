"""The facts of this process, and what is left of them where the kernel tells nothing."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from protocol import host_facts
from protocol.messages import HostFacts
from protocol.placement import choose


def test_the_facts_are_this_process():
    facts = host_facts.gather("cpu", 3)
    assert facts.pid == os.getpid()
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.pid_namespace == str(Path("/proc/self/ns/pid").readlink())
    assert facts.ipc_namespace == str(Path("/proc/self/ns/ipc").readlink())
    assert (facts.device, facts.threads) == ("cpu", 3)


def test_the_facts_survive_the_wire():
    facts = host_facts.gather("cpu", 1)
    assert msgspec.convert(msgspec.to_builtins(facts), HostFacts) == facts


def test_two_processes_of_one_machine_can_share_memory_and_torch_is_not_imported_to_say_so():
    code = (
        "import sys, msgspec; from protocol import host_facts\n"
        "facts = host_facts.gather('cpu', 1)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(msgspec.json.encode(facts))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    other = msgspec.json.decode(done.stdout, type=HostFacts)
    mine = host_facts.gather("cpu", 1)
    assert other.pid != mine.pid
    assert choose("auto", mine, other).transport == "shm"


def test_the_torch_version_is_known_without_importing_it():
    torch = pytest.importorskip("torch")
    assert host_facts.versions()["torch"] == torch.__version__


def test_a_package_that_is_not_installed_has_an_empty_version(monkeypatch):
    monkeypatch.setattr(host_facts, "PACKAGES", ("no-such-package-here",))
    assert host_facts.versions()["no-such-package-here"] == ""


def test_a_kernel_that_tells_nothing_leaves_empty_facts(monkeypatch, tmp_path):
    monkeypatch.setattr(host_facts, "BOOT_ID", tmp_path / "absent")
    monkeypatch.setattr(host_facts, "NAMESPACES", tmp_path)
    facts = host_facts.gather("cpu", 1)
    assert (facts.boot_id, facts.pid_namespace, facts.ipc_namespace) == ("", "", "")
