"""What one client of a request does with its messages, and which draft goes with which model."""

import io
import json
import signal
from pathlib import Path

import pytest

from launch import drafts, exit_codes
from launch.commands import generation, output
from launch.commands.output import ProgressLine, TextOutput, TraceFile
from launch.commands.receiver import Receiver
from launch.models import LocalModel
from launch.stream import TextStream
from protocol.codec import pack_tokens
from protocol.errors import Cancelled, ModelNotFound, PromptTooLong, UsageError
from protocol.messages import Cancel, Finished, Piece, Progress, Refused, Statistics
from protocol.signals import ENDING

NAMES = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer of one letter per id."""

    run_ids = frozenset()

    def decode(self, ids):
        return "".join(NAMES[index] for index in ids)


def _piece(*ids, **changes):
    fields = {
        "request": 1,
        "position": 5,
        "tokens": pack_tokens(ids),
        "width": 3,
        "proposed": pack_tokens([1, 2]),
        "chosen": pack_tokens([1, 2, 3]),
        "draft_seconds": 0.1,
        "ingest_seconds": 0.0,
        "verify_seconds": 0.2,
    }
    return Piece(**(fields | changes))


def _receiver(*, shown=True, trace=None):
    stream = TextStream(Letters().decode)
    return Receiver(stream, TextOutput(shown=shown), TraceFile(trace), ProgressLine(shown=False))


def test_text_is_written_when_a_block_is_accepted_not_at_the_end(capsys):
    receiver = _receiver()
    receiver(_piece(0, 1))
    assert capsys.readouterr().out == "ab"
    receiver(_piece(2))
    assert capsys.readouterr().out == "c"
    assert (receiver.text, receiver.ids, receiver.ended) == ("abc", [0, 1, 2], False)


def test_json_keeps_the_text_back(capsys):
    receiver = _receiver(shown=False)
    receiver(_piece(0, 1))
    assert capsys.readouterr().out == ""
    assert receiver.text == "ab"


def test_a_refusal_is_the_typed_error_of_its_code(capsys):
    receiver = _receiver()
    receiver(_piece(0))
    receiver(Refused(request=1, code="prompt_too_long", detail="9 tokens; 8 fit"))
    assert isinstance(receiver.error, PromptTooLong)
    assert str(receiver.error) == "9 tokens; 8 fit"
    assert receiver.ended
    assert capsys.readouterr().out == "a"


def test_a_cancelled_request_is_no_finished_one():
    receiver = _receiver()
    receiver(_piece(0, 1))
    receiver.check_completed()
    figures = Statistics(**dict.fromkeys(Statistics.__struct_fields__, 0))
    receiver(Finished(request=1, finish_reason="length", statistics=figures))
    receiver.check_completed()
    receiver(Finished(request=1, finish_reason="cancelled", statistics=figures))
    with pytest.raises(Cancelled, match="after 2 tokens"):
        receiver.check_completed()
    assert exit_codes.CANCELLED == Cancelled.exit_code != exit_codes.OK


def test_a_message_that_is_not_for_clients_is_a_defect():
    with pytest.raises(TypeError, match="Cancel"):
        _receiver()(Cancel(request=1))


def test_progress_says_how_far_the_prompt_is(monkeypatch):
    said = []
    monkeypatch.setattr(ProgressLine, "say", lambda _self, text: said.append(text))
    _receiver()(Progress(request=1, done=256, total=1000))
    assert said == ["reading the prompt: 256 of 1000 tokens"]


def test_once_text_is_shown_no_progress_is_drawn_into_it(monkeypatch, capsys):
    monkeypatch.setattr(output.Console, "is_terminal", True)
    line = ProgressLine(shown=True)
    stream = TextStream(Letters().decode)
    receiver = Receiver(stream, TextOutput(shown=True), TraceFile(None), line)
    line.say("loading")
    assert line._status is not None
    receiver(_piece(0))
    line.say("draft daemon: failed")
    assert line._status is None
    assert "failed" not in capsys.readouterr().err


def test_after_the_reader_went_away_nothing_is_written_and_nothing_raised(monkeypatch):
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    monkeypatch.setattr(output.sys, "stdout", Gone())
    receiver = _receiver()
    receiver(_piece(0))
    receiver(_piece(1))
    assert receiver.closed
    assert receiver.ids == [0, 1]


def test_a_trace_line_is_written_per_round_and_readable_at_once(tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceFile(path) as trace:
        trace.add(_piece(7, width=0, proposed=b"", chosen=b""))
        trace.add(_piece(1, 9))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    assert lines[1] == {
        "round": 1,
        "position": 5,
        "width": 3,
        "proposed": [1, 2],
        "parents": [],
        "path": [],
        "chosen": [1, 2, 3],
        "kept": [1, 9],
        "draft_seconds": 0.1,
        "ingest_seconds": 0.0,
        "verify_seconds": 0.2,
        "moved_bytes": 0,
    }


def test_a_trace_that_cannot_be_opened_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot write the trace"):
        TraceFile(tmp_path)


def test_the_last_line_is_ended_once(capsys):
    out = TextOutput(shown=True)
    out.write("abc")
    out.finish()
    out.finish()
    out.write("line\n")
    out.finish()
    assert capsys.readouterr().out == "abc\nline\n"


def test_every_caught_signal_has_its_exit_code():
    assert {number: 128 + number for number in ENDING} == exit_codes.SIGNALS
    assert exit_codes.SIGNALS[signal.SIGINT] == exit_codes.INTERRUPTED


# --- drafts ------------------------------------------------------------------------------------


def _model(name="smollm2-135m", source="default"):
    return LocalModel(name=name, path=Path("/m"), source=source)


def test_the_default_model_uses_the_installed_draft_and_another_model_none():
    folder = drafts.resolve_draft(None, _model())
    assert (folder / "config.json").is_file()
    assert drafts.resolve_draft("smollm2-135m-dflash", _model("other", "folder")) == folder
    assert drafts.resolve_draft(None, _model("other", "folder")) is None
    # A folder that merely has the default model's name is another model.
    assert drafts.resolve_draft(None, _model(source="folder")) is None


def test_none_is_none_for_every_model():
    assert drafts.resolve_draft("none", _model()) is None


def test_a_draft_that_is_no_folder_is_refused_with_the_installed_ones(tmp_path):
    with pytest.raises(ModelNotFound, match="smollm2-135m-dflash"):
        drafts.resolve_draft(str(tmp_path / "x"), _model())
    with pytest.raises(ModelNotFound, match="not a draft folder"):
        drafts.resolve_draft(str(tmp_path), _model())
    (tmp_path / "config.json").touch()
    assert drafts.resolve_draft(str(tmp_path), _model()) == tmp_path.resolve()


def test_a_system_text_without_a_template_is_refused_before_anything_is_read():
    options = generation.Options(
        prompt="x",
        prompt_file=None,
        model="/nowhere",
        block_width=0,
        verify="chain",
        target_device="cpu",
        target_devices="",
        target_layer_split="",
        draft_device="cpu",
        hand_over="synchronise",
        graphs="auto",
        rollback="auto",
        tree_budget=15,
        draft=None,
        draft_context=1,
        raw=True,
        max_tokens=1,
        system="s",
        dtype="auto",
        target_weights="dtype",
        exact=False,
        threads=0,
        trace=None,
        as_json=False,
        stats=None,
        quiet=True,
    )
    with pytest.raises(UsageError, match="--raw"):
        generation.generate(options)
