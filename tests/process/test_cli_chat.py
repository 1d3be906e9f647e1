"""`dflashd chat` as a user runs it: at a terminal and through a pipe, over a real tiny pair."""

import importlib.util
import json
import re
import signal

import msgspec
import pytest
import torch
from support.command import InProcess, dflashd
from support.served import ARGUMENTS, ENVIRONMENT, supervisor
from support.targets import load
from support.terminal import Terminal
from support.tiny_pair import VOCAB
from support.tiny_text import CHARACTERS, TEMPLATE, edit_json, text_of, write_speaking_pair
from support.waiting import until

from launch import exit_codes
from launch.commands.report import Report
from launch.remote import Remote
from protocol.instances import find

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

# An answer with a special token inside is spelled anew: here none has one.
WIDE = ("--block-width", "8", "--ignore-eos", "--logit-bias", "0=-100")
FIGURES = re.compile(r"turn \d+: ([\d,]+) tokens of prompt, ([\d,]+) kept, ([\d,]+) prefilled")
TOKENS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Its template shows an answer behind what the answer was asked for with."""
    target, draft = write_speaking_pair(tmp_path_factory.mktemp("pair"))
    edit_json(
        target / "tokenizer_config.json",
        chat_template=TEMPLATE.replace("[answer]", "[assistant]"),
    )
    return target, draft


def words(pair, verb, *more):
    target, draft = map(str, pair)
    return (verb, "--model", target, "--draft", draft, *ARGUMENTS, *WIDE, *more)


def figures(text):
    """Tokens of prompt, kept and prefilled, of each ``/stats`` in `text`."""
    return [
        tuple(int(number.replace(",", "")) for number in found) for found in FIGURES.findall(text)
    ]


@torch.inference_mode()
def cold_text(folder, prompt):
    """What the target alone says after `prompt`, the end token left out, in this process."""
    target = load(folder, taps=(), max_positions=512)
    ids, said = [CHARACTERS.get(one, 0) for one in prompt], []  # 0: what has no token
    logits = target.verify_batch(0, torch.tensor(ids), 0, "last")
    while len(said) < TOKENS:
        logits[-1, [0, VOCAB - 1]] = -torch.inf
        said.append(int(logits[-1].argmax()))
        base = len(ids) + len(said) - 1
        logits = target.verify_batch(0, torch.tensor(said[-1:]), base, "last")
    return text_of(said)


def test_a_turn_computes_what_is_new_and_says_what_a_whole_run_says(pair, tmp_path):
    saved = tmp_path / "saved.json"
    typed = f"Hello\n/stats\n\none\\\ntwo\n/stats\n//x\n/save {saved}\n/clear\nHello\n/stats\n"
    outcome = dflashd(
        *words(pair, "chat", "--max-tokens", str(TOKENS)), stdin=typed, env=ENVIRONMENT
    )
    assert outcome.code == 0, outcome.err
    said = json.loads(saved.read_text())["messages"]
    assert saved.stat().st_mode & 0o777 == 0o600
    assert [one["content"] for one in said[::2]] == ["Hello", "one\ntwo", "/x"]
    answers = [one["content"] for one in said[1::2]]
    assert outcome.out.splitlines() == [*answers, answers[0]]
    # What the second turn had to compute is the last token of the answer, and the question.
    first, second, again = figures(outcome.err)
    prompts = ["[user]Hello[assistant]", f"{answers[0]}[user]one\ntwo[assistant]"]
    assert first == (len(prompts[0]), 0, len(prompts[0]))
    whole = len(prompts[0] + prompts[1])
    assert second == (whole, len(prompts[0]) + TOKENS - 1, whole - len(prompts[0]) - TOKENS + 1)
    assert again[1] == len(prompts[0]) - 1  # the same question, of which one token is run
    assert answers[1] == cold_text(pair[0], "".join(prompts))


def test_what_a_command_left_on_disk_is_gone_on_from_by_the_next(pair, tmp_path):
    store = tmp_path / "store"
    kept = ("--keep", "--prefix-store", str(store), "--max-tokens", "8")
    asked = words(pair, "generate", "--json", *kept, "Hello")
    first, second = (
        msgspec.json.decode(dflashd(*asked, env=ENVIRONMENT).out, type=Report) for _ in range(2)
    )
    tokens = first.usage.prompt_tokens
    assert (first.usage.num_kept_tokens, second.usage.num_kept_tokens) == (0, tokens - 1)
    assert second.token_ids == first.token_ids
    (file,) = store.iterdir()
    assert file.suffix == ".safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    third = dflashd(*asked, env=ENVIRONMENT)
    told = f"warning: damaged files of the prefix store {store}, which are not used: 1"
    assert f"target daemon: {told}\n" in third.err
    assert msgspec.json.decode(third.out, type=Report).usage.num_kept_tokens == 0


def test_a_conversation_at_a_terminal(pair):
    """Ctrl-C stops an answer and not the program; lines are edited, and found again."""
    endless = ("chat", "--connect", "a", *WIDE, "--max-tokens", "15000")
    with supervisor(pair), Terminal(*endless, env=ENVIRONMENT) as terminal:
        terminal.wait_for("> ")
        terminal.type("Hellp\x7fo\r")
        terminal.wait_for("\n")
        answer = stopped(terminal)
        assert len(answer) > 10
        terminal.type("/stats\r")
        assert "(cancelled)" in terminal.wait_for("generated")
        first = figures(terminal.text)[-1]
        assert first[0] == len("[user]Hello[assistant]")
        emitted = int(re.findall(r"(\d+) tokens \(cancelled\)", terminal.text)[-1])
        terminal.type("one\\\r")
        terminal.wait_for(". ")
        terminal.type("two\r")
        terminal.wait_for("\n")
        stopped(terminal)
        terminal.type("/stats\r")
        terminal.wait_for("generated")
        second = figures(terminal.text)[-1]
        assert second[1] == first[0] + emitted - 1
        if importlib.util.find_spec("readline"):
            terminal.type("\x1b[A\r")
            terminal.wait_for("generated")
        terminal.type("/nonsense\r")
        terminal.wait_for("/nonsense is no command")
        terminal.type("half a line\x03")
        terminal.wait_for("Ctrl-C again")
        terminal.type("\x03")
        assert terminal.end() == exit_codes.INTERRUPTED
        for leave, status in ends():
            with Terminal(*endless, env=ENVIRONMENT) as other:
                other.wait_for("> ")
                assert leave(other) == status


def stopped(terminal):
    """Let an answer begin, and stop it; returns what was shown of it."""
    begun = len(terminal.text)
    with Remote(find("a")) as remote:
        until(
            lambda: any(one.completion_tokens > 9 for one in remote.status().requests), seconds=50
        )
    terminal.type("\x03")
    terminal.wait_for("> ")
    return terminal.text[begun:]


def ends():
    def typed(keys):
        def leave(terminal):
            terminal.type(keys)
            return terminal.end()

        return leave

    yield typed("\x04"), exit_codes.OK
    yield typed("/exit\r"), exit_codes.OK
    yield (lambda terminal: terminal.end(signal.SIGTERM)), exit_codes.TERMINATED


def test_a_model_without_a_template_is_refused(pair, tmp_path, capsys, monkeypatch):
    target, draft = write_speaking_pair(tmp_path / "base")
    edit_json(target / "tokenizer_config.json", chat_template=None)
    outcome = InProcess(capsys, monkeypatch)(*words((target, draft), "chat"))
    assert outcome.code == exit_codes.USAGE
    assert "the model has no chat template" in outcome.err
