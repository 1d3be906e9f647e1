"""``dflashd keys``: make the keys of the three roles, and show the public ones."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launch.commands.settings import config_option, settings
from launch.commands.standard_output import print_json
from launch.key_files import KeyShown, show, write_pairs
from protocol.keys import ROLES, KeyPair, Role, default_folder


@click.group(name="keys", context_settings={"help_option_names": ["-h", "--help"]})
def keys_group() -> None:
    """Make and show the keys with which daemons on several hosts know each other.

    Every role has a key pair of its own. Its secret file is for its owner alone; its public key is
    put on the list of those who may connect, on every host that it connects to.
    """


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return settings("keys")(config_option(as_json(command)))


@keys_group.command(name="new")
@click.argument("roles", metavar="[target|draft|supervisor]...", nargs=-1, type=click.Choice(ROLES))
@click.option("--force", is_flag=True, help="Replace secret keys that are there, for good.")
@_common
def new_command(*, roles: tuple[Role, ...], force: bool, keys: Path | None, as_json: bool) -> None:
    """Make a key pair for each role named, or for all three, and allow them to connect."""
    from protocol.sockets import new_curve_keys  # noqa: PLC0415 - loads zmq, not for --help

    folder = keys or default_folder(os.environ)
    pairs = [KeyPair(role, *new_curve_keys()) for role in dict.fromkeys(roles or ROLES)]
    write_pairs(folder, pairs, force=force)
    _print(folder, as_json=as_json)


@keys_group.command(name="show")
@_common
def show_command(*, keys: Path | None, as_json: bool) -> None:
    """Print the public keys: whose, whether they may connect, and whose secret is here."""
    _print(keys or default_folder(os.environ), as_json=as_json)


def _print(folder: Path, *, as_json: bool) -> None:
    shown = show(folder)
    if as_json:
        print_json({"folder": str(folder), "keys": shown})
        return
    click.echo(f"{folder}:" if shown else f"{folder}: no keys; `dflashd keys new` makes them")
    for each in shown:
        click.echo(f"{each.role:<10}  {each.public}  {_facts(each)}")


def _facts(key: KeyShown) -> str:
    allowed = "may connect" if key.allowed else "may not connect"
    return f"{allowed}, {'secret key here' if key.secret else 'secret key elsewhere'}"
