"""The arguments of ``dflashd supervisor``; `launch.commands.serving` does the work."""

import click

from launch.commands.pair import THEIRS, refuse_a_limit_alone, refuse_loading_options
from launch.commands.settings import config_option, settings
from launch.settings import Setting
from protocol.core_dumps import refuse_core_dumps


@click.command(name="supervisor")
@settings("model", "draft", "draft_context", "draft_vocab")
@settings("target_devices", "target_layer_split")
@settings("target_device", "draft_device", "hand_over", "graphs", "dtype", "exact")
@settings("target_weights", "rollback", "threads")
@settings("slots", "max_positions", "prefix_memory", "prefix_store", "prefix_disk")
@click.option(
    "--max-waiting",
    cls=Setting,
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="How many requests wait for a slot; one more is refused.",
)
@click.option("--instance", metavar="NAME", help="A name for --connect, in place of a random one.")
@settings("run_dir")
@click.option(
    "--attach", cls=Setting, is_flag=True, help="Drive the daemons of --instance that run already."
)
@click.option(
    "--attach-target",
    cls=Setting,
    metavar="FOLDER|tcp://HOST:PORT",
    help="The same, by the run directory, or by the address on another host.",
)
@click.option(
    "--attach-draft",
    cls=Setting,
    metavar="FOLDER|tcp://HOST:PORT|none",
    help="The same for the draft.",
)
@settings("keys")
@config_option
@click.option("--quiet", is_flag=True, help="Nothing on standard error but failures.")
def supervisor_command(**arguments: object) -> int:
    """Run a target daemon and a draft daemon, and serve this user's clients on this host.

    It listens on a socket in its private run directory: 'dflashd generate --connect' uses it,
    'dflashd ps' lists it, and SIGTERM or Ctrl-C ends it with both daemons.

    With --attach it starts no daemon: it drives 'dflashd target' and 'dflashd draft', which go on
    when it ends. --model is then the one whose text goes in and out.
    """
    context = click.get_current_context()
    if arguments["attach"] or arguments["attach_target"] is not None:
        refuse_loading_options(context, said="the daemons are started", names=THEIRS)
    refuse_a_limit_alone(context)
    from launch.commands.serving import Options, serve  # noqa: PLC0415 - not for --help

    refuse_core_dumps()
    return serve(Options(**arguments))  # type: ignore[arg-type]  # click has checked them
