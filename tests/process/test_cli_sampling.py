"""`dflashd generate` at a temperature, with stops, hints and log-probabilities: real processes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.command import ISOLATED, dflashd
from support.served import ARGUMENTS, ENVIRONMENT, lasting_supervisor, reached
from support.tiny_text import text_of, write_speaking_pair
from support.waiting import until

pytestmark = pytest.mark.process

WARM = (
    *("--temperature", "0.9", "--top-p", "0.95", "--frequency-penalty", "0.2"),
    *("--seed", "5", "--ignore-eos", "--max-tokens", "40"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_speaking_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def lasting(pair):
    with lasting_supervisor(pair, "--exact") as place:
        yield place


@pytest.fixture
def served(lasting, monkeypatch):
    """The supervisor of a pair with its draft, which the tests share."""
    with reached(lasting, monkeypatch):
        yield


def run(pair, *words):
    """By a target alone, or by the pair of the supervisor where `pair` is None."""
    target = ("--model", str(pair[0]), "--draft", "none", *ARGUMENTS, "--exact") if pair else ()
    where = target or ("--connect", "a")
    outcome = dflashd("generate", *where, "--json", *words, "Say something.", env=ENVIRONMENT)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


@pytest.fixture(scope="module")
def alone(pair):
    return run(pair, *WARM, "--logprobs", "2")


def test_a_seed_has_one_text_with_and_without_a_draft_and_with_guesses(
    pair, served, alone, tmp_path
):
    hints = tmp_path / "hints.json"
    hints.write_text(json.dumps(dict(enumerate(alone["token_ids"][:30]))))
    for where, words in (
        (None, ("--ngram",)),
        (pair, ("--ngram", "--hint-file", str(hints))),
    ):
        report = run(where, *WARM, *words)
        assert report["token_ids"] == alone["token_ids"], words
        assert (report["seed"], report["temperature"]) == (5, 0.9)
        assert report["logprobs"] is None
    spec = report["speculative_decoding"]
    assert (report["mode"], spec["num_draft_tokens"]) == ("speculative", 0)
    assert spec["num_accepted_hint_tokens"] >= 25
    assert spec["num_drafts"] < 14


def test_every_token_has_its_log_probabilities_where_asked_for(alone):
    assert [entry["token_id"] for entry in alone["logprobs"]] == alone["token_ids"]
    for entry in alone["logprobs"]:
        first, second = entry["top"]
        assert 0 >= first["logprob"] >= second["logprob"]
        assert first["logprob"] >= entry["logprob"]


def test_without_a_seed_one_is_drawn_and_repeats_the_text(pair, served):
    words = ("--temperature", "1.5", "--max-tokens", "12")
    drawn = run(pair, *words)
    again = run(None, *words, "--seed", str(drawn["seed"]))
    assert again["token_ids"] == drawn["token_ids"]


@pytest.mark.parametrize("drafted", [True, False])
def test_a_stop_across_tokens_ends_the_text_before_it(pair, served, alone, drafted):
    where = None if drafted else pair
    text = alone["text"]
    assert len(text) > 20
    stop = text[11:14]
    end = text.index(stop)
    report = run(where, *WARM, "--stop", "never this", "--stop", stop)
    assert (report["text"], report["finish_reason"]) == (text[:end], "stop")
    ids = report["token_ids"]
    assert ids == alone["token_ids"][: len(ids)]
    assert text_of(ids) == text[: end + len(stop)]
    assert report["usage"]["completion_tokens"] == len(ids)
    least = run(where, *WARM, "--stop", stop, "--min-tokens", str(len(ids)))
    assert len(least["token_ids"]) > len(ids)


def draft_daemon(parent):
    """Id of the draft daemon that `parent` has started, or None."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"draft_daemon" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    return None


LONG = (*WARM[:-1], "600")


@pytest.fixture(scope="module")
def whole(pair):
    return run(pair, *LONG)


@pytest.mark.fault
@pytest.mark.parametrize("verify", ["chain", "tree"])
def test_a_draft_that_is_killed_in_the_middle_changes_no_token_of_a_sample(
    pair, whole, tmp_path, verify
):
    target, draft = pair
    trace = tmp_path / "trace.jsonl"
    arguments = (
        *("generate", "--model", str(target), "--draft", str(draft), "--threads", "1"),
        *("--dtype", "float32", "--exact", "--json", "--trace", str(trace), *LONG),
        *("--block-width", "4"),  # by itself it leaves a tiny pair's draft, which does not pay
        *("--verify", verify),
        "Say something.",
    )
    drafted = re.compile(rb'"proposed":\[\d')
    with subprocess.Popen(
        [*ISOLATED, *arguments], stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
    ) as process:
        until(
            lambda: trace.exists() and drafted.search(trace.read_bytes()),
            seconds=100,
            what="a round with a draft",
        )
        pid = draft_daemon(process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    report = json.loads(out)
    assert (report["token_ids"], report["verify"]) == (whole["token_ids"], verify)
    widths = [json.loads(line)["width"] for line in trace.read_text().splitlines()]
    assert 1 in widths[2:-1]  # rounds without a draft, before the budget's last
