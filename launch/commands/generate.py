"""The arguments of ``dflashd generate``; `launch.commands.generation` does the work."""

from pathlib import Path

import click

from launch.commands.pair import (
    STORE,
    connect_option,
    leave_loading_options,
    refuse_loading_options,
)
from launch.commands.sampling import sampling_options
from launch.commands.settings import config_option, settings
from launch.settings import Setting
from protocol.core_dumps import refuse_core_dumps


@click.command(name="generate")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from FILE.")
@settings("model", "draft", "draft_context", "draft_vocab")
@settings("block_width", "verify", "tree_budget")
@click.option("--raw", cls=Setting, is_flag=True, help="Skip the chat template.")
@settings("max_tokens")
@sampling_options
@click.option(
    "--system", cls=Setting, metavar="TEXT", help="A system message for the chat template."
)
@settings("target_devices", "target_layer_split")
@settings("target_device", "draft_device", "hand_over", "graphs", "dtype", "exact")
@settings("target_weights", "rollback", "threads")
@settings("prefix_store", "prefix_disk")
@click.option(
    "--keep",
    is_flag=True,
    help="Go on from what earlier requests have left, and leave this one's state.",
)
@connect_option("Use the supervisor that runs; with PATH or NAME, that one.")
@config_option
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
    if arguments["connect"] is not None:
        leave_loading_options(click.get_current_context())
    if not arguments["keep"]:
        context = click.get_current_context()
        refuse_loading_options(context, said="--keep is, too", names=STORE)
        arguments["prefix_store"] = None  # of a file or the environment, for other verbs
    from launch.commands.generation import Options, generate  # noqa: PLC0415 - not for --help

    refuse_core_dumps()
    return generate(Options(**arguments))  # type: ignore[arg-type]  # click has checked them
