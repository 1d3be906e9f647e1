"""A chat over a pair that says what a test tells it: commands, errors, signals, room."""

import os
import signal

import pytest
from support.talking_pair import Broken, TalkingPair
from support.tiny_text import TEMPLATE, ids_of, write_speaking_pair

from launch import exit_codes
from launch.commands.chatting import Chat, Options
from launch.commands.output import ProgressLine
from launch.conversation import Conversation
from launch.tokenizer import load_text_side
from protocol.codec import unpack_tokens
from protocol.errors import Overloaded, PromptTooLong, Unavailable, UsageError

QUESTION = len("[user]a[answer]")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return load_text_side(write_speaking_pair(tmp_path_factory.mktemp("pair"))[0])


@pytest.fixture
def talk(texts, monkeypatch, capsys):
    """Run the lines over a pair; what came out, and the pair."""

    def run(lines, *script, interactive=False, max_tokens=8, **settings):
        pair = TalkingPair(script, **settings)
        tokenizer, template = texts
        options = Options(
            model="m",
            draft=None,
            target_device="cpu",
            target_devices="",
            target_layer_split="",
            draft_device="cpu",
            hand_over="synchronise",
            graphs=False,
            dtype="auto",
            target_weights="dtype",
            exact=False,
            rollback="auto",
            threads=0,
            draft_context=64,
            block_width=0,
            verify="chain",
            tree_budget=1,
            max_tokens=max_tokens,
            system=None,
            quiet=False,
        )
        monkeypatch.setattr("launch.commands.chatting.is_interactive", lambda: interactive)
        waiting = list(lines)

        def read_line(goes_on):
            line = waiting.pop(0) if waiting else None
            return line() if callable(line) else line

        with ProgressLine(shown=False) as line:
            conversation = Conversation(tokenizer, template)
            status = Chat(options, pair, conversation, tokenizer, line).run(read_line)
        return status, *capsys.readouterr(), pair

    assert TEMPLATE.endswith("[answer]")
    return run


def interrupt(number=signal.SIGINT, ids=()):
    """Something that comes while it is called."""

    def come():
        os.kill(os.getpid(), number)
        return list(ids)

    return come


def test_every_turn_asks_for_what_was_left_and_leaves_its_own_state(talk):
    status, out, _, pair = talk(["a", "", "b", "/exit", "c"], ids_of("one"), ids_of("two"))
    assert (status, out) == (exit_codes.OK, "one\ntwo\n")
    for submit in pair.submits:
        assert submit.retain
        assert submit.base_pos == len(unpack_tokens(submit.prompt))
    assert len(pair.submits) == 2


def test_an_answer_is_as_long_as_there_is_room(talk):
    _, _, _, pair = talk(["a"], ids_of("x"), max_positions=QUESTION + 3)
    assert pair.submits[0].max_tokens == 3
    with pytest.raises(PromptTooLong, match=r"15 tokens.*/clear begins a new conversation"):
        talk(["a"], max_positions=QUESTION)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/nonsense", "/nonsense is no command; /help lists them"),
        ("/exit now", "/exit takes nothing behind it"),
        ("/clear x", "/clear takes nothing behind it"),
        ("/save", "/save needs the name of a file"),
        ("/save {place}/none/x", "cannot write .*/none/x: No such file"),
        ("/save {place}/taken", "exists already, and was not written by this chat"),
    ],
)
def test_what_cannot_be_done_is_said_at_a_terminal_and_ends_a_pipe(talk, tmp_path, line, sentence):
    taken = tmp_path / "taken"
    taken.write_text("kept")
    line = line.format(place=tmp_path)
    with pytest.raises(UsageError, match=sentence):
        talk([line])
    status, out, err, _ = talk([line, "a"], ids_of("on"), interactive=True)
    assert (status, out) == (exit_codes.OK, "on\n")
    assert "dflashd: " in err
    assert "(cut off after 2 tokens)" in err
    assert taken.read_text() == "kept"


def test_a_conversation_can_be_saved_again_under_its_name(talk, tmp_path):
    file = tmp_path / "said"
    talk(["a", f"/save {file}", "b", f"/save {file}"], ids_of("one"), ids_of("two"))
    assert '"two"' in file.read_text()


def test_the_figures_say_what_was_kept(talk):
    _, _, err, _ = talk(["/stats", "a", "a", "/stats", "/help"], ids_of("one"), ids_of("one"))
    assert err.startswith("no turn yet\n")
    assert f"turn 2: {2 * QUESTION + len('[assistant]one') - 8} tokens of prompt, 3 kept" in err
    assert "all turns: " in err
    assert "load " not in err
    assert ", 6 kept" in err
    assert "6 generated" in err
    assert "/save FILE" in err


def test_a_turn_that_fails_is_no_part_of_the_conversation(talk):
    status, out, err, pair = talk(["a", "b"], Overloaded("busy"), ids_of("x"), interactive=True)
    assert (status, out) == (exit_codes.OK, "x\n")
    assert "dflashd: busy" in err
    assert len(pair.submits[1].prompt) == 4 * QUESTION
    with pytest.raises(Overloaded):
        talk(["a"], Overloaded("busy"))


def test_what_came_before_the_supervisor_went_away_stays_and_so_does_the_prompt(talk, tmp_path):
    file = tmp_path / "said"
    lost = Broken(ids_of("par"), Unavailable("gone"))
    lines = ["a", f"/save {file}", "b"]
    status, out, err, pair = talk(lines, lost, ids_of("x"), interactive=True)
    assert (status, out) == (exit_codes.OK, "par\nx\n")
    assert "dflashd: gone" in err
    assert '"par"' in file.read_text()
    assert unpack_tokens(pair.submits[1].prompt)[len("[user]a[assistant]") :][:3] == tuple(
        ids_of("par")
    )
    with pytest.raises(Unavailable):
        talk(["a", "b"], Broken(ids_of("par"), Unavailable("gone")))


def test_ctrl_c_stops_an_answer_and_a_second_one_the_program(talk):
    stopped, typed = interrupt(ids=ids_of("par")), interrupt()
    status, out, err, pair = talk(["a", "b", typed], stopped, ids_of("x"), interactive=True)
    assert (status, out) == (exit_codes.OK, "par\nx\n")
    assert "Ctrl-C again, Ctrl-D or /exit ends" in err
    assert unpack_tokens(pair.submits[1].prompt)[len("[user]a[assistant]") :][:3] == tuple(
        ids_of("par")
    )
    status, _, _, _ = talk(["a", typed], stopped, interactive=True)
    assert status == exit_codes.INTERRUPTED
    status, _, _, _ = talk(["a", "b"], interrupt())
    assert status == exit_codes.INTERRUPTED  # through a pipe


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, exit_codes.TERMINATED), (signal.SIGHUP, exit_codes.HUNG_UP)],
)
def test_an_ending_signal_ends_it_wherever_it_is(talk, number, status):
    assert talk(["a", "b"], interrupt(number), interactive=True)[0] == status
    assert talk([interrupt(number), "b"], interactive=True)[0] == status


def test_a_reader_that_went_away_ends_it(talk, monkeypatch):
    def fail(*_):
        raise BrokenPipeError

    monkeypatch.setattr("launch.commands.output.TextOutput.write", fail)
    with pytest.raises(BrokenPipeError):
        talk(["a"], ids_of("x"))
