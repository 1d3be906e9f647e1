"""``dflashd status``: what one supervisor does, how, and why."""

import sys
from typing import Final

import click

from launch import exit_codes
from launch.commands.pair import connect_option
from launch.commands.standard_output import print_json
from launch.commands.status_text import full
from launch.interrupts import Interrupts
from launch.remote import Remote
from protocol.errors import UsageError
from protocol.instances import find
from protocol.messages import StatusReport, Watch
from protocol.state import ClientReply

EVERY: Final = 1.0  # seconds


@click.command(name="status")
@connect_option("The supervisor to ask; needed where several run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, or one a line.")
@click.option("--watch", is_flag=True, help="Print it again and again, until Ctrl-C.")
@click.option(
    "--every",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 3600.0),
    help="How often, with --watch.  [default: 1]",
)
def status_command(*, connect: str | None, as_json: bool, watch: bool, every: float | None) -> int:
    """Say what a supervisor does, how, and why.

    Mode, transport, daemons with their lives and restarts, requests, and how much of what the
    draft proposed was accepted.
    """
    if every is not None and not watch:
        raise UsageError("--every goes with --watch")
    with Interrupts() as interrupts, Remote(find(connect or "")) as remote:
        if not watch:
            _show(remote.status(), as_json=as_json)
            return exit_codes.OK

        def take(message: ClientReply) -> None:
            if isinstance(message, StatusReport):
                _show(message, as_json=as_json, clear=sys.stdout.isatty())

        remote.watch(interrupts.fd, interrupts.on_ready)
        remote.send(Watch(seconds=EVERY if every is None else every))
        remote.run_until(lambda: interrupts.number is not None, take)
    return exit_codes.OK


def _show(status: StatusReport, *, as_json: bool, clear: bool = False) -> None:
    if as_json:
        print_json(status)
        return
    if clear:
        click.clear()
    for line in full(status):
        click.echo(line)
