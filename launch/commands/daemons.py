"""The arguments of ``dflashd target`` and ``dflashd draft``: one daemon as a service of its own."""

import click

from launch import exit_codes
from launch.commands.pair import connect_option, refuse_a_limit_alone
from launch.commands.settings import config_option, settings
from launch.commands.value_types import NetworkAddress
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
@settings("target_devices", "target_layer_split")
@settings("target_device", "draft_device", "hand_over", "graphs", "dtype", "exact")
@settings("target_weights", "rollback", "threads")
@settings("slots", "max_positions", "prefix_memory", "prefix_store", "prefix_disk")
@_instance
@settings("run_dir", "listen", "keys")
@config_option
def target_command(**arguments: object) -> int:
    """Run the target daemon in the foreground, as a service of its own.

    'dflashd supervisor --attach' drives it, while it holds the lock in the daemon's private run
    directory, or over a network a lease. It needs the draft's config.json, to know which layers to
    capture.
    """
    refuse_a_limit_alone(click.get_current_context())
    from launch.commands.alone import TargetOptions, run_target  # noqa: PLC0415 - not for --help

    return run_target(TargetOptions(**arguments))  # type: ignore[arg-type]  # click has checked them


@click.group(
    name="draft",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--model",
    cls=Setting,
    default=DEFAULT_NAME,
    show_default=True,
    help="The target's model: its own draft is taken where --draft names none. Not fetched.",
)
@settings("draft", "draft_context", "draft_vocab", "draft_device", "dtype", "threads", "slots")
@_instance
@settings("run_dir", "listen", "keys")
@click.option(
    "--target-address",
    cls=Setting,
    type=NetworkAddress(),
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
@click.pass_context
def draft_command(context: click.Context, /, **arguments: object) -> int:
    """Run the draft daemon in the foreground, as a service of its own.

    See 'dflashd target'. With 'swap', change the draft of a running supervisor.
    """
    if context.invoked_subcommand is not None:
        return 0
    from launch.commands.alone import DraftOptions, run_draft  # noqa: PLC0415 - not for --help

    return run_draft(DraftOptions(**arguments))  # type: ignore[arg-type]  # click has checked them


@draft_command.command(name="swap")
@click.argument("draft", metavar="DRAFT")
@connect_option("The supervisor to ask; needed where several run.")
def swap_command(*, draft: str, connect: str | None) -> int:
    """Put DRAFT in the place of a running supervisor's draft.

    DRAFT is a folder, a GGUF file, the name of the installed draft, or a hub id. Requests go on,
    and their text does not change. If DRAFT cannot be used the one of before serves on, and this
    says why.
    """
    from launch.commands.operating import operate  # noqa: PLC0415 - not for --help
    from launch.drafts import find_draft  # noqa: PLC0415
    from launch.remote import OPERATION  # noqa: PLC0415
    from protocol.messages import Swap  # noqa: PLC0415

    folder = find_draft(draft).path
    number = operate(Swap(draft=str(folder), operation=OPERATION), connect)
    return exit_codes.OK if number is None else exit_codes.SIGNALS[number]
