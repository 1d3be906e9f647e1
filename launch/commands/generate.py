"""The arguments of ``dflashd generate``; `launch.commands.generation` does the work."""

from pathlib import Path

import click

from launch.commands.sampling import sampling_options
from launch.models import DEFAULT_NAME

MAX_TOKENS = (1 << 31) - 1


@click.command(name="generate")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from FILE.")
@click.option(
    "--model",
    default=DEFAULT_NAME,
    show_default=True,
    help="A known name, a hub id, a folder, or a GGUF file.",
)
@click.option(
    "--draft",
    metavar="DRAFT|none",
    help="A folder with a DFlash draft for this model. The default model has one; others none.",
)
@click.option(
    "--draft-context",
    type=click.IntRange(1, 1 << 30),
    default=4096,
    show_default=True,
    help="How many of the latest positions the draft attends to.",
)
@click.option("--raw", is_flag=True, help="Skip the chat template.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=256,
    show_default=True,
    help="At most so many new tokens.",
)
@sampling_options
@click.option("--system", metavar="TEXT", help="A system message for the chat template.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="auto is bfloat16 where this processor is fast at it.",
)
@click.option("--exact", is_flag=True, help="The text cannot depend on the draft, or refuse.")
@click.option(
    "--threads",
    type=click.IntRange(0, 4096),
    default=0,
    help="Threads of each daemon.  [default: as many as it may use]",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one JSON line per round to FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of the text.")
@click.option(
    "--stats/--no-stats",
    default=None,
    help="The closing statistics line on standard error.  [default: on a terminal]",
)
@click.option("--quiet", is_flag=True, help="No progress and no statistics.")
def generate_command(**arguments: object) -> int:
    """Generate text from PROMPT.

    Without PROMPT, or with '-', the prompt is read from standard input. The text is the target
    model's own; a draft only makes it come sooner.
    """
    from launch.commands.generation import Options, generate  # noqa: PLC0415 - not for --help

    return generate(Options(**arguments))  # type: ignore[arg-type]  # click has checked them
