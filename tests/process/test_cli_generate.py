"""`dflashd generate` as a user runs it: real processes, a tiny pair, every output and exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from support.command import ISOLATED, dflashd
from support.terminal import SCREEN, Screen
from support.tiny_text import POSITIONS, edit_json, ids_of, text_of, write_speaking_pair
from support.waiting import until

from launch import exit_codes
from launch.commands.report import Report
from launch.policy import FULL
from protocol.errors import from_wire
from protocol.gpu import device_nodes

pytestmark = pytest.mark.process

PROMPT = "Say something."
TOKENS = 40
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ARGUMENTS = ("--threads", "1", "--dtype", "float32")


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path

    def arguments(self, *more):
        return (
            "generate",
            "--model",
            str(self.target),
            "--draft",
            str(self.draft),
            *ARGUMENTS,
            *more,
        )

    def alone(self, *more):
        return self.arguments("--draft", "none", *more)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(*write_speaking_pair(tmp_path_factory.mktemp("pair")))


@pytest.fixture
def broken(pair, tmp_path):
    """A copy of the pair for a test to damage."""
    return Pair(
        shutil.copytree(pair.target, tmp_path / "target"),
        shutil.copytree(pair.draft, tmp_path / "draft"),
    )


@pytest.fixture(scope="module")
def alone(pair):
    """The target's own text: one token at a time, no draft."""
    outcome = dflashd(
        *pair.alone("--json", "--no-ngram", "--max-tokens", str(TOKENS), PROMPT),
        env=ONE_THREAD,
    )
    assert outcome.code == 0, outcome.err
    return msgspec.json.decode(outcome.out, type=Report)


def _run(*arguments, **options):
    return dflashd(*arguments, env=ONE_THREAD, **options)


def test_the_json_object_has_the_listed_keys_and_true_figures(pair, alone, tmp_path):
    trace = tmp_path / "trace.jsonl"
    full = ("--block-width", str(FULL))
    outcome = _run(
        *pair.arguments("--json", "--trace", str(trace), "--max-tokens", str(TOKENS), *full, PROMPT)
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    assert list(json.loads(outcome.out)) == [field.name for field in msgspec.structs.fields(Report)]
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.token_ids == alone.token_ids
    assert report.text == alone.text == text_of(report.token_ids)
    assert (report.mode, report.transport, report.finish_reason) == ("speculative", "shm", "length")
    assert report.usage.completion_tokens == len(report.token_ids) == TOKENS
    prompt = f"[user]{PROMPT}[answer]"
    assert report.usage.prompt_tokens == len(ids_of(prompt))
    _check_figures(report, [json.loads(line) for line in trace.read_text().splitlines()])


@pytest.mark.parametrize(("width", "rollback"), [("auto", "auto"), ("1", "fast"), ("2", "replay")])
def test_the_text_is_the_same_at_any_block_width_and_by_either_way_back(
    pair, alone, width, rollback
):
    words = ("--block-width", width, "--rollback", rollback)
    outcome = _run(*pair.arguments("--json", "--max-tokens", str(TOKENS), *words, PROMPT))
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.token_ids == alone.token_ids
    spec = report.speculative_decoding
    accepted = spec.num_accepted_tokens + spec.num_accepted_ngram_tokens
    assert sum(spec.width_histogram) + accepted == TOKENS - 1
    assert report.rollback == ("replay" if rollback == "replay" else "fast")
    if width != "auto":
        assert len(spec.width_histogram) <= int(width) + 1
    if width == "2":
        rejected = spec.acceptance_histogram[0]  # rounds that kept one of two rows
        counts = (spec.num_fast_rollbacks, spec.num_replays, spec.num_replayed_tokens)
        assert counts == (0, rejected, rejected)
        assert rejected
    if width == "1":
        assert (report.mode, report.mode_reason) == (
            "autoregressive",
            "a block width of 1 was asked for",
        )


def test_a_tree_has_the_targets_own_text_and_its_branches_are_traced(pair, alone, tmp_path):
    trace = tmp_path / "trace.jsonl"
    words = ("--verify", "tree", "--tree-budget", "9", "--block-width", str(FULL))
    limit = ("--max-tokens", str(TOKENS), "--trace", str(trace))
    outcome = _run(*pair.arguments("--json", *limit, *words, PROMPT))
    assert (outcome.code, outcome.err) == (0, "")
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.token_ids == alone.token_ids
    assert (report.verify, report.verify_reason) == ("tree", "")
    spec = report.speculative_decoding
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    trees = [line for line in lines if line["parents"]]
    assert spec.num_trees == len(trees) > 0
    assert spec.num_tree_nodes == sum(len(line["proposed"]) for line in trees)
    for line in trees:
        assert line["width"] == len(line["proposed"]) + 1 == len(line["parents"]) + 1 <= 10
        kept = [line["proposed"][row - 1] for row in line["path"][1:]]
        assert kept == line["kept"][:-1]


@pytest.mark.parametrize("width", ["0", "-1", "1025", "wide"])
def test_a_block_width_that_there_is_not_is_refused(pair, width):
    outcome = _run(*pair.arguments("--block-width", width, PROMPT))
    assert (outcome.code, outcome.out) == (exit_codes.USAGE, "")
    assert "--block-width" in outcome.err


def _check_figures(report, rounds):
    """The trace and the closing figures tell the same story."""
    first, *later = rounds
    assert (first["round"], first["width"], first["proposed"]) == (0, 0, [])
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    assert [token for line in rounds for token in line["kept"]] == list(report.token_ids)
    position = report.usage.prompt_tokens
    for line in rounds:
        assert line["position"] == position
        position += len(line["kept"])
    for line in later:
        assert len(line["proposed"]) == line["width"] - 1
        assert len(line["chosen"]) == line["width"]
        accepted = len(line["kept"]) - 1
        assert line["kept"] == line["chosen"][: accepted + 1]
        assert line["kept"][:accepted] == line["proposed"][:accepted]
    drafted = [line for line in later if line["proposed"]]
    spec, times = report.speculative_decoding, report.timings
    assert spec.num_drafts == len(drafted) > 0
    assert spec.num_draft_tokens == sum(len(line["proposed"]) for line in drafted)
    accepted = [len(line["kept"]) - 1 for line in drafted]
    assert spec.num_accepted_tokens == sum(accepted) == sum(spec.num_accepted_tokens_per_pos)
    assert list(spec.acceptance_histogram) == [
        accepted.count(count) for count in range(len(spec.acceptance_histogram))
    ]
    assert spec.mean_acceptance_length == pytest.approx(1 + sum(accepted) / len(drafted))
    assert spec.draft_acceptance_rate == pytest.approx(sum(accepted) / spec.num_draft_tokens)
    assert times.verify_seconds == pytest.approx(sum(line["verify_seconds"] for line in later))
    drafting = sum(line["draft_seconds"] for line in later)
    # A proposal that came late is in the sum, and in no round.
    assert times.draft_seconds >= drafting
    assert report.faults.num_late_proposals or times.draft_seconds == pytest.approx(drafting)
    assert 0 < times.time_to_first_token_seconds < times.load_seconds + 60
    assert times.tokens_per_second == pytest.approx((TOKENS - 1) / times.decode_seconds)


def test_without_a_draft_the_mode_and_its_reason_say_so(alone):
    assert (alone.mode, alone.transport) == ("autoregressive", "none")
    assert alone.mode_reason
    spec = alone.speculative_decoding
    assert (spec.num_drafts, spec.mean_acceptance_length, spec.draft_acceptance_rate) == (
        0,
        None,
        None,
    )


def test_without_a_draft_ngrams_propose_where_they_pay_and_the_text_is_the_same(pair, alone):
    outcome = _run(*pair.alone("--json", "--max-tokens", str(TOKENS), PROMPT))
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.token_ids == alone.token_ids
    spec = report.speculative_decoding
    assert spec.num_ngram_tokens > 0  # this model's text comes back to the same words
    assert spec.num_draft_tokens == 0
    assert (report.mode, report.mode_reason) == (
        "speculative",
        f"guesses alone: {alone.mode_reason}",
    )


def test_exact_forwards_are_no_wider_for_ngrams_that_nobody_asked_for(pair):
    """Every one is as wide as the widest: a step would pay for all the rows."""
    outcome = _run(*pair.alone("--json", "--exact", "--max-tokens", str(TOKENS), PROMPT))
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.mode == "autoregressive"
    assert report.speculative_decoding.num_ngram_tokens == 0


def test_a_piped_prompt_gives_the_text_alone_and_raw_skips_the_template(pair, alone):
    outcome = _run(
        *pair.alone("--raw", "--max-tokens", str(TOKENS)), stdin=f"[user]{PROMPT}[answer]"
    )
    assert (outcome.code, outcome.out, outcome.err) == (0, alone.text + "\n", "")


def test_a_system_text_and_a_prompt_file_go_through_the_template(pair, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    outcome = _run(
        *pair.alone("--json", "--system", "Be kind.", "--prompt-file", str(file)),
        "--max-tokens",
        "2",
    )
    report = msgspec.json.decode(outcome.out, type=Report)
    assert report.usage.prompt_tokens == len(ids_of("[system]Be kind.[user]Hello[answer]"))


def test_on_a_terminal_progress_and_statistics_are_shown(pair):
    with Screen() as screen:
        command = [*ISOLATED, *pair.alone("--max-tokens", "4", PROMPT)]
        done = subprocess.run(command, **_at(screen), timeout=50, check=False)
    assert done.returncode == 0
    assert "target daemon" in screen.text
    assert re.search(r"4 tokens \(length\) \| [\d.]+ tokens/s \| ", screen.text)


def _at(screen):
    """Streams of a process whose standard error is a terminal."""
    return {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": screen.slave,
        "env": {**os.environ, **ONE_THREAD, **SCREEN},
    }


# --- it ends early -----------------------------------------------------------------------------


def _endless(pair, *more, **options):
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": {**os.environ, **ONE_THREAD},
    }
    arguments = pair.arguments("--max-tokens", str(POSITIONS - 100), *more, PROMPT)
    return subprocess.Popen([*ISOLATED, *arguments], **(streams | options))


def test_ctrl_c_ends_it_with_the_text_so_far_and_quiet_says_nothing(pair, alone):
    # In a group of its own, and the signal to all of it, as a terminal sends it.
    with (
        Screen() as screen,
        _endless(pair, "--quiet", start_new_session=True, **_at(screen)) as process,
    ):
        text = process.stdout.read(8).decode()
        os.killpg(process.pid, signal.SIGINT)
        text += process.stdout.read().decode()
        assert process.wait(timeout=60) == exit_codes.INTERRUPTED
    assert screen.text == ""
    assert text.endswith("\n")
    common = min(len(text) - 1, TOKENS)
    assert text[:common] == alone.text[:common]


def test_a_signal_while_loading_ends_it_at_once(pair, runtime_dir):
    with _endless(pair) as process:
        until(lambda: list(runtime_dir.glob("*/*.json")), seconds=60, what="a started daemon")
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (exit_codes.TERMINATED, b"", b"")


def test_a_signal_while_loading_still_prints_one_object(pair, runtime_dir):
    with _endless(pair, "--json") as process:
        until(lambda: list(runtime_dir.glob("*/*.json")), seconds=60, what="a started daemon")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    report = msgspec.json.decode(out, type=Report)
    assert (process.returncode, err) == (exit_codes.INTERRUPTED, b"")
    assert (report.finish_reason, report.text, report.token_ids) == ("cancelled", "", ())
    assert report.mode_reason == "cancelled while the daemons were loading"
    assert report.usage.prompt_tokens > 0


def test_a_reader_that_goes_away_ends_it_with_141_and_no_process_left(pair):
    with _endless(pair) as process:
        assert len(process.stdout.read(4)) == 4
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == exit_codes.CLOSED_OUTPUT
    assert err == b""


@pytest.mark.fault
def test_a_draft_that_is_killed_costs_no_token_and_an_interrupted_run_prints_what_there_is(
    pair, alone, tmp_path
):
    trace = tmp_path / "trace.jsonl"
    with _endless(pair, "--json", "--trace", str(trace), "--block-width", "8") as process:
        drafted = re.compile(rb'"proposed":\[\d')
        until(lambda: drafted.search(_read(trace)), seconds=100, what="a round with a draft")
        os.kill(_daemon(process.pid, "draft_daemon"), signal.SIGKILL)
        before = len(_read(trace))
        until(lambda: b'"width":1,' in _read(trace)[before:], what="a round without one")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (exit_codes.INTERRUPTED, b"")
    report = msgspec.json.decode(out, type=Report)
    assert report.finish_reason == "cancelled"
    # On a slow machine the interrupt may come when another life of it has joined already.
    assert report.mode == "autoregressive" or report.faults.num_draft_restarts == 1
    assert "draft" in report.mode_reason
    common = min(len(report.token_ids), TOKENS)
    assert report.token_ids[:common] == alone.token_ids[:common]


def _read(path):
    return path.read_bytes() if path.exists() else b""


def _daemon(parent, module):
    """Id of the child of `parent` that runs `module`, or 0."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if module.encode() in words and int(fields[1]) == parent:
            return int(folder.name)
    return 0


# --- it cannot begin ---------------------------------------------------------------------------


def _refused(outcome, kind, *words):
    """One sentence, the exit code of `kind`, and all `words` in it."""
    assert outcome.code == from_wire(kind, "").exit_code, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("dflashd: ")
    assert outcome.err.count("\n") == 1
    for word in words:
        assert word in outcome.err


def test_an_unknown_model_is_refused_with_a_hint():
    _refused(_run("generate", "--model", "smollm", "x"), "model_not_found", "smollm2-135m")


def test_a_folder_without_a_config_is_refused(tmp_path):
    outcome = _run("generate", "--model", str(tmp_path), "x")
    _refused(outcome, "checkpoint", str(tmp_path), "config.json")


def test_an_unknown_draft_is_refused(pair):
    outcome = _run(*pair.arguments("--draft", "/nowhere/draft", "x"))
    _refused(outcome, "model_not_found", "/nowhere/draft")


@pytest.mark.skipif(bool(device_nodes()), reason="this machine has a GPU")
@pytest.mark.parametrize("option", ["--target-device", "--draft-device"])
def test_a_gpu_that_is_not_there_is_refused_and_the_cpu_is_not_used_instead(pair, option):
    outcome = _run(*pair.arguments(option, "cuda:0", "x"))
    _refused(outcome, "device_absent", "no CUDA device", f"{option} cuda:0")


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(broken):
    edit_json(broken.target / "config.json", max_position_embeddings=32)
    outcome = _run(*broken.arguments("--raw", "y" * 50))
    _refused(outcome, "prompt_too_long", "50", "31")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, ("64", "32")),
        ({"vocab_size": 1000}, ("1000", "97")),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 9]}}, ("9", "3")),
        ({"dflash_config": {"mask_token_id": 500, "target_layer_ids": [0, 2, 3]}}, ("500", "97")),
    ],
    ids=["hidden size", "vocabulary", "taps", "mask id"],
)
def test_a_draft_for_another_target_is_refused_with_both_values(changes, words, broken):
    edit_json(broken.draft / "config.json", **changes)
    outcome = _run(*broken.arguments("x"))
    assert outcome.code == exit_codes.CONFIG
    assert all(word in outcome.err for word in words), outcome.err


def test_a_misshapen_tensor_is_named_with_what_was_expected_and_found(broken):
    path = broken.target / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    height, width = tensors[name].shape
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    outcome = _run(*broken.arguments("x"))
    _refused(outcome, "checkpoint", name, str(width), str(width - 1), str(height))


def test_a_context_that_does_not_fit_into_memory_is_refused_with_the_arithmetic(broken):
    edit_json(broken.target / "config.json", max_position_embeddings=1 << 30)
    outcome = _run(*broken.arguments("x"))
    _refused(outcome, "insufficient_memory", "x", "=")


def test_a_draft_that_cannot_be_loaded_leaves_the_target_to_generate_alone(broken, alone):
    (broken.draft / "model.safetensors").write_bytes(b"no checkpoint")
    outcome = _run(*broken.arguments("--json", "--max-tokens", "8", PROMPT))
    report = msgspec.json.decode(outcome.out, type=Report)
    assert outcome.code == 0
    assert report.mode == "autoregressive"
    assert "model.safetensors" in report.mode_reason
    assert report.token_ids == alone.token_ids[:8]


def test_a_trace_that_cannot_be_written_to_its_end_is_said_and_leaves_nothing(pair):
    outcome = _run(*pair.alone("--trace", "/dev/full", PROMPT))
    assert outcome.code == exit_codes.TEMPORARY
    assert "/dev/full: No space left" in outcome.err
