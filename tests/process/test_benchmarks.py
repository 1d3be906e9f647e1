"""The benchmark as a user runs it, on a tiny pair: every mode, real daemons, one JSON file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_text import write_speaking_pair

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOKENS = 12


def script(name, *arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_speaking_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def settings(pair, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"id": text, "turns": [text]}) for text in ("Say.", "Count to ten."))
    )
    target, draft = pair
    pairs = {
        "--model": target,
        "--draft": draft,
        "--prompts": prompts,
        "--max-tokens": TOKENS,
        "--dtype": "float32",
        "--threads": 1,
    }
    return [part for item in pairs.items() for part in item]


def test_every_mode_is_measured_on_the_same_prompts_and_runs_the_same_forwards(settings, tmp_path):
    out = tmp_path / "out.json"
    modes = "speculative,autoregressive,inprocess,concurrent"
    ended = script("decode.py", *settings, "--modes", modes, "--json", out)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert set(found["ratios"]) == {"speculative/autoregressive", "speculative/inprocess"}
    assert all(one["count"] == 2 for one in found["ratios"].values())
    assert found["different_forwards"] == []
    assert all(same["identical"] == 2 for same in found["identical"].values())
    speculative = found["modes"]["speculative"]
    assert set(speculative["memory"]) == {"target", "draft", "supervisor"}
    assert set(speculative["stages_ms"]) == {"draft", "ingest", "verify", "overhead"}
    assert speculative["stages_ms"]["draft"]["median"] > 0
    assert speculative["acceptance"]["mean_acceptance_length"] >= 1
    assert found["modes"]["autoregressive"]["acceptance"] == {}
    assert [len(run["ids"]) for run in found["prompts"]["inprocess"]] == [TOKENS, TOKENS]
    assert found["concurrent"]["tokens_per_second_over_one_alone"]["count"] == 1
    assert found["machine"]["commit"]
    assert "2/2 Count to ten." in ended.stderr
    assert "2 of 2 texts identical" in ended.stdout
    assert "inprocess ran the same forwards: True" in ended.stdout


def test_a_cold_start_is_measured_to_the_first_byte_with_its_stages(settings, tmp_path):
    out = tmp_path / "out.json"
    ended = script("cold_start.py", *settings[:4], "--threads", 1, "--runs", 1, "--json", out)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    marks = found["stages_seconds"]
    assert 0 < marks["target loading"] < marks["ready"] < marks["first token"] < marks["ended"]
    assert found["first_byte_seconds"]["median"] > marks["first token"] / 2


def test_the_first_token_after_a_hit_is_measured_against_a_step(settings):
    ended = script("kept.py", *settings[:4], "--threads", 1, "--tokens", 60)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert 0 < found["copy_ms"] < found["store_ms"]
    assert found["slot / step"] > 0


def test_the_gpus_benchmark_runs_the_same_engines_on_the_cpu_and_refuses_a_gpu_that_is_not_there():
    words = ("--device", "cpu", "--contexts", "64", "--weights", "int8")
    ended = script("gpu.py", "--shape", "tiny", *words)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    (figures,) = found["contexts"].values()
    parts = [figures[name] for name in ("ingest_ms", "draft_ms", "verify_ms")]
    assert figures["round_ms"] == pytest.approx(sum(parts), abs=1e-3)
    assert found["not run"]
    assert found["weights"] == "int8"
    ended = script("gpu.py", "--shape", "tiny", "--device", "cuda:99")
    assert ended.returncode == 1
    assert ended.stderr.startswith("no CUDA device") or "cupy" in ended.stderr
