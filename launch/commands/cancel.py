"""``dflashd cancel``: end a request of a running supervisor, whoever's it is."""

import click

from launch.commands.pair import connect_option


@click.command(name="cancel")
@click.argument("request", metavar="ID", type=click.IntRange(1, (1 << 63) - 1))
@connect_option("The supervisor whose request it is; needed where several run.")
def cancel_command(*, request: int, connect: str | None) -> None:
    """End the request ID, as 'dflashd ps' lists it, within one round or prompt chunk.

    Whoever submitted it gets the text so far.
    """
    from launch.remote import OPERATION, Remote  # noqa: PLC0415 - not for --help
    from protocol.instances import find  # noqa: PLC0415
    from protocol.messages import Cancel  # noqa: PLC0415

    with Remote(find(connect or "")) as remote:
        click.echo(remote.operate(Cancel(request=request, operation=OPERATION)))
