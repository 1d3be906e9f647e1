"""What `dflashd target` and `dflashd draft` tell the daemon that they become."""

import os
import sys
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from support.tiny_text import write_speaking_pair

from launch.becoming import become
from launch.cli import main
from launch.commands.alone import DraftOptions, TargetOptions
from launch.commands.attaching import attach_plan
from launch.commands.daemons import draft_command, target_command
from launch.commands.serving import Options as ServingOptions
from launch.commands.supervisor import supervisor_command
from launch.drafts import SHIPPED_VOCAB
from launch.idle_threads import SETTINGS
from launch.meeting import check_served
from launch.plan import Attach
from protocol.config import DraftConfig, TargetConfig, read_config
from protocol.errors import ConfigError, Unavailable, UsageError
from protocol.instances import daemon_directory, instances, named_directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(path) for path in write_speaking_pair(tmp_path_factory.mktemp("pair"))]


class Replaced(Exception):
    pass


@pytest.fixture
def become_what(monkeypatch):
    """Runs a command line; returns the program that it became, its config and environment."""

    def execve(program, command, environment):
        kind = TargetConfig if "target_daemon" in command else DraftConfig
        config = read_config(kind, Path(command[-1]))
        os.close(int(command[-1].rpartition("/")[2]))
        raise Replaced(command, config, environment)

    monkeypatch.setattr(os, "execve", execve)

    def run(*arguments):
        with pytest.raises(Replaced) as caught:
            main(arguments)
        return caught.value.args

    return run


def test_the_target_knows_the_drafts_taps_and_stands_alone(folders, become_what, runtime_dir):
    target, draft = folders
    command, config, environment = become_what("target", "--model", target, "--draft", draft)
    assert command[:-1] == (sys.executable, "-I", "-m", "target_daemon")
    assert config.service
    assert config.taps == (0, 2, 3)
    assert config.mask_token_id == 3
    assert config.golden  # to find out a draft of another target when they are paired
    assert config.block_size == 16  # so that guesses fit too
    assert config.run_dir == str(daemon_directory("target", None, None))
    assert SETTINGS.items() <= environment.items()
    assert environment["PATH"] == os.environ["PATH"]


def test_taps_can_be_said_where_the_draft_is_not_here(folders, become_what):
    said = ("--taps", "1, 2", "--mask-token", "7", "--block-size", "32")
    _, config, _ = become_what("target", "--model", folders[0], *said)
    assert (config.taps, config.mask_token_id, config.block_size) == ((1, 2), 7, 32)
    assert config.golden


def test_without_a_draft_nothing_is_captured(folders, become_what):
    _, config, _ = become_what("target", "--model", folders[0], "--draft", "none")
    assert config.taps == ()


def test_the_draft_is_told_its_folder_and_context(folders, become_what, tmp_path):
    words = ("--draft", folders[1], "--draft-context", "99", "--run-dir", str(tmp_path / "d"))
    command, config, _ = become_what("draft", *words)
    assert command[3] == "draft_daemon"
    assert config.service
    assert (config.draft, config.context_window) == (folders[1], 99)
    assert config.run_dir == str(tmp_path / "d")


def test_the_default_models_draft_is_the_installed_one(become_what):
    _, config, _ = become_what("draft", "--slots", "3")
    assert Path(config.draft).name == "smollm2-135m-dflash"
    assert config.slots == 3
    assert config.vocab == SHIPPED_VOCAB


@pytest.mark.parametrize(
    ("more", "vocab"),
    [(("--draft-head", "target"), "all"), (("--draft-vocab", "4096"), "4096")],
)
def test_what_is_said_of_the_head_comes_before_the_drafts_own_vocabulary(become_what, more, vocab):
    _, config, _ = become_what("draft", *more)
    assert config.vocab == vocab


@pytest.mark.parametrize("verb", ["target", "draft"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_started(verb, folders, capsys):
    more = ("--model", folders[0], "--draft", folders[1], "--draft-device", "cuda:99")
    assert main([verb, *more]) == 75
    assert "--draft-device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--taps", "1"), "said together or not at all"),
        (("--mask-token", "1", "--block-size", "4"), "said together or not at all"),
        (("--taps", "1,x", "--mask-token", "1", "--block-size", "4"), "numbers with commas"),
        (
            ("--taps", "1", "--mask-token", "1", "--block-size", "4", "--draft", "none"),
            "in place of --draft",
        ),
    ],
)
def test_taps_that_cannot_be_are_refused(folders, words, told, capsys):
    assert main(["target", "--model", folders[0], *words]) == 2
    assert told in capsys.readouterr().err


def test_a_system_that_starts_no_program_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot start /nowhere/python"):
        become("draft", DraftConfig(draft="x", run_dir="/x", life=0), {})


def test_a_daemons_folder_is_no_supervisors(runtime_dir):
    folder = daemon_directory("draft", "mine", None)
    assert folder == Path(f"{named_directory('mine')}.draft")
    folder.mkdir(mode=0o700)
    (folder / "owner.lock").write_text(f"{os.getpid()}\n")
    try:
        assert instances() == []
    finally:
        (folder / "owner.lock").unlink()
        folder.rmdir()
    with pytest.raises(UsageError, match="no name of an instance"):
        daemon_directory("draft", "a.b", None)


def test_a_plan_to_attach_names_folders_and_the_models_shape(folders):
    plan = attach_plan(Path(folders[0]), target=None, draft=None, instance="a")
    assert plan.attach == Attach(
        target=str(daemon_directory("target", "a", None)),
        draft=str(daemon_directory("draft", "a", None)),
        hidden_size=32,
        num_layers=4,
    )
    assert not plan.asks_no_draft
    alone = attach_plan(Path(folders[0]), target="/t", draft="none", instance="a")
    assert (alone.attach.target, alone.attach.draft) == ("/t", None)
    assert alone.asks_no_draft


def test_a_target_of_another_model_than_the_clients_is_refused():
    class Hello(msgspec.Struct):
        hidden_size: int = 64
        num_layers: int = 4

    attach = Attach(target="/t", hidden_size=32, num_layers=4)
    with pytest.raises(ConfigError, match="hidden_size 64, the model of --model has 32"):
        check_served(attach, Hello())
    check_served(Attach(target="/t", hidden_size=64, num_layers=4), Hello())
    check_served(Attach(target="/t"), Hello())
    check_served(None, Hello())


def test_to_attach_to_a_draft_alone_makes_no_sense(folders, capsys):
    assert main(["supervisor", "--model", folders[0], "--attach-draft", "/d"]) == 2
    assert "--attach-draft goes with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (target_command, TargetOptions),
        (draft_command, DraftOptions),
        (supervisor_command, ServingOptions),
    ],
)
def test_what_a_verb_takes_is_what_it_is_run_with(command, options):
    taken = {param.name for param in command.params if param.expose_value}
    assert taken == {field.name for field in fields(options)}


def test_daemons_are_told_where_to_listen_and_whom_to_meet(folders, become_what, tmp_path):
    model, draft = folders
    keys = ("--keys", str(tmp_path))
    listen = ("--listen", "tcp://[::1]:0", *keys)
    _, config, _ = become_what("target", "--model", model, "--draft", draft, *listen)
    assert (config.listen, config.keys) == ("tcp://[::1]:0", str(tmp_path))
    far = ("--target-address", "tcp://10.0.0.1:7000", "--target-model", model)
    words = ("draft", "--draft", draft, "--listen", "tcp://10.0.0.2:7001", *far)
    _, config, _ = become_what(*words)
    assert (config.listen, config.keys) == ("tcp://10.0.0.2:7001", "")
    assert (config.target_address, config.target_model) == ("tcp://10.0.0.1:7000", model)
    _, config, _ = become_what("draft", "--draft", draft, "--draft-head", "target")
    assert (config.listen, config.target_model, config.draft_head) == ("", "", "target")


@pytest.mark.parametrize(
    ("verb", "words", "code"),
    [
        ("target", ("--listen", "tcp://10.0.0.1"), 2),
        ("draft", ("--listen", "10.0.0.1:7000"), 2),
        ("draft", ("--target-address", "tcp://10.0.0.1:0"), 2),
    ],
)
def test_what_is_no_address_is_refused_before_anything_starts(folders, capsys, verb, words, code):
    assert main([verb, "--model", folders[0], "--draft", folders[1], *words]) == code
    assert "tcp://" in capsys.readouterr().err


def test_daemons_on_other_hosts_are_attached_to_by_their_addresses(folders, tmp_path):
    plan = attach_plan(
        Path(folders[0]),
        target="tcp://10.0.0.1:7000",
        draft="tcp://[fe80::2]:7001",
        instance=None,
        keys=tmp_path,
    )
    assert (plan.attach.target, plan.attach.draft) == (
        "tcp://10.0.0.1:7000",
        "tcp://[fe80::2]:7001",
    )
    assert plan.attach.keys == str(tmp_path)
    with pytest.raises(ConfigError, match="the port is 0"):
        attach_plan(Path(folders[0]), target="tcp://a:0", draft="none", instance=None)
