"""Parts of `dflashd train` that need no process: facts of a target, the card, progress, room."""

import io
import re
from collections import Counter
from dataclasses import fields

import msgspec
import pytest
from support.tiny_text import edit_json, write_speaking_pair

from launch.chat_template import TOKENIZER_CONFIG
from launch.commands.value_types import ByteSize
from launch.interrupts import Interrupts
from launch.models import LocalModel
from launch.tokenizer import TextTokenizer, load_text_side
from launch.training.bars import LINE_SECONDS, Bars, Lines, Stages, stages_for
from launch.training.card import CardFacts, card_text, licence_of
from launch.training.collecting import Collecting, Goal
from launch.training.facts import even_taps, mask_id, parse_taps, read_start
from launch.training.found import Found
from launch.training.harvest import SOURCE_TASK, Harvest
from launch.training.history import History, LastStep, read_history
from launch.training.options import TrainOptions
from launch.training.overlap import Overlap
from launch.training.pace import WINDOW_SECONDS, Pace
from launch.training.plan import Composed, DataPlan, Plan, TrainPlan
from launch.training.room import (
    check_disk,
    check_memory,
    feature_budget,
    feature_bytes,
    features_there,
)
from launch.training.sources import OwnSource
from launch.training.speech import Speech
from launch.training.tasks import TASKS
from launch.training.watch import Watch
from protocol.checkpoints.draft_config import read_draft_config
from protocol.checkpoints.target_config import read_model_config
from protocol.errors import (
    CheckpointError,
    ConfigError,
    DraftMismatch,
    InsufficientMemory,
    TemporaryFailure,
    UsageError,
)
from protocol.memory import Available
from protocol.training import (
    ANSWER,
    CACHED_SHARDS,
    FEATURES,
    SHARD,
    SHARD_TOKENS,
    Report,
    TrainConfig,
    Trained,
    Validated,
)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (30, (1, 8, 14, 21, 27)),  # the published draft for SmolLM2
        (36, (1, 9, 17, 25, 33)),  # those for Qwen3 of 4 and 8 billion weights
        (4, (1,)),
        (6, (1, 2, 3)),
        (1, (0,)),
    ],
)
def test_taps_are_spaced_as_in_the_published_drafts(layers, taps):
    assert even_taps(layers) == parse_taps("auto", layers) == taps


def test_taps_can_be_named():
    assert parse_taps("0, 2,5", 6) == (0, 2, 5)
    for wrong in ("", "1,,2", "-1", "1;2", "3,3", "6"):
        with pytest.raises(UsageError, match="--taps"):
            parse_taps(wrong, 6)


def test_no_draft_is_trained_in_float16():
    asked = {field.name: None for field in fields(TrainOptions)} | {"dtype": "float16"}
    with pytest.raises(UsageError, match="--dtype float16: drafts are trained in float32 or"):
        TrainOptions(**asked).completed(None)


@pytest.fixture
def target(tmp_path):
    return write_speaking_pair(tmp_path)[0]


def _mask(target, rows=97):
    return mask_id(target, TextTokenizer.load(target), rows)


def test_the_mask_is_an_id_that_no_text_contains(target):
    assert _mask(target, rows=100) == 97  # a row behind the tokenizer's ids
    assert _mask(target) == 0  # a special token that nothing uses
    edit_json(target / TOKENIZER_CONFIG, mask_token="5")
    assert _mask(target) == 22
    edit_json(target / TOKENIZER_CONFIG, mask_token="no such token", bos_token="<s>")
    with pytest.raises(ConfigError, match="every id of its 97 may stand in a text"):
        _mask(target)
    edit_json(target / TOKENIZER_CONFIG, bos_token=None, chat_template="<s>{{ messages }}")
    with pytest.raises(ConfigError, match="every id"):
        _mask(target)


def test_a_draft_that_is_begun_with_says_taps_and_mask(tmp_path):
    target, draft = write_speaking_pair(tmp_path)
    model, theirs = read_model_config(target), read_draft_config(draft)
    layers = len(theirs.layers)
    start = read_start(draft, model, layers)
    assert parse_taps("auto", model.num_layers, start) == theirs.target_layer_ids
    assert parse_taps("0", model.num_layers, start) == (0,)
    rows = model.vocab_size
    assert mask_id(target, TextTokenizer.load(target), rows, start) == theirs.mask_token_id
    assert read_start(None, model, layers) is None
    with pytest.raises(UsageError, match=f"--layers {layers + 1}: --start .* has {layers}"):
        read_start(draft, model, layers + 1)
    with pytest.raises(DraftMismatch, match="hidden size"):
        read_start(draft, msgspec.structs.replace(model, hidden_size=8), layers)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("500MB", 500_000_000), ("1.5 gb", 1_500_000_000), ("12", 12)]
)
def test_sizes_are_numbers_with_units(text, size):
    assert ByteSize().convert(text, None, None) == size


def test_features_have_their_share_of_the_disk_unless_their_size_is_said(tmp_path):
    assert feature_budget(7, tmp_path) == 7
    assert feature_budget(None, tmp_path) > 0
    (tmp_path / FEATURES.format(3)).write_bytes(bytes(70))
    (tmp_path / SHARD.format(3)).write_bytes(bytes(5))
    assert features_there(tmp_path) == 70
    check_disk(tmp_path, 1, 0)
    with pytest.raises(TemporaryFailure, match=r"needed: 0\.1 MB for 1,000 tokens, .* features"):
        check_disk(tmp_path, 1000, 1 << 60)


def test_the_feature_cache_is_a_bound_and_not_a_need():
    assert feature_bytes(10**15, 1000, 50, 1) == 100_000
    assert feature_bytes(70, 1 << 40, 50, 0) == 70
    assert feature_bytes(10**15, 0, 50, 1) == 10**15  # tokens as time allows


def test_features_that_are_made_again_take_room_while_they_are_used():
    assert feature_bytes(70, 1000, 50, 1) == 100_000
    many = 1 << 40
    alone, together = (feature_bytes(70, many, 50, ranks) - 70 for ranks in (1, 3))
    assert alone == CACHED_SHARDS * SHARD_TOKENS * 100
    assert together == 3 * alone


def test_memory_is_held_against_what_is_known_before_anything_is_loaded(target):
    config = read_model_config(target)
    check_memory(target, config, 3, Available(1 << 40, "a test"))
    with pytest.raises(InsufficientMemory, match=r"400\.0 MB for the process"):
        check_memory(target, config, 3, Available(1 << 20, "a test"))


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("# A\n\nLicence: MIT (see LICENSE)\n", "MIT (see LICENSE)"),
        ("# A licence: none\n", ""),
    ],
)
def test_a_licence_is_what_the_targets_card_says(tmp_path, text, licence):
    (tmp_path / "README.md").write_text(text)
    assert licence_of(tmp_path) == licence
    assert licence_of(tmp_path / "nowhere") == ""


def _validated(step, length=1.5, *, best=True):
    return Validated(
        step=step,
        mean_acceptance_length=length,
        by_task={"chat": length, "a|b": 1.25},
        accepted_per_slot=(0.4, 0.1),
        best=best,
    )


def _card(tmp_path, history, *, exclude=(), files=(), texts=(), steps=0):
    found = Found(tasks=Counter({"chat": 3, SOURCE_TASK: 2}), tokens=12_345, sampled=2)
    found.task_tokens.update({"chat": 12_000, SOURCE_TASK: 345})
    found.held_out["chat"] = 1
    data = DataPlan(
        model="m",
        target="",
        taps=(1, 2),
        seed=4,
        max_positions=1024,
        dtype="auto",
        prompt_files=files,
        text_files=texts,
        exclude_files=exclude,
    )
    train = TrainPlan(layers=1, block_size=8, mask_token_id=3, hours=2.0, steps=steps)
    return card_text(
        CardFacts(
            LocalModel(name="m", path=tmp_path, source="folder"),
            Plan(data=data, train=train),
            TrainConfig(model="/secret/m", folder="/secret/d", taps=(1, 2), mask_token_id=3),
            found,
            Composed(dropped={"duplicate": [4, 5], "excluded": [6]}, seconds=9000.0),
            history,
            Trained(steps=1200, seconds=300.0, tokens=12_000, passes=1.5),
        )
    )


def test_the_card_tells_what_was_measured(tmp_path):
    validations = tuple(_validated(step, 1 + step / 100) for step in range(50))
    last = LastStep(step=49, loss=3.25, accuracy=(0.5, 0.25))
    text = _card(tmp_path, History(validations, last), exclude=("/a/bench.jsonl",))
    for fact in (
        "taps [1, 2], mask id 3, 1 layer)",
        "5 sequences, 12,345 tokens",
        "3 answers greedy and 2 answers sampled",
        "Held out: 1 sequence.",
        "Collecting took 2.5 hours",
        "| chat | 3 | 12,000 | 1 |",
        "2 duplicate, 1 excluded",
        "a run of 8 tokens, in lower case, with one of bench.jsonl",
        "1,200 steps in 5 minutes (asked for: 2 hours in all)",
        "`anchors` 32, `gamma` 4.0, `rate` 0.001",
        "loss 3.250, accuracy of each slot 0.500 0.250",
        "**1.490**, at step 49",
        "| a\\|b | 1.250 |",
        "Licence: the target's card names none",
    ):
        assert fact in text, fact
    assert "/secret" not in text
    rows = re.findall(r"^\| \d+ \| 1\.\d+ \|$", text, re.MULTILINE)
    assert len(rows) <= 21
    assert rows[-1] == "| 49 | 1.490 |"


def test_the_card_of_a_run_without_validations_says_so(tmp_path):
    text = _card(tmp_path, History((), None), files=("/x/p.txt",), steps=1)
    about = _card(tmp_path, History((), None), texts=("/x/wiki.jsonl",))
    assert "prompts that the target wrote itself, some of them about texts of wiki.jsonl;" in about
    assert "No validation was made." in text
    assert "from the files p.txt" in text
    assert "asked for: 1 step)" in text
    assert "temperature 0.7" not in text
    assert "No prompts were excluded by name." in text


def test_the_history_counts_a_step_that_was_told_again_once(tmp_path):
    path = tmp_path / "train.jsonl"
    assert read_history(path) == History((), None)
    lines = [
        {"type": "Stepped", "step": 1, "loss": 2.0, "accuracy": [0.5], "rate": 1e-3},
        *(msgspec.to_builtins(one) for one in (_validated(4), _validated(2, 1.2))),
        msgspec.to_builtins(_validated(4, 1.1, best=False)),
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b'\n{"type":"Ste')
    history = read_history(path)
    assert [one.step for one in history.validations] == [2, 4]
    assert history.best.step == 2
    assert history.last.loss == 2.0
    path.write_text("nonsense\n")
    with pytest.raises(CheckpointError, match="line 1"):
        read_history(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_history(path)


def test_a_log_gets_a_line_a_minute_for_each_stage(monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr("launch.training.bars.time.monotonic", lambda: now[0])
    with stages_for(out) as stages:
        assert isinstance(stages, Lines)
        for done in range(5):
            stages.update("collect", done * 1000, 9000, "tokens", "7 a second")
            now[0] += LINE_SECONDS / 2
        stages.update("load", 0, 0, detail="8 MB are needed")
        stages.report(Report(stage="validate", done=1, total=2, unit="answers"))
        stages.end("load")
        stages.note("kept")
    assert out.getvalue().splitlines() == [
        "collect: 0 of 9,000 tokens, 7 a second",
        "collect: 2,000 of 9,000 tokens, 7 a second",
        "collect: 4,000 of 9,000 tokens, 7 a second",
        "load: 8 MB are needed",
        "validate: 1 of 2 answers",
        "kept",
    ]


def test_a_terminal_gets_bars_that_vanish(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with stages_for(out) as stages:
        assert isinstance(stages, Bars)
        stages.update("collect", 10, 100, "tokens", "7 a second")
        stages.update("collect", 100, 100, "tokens", "8 a second")
        stages.end("collect")
        stages.end("collect")
        stages.update("train", 1, 0)
        stages.note("step 1: it learns")
    assert "step 1: it learns" in out.getvalue()
    assert "10 of 100 tokens, 7 a sec" in out.getvalue()
    stages.close()


def test_a_pace_is_that_of_the_last_minute():
    pace = Pace()
    assert pace.rate == 0
    pace.note(5.0, 40)
    pace.note(5.1, 60)
    assert pace.rate == 20  # over a whole second, not 200
    for second in range(200):
        pace.note(5.0 + second, 40 + 3 * min(second, 100))
    assert pace.rate == 0  # nothing came in the last minute
    pace.note(205.0, 340 + 7 * WINDOW_SECONDS)
    assert pace.rate == 7


def test_collecting_takes_time_from_where_its_process_is_loaded(monkeypatch, target):
    now, stages = [100.0], Stages()
    monkeypatch.setattr("launch.training.collecting.time.monotonic", lambda: now[0])
    speech = Speech(*load_text_side(target))
    harvest = Harvest(OwnSource(TASKS, 1), speech, Overlap([], speech.words), positions=99, seed=1)
    with Interrupts() as interrupts:
        watch = Watch(interrupts, stages)
        collecting = Collecting(harvest, Goal(tokens=9), watch, lambda _: None, before=7.0)
    collecting._take([Report(stage="load", done=1, total=1)])
    now[0] = 200.0
    assert collecting.seconds == 7
    collecting._take([Report(stage=ANSWER, done=0)])  # before any answer has ended
    now[0] = 230.0
    assert collecting.seconds == 37


def test_quiet_shows_nothing():
    out = io.StringIO()
    with stages_for(out, quiet=True) as stages:
        assert type(stages) is Stages
        stages.update("collect", 1, 2)
        stages.note("x")
        stages.end("collect")
    assert out.getvalue() == ""
