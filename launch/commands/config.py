"""``dflashd config show``: every setting's value, and what said so."""

import copy
import json
from collections.abc import Mapping
from typing import Any, Literal

import click
import msgspec
from click.core import ParameterSource

from launch.commands.settings import FILES, config_option, verbs
from launch.commands.standard_output import print_json
from launch.config_file import ONLY, Stated
from launch.settings import Setting, settings_of

Source = Literal["command line", "environment", "file", "default"]

_SOURCES: Mapping[ParameterSource, Source] = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as ``dflashd config show --json`` prints it."""

    name: str
    value: Any
    source: Source
    where: str | None  # the option, the variable, or the file


@click.group(name="config", context_settings={"help_option_names": ["-h", "--help"]})
def config_group() -> None:
    """Say what is set, and by what.

    The command line comes before the environment, the environment before a file, a file before
    what is set by default.
    """


@config_group.command(
    name="show", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--config",
    metavar="FILE",
    help="Read settings from FILE alone, in place of the user's and the system's config.toml.",
)
@click.argument("verb", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def show_command(
    *, as_json: bool, config: str | None, verb: str | None, arguments: tuple[str, ...]
) -> None:
    """Name each setting's value and its source.

    With VERB, only what that verb takes, and as it would be with these ARGUMENTS.
    """
    commands = verbs()
    if verb is not None and verb not in commands:
        raise click.UsageError(f"{verb!r} is no verb; there are {', '.join(commands)}")
    words = [*(() if config is None else ("--config", config)), *arguments]
    shown = _everything(commands, words) if verb is None else _shown(commands[verb], words)
    if as_json:
        print_json({"settings": shown}, enc_hook=str)
        return
    widest = max((len(each.name) for each in shown), default=0)
    for each in shown:
        where = each.source if each.where is None else f"{each.source}: {each.where}"
        click.echo(f"{each.name:<{widest}}  {_word(each.value)}  ({where})")


def _everything(commands: Mapping[str, click.Command], words: list[str]) -> list[Shown]:
    """All settings, as a verb has them that no ``[only.VERB]`` speaks of; then those tables."""
    params = {
        key: each for command in commands.values() for key, each in settings_of(command).items()
    }
    shown = _shown(click.Command("", params=list(params.values())), words)
    for verb, command in commands.items():
        own = [each for each in _shown(command, words) if each not in shown]
        shown += [msgspec.structs.replace(each, name=f"{ONLY}.{verb}.{each.name}") for each in own]
    return shown


def _shown(command: click.Command, words: list[str]) -> list[Shown]:
    """What `command` would be told with `words`; its arguments need not be there."""
    settings = settings_of(command)
    others = [each for each in command.params if isinstance(each, click.Option)]
    config = [each for each in _probe.params if isinstance(each, click.Option)]
    params = {each.name: _optional(each) for each in (*config, *settings.values(), *others)}
    probe = click.Command(command.name, params=list(params.values()), add_help_option=False)
    with probe.make_context(command.name, list(words), allow_extra_args=True) as context:
        stated: Mapping[str, Stated] = context.meta.get(FILES, {})
        return [_one(context, each, stated) for each in settings.values()]


def _one(context: click.Context, setting: Setting, stated: Mapping[str, Stated]) -> Shown:
    key = setting.key
    source = _SOURCES[context.get_parameter_source(key) or ParameterSource.DEFAULT]
    where = {
        "command line": setting.opts[0],
        "environment": str(setting.envvar),
        "file": str(stated[key].file) if key in stated else None,
        "default": None,
    }
    return Shown(
        name=key, value=setting.as_said(context.params[key]), source=source, where=where[source]
    )


def _optional(option: click.Option) -> click.Option:
    option = copy.copy(option)
    option.required = False
    return option


def _word(value: object) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False, default=str)


@click.command()
@config_option
def _probe() -> None:
    """Hold the option ``--config``, for commands that are only asked for their settings."""
