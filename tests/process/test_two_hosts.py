"""A target and a draft in two network namespaces, over a wire that delays, loses and is cut."""

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from support import wire
from support.command import ISOLATED, dflashd
from support.keys import write_keys
from support.services import Service
from support.tiny_text import write_speaking_pair
from support.waiting import until

from launch.remote import Remote
from protocol.instances import find, named_directory

pytestmark = [pytest.mark.process, pytest.mark.fault, pytest.mark.timeout(300)]

OBSTACLE = wire.obstacle()
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SMALL = ("--threads", "1", "--dtype", "float32", "--slots", "2")
TARGET, DRAFT = "tcp://10.9.0.1:7000", "tcp://10.9.0.2:7001"
DELAY, LOSS = 0.004, 0.01
WORDS = ("generate", "Say something.", "--json", "--block-width", "6", "--connect", "far")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(folder) for folder in write_speaking_pair(tmp_path_factory.mktemp("pair"))]


@contextmanager
def two_hosts(folders, place):
    """Target and supervisor on one host, the draft on the other; yields the wire between them."""
    model, draft = folders
    keys = {role: str(write_keys(place / role, role)) for role in ("target", "draft", "supervisor")}
    far = ("--target-model", model)
    with ExitStack() as stack:
        one, other = (stack.enter_context(wire.Host(a)) for a in ("10.9.0.1", "10.9.0.2"))
        cable = stack.enter_context(wire.Wire(one, other, delay=DELAY, loss=LOSS))
        for role, host, words in (
            ("target", one, ("--listen", TARGET, "--model", model, "--draft", draft)),
            ("draft", other, ("--listen", DRAFT, "--draft", draft, *far)),
        ):
            run_dir = place / f"{role}.d"
            command = (*host.prefix, *ISOLATED, role, *words, *SMALL, "--keys", keys[role])
            service = Service(
                role, run_dir, place / f"{role}.log", (*command, "--run-dir", str(run_dir))
            )
            stack.callback(service.end)
            service.start().until_ready()
        command = (*one.prefix, *ISOLATED, "supervisor", "--instance", "far", "--model", model)
        addresses = ("--attach-target", TARGET, "--attach-draft", DRAFT)
        supervisor = stack.enter_context(
            subprocess.Popen(
                (*command, *addresses, "--keys", keys["supervisor"]), env=os.environ | ENVIRONMENT
            )
        )
        stack.callback(supervisor.terminate)
        until((named_directory("far") / "dflash.sock").is_socket, seconds=60)
        until(lambda: state().draft.stage == "ready", seconds=40, what="a pair")
        yield cable


def state():
    with Remote(find("far")) as remote:
        return remote.status()


def generated(limit):
    done = dflashd(*WORDS, "--max-tokens", str(limit), env=ENVIRONMENT)
    assert done.code == 0, done.err
    return json.loads(done.out)


def speculative(expected):
    """A generation with the draft: the text is the same, however often packets are lost."""

    def once():
        found = generated(len(expected))
        assert found["token_ids"] == expected
        return found if found["mode"] == "speculative" else None

    return until(once, seconds=60, what="a generation with the draft")


def plain(folders, limit):
    """The text of the same model on this host, without a draft."""
    words = ("generate", "Say something.", "--json", "--model", folders[0], "--draft", "none")
    options = ("--dtype", "float32", "--threads", "1", "--max-tokens", str(limit))
    done = dflashd(*words, *options, env=ENVIRONMENT)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
def test_latency_loss_and_a_cut_cable_change_no_text(folders, tmp_path, runtime_dir):
    expected = plain(folders, 600)
    short = expected["token_ids"][:40]
    with two_hosts(folders, tmp_path) as cable:
        first = speculative(short)
        assert first["transport"] == "tcp"
        assert first["network"]["bytes_per_round"] > 3 * 32 * 4  # a row: taps, hidden, float32
        assert cable.lost > 0

        command = (*ISOLATED, *WORDS, "--max-tokens", "600")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT
        ) as running:
            until(
                lambda: any(one.completion_tokens > 20 for one in state().requests),
                seconds=60,
                what="a request in the middle of its text",
            )
            cable.cut()
            assert all(one.completion_tokens < 600 for one in state().requests)
            out, _ = running.communicate(timeout=60)
        assert json.loads(out)["token_ids"] == expected["token_ids"]
        until(lambda: state().mode == "autoregressive", seconds=60, what="the draft being lost")
        reason = state().mode_reason
        assert DRAFT in reason or "the draft did not answer" in reason
        alone = generated(40)
        assert (alone["mode"], alone["token_ids"]) == ("autoregressive", short)

        cable.mend()
        until(lambda: state().mode == "speculative", seconds=40, what="the draft being back")
        again = speculative(short)
        assert again["speculative_decoding"]["num_draft_tokens"] > 0
