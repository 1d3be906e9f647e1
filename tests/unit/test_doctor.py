"""`dflashd doctor` states facts, and names what would keep generation from working."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner
from support.command import dflashd

from launch import doctor, exit_codes
from launch.commands.doctor import doctor_command
from protocol import cpu

KEYS = {
    "version",
    "python",
    "import_names",
    "packages",
    "cpu",
    "memory",
    "threads",
    "devices",
    "gpu",
    "home",
    "runtime",
    "transport",
    "problems",
}


def test_quick_facts_are_this_machines():
    facts = doctor.quick()
    assert set(facts) == KEYS
    assert facts["python"]["version"] == platform.python_version()
    assert facts["packages"]["torch"] == metadata.version("torch")
    assert facts["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert facts["cpu"]["fast_bf16"] == cpu.fast_bf16()
    assert facts["memory"]["total_bytes"] >= facts["memory"]["available_bytes"] > 1 << 20
    assert facts["transport"]["name"] == "shm"
    assert facts["transport"]["reason"]
    assert all(entry["ours"] for entry in facts["import_names"].values())
    assert facts["problems"] == []


def test_the_full_facts_add_what_torch_sees_in_a_process_of_its_own():
    outcome = dflashd("doctor", "--json")
    facts = json.loads(outcome.out)
    assert set(facts) == KEYS | {"target_daemon"}
    assert facts["target_daemon"]["torch"] == metadata.version("torch")
    gpus = facts["target_daemon"]["gpus"]
    assert gpus.keys() == {"none"} or all(name.startswith("cuda:") for name in gpus)
    assert facts["import_names"]["launch"]["claimed_by"] == [doctor.DISTRIBUTION]
    assert (outcome.code, outcome.err) == (exit_codes.OK, "")


def test_the_text_names_the_transport_and_why():
    outcome = dflashd("doctor", "--quick")
    lines = dict(line.split(None, 1) for line in outcome.out.splitlines())
    assert lines["transport"].startswith("shm: ")
    assert str(len(os.sched_getaffinity(0))) in lines["processor"]
    assert outcome.code == exit_codes.OK


def test_a_foreign_package_under_one_of_our_names_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "launch.py").touch()
    monkeypatch.setattr(
        doctor.importlib.util,
        "find_spec",
        lambda name: doctor.importlib.machinery.ModuleSpec(
            name, None, origin=str(tmp_path / f"{name}.py")
        ),
    )
    facts = doctor.quick()
    assert len(facts["problems"]) == len(doctor.IMPORT_NAMES)
    assert "environment of its own" in facts["problems"][0]
    assert str(tmp_path) in facts["problems"][0]


def test_a_name_that_two_distributions_claim_is_a_problem(monkeypatch):
    claims = {name: ["dflash-daemons"] for name in doctor.IMPORT_NAMES}
    claims["launch"] = ["dflash-daemons", "ros-launch"]
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: claims)
    monkeypatch.setattr(doctor, "daemon_facts", dict)
    (problem,) = doctor.full()["problems"]
    assert "'launch'" in problem
    assert "ros-launch" in problem


def test_a_missing_package_is_a_problem_and_an_extra_is_not(monkeypatch):
    absent = dict.fromkeys(("torch", "transformers", "matplotlib"))
    versions = {**dict.fromkeys(doctor.PACKAGES, "1.0"), **absent}
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert doctor.quick()["problems"] == ["the package torch is not installed"]


def test_problems_are_printed_and_end_with_exit_code_78(monkeypatch):
    monkeypatch.setenv("DFLASH_RUNTIME", "/tmp/" + "x" * 120)
    result = CliRunner().invoke(doctor_command, ["--quick"], standalone_mode=False)
    assert result.return_value == exit_codes.CONFIG
    assert "problem: no run directory can be made" in result.output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.stderr.write('no torch here\\n'); sys.exit(3)", "3: no torch here"),
        ("raise SystemExit(4)", "4: no output"),
        ("print('hello')", "target_daemon --facts: "),
        ("print('[1]')", "no JSON object"),
        ("import time; time.sleep(30)", "did not answer within"),
    ],
    ids=["fails", "fails silently", "no json", "a list", "hangs"],
)
def test_a_target_daemon_that_cannot_say_its_facts_is_a_problem(code, words, monkeypatch):
    run = subprocess.run
    command = [sys.executable, "-I", "-c", code]
    monkeypatch.setattr(doctor.subprocess, "run", lambda _command, **kw: run(command, **kw))
    answer = doctor.daemon_facts(timeout=1.0)
    assert words in answer["error"]
    facts = {**doctor.quick(), "target_daemon": answer}
    assert doctor._problems(facts) == [answer["error"]]


def test_an_interpreter_that_cannot_be_started_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/nowhere/python")
    assert "No such file" in doctor.daemon_facts()["error"]


def test_facts_that_the_kernel_does_not_tell_are_left_out(monkeypatch):
    monkeypatch.setattr(doctor, "_text", lambda _path: "")
    facts = doctor.quick()
    assert facts["memory"] == {"total_bytes": None, "available_bytes": None, "limit_bytes": None}
    assert facts["cpu"]["model"] == platform.machine()
    monkeypatch.setattr(doctor, "quick", lambda: facts)
    result = CliRunner().invoke(doctor_command, ["--quick"], standalone_mode=False)
    assert re.search(r"^memory +unknown$", result.output, re.MULTILINE)


def test_a_machine_without_a_transport_is_a_problem(monkeypatch):
    here = doctor.gather("cpu", 1)
    monkeypatch.setattr(
        doctor, "gather", lambda device, threads: here.__class__(**{**_fields(here), "boot_id": ""})
    )
    facts = doctor.quick()
    assert facts["transport"]["name"] is None
    assert any("boot id" in problem for problem in facts["problems"])


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_an_unreadable_file_reads_as_nothing():
    assert doctor._text("/nowhere") == ""


def test_what_stands_against_sharing_a_gpu_is_said_beforehand(monkeypatch):
    monkeypatch.setattr(doctor.gpu, "device_nodes", lambda: ("/dev/nvidia0",))
    monkeypatch.setattr(doctor.gpu, "mps_runs", lambda _environment: True)
    for wsl, words in ((True, "WSL2 has no CUDA IPC"), (False, "nothing known against it")):
        monkeypatch.setattr(doctor.gpu, "is_wsl", lambda wsl=wsl: wsl)
        result = CliRunner().invoke(doctor_command, ["--quick"], standalone_mode=False)
        (line,) = [line for line in result.output.splitlines() if line.startswith("gpu sharing")]
        assert words in line
        assert "under MPS" in line
        assert "pid:[" in line
        assert "/dev/nvidia0" in result.output
        assert result.return_value == exit_codes.OK  # the CPU does without
