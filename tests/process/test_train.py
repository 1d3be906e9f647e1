"""`dflashd train` around its two children: what is asked of them, and what becomes of their faults.

The children are scripts that answer at once; the last test runs the real ones.
"""

import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support.command import InProcess
from support.command import dflashd as in_a_process
from support.gguf_files import TinyGGUF, byte_level_vocabulary
from support.learnable import write_learnable_target
from support.tiny_text import edit_json, write_speaking_pair, write_tokenizer
from support.train_child import COMMAND, SEQUENCES

from launch.chat_template import TOKENIZER_CONFIG
from launch.commands import training
from launch.interrupts import Interrupts
from launch.process import Child
from launch.training import collecting, teaching
from launch.training.bars import Stages
from launch.training.found import STEPS, find
from launch.training.plan import COMPOSED, LOCK, PLAN, opened
from launch.training.watch import Watch
from protocol.checkpoints.identity import weights_digest
from protocol.config import Deadlines
from protocol.errors import CheckpointError, DaemonDied, DaemonError, TemporaryFailure
from protocol.file_locks import held, taken
from protocol.training import (
    DATA_FOLDER,
    MEETING_VARIABLE,
    CollectConfig,
    Report,
    TrainConfig,
    Trained,
)

pytestmark = pytest.mark.process
ENOUGH = ("--tokens", "2000", "--steps", "2", "--feature-cache", "0")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    target, _ = write_speaking_pair(folder)
    (target / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A tiny one\n")
    return target


@pytest.fixture
def out(tmp_path):
    return tmp_path / "draft"


@pytest.fixture
def dflashd(capsys, monkeypatch):
    """Runs the verb in this process; its children behave as `manner` and `taught` say."""
    run = InProcess(capsys, monkeypatch)

    def call(*arguments, manner="well", taught="well"):
        def child(how):
            return lambda config, *_: (*COMMAND, how, str(config))

        with monkeypatch.context() as patched:
            patched.setattr(collecting, "command", child(manner))
            patched.setattr(teaching, "command", child(taught))
            return run("train", *map(str, arguments))

    return call


def the_data(out):
    return find(out, lambda _: 0)


def test_a_draft_is_made_and_described(dflashd, target, out):
    done = dflashd("--model", target, "--out", out, *ENOUGH, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    found = the_data(out)
    assert told["tokens"] == found.tokens >= 2000
    assert told["sequences"] == found.sequences
    assert told["held_out"] == found.held_out.total() > 0
    assert told["mean_acceptance_length"] == 1.5
    assert told["step_of_best"] == told["steps"] == 2
    collect = msgspec.json.decode((out / "work/collect.json").read_bytes(), type=CollectConfig)
    train = msgspec.json.decode((out / "work/train.json").read_bytes(), type=TrainConfig)
    assert collect.taps == train.taps == (1,)
    assert (collect.max_positions, train.steps, train.hours) == (1024, 2, 0.0)
    assert train.mask_token_id == 0
    card = (out / "README.md").read_text()
    for fact in (f"{found.tokens:,} tokens", "cc-by-4.0", "**1.500**", "loss 1.250", "curve.png"):
        assert fact in card, fact
    assert "collect: " in done.err
    assert f"collected: {found.sequences:,} sequences, {found.tokens:,} tokens; " in done.err


def test_data_alone_can_be_collected_and_trained_on_later(dflashd, target, out):
    first = dflashd("--model", target, "--out", out, *ENOUGH[:2], "--data-only", "--quiet")
    assert (first.code, first.err) == (0, "")
    assert not (out / "README.md").exists()
    there = the_data(out).tokens
    again = dflashd("--out", out, "--resume", "--tokens", there + 500)  # it stays with data alone
    assert again.code == 0, again.err
    assert f"`dflashd train --out {out} --resume --hours H` trains on them" in again.out
    assert not (out / "README.md").exists()
    more = the_data(out)
    assert more.tokens >= there + 500
    assert dflashd("--out", out, "--resume", "--steps", "2").code == 0
    assert the_data(out).tokens == more.tokens
    assert "1.500" in (out / "README.md").read_text()


def test_a_killed_collecting_says_why_and_goes_on_without_asking_again(dflashd, target, out):
    failed = dflashd("--model", target, "--out", out, *ENOUGH, manner="die")
    assert failed.code == 70
    assert "SIGKILL: about to die" in failed.err
    before = the_data(out)
    assert before.sequences == SEQUENCES
    done = dflashd("--out", out, "--resume")
    assert done.code == 0, done.err
    found = the_data(out)
    assert found.tokens >= 2000
    # Every talk was begun once: no id is there twice.
    assert before.talks < found.talks
    assert len(found.prompts) == found.sequences


def test_ctrl_c_ends_the_children_and_says_how_to_go_on(dflashd, target, out):
    stopped = dflashd("--model", target, "--out", out, *ENOUGH, manner="interrupt")
    assert stopped.code == 130
    assert "\nstopping: " in stopped.err
    line = f"`dflashd train --out {out} --resume` goes on"
    assert f"{line}; lost: 4 answers under way (30 tokens)\n" in stopped.err
    assert the_data(out).sequences == SEQUENCES
    stopped = dflashd("--out", out, "--resume", taught="interrupt")
    assert stopped.code == 130
    data = the_data(out).sequences
    done = dflashd("--out", out, "--resume")
    assert done.code == 0, done.err
    assert the_data(out).sequences == data


@pytest.mark.parametrize(
    ("manner", "code", "sentence"),
    [
        ("problem", 75, "12 MB are needed, 3 MB are there"),
        ("defect", 70, "it failed; the daemon's log says why: KeyError: 'lost'"),
        ("nonsense", 70, "said what is no message"),
        ("leave", 70, "ended before there was enough"),
        ("refuse", 78, "were refused, the last: no room"),
    ],
)
def test_what_goes_wrong_in_the_collecting_child_is_one_sentence(
    dflashd, target, out, manner, code, sentence
):
    failed = dflashd("--model", target, "--out", out, *ENOUGH, "--quiet", manner=manner)
    assert failed.code == code, failed.err
    assert sentence in failed.err
    assert failed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("manner", "code", "sentence"),
    [
        ("die", 70, "the training process was ended by SIGKILL: about to die"),
        ("problem", 75, "12 MB are needed"),
        ("defect", 70, "log says why: KeyError: 'lost'"),
        ("leave", 70, "without a word about its result"),
    ],
)
def test_what_goes_wrong_in_the_training_child_is_one_sentence(
    dflashd, target, out, manner, code, sentence
):
    failed = dflashd("--model", target, "--out", out, *ENOUGH, "--quiet", taught=manner)
    assert (failed.code, failed.err.count("\n")) == (code, 1)
    assert sentence in failed.err


def test_a_child_that_says_nothing_for_long_is_ended(dflashd, target, out, monkeypatch):
    short = msgspec.structs.replace(Deadlines(), training_silence=1.0)
    monkeypatch.setattr(training, "Watch", lambda *those, **named: Watch(*those, short, **named))
    failed = dflashd("--model", target, "--out", out, *ENOUGH, "--quiet", manner="silence")
    assert failed.code == 75
    assert "said nothing for 1 s" in failed.err


def test_what_libraries_print_is_no_message(dflashd, target, out):
    assert dflashd("--model", target, "--out", out, *ENOUGH, manner="print").code == 0


@pytest.fixture(scope="module")
def first_begun(tmp_path_factory):
    return tmp_path_factory.mktemp("begun") / "draft"


@pytest.fixture
def begun(dflashd, target, out, first_begun):
    """A copy of a folder that was made once."""
    if not first_begun.exists():
        done = dflashd("--model", target, "--out", first_begun, *ENOUGH)
        assert done.code == 0, done.err
    shutil.copytree(first_begun, out)
    return out


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--seed", "3", "--seed (0, now 3)"),
        ("--taps", "0,2", "--taps (1, now 0,2)"),
        ("--layers", "2", "--layers (3, now 2)"),
        ("--block-size", "4", "--block-size (8, now 4)"),
        ("--gamma", "1.5", "--gamma (4.0, now 1.5)"),
        ("--dtype", "float32", "--dtype (auto, now float32)"),
        ("--tokens", "4000", "--tokens (2000, now 4000)"),
    ],
)
def test_resume_with_another_setting_names_it_with_both_values(
    dflashd, begun, option, value, named
):
    refused = dflashd("--out", begun, "--resume", option, value)
    assert refused.code == 2
    assert named in refused.err


def test_resume_with_another_target_or_other_prompts_is_refused(
    dflashd, begun, tmp_path_factory, tmp_path
):
    other, _ = write_speaking_pair(tmp_path_factory.mktemp("other"))
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    refused = dflashd("--out", begun, "--resume", "--model", other)
    assert (refused.code, f", now {other} " in refused.err) == (2, True)
    file = tmp_path / "p.txt"
    file.write_text("What?\n")
    refused = dflashd("--out", begun, "--resume", "--prompts", file)
    assert (refused.code, f"--prompts (none, now {file} " in refused.err) == (2, True)


def test_no_data_are_added_once_training_has_begun(dflashd, begun):
    before = the_data(begun).tokens
    refused = dflashd("--out", begun, "--resume", "--data-only", "--tokens", "9999")
    assert refused.code == 2
    assert dflashd("--out", begun, "--resume").code == 0
    assert the_data(begun).tokens == before


def test_a_folder_in_use_is_left_alone(dflashd, begun):
    with taken(begun / LOCK) as ours:
        assert ours
        refused = dflashd("--out", begun, "--resume")
    assert (refused.code, "another `dflashd train` works in" in refused.err) == (75, True)


def test_what_kills_left_is_removed_and_nothing_else(dflashd, begun):
    halves = [
        ".model.safetensors.317",
        ".train.jsonl.26618",
        ".tmp5KQ7cu",
        "work/.plan.json.0a1b2c3d",
    ]
    others = [".model.safetensors.orig", ".gitignore", "work/.notes.12"]
    for name in (*halves, *others):
        (begun / name).write_text("half")
    (begun / "work/features-1").mkdir()
    assert dflashd("--out", begun, "--resume").code == 0
    assert not any((begun / name).exists() for name in (*halves, "work/features-1"))
    assert all((begun / name).exists() for name in (*others, DATA_FOLDER))


def test_prompts_of_files_are_asked_as_they_are_and_excluded_ones_not(
    dflashd, target, out, tmp_path
):
    prompts = [{"prompt": f"Say number {number} aloud", "task": "say"} for number in range(30)]
    prompts += [{"turns": ["This one is a secret of mine"]}]
    file, secret = tmp_path / "p.jsonl", tmp_path / "s.txt"
    file.write_text("\n".join(map(json.dumps, prompts)))
    secret.write_text("is a secret of\n")
    done = dflashd(
        *("--model", target, "--out", out, "--prompts", file, "--exclude", secret),
        *("--tokens", "1000000", "--steps", "2", "--json"),
    )
    assert done.code == 0, done.err
    told, found = json.loads(done.out), the_data(out)
    assert set(found.tasks) == {"say"}
    assert told["dropped"]["excluded"] == 4  # one for each time over the prompts
    assert found.sampled / found.sequences > 0.7
    card = (out / "README.md").read_text()
    assert "the files p.jsonl" in card
    assert "with one of s.txt" in card
    assert dflashd("--out", out, "--resume").code == 0  # used up: nothing is asked


def test_talks_are_about_the_texts_of_files(dflashd, target, out, tmp_path):
    file = tmp_path / "wiki.jsonl"
    told = " ".join(f"Sentence {number} is about bees and honey." for number in range(40))
    file.write_text("\n".join(json.dumps({"text": told.replace("S", "A")}) for _ in range(3)))
    asked = ("--model", target, "--out", out, "--texts", file, "--tokens", "20000")
    done = dflashd(*asked, "--steps", "1")
    assert done.code == 0, done.err
    assert "about texts of wiki.jsonl" in (out / "README.md").read_text()
    file.write_text("Another text.\n")
    refused = dflashd("--out", out, "--resume", "--texts", file)
    assert (
        refused.code,
        "--texts (wiki.jsonl" in refused.err.replace(str(tmp_path) + "/", ""),
    ) == (2, True)


def test_too_little_data_are_named(dflashd, target, out, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("Only this one\n")
    failed = dflashd("--model", target, "--out", out, "--prompts", file, "--steps", "1")
    assert failed.code == 78
    assert "0 sequences to train on and 1 greedy ones held out, of 1, with" in failed.err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--hours", "1", "--steps", "2"), 2, "exclude each other"),
        (("--data-only", "--steps", "2"), 2, "--data-only trains no steps"),
        (("--resume",), 2, "nothing was begun"),
        (("--taps", "1,x"), 2, "auto, or numbers of layers"),
        (("--taps", "2,1"), 2, "ascending numbers below 4"),
        (("--taps", "1,4"), 2, "ascending numbers below 4"),
        (("--prompts", "/nowhere/p"), 2, "cannot read /nowhere/p"),
        (("--exclude", "/nowhere/p"), 2, "cannot read /nowhere/p"),
        (("--texts", "/nowhere/p"), 2, "cannot read /nowhere/p"),
        (("--texts", "/nowhere/p", "--prompts", "/nowhere/p"), 2, "--prompts and --texts exclude"),
        (("--feature-cache", "4 sheep"), 2, "is no size"),
        (("--feature-cache", "900000TB"), 75, "MB are needed: 0.0 MB for"),
        (("--device", "gpu"), 2, "is none of cpu"),
        (("--ranks", "0"), 2, "--ranks"),
        (("--ranks", "9"), 2, "--ranks 9: a step has 8 sequences"),
        (("--steps", "0"), 2, "--steps"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    dflashd, target, out, arguments, code, sentence
):
    refused = dflashd("--model", target, "--out", out, *arguments)
    assert refused.code == code, refused.err
    assert sentence in refused.err
    assert not list((out / DATA_FOLDER).glob("*")) if out.exists() else True


def test_a_folder_that_holds_something_else_is_left_alone(dflashd, target, out):
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    refused = dflashd("--model", target, "--out", out)
    assert (refused.code, "is not empty" in refused.err) == (2, True)
    assert os.listdir(out) == ["thesis.txt"]
    refused = dflashd("--model", target, "--out", out / "thesis.txt")
    assert (refused.code, "is a file" in refused.err) == (2, True)


def test_what_was_begun_needs_resume(dflashd, begun):
    refused = dflashd("--out", begun)
    assert (refused.code, "--resume goes on" in refused.err) == (2, True)


def test_a_target_without_a_tokenizer_is_refused(dflashd, out, tmp_path):
    target, _ = write_speaking_pair(tmp_path / "pair")
    (target / "tokenizer.json").unlink()
    refused = dflashd("--model", target, "--out", out)
    assert (refused.code, "holds no tokenizer.json" in refused.err) == (78, True)


def test_too_little_memory_is_refused_with_the_numbers(dflashd, target, out, monkeypatch):
    from launch.training import making
    from protocol.memory import Available

    monkeypatch.setattr(making, "available", lambda: Available(5_000_000, "a test"))
    refused = dflashd("--model", target, "--out", out)
    assert refused.code == 75
    assert "and 5.0 MB are available (a test)" in refused.err


def test_too_little_disk_is_refused_with_the_numbers(dflashd, target, out, monkeypatch):
    monkeypatch.setattr(
        "launch.training.room.shutil.disk_usage", lambda _: SimpleNamespace(free=5_000_000)
    )
    refused = dflashd("--model", target, "--out", out, "--tokens", "1000000")
    assert refused.code == 75
    assert "has 5.0 MB free, and " in refused.err
    assert "100.0 MB for 1,000,000 tokens, 26.4 MB for features" in refused.err


def test_without_the_extra_nothing_is_begun(dflashd, target, out, monkeypatch):
    from launch.training import making

    monkeypatch.setattr(making, "DRAWING", "no_such_library")
    refused = dflashd("--model", target, "--out", out)
    assert (refused.code, "dflash-daemons[train]" in refused.err) == (78, True)
    assert not list((out / DATA_FOLDER).iterdir())
    assert dflashd("--model", target, "--out", out, *ENOUGH[:2], "--data-only").code == 0


def test_training_can_go_on_for_longer_than_it_was_begun(dflashd, begun):
    assert dflashd("--out", begun, "--resume", "--steps", "9").code == 0
    told = msgspec.json.decode((begun / "work/train.json").read_bytes(), type=TrainConfig)
    assert told.steps == 9


def test_fewer_steps_than_are_done_are_refused_and_change_nothing(dflashd, begun):
    before = (begun / PLAN).read_bytes()
    refused = dflashd("--out", begun, "--resume", "--steps", "1")
    assert (refused.code, "2 steps are done there, and --steps asks for 1" in refused.err) == (
        2,
        True,
    )
    assert (begun / PLAN).read_bytes() == before


def test_damaged_plans_and_records_are_named(dflashd, begun):
    for name in (COMPOSED, PLAN):
        kept = (begun / name).read_bytes()
        (begun / name).write_bytes(b"{")
        refused = dflashd("--out", begun, "--resume")
        assert (refused.code, name in refused.err) == (78, True), name
        (begun / name).write_bytes(kept)


def test_each_rank_is_told_its_number_and_a_file_to_meet_at(tmp_path):
    assert teaching.places(1, tmp_path / "m") == [{"WORLD_SIZE": "1"}]
    three = teaching.places(3, tmp_path / "m")
    assert [each["RANK"] for each in three] == [each["LOCAL_RANK"] for each in three] == list("012")
    assert {each[MEETING_VARIABLE] for each in three} == {str(tmp_path / "m")}
    assert {each["GLOO_SOCKET_IFNAME"] for each in three} == {"lo"}


def test_what_is_wrong_with_any_rank_ends_all_of_them(tmp_path):
    """The first one waits for its parent for ever, and says nothing more."""
    say = "import os, sys; print({told!r}); sys.stdin.read() if os.environ['RANK'] == '0' else 1/0"
    told = msgspec.json.encode(Report(stage="load", done=1, total=1)).decode()
    line = (sys.executable, "-I", "-c", say.format(told=told))
    with Interrupts() as interrupts, pytest.raises(DaemonDied, match="ZeroDivisionError"):
        teaching.teach(line, teaching.places(3, tmp_path / "m"), Watch(interrupts, Stages()), print)


def test_a_child_inherits_the_lock_and_its_first_word_after_loading_is_noticed(tmp_path):
    told = [Report(stage="load", done=done, total=1) for done in (0, 1)]
    told.append(Trained(steps=1, seconds=1.0, tokens=1, passes=1.0))
    text = "".join(msgspec.json.encode(line).decode() + "\n" for line in told)
    called = []
    with held(tmp_path / "lock", create=True) as lock, Interrupts() as interrupts:
        words = f"import os; os.fstat({lock}); print({text!r})"
        line, watch = (sys.executable, "-I", "-c", words), Watch(interrupts, Stages(), held=(lock,))
        assert teaching.teach(line, [{}], watch, lambda: called.append(1)) == told[-1]
    assert called == [1]


def test_a_folder_belongs_to_a_child_that_outlives_the_command(out):
    child = (sys.executable, "-I", "-c", "input()")
    with ExitStack() as stack:
        with opened(out, resume=False) as folder:
            stack.enter_context(Child(child, deadlines=Deadlines(), inherited=(folder.lock,)))
        with pytest.raises(TemporaryFailure, match="or still ends there"):
            stack.enter_context(opened(out, resume=False))
    with opened(out, resume=False):
        pass


def test_a_lock_that_cannot_be_made_is_no_lock_of_another(out):
    (out / LOCK).mkdir(parents=True)
    with pytest.raises(DaemonError, match=r"cannot write .*: Is a directory"), ExitStack() as stack:
        stack.enter_context(opened(out, resume=False))


def test_data_that_training_refuses_can_be_added_to(dflashd, target, out):
    failed = dflashd("--model", target, "--out", out, *ENOUGH, taught="unfit")
    assert (failed.code, "these data will not do" in failed.err) == (78, True)
    before = the_data(out).tokens
    more = dflashd("--out", out, "--resume", "--data-only", "--tokens", before + 500)
    assert more.code == 0, more.err
    assert the_data(out).tokens >= before + 500


def test_resume_with_other_weights_or_another_template_is_refused(dflashd, begun, target, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(target, other)
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    refused = dflashd("--out", begun, "--resume", "--model", other)
    assert (refused.code, "the weights of --model (" in refused.err) == (2, True)
    (other / "model.safetensors").write_bytes(weights)
    assert dflashd("--out", begun, "--resume", "--model", other).code == 0
    text = json.loads((other / TOKENIZER_CONFIG).read_text())["chat_template"]
    edit_json(other / TOKENIZER_CONFIG, chat_template=text + "{# another #}")
    refused = dflashd("--out", begun, "--resume", "--model", other)
    assert (refused.code, "the chat template of --model (" in refused.err) == (2, True)


def test_samples_of_large_weights_tell_one_training_from_another(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(6 << 20))
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(bytes(5 << 20) + b"1" * (1 << 20))
    assert weights_digest(tmp_path) != before
    (tmp_path / "model.safetensors").write_bytes(bytes((6 << 20) + 1))
    assert weights_digest(tmp_path) != before
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    with pytest.raises(CheckpointError, match=r"cannot read .*gone: No such file"):
        weights_digest(tmp_path)


def test_resume_goes_on_from_any_folder_and_without_the_files_of_prompts(
    dflashd, target, out, tmp_path, monkeypatch
):
    file = tmp_path / "p.txt"
    file.write_text("".join(f"Say number {number} aloud\n" for number in range(30)))
    monkeypatch.chdir(target.parent)
    done = dflashd("--model", f"./{target.name}", "--out", out, *ENOUGH, "--prompts", file)
    assert done.code == 0, done.err
    monkeypatch.chdir(tmp_path)
    file.unlink()
    done = dflashd("--out", out, "--resume")
    assert done.code == 0, done.err
    assert "the files p.txt" in (out / "README.md").read_text()
    assert dflashd("--out", out, "--resume", "--prompts", file).code == 2


def test_ids_of_requests_say_their_talk(dflashd, begun):
    found = the_data(begun)
    assert max(found.talks) * STEPS < 1 << 40
    assert Path(begun / PLAN).stat().st_size < 4096


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_one_command_makes_a_draft_that_generate_uses(out, tmp_path):
    target = write_learnable_target(tmp_path / "target")
    write_tokenizer(target)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Say number {number} aloud\n" for number in range(30)))
    made = in_a_process(
        *("train", "--model", str(target), "--out", str(out), "--prompts", str(prompts)),
        *("--tokens", "4000", "--steps", "80", "--layers", "1", "--block-size", "4"),
        *("--taps", "0,2,3", "--threads", "1", "--json"),
        env={"DFLASH_HOME": str(tmp_path)},
        timeout=250,
    )
    assert made.code == 0, made.err
    told = json.loads(made.out)
    assert told["trained"]
    assert told["mean_acceptance_length"] > 1.1
    assert f"**{told['mean_acceptance_length']:.3f}**" in (out / "README.md").read_text()
    assert (out / "curve.png").stat().st_size > 1000
    words = ("generate", "--model", str(target), "--block-width", "8", "--threads", "1", "--json")
    told = in_a_process(
        *(*words, "--draft", str(out), "--max-tokens", "40", "Say number 7 aloud"),
        env={"DFLASH_HOME": str(tmp_path)},
        timeout=150,
    )
    assert told.code == 0, told.err
    report = json.loads(told.out)
    assert report["mode"] == "speculative"
    assert report["speculative_decoding"]["num_drafts"] > 0
    assert report["speculative_decoding"]["mean_acceptance_length"] > 1


@pytest.fixture
def gguf(tmp_path):
    """A file whose table has a row behind the tokenizer's ids, to mask with."""
    vocab = len(byte_level_vocabulary()[0]) + 1
    table = np.random.default_rng(5).standard_normal((vocab, 64)).astype(np.float32)
    tiny = TinyGGUF(raw={"llama.vocab_size": vocab}, tensors={"token_embd.weight": table})
    return tiny.write(tmp_path / "tiny.gguf")


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_a_gguf_file_is_a_target_from_the_first_prompt_to_generate(gguf, out, tmp_path):
    prompts, home = tmp_path / "prompts.txt", {"DFLASH_HOME": str(tmp_path / "home")}
    prompts.write_text("".join(f"Say {number}\n" for number in range(12)))
    made = in_a_process(
        *("train", "--model", str(gguf), "--out", str(out), "--prompts", str(prompts)),
        *("--tokens", "300", "--steps", "2", "--layers", "1", "--block-size", "4"),
        *("--taps", "0,1", "--threads", "1", "--json"),
        env=home,
        timeout=250,
    )
    assert made.code == 0, made.err
    assert json.loads(made.out)["trained"]
    words = ("generate", "--model", str(gguf), "--block-width", "4", "--threads", "1", "--json")
    told = in_a_process(
        *(*words, "--draft", str(out), "--max-tokens", "8", "Say 7"), env=home, timeout=150
    )
    assert told.code == 0, told.err
    assert json.loads(told.out)["speculative_decoding"]["num_drafts"] > 0


def test_a_gguf_file_without_an_id_to_mask_with_is_refused_first(dflashd, out, tmp_path):
    file = TinyGGUF().write(tmp_path / "tiny.gguf")
    refused = dflashd("--model", file, "--out", out)
    assert (refused.code, refused.err.count("\n")) == (78, 1)
    assert "a draft needs one that does not" in refused.err
