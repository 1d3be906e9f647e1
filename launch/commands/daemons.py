"""The arguments of ``dflashd target`` and ``dflashd draft``: one daemon as a service of its own."""

import click

from launch.commands.settings import config_option, settings
from launch.models import DEFAULT_NAME
from launch.settings import Setting

_instance = click.option(
    "--instance", metavar="NAME", help="The pair it belongs to.  [default: default]"
)


@click.command(name="target")
@settings("model", "draft")
@click.option(
    "--taps",
    metavar="IDS",
    help="In place of --draft: the layers to capture, such as 1,8,15. Needs the two below.",
)
@click.option("--mask-token", type=click.IntRange(0, (1 << 31) - 1), help="The draft's mask id.")
@click.option("--block-size", type=click.IntRange(1, 1024), help="The draft's block size.")
@settings("target_device", "draft_device", "hand_over", "dtype", "exact", "threads")
@settings("slots", "max_positions")
@_instance
@settings("run_dir", "listen", "keys")
@config_option
def target_command(**arguments: object) -> int:
    """Run the target daemon in the foreground, as a service of its own.

    'dflashd supervisor --attach' drives it, while it holds the lock in the daemon's private run
    directory, or over a network a lease. It needs the draft's config.json, to know which layers to
    capture.
    """
    from launch.commands.alone import TargetOptions, run_target  # noqa: PLC0415 - not for --help

    return run_target(TargetOptions(**arguments))  # type: ignore[arg-type]  # click has checked them


@click.command(name="draft")
@click.option(
    "--model",
    cls=Setting,
    default=DEFAULT_NAME,
    show_default=True,
    help="The target's model: its own draft is taken where --draft names none. Not fetched.",
)
@settings("draft", "draft_context", "draft_device", "dtype", "threads", "slots")
@_instance
@settings("run_dir", "listen", "keys")
@click.option(
    "--target-address",
    cls=Setting,
    metavar="tcp://HOST:PORT",
    help="Where to reach a target on another host.  [default: as the supervisor reaches it]",
)
@click.option(
    "--target-model",
    cls=Setting,
    metavar="MODEL",
    help="The target's model on this host, for its embedding and head. Not fetched.",
)
@click.option(
    "--draft-head",
    cls=Setting,
    type=click.Choice(["auto", "target"]),
    default="auto",
    show_default=True,
    help="target: a target on another host is asked to embed and to choose ids.",
)
@config_option
def draft_command(**arguments: object) -> int:
    """Run the draft daemon in the foreground, as a service of its own.

    See 'dflashd target'.
    """
    from launch.commands.alone import DraftOptions, run_draft  # noqa: PLC0415 - not for --help

    return run_draft(DraftOptions(**arguments))  # type: ignore[arg-type]  # click has checked them
