"""Whole runs on a tiny target: what is learned, what is counted, and what a resumed run does."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.learnable import tiny_config, write_answers, write_learnable_target
from support.trained import figures_of_the_loop, train

from draft_daemon.training.journal import Stepped, read_journal
from draft_daemon.training.state import STATE
from protocol.ending import Ended
from protocol.errors import CheckpointError, ConfigError, InsufficientMemory, NotFinite
from protocol.memory import Available
from protocol.training import (
    CURVE_FILE,
    DATA_FOLDER,
    STEPS_FILE,
    Report,
    Trained,
    Validated,
)

STEPS, SHORT = 170, 8
WRITTEN = ("config.json", "model.safetensors", CURVE_FILE)

pytestmark = pytest.mark.timeout(240)  # whoever comes first trains for all


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target and its answers; copy the answers to train on them."""
    folder = tmp_path_factory.mktemp("learnable")
    model = write_learnable_target(folder / "target")
    write_answers(model, folder / "answers")
    return model, folder / "answers"


@pytest.fixture(scope="module")
def proven(made, tmp_path_factory):
    """One run long enough to learn: (model, folder, what it returned, its lines)."""
    model, answers = made
    folder = tmp_path_factory.mktemp("proof") / "out"
    shutil.copytree(answers, folder)
    config = tiny_config(model, folder, steps=STEPS, validate_every=STEPS)
    return model, folder, *train(config)


@pytest.fixture
def fresh(made, tmp_path):
    """A config over a copy of the data."""
    model, answers = made

    def make(name="out", **changes):
        shutil.copytree(answers, tmp_path / name)
        settings = {"steps": SHORT, "validate_every": 4} | changes
        return tiny_config(model, tmp_path / name, **settings)

    return make


def test_a_draft_that_was_trained_is_accepted_and_before_that_it_is_not(proven):
    _, folder, trained, lines = proven
    first, last = (line for line in lines if isinstance(line, Validated))
    assert (first.step, first.mean_acceptance_length) == (0, 1.0)
    assert first.accepted_per_slot == (0.0,) * 5
    assert (last.step, last.best) == (STEPS, True)
    assert last.mean_acceptance_length > 2
    assert set(last.by_task) == {"even", "odd"}
    assert list(last.accepted_per_slot) == sorted(last.accepted_per_slot, reverse=True)
    assert (trained.steps, trained.passes) == (STEPS, STEPS * 4 / 48)
    assert trained == Trained(
        steps=STEPS, seconds=trained.seconds, tokens=trained.tokens, passes=trained.passes
    )
    assert all((folder / name).stat().st_mode & 0o777 == 0o644 for name in WRITTEN)
    assert (folder / CURVE_FILE).read_bytes().startswith(b"\x89PNG")


def test_slots_that_count_little_are_trained_at_the_end_and_drawn_from_there_on(fresh):
    config = fresh(gamma=1.0)
    train(config)
    folder = Path(config.folder)
    steps = [line for line in read_journal(folder / STEPS_FILE) if isinstance(line, Stepped)]
    assert [len(line.accuracy) for line in steps] == [2] * (SHORT - 1) + [5]
    assert (folder / CURVE_FILE).read_bytes().startswith(b"\x89PNG")


def test_the_walk_counts_what_the_real_loop_reports(proven):
    model, folder, _, lines = proven
    walked = [line for line in lines if isinstance(line, Validated)][-1]
    rounds = figures_of_the_loop(model, folder)
    assert walked.by_task == rounds.by_task()
    assert walked.mean_acceptance_length == rounds.mean_acceptance_length
    assert walked.accepted_per_slot == rounds.per_slot(5)


def steps_of(folder):
    """The journal without what differs between two equal runs."""
    lines = read_journal(folder / STEPS_FILE)
    return [
        line if isinstance(line, Validated) else msgspec.structs.replace(line, seconds=0.0)
        for line in lines
    ]


def same_run(one, other):
    """Whether two folders hold the same checkpoint, journal and state, bit for bit."""
    for file in ("model.safetensors", STATE):
        ours, theirs = (load_file(folder / file) for folder in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert steps_of(one) == steps_of(other)
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fresh, tmp_path):
    whole, parts = fresh("whole"), fresh("parts")
    train(whole)
    with pytest.raises(Ended, match="by the test"):
        train(parts, ends_at=6)
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["block_size"] == 6
    train(parts)
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_was_killed_goes_on_from_its_last_state(fresh, tmp_path):
    whole, killed = fresh("whole"), fresh("killed", save_seconds=1e-6)

    def die(line):
        if isinstance(line, Validated) and line.step == 4:
            raise KeyboardInterrupt

    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(killed, say=die)
    journal = tmp_path / "killed" / STEPS_FILE
    journal.write_bytes(journal.read_bytes() + b'{"type":"Stepped","st')  # as a kill may leave it
    train(killed)
    same_run(tmp_path / "whole", tmp_path / "killed")


def test_after_a_kill_the_state_knows_of_the_draft_that_lies_there(fresh, tmp_path):
    config, out = fresh(), tmp_path / "out"

    def killed(line):
        if isinstance(line, Report) and line.stage == "train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, say=killed)
    with safe_open(out / STATE, framework="pt") as source:
        counts = json.loads(source.metadata()["state"])["counts"]
    walked = [line for line in read_journal(out / STEPS_FILE) if isinstance(line, Validated)]
    best = [line for line in walked if line.best][-1]
    assert (counts["best"], counts["validated"]) == (best.mean_acceptance_length, best.step)


def test_a_draft_that_is_lost_is_written_again_from_the_state(fresh, tmp_path):
    config, out = fresh(validate_every=SHORT), tmp_path / "out"
    train(config)
    for name, left in (("model.safetensors", 0), ("model.safetensors", 100), ("config.json", 0)):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(whole[:left])
        _, lines = train(config)
        assert (out / name).read_bytes() == whole
        (told,) = [line for line in lines if isinstance(line, Validated)]
        assert (told.step, told.best) == (SHORT, True)
    lines = read_journal(out / STEPS_FILE)
    assert [line.step for line in lines if isinstance(line, Validated)] == [0, SHORT]


def test_a_run_says_how_far_it_is_and_when_it_is_over_is_not_run_again(fresh, tmp_path):
    config = fresh(validate_every=100)
    first, lines = train(config)
    reports = [(each.stage, each.done) for each in lines if isinstance(each, Report)]
    assert reports[:2] == [("load", 0), ("load", 1)]
    assert ("train", SHORT) in reports
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    again, lines = train(config)
    assert again.steps == first.steps
    assert not any(isinstance(line, Validated) for line in lines)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_the_clock_ends_a_run_as_well(fresh):
    config = fresh(steps=0, hours=1e-9)
    trained, lines = train(config)
    assert trained.steps == 0
    assert [line.step for line in lines if isinstance(line, Validated)] == [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gamma": 2.0}, r"other settings: gamma 4.0, now 2.0"),
        ({"steps": 0}, "say one of both"),
        ({"hours": 1.0}, "say one of both"),
        ({"taps": (0, 9)}, "taps layer 9, the target's last is 3"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(fresh, change, words):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    with pytest.raises(ConfigError, match=words):
        train(msgspec.structs.replace(config, **change))


def test_a_state_of_another_target_is_refused(fresh, tmp_path):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    other = shutil.copytree(config.model, tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace("10000.0", "20000.0"))
    with pytest.raises(ConfigError, match="another target"):
        train(msgspec.structs.replace(config, model=str(other)))


def test_other_data_are_refused(fresh, tmp_path):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    for name in ("shard", "features"):
        (tmp_path / "out" / DATA_FOLDER / f"{name}-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"was trained on 48 sequences .* here are 24"):
        train(config)


def test_a_damaged_state_is_refused(fresh, tmp_path):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    state = tmp_path / "out" / STATE
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be gone on from"):
        train(config)


def test_a_state_with_other_tensors_is_refused_by_name(fresh, tmp_path):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    file = tmp_path / "out" / STATE
    with safe_open(file, framework="pt") as source:
        metadata = source.metadata()
    whole = load_file(file)
    for group in ("weights", "average", "exp_avg", "exp_avg_sq"):
        name = f"{group}.layers.0.self_attn.k_proj.weight"
        for change, words in (
            ({name: whole[name][:1].clone()}, r"is torch.float32 \[1, 32\], not \("),
            ({name: whole[name].half()}, "is torch.float16"),
            ({name: whole[name] * torch.nan}, "not finite"),
            ({f"{group}.other": whole[name].clone()}, "one too many"),
        ):
            save_file(whole | change, file, metadata=metadata)
            with pytest.raises(CheckpointError, match=f"(?s)cannot be gone on from.*{words}"):
                train(config)


def test_a_step_that_is_not_finite_is_not_taken_and_nothing_of_it_is_kept(fresh, tmp_path):
    config = fresh()
    with pytest.raises(Ended):
        train(config, ends_at=2)
    out = tmp_path / "out"
    before = {name: (out / name).read_bytes() for name in (STATE, "model.safetensors")}
    features = {}
    for file in (out / DATA_FOLDER).glob("features-*"):
        features[file] = file.read_bytes()
        with safe_open(file, framework="pt") as source:
            metadata = source.metadata()
        rows = load_file(file)["features"]
        save_file({"features": torch.full_like(rows, torch.nan)}, file, metadata=metadata)
    with pytest.raises(NotFinite, match=r"loss of step 2 is nan, .* the step was not taken"):
        train(config)
    assert before == {name: (out / name).read_bytes() for name in before}
    for file, whole in features.items():
        file.write_bytes(whole)
    assert train(config)[0].steps == SHORT


def test_a_run_may_begin_with_another_draft_of_the_same_shape(proven, fresh):
    _, folder, _, lines = proven
    best = [line for line in lines if isinstance(line, Validated)][-1]
    _, told = train(fresh(start=str(folder), steps=1))
    first = next(line for line in told if isinstance(line, Validated))
    assert first.mean_acceptance_length == best.mean_acceptance_length
    with pytest.raises(ConfigError, match=r"cannot be begun with: its layers is .* wanted"):
        train(fresh("other", start=str(folder), layers=3))


def test_too_little_memory_is_refused_with_the_arithmetic(fresh, monkeypatch):
    config = fresh()
    little = Available(1_000_000, "the test")
    monkeypatch.setattr("protocol.transports.devices.available", lambda: little)
    with pytest.raises(InsufficientMemory, match=r"(?s)training needs .* block rows .* kept"):
        train(config)


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_state(fresh, tmp_path):
    config = fresh(rate=1e30, save_seconds=1e-6)
    with pytest.raises(NotFinite, match=r"the loss of step \d is .* rate of"):
        train(config)
    state = load_file(tmp_path / "out" / STATE)
    lines = read_journal(tmp_path / "out" / STEPS_FILE)
    assert all(not isinstance(line, Validated) or line.step == 0 for line in lines)
    assert any(name.startswith("weights.") for name in state)


def test_sequences_longer_than_the_target_takes_are_refused(fresh, tmp_path):
    config = fresh()
    short = shutil.copytree(config.model, tmp_path / "short")
    text = (short / "config.json").read_text()
    short_text = text.replace('"max_position_embeddings": 512', '"max_position_embeddings": 30')
    (short / "config.json").write_text(short_text)
    with pytest.raises(ConfigError, match=r"a sequence of 3\d tokens .* 30 positions"):
        train(msgspec.structs.replace(config, model=str(short)))
