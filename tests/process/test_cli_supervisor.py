"""`dflashd supervisor` and its clients as a user runs them: real processes, a tiny pair."""

import json
import shutil
import signal

import msgspec
import pytest
from support.command import dflashd
from support.served import (
    ARGUMENTS,
    ENVIRONMENT,
    lasting_supervisor,
    reached,
    started,
    status,
    supervisor,
)
from support.tiny_text import edit_json, write_speaking_pair
from support.waiting import until

from launch import exit_codes
from launch.commands.report import Report
from protocol.instances import named_directory
from protocol.messages import StatusReport

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROMPT = "Say something."
LONG = ("--max-tokens", "15000", "--ignore-eos")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_speaking_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def lasting(pair):
    with lasting_supervisor(pair) as place:
        yield place


@pytest.fixture
def served(lasting, monkeypatch):
    """The supervisor that the tests share which leave it as it was."""
    with reached(lasting, monkeypatch):
        yield


def _run(*arguments, **options):
    return dflashd(*arguments, env=ENVIRONMENT, **options)


def _untimed(report):
    """A report without what differs from run to run."""
    faults = msgspec.structs.replace(report.faults, num_late_proposals=0, num_stale_replies=0)
    return (report.text, report.token_ids, report.finish_reason, report.usage, faults)


def test_a_client_gets_what_a_pair_of_its_own_would_say(pair, served, tmp_path):
    words = ("--json", "--max-tokens", "40", "--stop", "q", "--logprobs", "1", PROMPT)
    target, draft = map(str, pair)
    own = _run("generate", "--model", target, "--draft", draft, *ARGUMENTS, *words)
    trace = tmp_path / "trace.jsonl"
    outcome = _run("generate", "--connect", "a", "--trace", str(trace), *words)
    assert (outcome.code, outcome.err) == (0, "")
    one, other = (msgspec.json.decode(each.out, type=Report) for each in (own, outcome))
    assert _untimed(one) == _untimed(other)
    assert other.transport == "shm"
    assert other.timings.load_seconds == 0
    assert len(other.logprobs) == len(other.token_ids)
    kept = [json.loads(line)["kept"] for line in trace.read_text().splitlines()]
    assert [token for tokens in kept for token in tokens] == list(other.token_ids)


def test_requests_are_listed_and_cancelled_by_their_number_and_by_their_clients_end(pair):
    client = ("generate", "--connect", *LONG, PROMPT)
    with supervisor(pair) as process, started(*client) as first, started(*client) as second:

        def phases():
            return [one.phase for one in status().requests]

        until(lambda: phases() == ["decoding", "decoding"], seconds=60)
        listed = json.loads(_run("ps", "--json").out)["supervisors"]
        assert [(one["name"], one["pid"]) for one in listed] == [("a", process.pid)]
        assert [one["request"] for one in listed[0]["status"]["requests"]] == [1, 2]
        seen = _run("status").out
        assert "target: ready, pid " in seen
        assert "request 1: decoding" in seen
        assert _run("ps").out.startswith(f"a  pid {process.pid}  {pair[0]}")
        outcome = _run("cancel", "1")
        assert (outcome.code, outcome.out) == (0, "request 1 is cancelled\n")
        until(lambda: phases() == ["decoding"], seconds=60)
        assert _run("cancel", "1").code == exit_codes.USAGE
        told = msgspec.json.decode(_run("status", "--json").out, type=StatusReport)
        assert (told.running, told.finished) == (1, 1)
        ended, going = (first, second) if first.poll() is not None else (second, first)
        assert ended.wait(timeout=60) == exit_codes.CANCELLED
        assert len(ended.stdout.readline()) > 1
        assert "the request was cancelled after" in ended.stderr.read()
        going.send_signal(signal.SIGKILL)
        until(lambda: phases() == [], seconds=60)


def test_ctrl_c_at_a_client_cancels_its_request_and_leaves_the_text_so_far(served):
    client = ("generate", "--connect", "--stats", *LONG, PROMPT)
    with started(*client) as process:
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == exit_codes.INTERRUPTED
        assert "(cancelled)" in process.stderr.read()
        assert status().requests == ()


def _check_text(report):
    """What was cancelled is the beginning of the text that a run of its own has."""
    tokens = len(report.token_ids)
    words = ("--json", "--max-tokens", str(tokens), "--ignore-eos", PROMPT)
    again = msgspec.json.decode(_run("generate", "--connect", *words).out, type=Report)
    assert report.token_ids == again.token_ids
    assert (report.finish_reason, report.faults.num_replay_mismatches) == ("cancelled", 0)


def _running():
    """How many tokens each request has come to."""
    return [one.completion_tokens for one in status().requests]


def test_parking_pauses_a_request_of_our_own_daemons_and_changes_no_token(served):
    with started("generate", "--connect", "--json", *LONG, PROMPT) as client:
        until(lambda: any(tokens > 3 for tokens in _running()), seconds=60)
        assert _run("park", "target", "--now").out == "the target is parked\n"
        seen = status()
        assert (seen.target.stage, seen.target.pid) == ("parked", None)
        (request,) = seen.requests
        assert request.phase == "paused"
        (before,) = _running()
        assert _run("unpark", "target").out == "the target runs\n"
        until(lambda: _running()[0] > before, seconds=60)
        assert _run("cancel", str(request.request)).code == 0
        report = msgspec.json.decode(client.stdout.read(), type=Report)
    _check_text(report)


def test_a_draft_with_other_taps_takes_over_from_our_own_daemons_and_changes_no_token(
    pair, tmp_path
):
    other = shutil.copytree(pair[1], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())["dflash_config"]
    edit_json(other / "config.json", dflash_config=config | {"target_layer_ids": [0, 1, 3]})
    with supervisor(pair):
        until(lambda: status().mode == "speculative", seconds=60)
        with started("generate", "--connect", "--json", *LONG, PROMPT) as client:
            until(lambda: any(tokens > 3 for tokens in _running()), seconds=60)
            outcome = _run("draft", "swap", str(other))
            assert (outcome.code, outcome.out) == (0, f"the draft is {other} now\n")
            seen = status()
            assert (seen.mode, seen.target_facts.taps) == ("speculative", (0, 1, 3))
            (before,) = _running()
            until(lambda: _running()[0] > before, seconds=60)
            assert _run("cancel", "1").code == 0
            report = msgspec.json.decode(client.stdout.read(), type=Report)
        _check_text(report)
        refused = _run("draft", "swap", str(tmp_path))
    assert refused.code == exit_codes.CONFIG
    assert "no config.json" in refused.err


def test_ctrl_c_at_an_operation_ends_its_waiting_alone(served):
    with started("generate", "--connect", "a", *LONG, PROMPT) as client:
        assert client.stdout.read(20)
        with started("park", "target") as parking:
            until(lambda: status().target.reason == "being parked", seconds=60)
            parking.send_signal(signal.SIGINT)
            assert parking.wait(timeout=60) == exit_codes.INTERRUPTED
        outcome = _run("unpark", "target")
        assert (outcome.code, outcome.out) == (0, "the target runs\n")


def test_a_supervisor_that_ends_gives_its_clients_a_typed_error(pair):
    client = ("generate", "--connect", *LONG, PROMPT)
    with started(*client) as process:
        assert process.wait(timeout=60) == exit_codes.UNAVAILABLE
        assert "no supervisor runs here" in process.stderr.read()
    with supervisor(pair) as running, started(*client) as process:
        assert process.stdout.read(20)
        running.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == exit_codes.UNAVAILABLE
        assert "the supervisor is ending" in process.stderr.read()


def test_a_killed_supervisor_leaves_its_clients_the_text_so_far_and_an_error_at_once(pair):
    """A second one of its name was refused before."""
    words = ("supervisor", "--model", str(pair[0]), "--draft", "none", "--instance", "a")
    client = ("generate", "--connect", *LONG, PROMPT)
    with started(*words, *ARGUMENTS) as first:
        place = named_directory("a")
        until((place / "dflash.sock").is_socket, seconds=60)
        second = _run(*words, *ARGUMENTS, "--quiet")
        assert second.code == exit_codes.TEMPORARY
        assert second.err == f"dflashd: {place} is in use by process {first.pid}\n"
        with started(*client) as process:
            text = process.stdout.read(20)
            first.kill()
            assert process.wait(timeout=60) == exit_codes.UNAVAILABLE
            text += process.stdout.read()
            said = process.stderr.read()
        assert text.endswith("\n")
        assert f"the supervisor, process {first.pid}, has ended the connection after " in said
        assert said.count("\n") == 1
        until(lambda: not place.exists(), what="the daemons to end and remove the folder")


def test_a_watched_status_goes_on_until_ctrl_c(served):
    with started("status", "--watch", "--json", "--every", "0.1") as process:
        reports = [msgspec.json.decode(process.stdout.readline(), type=StatusReport) for _ in "123"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert [one.seconds for one in reports] == sorted(one.seconds for one in reports)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("generate", "--connect", "--model", "x", "hi"), exit_codes.USAGE, "--model: said when"),
        (("generate", "--exact", "hi", "--connect"), exit_codes.USAGE, "--exact"),
        (("status", "--connect", "nobody"), exit_codes.UNAVAILABLE, "nobody; running: none"),
        (("cancel", "7"), exit_codes.UNAVAILABLE, "no supervisor runs here"),
        (("supervisor", "--instance", "a b"), exit_codes.USAGE, "no name of an instance"),
        (
            ("supervisor", "--instance", "a", "--run-dir", "/x"),
            exit_codes.USAGE,
            "--instance chooses",
        ),
        (("supervisor", "--model", "/nowhere"), exit_codes.CONFIG, "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_its_code(words, code, says):
    outcome = _run(*words)
    assert (outcome.code, outcome.out) == (code, "")
    assert says in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_target_that_cannot_load_ends_the_supervisor_with_its_own_error(pair, tmp_path):
    target, _ = pair
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in target.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:200] if file.suffix == ".safetensors" else data)
    outcome = _run("supervisor", "--model", str(broken), "--draft", "none", *ARGUMENTS, "--quiet")
    assert outcome.code == exit_codes.CONFIG
    assert "model.safetensors" in outcome.err
    assert _run("ps").out == "no supervisor runs\n"
