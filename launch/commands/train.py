"""The arguments of ``dflashd train``; `launch.commands.training` does the work."""

from pathlib import Path

import click

from launch.commands.settings import MAX_COUNT, config_option, settings
from launch.commands.value_types import ByteSize, DeviceName
from protocol.core_dumps import refuse_core_dumps

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(name="train", short_help="Make a draft for a model.")
@settings("model")
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the draft is made: new, empty, or with --resume one that was begun.",
)
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    type=_FILE,
    help="Prompts: JSON lines with turns, messages or prompt (and task), or a prompt a line. "
    "[default: the target writes them]",
)
@click.option(
    "--texts",
    multiple=True,
    metavar="FILE",
    type=_FILE,
    help="Texts that prompts are to be about: JSON lines with text (and language), or plain text. "
    "The target writes the prompts.  [default: it writes the texts as well]",
)
@click.option(
    "--hours",
    type=click.FloatRange(0.0, 10_000.0, min_open=True),
    help="Time for all: 40 % to collect data, 60 % to train; all of it to train with --tokens, "
    "and to collect with --data-only.  [default: 4]",
)
@click.option(
    "--steps", type=click.IntRange(1, MAX_COUNT), help="Train so many steps, in place of --hours."
)
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_COUNT),
    help="Collect at least so many tokens, prompts included, by whole answers.  "
    "[default with --steps: 1000000]",
)
@click.option(
    "--layers", type=click.IntRange(1, 64), default=3, show_default=True, help="Of the draft."
)
@click.option(
    "--block-size",
    type=click.IntRange(2, 64),
    default=8,
    show_default=True,
    help="Rows of a block: the pending token and what the draft proposes behind it.",
)
@click.option(
    "--gamma",
    type=click.FloatRange(0.1, 1000.0),
    default=4.0,
    show_default=True,
    help="The k-th token of a block counts exp(-(k - 1) / gamma) in the loss; about 1.5 where few "
    "proposals are accepted.",
)
@click.option(
    "--taps",
    default="auto",
    show_default=True,
    metavar="auto|N,N,...",
    help="Layers of the target whose outputs the draft reads; auto: five, evenly spaced.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="FILE",
    type=_FILE,
    help="Drop every prompt that shares a run of 8 tokens with a prompt of FILE.",
)
@click.option(
    "--start",
    metavar="DRAFT",
    type=click.Path(path_type=Path, exists=True),
    help="Begin with this draft of the same shape: a folder.  [default: the target's own layers]",
)
@click.option("--resume", is_flag=True, help="Go on with what was begun in DIR.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, show_default=True, help="Of it all."
)
@click.option(
    "--device",
    type=DeviceName(),
    metavar="cpu|cuda:N",
    default="cpu",
    show_default=True,
    help="Where both stages compute.",
)
@settings("threads", "dtype")
@click.option(
    "--feature-cache",
    type=ByteSize(),
    metavar="SIZE",
    help="Disk for the target's features, as in 8GB; what is not kept is computed anew.  "
    "[default: all, in at most a quarter of the free disk]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Training processes on this host.",
)
@click.option(
    "--data-only",
    is_flag=True,
    help="Collect, and do not train yet: until --hours or --steps are said without it.",
)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
def train_command(**arguments: object) -> int:
    """Make a DFlash draft for a model.

    Collects the target's own answers, trains a draft on them, validates it by an exact greedy walk
    over answers that were held out, and leaves the best one in DIR, with a card. Broken off at any
    moment, `dflashd train --out DIR --resume` goes on.
    """
    from launch.commands.training import train  # noqa: PLC0415 - not for --help

    context = click.get_current_context()
    line = click.core.ParameterSource.COMMANDLINE
    said = frozenset(name for name in arguments if context.get_parameter_source(name) is line)
    refuse_core_dumps()
    as_json, quiet = bool(arguments.pop("as_json")), bool(arguments.pop("quiet"))
    return train(arguments, said, as_json=as_json, quiet=quiet)
