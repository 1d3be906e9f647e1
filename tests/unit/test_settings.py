"""Settings: command line before environment before file before default, and what is refused."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.command import InProcess

from launch import cli, config_file
from launch.commands.generate import generate_command
from launch.commands.pair import leave_loading_options
from launch.commands.settings import (
    MAX_SLOTS,
    MAX_THREADS,
    SETTINGS,
    config_option,
    settings,
)
from launch.config_file import files_for, read_files
from launch.settings import Setting, settings_of
from protocol.errors import ConfigError, UsageError
from target_daemon.daemon import BOUNDS


@pytest.fixture
def dflashd(capsys, monkeypatch):
    return InProcess(capsys, monkeypatch)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "c.toml"


def _read(file, text, verb="generate"):
    file.write_text(text, encoding="utf-8")
    found = read_files([file], cli.commands, verb)
    return {key: stated.value for key, stated in found.items()}


@pytest.fixture
def show(dflashd):
    def rows(*words, env=None):
        outcome = dflashd("config", "show", "--json", *words, env=env)
        assert outcome.code == 0, outcome.err
        found = json.loads(outcome.out)["settings"]
        return {row["name"]: (row["value"], row["source"], row["where"]) for row in found}

    return rows


def test_the_command_line_comes_before_the_environment_before_the_file_before_the_default(
    file, show
):
    file.write_text("threads = 2\ntop_k = 2\nmax_tokens = 2\n")
    shown = show(
        *("--config", str(file), "generate", "--threads", "4"),
        env={"DFLASHD_THREADS": "3", "DFLASHD_TOP_K": "3"},
    )
    assert shown["threads"] == (4, "command line", "--threads")
    assert shown["top_k"] == (3, "environment", "DFLASHD_TOP_K")
    assert shown["max_tokens"] == (2, "file", str(file))
    assert shown["min_tokens"] == (0, "default", None)
    assert shown["seed"] == (None, "default", None)


def test_a_verb_receives_what_the_file_says(file, monkeypatch):
    file.write_text('max_tokens = 7\nstop = ["x", "y z"]\nexact = true\ntop_p = 1\nmodel = "m"\n')
    context = generate_command.make_context("generate", ["--config", str(file), "hello"])
    wanted = {"max_tokens": 7, "stop": ("x", "y z"), "exact": True, "top_p": 1.0, "model": "m"}
    assert {name: context.params[name] for name in wanted} == wanted
    assert "config" not in context.params


def test_what_stands_for_one_verb_alone_wins_for_that_verb(file, show):
    text = "threads = 2\n[only.generate]\nthreads = 1\n"
    assert _read(file, text) == {"threads": 1}
    assert _read(file, text, verb="") == {"threads": 2}
    assert show("--config", str(file))["only.generate.threads"] == (1, "file", str(file))


def test_the_users_file_comes_before_the_systems(file, tmp_path, monkeypatch):
    system, user = tmp_path / "system.toml", tmp_path / "dflash" / "config.toml"
    user.parent.mkdir()
    monkeypatch.setattr(config_file, "SYSTEM_FILE", system)
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert files_for(None, environment) == []
    user.write_text("threads = 1\n")
    system.write_text("threads = 2\ntop_k = 2\n")
    files = files_for(None, environment)
    found = read_files(files, cli.commands, "generate")
    assert {key: (each.value, each.file) for key, each in found.items()} == {
        "threads": (1, user),
        "top_k": (2, system),
    }
    assert files_for(None, {"HOME": str(tmp_path)}) == [system]
    assert files_for(None, {"XDG_CONFIG_HOME": "relative", "HOME": "/nowhere"}) == [system]
    assert files_for(file, environment) == [file]


def test_a_file_that_this_user_may_not_look_for_is_as_good_as_absent(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert files_for(None, {"HOME": "/root"}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thread = 1", "no setting is named `thread`; did you mean `threads`?"),
        ("zzz = 1", "no setting is named `zzz`"),
        ("json = true", "no setting is named `json`"),
        ('threads = "x"', '`threads` must be an integer from 0 to 1024; found "x"'),
        ("threads = 1.5", "an integer from 0 to 1024; found 1.5"),
        ("threads = true", "an integer from 0 to 1024; found true"),
        ("threads = 5000", "an integer from 0 to 1024; found 5000"),
        ("threads = [1]", "an integer from 0 to 1024; found [1]"),
        ('temperature = "hot"', '`temperature` must be a number from 0.0 to 10.0; found "hot"'),
        ("temperature = false", "a number from 0.0 to 10.0; found false"),
        ("temperature = nan", "a number from 0.0 to 10.0; found NaN"),
        ("top_p = 0", "`top_p` must be a number above 0.0 to 1.0; found 0"),
        (
            'dtype = "int8"',
            '`dtype` must be one of "auto", "float32", "bfloat16", "float16"; found "int8"',
        ),
        ("exact = 1", "`exact` must be true or false; found 1"),
        ("model = 3", "`model` must be a text; found 3"),
        ("block_width = 0", '`block_width` must be "auto", or an integer from 1 to'),
        ("slots = 4097", "`slots` must be an integer from 1 to 4096; found 4097"),
        ("keep = true", "no setting is named `keep`"),
        ("draft_vocab = 1.5", '`draft_vocab` must be a number of ids, a file, or "all"; found 1.5'),
        ("system = 2026-11-30", '`system` must be a text; found "2026-11-30"'),
        ('stop = "x"', '`stop` must be a list, each a text; found "x"'),
        ("stop = [1]", "`stop` must be a list, each a text; found [1]"),
        ('stop = [""]', "characters each"),
        ('logit_bias = ["a"]', "'a' is not of the form ID=V"),
        ("only = 3", "`only` must be a table of tables"),
        ("only.generate = 3", "`only.generate` must be a table"),
        ("[only.sing]", "[only.sing] names no verb; there are generate"),
        ("[only.generate]\nthread = 1", "named `only.generate.thread`; did you mean `threads`?"),
        ('[only.generate]\nthreads = "x"', "`only.generate.threads` must be an integer"),
        ("x", "is not TOML"),
        ("a = 1\na = 2", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_file_key_and_expectation(file, text, words):
    with pytest.raises(ConfigError) as refused:
        _read(file, text)
    assert str(refused.value).startswith(str(file))
    assert words in str(refused.value)


def test_a_long_value_is_not_repeated_in_full(file):
    with pytest.raises(ConfigError) as refused:
        _read(file, f'threads = "{"x" * 500}"')
    assert len(str(refused.value)) < 300


def test_a_file_that_cannot_be_read_is_refused(file, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*c\.toml: No such file"):
        read_files([file], cli.commands, "generate")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_files([tmp_path], cli.commands, "generate")
    file.write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 text, at byte 9"):
        read_files([file], cli.commands, "generate")
    file.write_bytes(b"#" * (config_file.MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_files([file], cli.commands, "generate")


def test_a_wrong_file_is_one_sentence_and_an_exit_code(file, dflashd):
    file.write_text("threads = -1\n")
    outcome = dflashd("generate", "hello", env={"DFLASHD_CONFIG": str(file)})
    assert (outcome.code, outcome.out) == (78, "")
    assert outcome.err.count("\n") == 1
    assert f"{file}: `threads` must be" in outcome.err


def test_a_wrong_variable_is_a_usage_error_that_names_it(dflashd):
    outcome = dflashd("generate", "hello", env={"DFLASHD_THREADS": "many"})
    assert outcome.code == 2
    assert "DFLASHD_THREADS" in outcome.err
    assert "DFLASHD" not in dflashd("generate", "--threads", "many", "hello").err


def test_a_misspelt_variable_is_refused_with_the_nearest_one(dflashd, show):
    outcome = dflashd("generate", "hello", env={"DFLASHD_THREAD": "1"})
    assert outcome.code == 78
    assert "DFLASHD_THREAD names no setting; did you mean `DFLASHD_THREADS`?" in outcome.err
    others = {"DFLASHD_MAX_WAITING": "3", "DFLASHD_PARENT": "1"}
    assert show("generate", env=others).keys() == show("generate").keys()


def test_help_is_given_whatever_the_files_say(file, dflashd):
    file.write_text("nonsense")
    outcome = dflashd("generate", "--help", env={"DFLASHD_CONFIG": str(file)})
    assert outcome.code == 0


def test_nothing_is_read_where_words_are_only_being_completed(file):
    context = generate_command.make_context(
        "generate", ["--config", str(file)], resilient_parsing=True
    )
    assert context.default_map is None


def test_show_without_a_verb_lists_every_setting_of_every_verb(show):
    everything = {key for command in cli.commands().values() for key in settings_of(command)}
    assert set(show()) == everything >= set(SETTINGS)


def test_show_for_people_names_value_and_source(file, dflashd):
    file.write_text('system = "Größe"\n')
    outcome = dflashd("config", "show", "--config", str(file), "generate")
    assert f'system              "Größe"  (file: {file})\n' in outcome.out
    assert "seed                -  (default)\n" in outcome.out


def test_show_of_a_verb_without_settings_is_empty(show):
    assert show("doctor") == {}


def test_show_refuses_what_is_no_verb_and_what_the_verb_refuses(dflashd):
    outcome = dflashd("config", "show", "sing")
    assert outcome.code == 2
    assert "'sing' is no verb; there are generate" in outcome.err
    assert dflashd("config", "show", "generate", "--bogus").code == 2


def test_what_is_shown_is_what_a_file_or_a_command_line_can_say(file, show):
    file.write_text('block_width = "auto"\ndraft_vocab = 100\n')
    shown = show("--config", str(file), "generate")
    assert shown["block_width"] == ("auto", "file", str(file))
    assert shown["draft_vocab"] == ("100", "file", str(file))
    assert show("generate")["block_width"] == ("auto", "default", None)
    assert show("generate", "--block-width", "3")["block_width"][0] == 3


def _connecting(file, *words):
    words = ("--config", str(file), "--connect", "x", *words, "hello")
    return generate_command.make_context("generate", list(words))


def test_settings_that_a_running_supervisor_cannot_honour_are_named_in_one_line(
    file, capsys, monkeypatch
):
    file.write_text("exact = true\nmax_tokens = 3\n")
    monkeypatch.setenv("DFLASHD_THREADS", "2")
    leave_loading_options(_connecting(file))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(f": exact ({file}), threads (DFLASHD_THREADS)\n")
    leave_loading_options(_connecting(file, "--quiet"))
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="--exact: said when the supervisor is started"):
        leave_loading_options(_connecting(file, "--exact"))


def test_the_ranges_are_those_of_the_daemons():
    assert BOUNDS["slots"] == (1, MAX_SLOTS)
    assert BOUNDS["threads"] == (0, MAX_THREADS)


def test_one_name_has_one_type_in_all_verbs():
    seen = {}
    for command in cli.commands().values():
        for key, setting in settings_of(command).items():
            facts = (setting.expected, setting.default)
            assert seen.setdefault(key, facts) == facts


def test_a_new_verb_takes_settings_of_the_table_and_its_own_without_further_code(file):
    @click.command(name="new")
    @settings("threads")
    @click.option("--depth", cls=Setting, type=int, default=1)
    @config_option
    def new(threads, depth):
        click.echo(f"{threads} {depth}")

    file.write_text("threads = 3\n")
    environment = {"DFLASHD_CONFIG": str(file), "DFLASHD_DEPTH": "2"}
    assert CliRunner().invoke(new, env=environment).output == "3 2\n"
    assert read_files([file], lambda: {"new": new}, "new")["threads"].value == 3
    assert new.params[1].expected == "an integer"


def test_the_settings_of_a_group_are_those_of_its_commands():
    @click.group()
    def group():
        pass

    @group.command()
    @settings("model")
    def below(model):
        pass

    assert list(settings_of(group)) == ["model"]
