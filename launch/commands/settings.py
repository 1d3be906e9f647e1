"""The table of settings that several verbs share, and how a verb takes some of them.

::

    @click.command(name="target")
    @settings("model", "dtype", "threads")
    @config_option
    def target_command(**arguments): ...

gives the verb these options with their variables and their keys in a file, and ``--config``. A
setting of one verb alone is ``click.option(..., cls=Setting)``, and nothing else is needed.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from launch.commands.value_types import (
    BlockWidth,
    CheckedText,
    DeviceName,
    DraftVocab,
    NetworkAddress,
)
from launch.config_file import files_for, nearest, read_files
from launch.models import DEFAULT_NAME
from launch.policy import FULL
from launch.settings import PREFIX, Setting, settings_of
from protocol.errors import ConfigError
from protocol.gpu import CPU
from protocol.layer_split import device_list, share_list
from protocol.lifeline import PARENT_VARIABLE
from protocol.messages import DEFAULT_TREE_BUDGET


class Folder(click.Path):
    """A folder's name; an empty one would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty name is no folder", param, ctx)
        return super().convert(value, param, ctx)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
NO_SETTINGS: Final = frozenset({CONFIG_VARIABLE, PARENT_VARIABLE})
FILES: Final = "launch.config_file"  # in click's Context.meta: what the files say, by key
MAX_COUNT: Final = 1 << 30
MAX_SLOTS: Final = 4096
MAX_THREADS: Final = 1024
MAX_TOKENS: Final = (1 << 31) - 1

_THREADS: Final = "Threads of each daemon; 0: as many as it may use."
_DRAFT: Final = (
    "A DFlash draft for this model: a hub id, a folder, a GGUF file, or the name of an installed "
    "one. The default model has one; others none."
)


_VOCAB: Final = (
    "Ids that the draft may propose: the N most frequent, those of a FILE, or all.  "
    "[default: the draft's own]"
)


def _option(name: str, **attributes: Any) -> Decorator:
    return click.option(name, cls=Setting, **attributes)


def _count(name: str, default: int, about: str) -> Decorator:
    kind = click.IntRange(1, MAX_COUNT)
    return _option(name, type=kind, default=default, show_default=True, help=about)


def _device(name: str, about: str) -> Decorator:
    kind, shown = DeviceName(), "cpu|cuda:N"
    return _option(name, type=kind, metavar=shown, default=CPU, show_default=True, help=about)


SETTINGS: Final[dict[str, Decorator]] = {
    "model": _option(
        "--model",
        default=DEFAULT_NAME,
        show_default=True,
        help="A known name, a hub id, a folder, or a GGUF file.",
    ),
    "draft": _option("--draft", metavar="DRAFT|none", help=_DRAFT),
    "draft_context": _count(
        "--draft-context", 4096, "How many of the latest positions the draft attends to at most."
    ),
    "draft_vocab": _option("--draft-vocab", type=DraftVocab(), metavar="N|FILE|all", help=_VOCAB),
    "block_width": _option(
        "--block-width",
        type=BlockWidth(),
        default="auto",
        show_default=True,
        help="Rows of a verify: the pending token and the draft's. auto: what pays; 1: no draft.",
    ),
    "verify": _option(
        "--verify",
        type=click.Choice(["chain", "tree", "auto"]),
        default="chain",
        show_default=True,
        help="What a round verifies: the draft's chain, or a tree of it and its alternatives.",
    ),
    "tree_budget": _option(
        "--tree-budget",
        type=click.IntRange(1, FULL - 1),
        default=DEFAULT_TREE_BUDGET,
        show_default=True,
        help="How many proposals a tree has, its chain among them; at most what one forward takes.",
    ),
    "dtype": _option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="auto: bfloat16 where this processor is fast at it. float16 is for GPUs.",
    ),
    "target_weights": _option(
        "--target-weights",
        type=click.Choice(["dtype", "int8", "int4"]),
        default="dtype",
        show_default=True,
        help="How the target holds its layers: as --dtype says, or rounded to 8 or 4 bits.",
    ),
    "exact": _option(
        "--exact", is_flag=True, help="The text cannot depend on the draft, or refuse."
    ),
    "rollback": _option(
        "--rollback",
        type=click.Choice(["auto", "fast", "replay"]),
        default="auto",
        show_default=True,
        help="How a target undoes rejected rows: as it stands, by running the kept ones again.",
    ),
    "target_device": _device("--target-device", "Where the target computes."),
    "target_devices": _option(
        "--target-devices",
        type=CheckedText(device_list, "GPUs with commas between"),
        metavar="cuda:N,...",
        default="",
        help="GPUs that share the target's layers, in this order.",
    ),
    "target_layer_split": _option(
        "--target-layer-split",
        type=CheckedText(share_list, "shares that add up to 1, with commas between"),
        metavar="0.6,0.4",
        default="",
        help="The share of the layers that each of them has.  [default: equal ones]",
    ),
    "draft_device": _device("--draft-device", "Where the draft computes."),
    "hand_over": _option(
        "--hand-over",
        type=click.Choice(["synchronise", "event"]),
        default="synchronise",
        show_default=True,
        help="How a GPU's feature rows reach the draft: waited for, or by an event.",
    ),
    "listen": _option(
        "--listen",
        type=NetworkAddress(listens=True),
        metavar="tcp://HOST:PORT",
        help="Listen for other hosts, with keys; without them on the loopback interface only.",
    ),
    "graphs": _option(
        "--graphs", is_flag=True, help="Decode in fixed shapes, recorded as CUDA graphs on a GPU."
    ),
    "keys": _option(
        "--keys",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Where the keys lie.  [default: /etc/dflash/keys for root, else the user's settings]",
    ),
    "threads": _option(
        "--threads",
        type=click.IntRange(0, MAX_THREADS),
        default=0,
        show_default=True,
        help=_THREADS,
    ),
    "slots": _option(
        "--slots",
        type=click.IntRange(1, MAX_SLOTS),
        default=2,
        show_default=True,
        help="How many requests run at the same time.",
    ),
    "max_positions": _option(
        "--max-positions",
        type=click.IntRange(0, (1 << 31) - 1),
        default=0,
        help="Prompt and text of one request, in tokens.  [default and most: what the model takes]",
    ),
    "max_tokens": _option(
        "--max-tokens",
        type=click.IntRange(1, MAX_TOKENS),
        default=256,
        show_default=True,
        help="At most so many new tokens in a text.",
    ),
    "prefix_memory": _option(
        "--prefix-memory",
        metavar="MB",
        type=click.IntRange(0, 1 << 30),
        default=512,
        show_default=True,
        help="Memory of the target for states that later requests may go on from; 0: none.",
    ),
    "prefix_store": _option(
        "--prefix-store",
        metavar="FOLDER",
        type=Folder(path_type=Path),
        help="A private folder where states of requests stay, which the next start goes on from.",
    ),
    "prefix_disk": _option(
        "--prefix-disk",
        metavar="MB",
        type=click.IntRange(0, 1 << 30),
        default=4096,
        show_default=True,
        help="How much may lie in the folder of --prefix-store.",
    ),
    "run_dir": _option(
        "--run-dir",
        metavar="FOLDER",
        help="The private folder for the sockets; it is made, and removed at the end.",
    ),
}


def settings(*names: str) -> Decorator:
    """Give a command the named settings, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            command = SETTINGS[name](command)
        return command

    return decorate


def said_where(context: click.Context, name: str) -> str:
    """The variable or the file that said a setting; empty where neither did."""
    source = context.get_parameter_source(name)
    if source is click.core.ParameterSource.ENVIRONMENT:
        return f"{PREFIX}{name.upper()}"
    if source is click.core.ParameterSource.DEFAULT_MAP:
        return str(context.meta[FILES][name].file)
    return ""


def verbs() -> Mapping[str, click.Command]:
    """Every verb of the command line, imported."""
    from launch.cli import commands  # noqa: PLC0415 - its verbs' modules import this one

    return commands()


def _check_variables(command: click.Command) -> None:
    """Refuse a variable of ours that no verb takes: it would be a silent misspelling."""
    named = {name for name in os.environ if name.startswith(PREFIX)} - NO_SETTINGS
    if not named - _variables([command]):
        return
    known = _variables(verbs().values())
    for name in sorted(named - known):
        hint = nearest(name, known)
        raise ConfigError(f"the environment's {name} names no setting{hint}")


def _variables(commands: Iterable[click.Command]) -> set[str]:
    return {str(each.envvar) for command in commands for each in settings_of(command).values()}


def _load(context: click.Context, _: click.Parameter, named: Path | None) -> None:
    """Read the files before any other option is looked at."""
    if context.resilient_parsing:
        return
    _check_variables(context.command)
    files = files_for(named, os.environ)
    stated = read_files(files, verbs, context.command.name or "")
    context.meta[FILES] = stated
    context.default_map = {key: each.value for key, each in stated.items()}


config_option: Final = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar=CONFIG_VARIABLE,
    is_eager=True,
    expose_value=False,
    callback=_load,
    help="Read settings from FILE alone, in place of the user's and the system's config.toml.",
)
