"""``dflashd ps``: the supervisors of this user on this host, their daemons and requests."""

import click
import msgspec

from launch.commands.standard_output import print_json
from launch.commands.status_text import overview
from launch.remote import Remote
from protocol.errors import DaemonError
from protocol.instances import Instance, daemons, instances
from protocol.messages import StatusReport


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One supervisor as ``dflashd ps --json`` prints it."""

    name: str
    pid: int
    run_dir: str
    model: str | None
    draft: str | None
    status: StatusReport | None
    why_not: str | None  # there is no status


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon that is a service of its own, as ``dflashd ps --json`` prints it."""

    instance: str
    role: str
    pid: int
    run_dir: str
    driver: int | None  # the supervisor's pid
    listens: str  # its address on the network; no pid is known of who drives it there


@click.command(name="ps")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ps_command(*, as_json: bool) -> None:
    """List the supervisors that run, with their daemons and requests.

    Daemons that run as services of their own are listed after them, with the supervisor's pid.
    Found are those in the usual places; one with a --run-dir elsewhere is asked by
    'dflashd status --connect PATH'.
    """
    found = [_ask(one) for one in instances()]
    services = [
        Service(
            instance=one.instance,
            role=one.role,
            pid=one.pid,
            run_dir=str(one.run_dir),
            driver=one.driver or None,
            listens=one.listens,
        )
        for one in daemons()
    ]
    if as_json:
        print_json({"supervisors": found, "services": services})
        return
    for one in found:
        click.echo(f"{one.name}  pid {one.pid}  {one.model or one.why_not}")
        if one.status is not None:
            for line in overview(one.status):
                click.echo(f"  {line}")
    if not found:
        click.echo("no supervisor runs")
    for service in services:
        click.echo(f"{service.role} of {service.instance}  pid {service.pid}  {_driver(service)}")


def _driver(service: Service) -> str:
    if service.listens:
        return f"listens at {service.listens}"
    return f"driven by process {service.driver}" if service.driver else "nobody drives it"


def _ask(instance: Instance) -> Listed:
    silent = Listed(
        name=instance.name,
        pid=instance.pid,
        run_dir=str(instance.run_dir),
        model=None,
        draft=None,
        status=None,
        why_not="serves one command, and no clients",
    )
    if not instance.is_service:
        return silent
    try:
        with Remote(instance.socket) as remote:
            welcome, status = remote.welcome, remote.status()
    except DaemonError as error:
        return msgspec.structs.replace(silent, why_not=str(error))
    return msgspec.structs.replace(
        silent, model=welcome.model, draft=welcome.draft or None, status=status, why_not=None
    )
