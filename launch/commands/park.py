"""``dflashd park`` and ``unpark``: free a daemon's memory, and start it again."""

from typing import TYPE_CHECKING, Literal

import click

from launch import exit_codes
from launch.commands.pair import connect_option

if TYPE_CHECKING:  # not for --help
    from protocol.messages import Message

_ROLE = click.argument("role", metavar="target|draft", type=click.Choice(["target", "draft"]))


@click.command(name="park")
@_ROLE
@click.option("--now", is_flag=True, help="Pause the requests that run, in place of waiting.")
@click.option(
    "--within",
    metavar="SECONDS",
    type=click.FloatRange(0, 86400, min_open=True),
    default=300.0,
    show_default=True,
    help="How long a request waits for a parked target before it is refused.",
)
@connect_option("The supervisor to ask; needed where several run.")
def park_command(
    *, role: Literal["target", "draft"], now: bool, within: float, connect: str | None
) -> int:
    """End a daemon of a running supervisor and free its memory.

    Requests that run finish first, and this command waits for it. With --now they are paused, and
    go on at 'unpark' where they were. New requests wait for a parked target; without a draft they
    run one token at a time.
    """
    from launch.remote import OPERATION  # noqa: PLC0415 - not for --help
    from protocol.messages import Park  # noqa: PLC0415

    return _operate(Park(role=role, now=now, within=within, operation=OPERATION), connect)


@click.command(name="unpark")
@_ROLE
@connect_option("The supervisor to ask; needed where several run.")
def unpark_command(*, role: Literal["target", "draft"], connect: str | None) -> int:
    """Start a parked daemon again, and wait until it serves."""
    from launch.remote import OPERATION  # noqa: PLC0415 - not for --help
    from protocol.messages import Unpark  # noqa: PLC0415

    return _operate(Unpark(role=role, operation=OPERATION), connect)


def _operate(message: "Message", connect: str | None) -> int:
    """Ask, wait, and print what was done; Ctrl-C ends the waiting alone."""
    from launch.commands.operating import operate  # noqa: PLC0415 - not for --help

    number = operate(message, connect)
    return exit_codes.OK if number is None else exit_codes.SIGNALS[number]
