"""``dflashd units``: systemd's unit files, printed, installed or checked."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from launch import exit_codes
from launch.unit_check import MOST_EXPOSED, check
from launch.unit_files import SUPERVISOR, Choice, unit_files
from launch.unit_install import Planned, State, choose, default_base, install, plan

WORDS: Final[dict[State, str]] = {
    "new": "written",
    "same": "unchanged",
    "older": "replaced",
    "changed": "replaced, though it was changed by hand",
}
WOULD: Final[dict[State, str]] = {
    "new": "would be written",
    "same": "would stay as it is",
    "older": "would be replaced",
    "changed": "was changed by hand, and would be kept unless --force is given",
}


@click.group(name="units", context_settings={"help_option_names": ["-h", "--help"]})
def units_group() -> None:
    """Run the three processes as services of systemd.

    An instance NAME is 'dflash@NAME', which starts 'dflash-target@NAME' and 'dflash-draft@NAME', or
    'dflash-single@NAME', one unit whose supervisor starts both daemons. Its settings are NAME.toml
    in /etc/dflash, or in the user's folder of settings.
    """


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--user", is_flag=True, help="For this user's manager, not the system's."),
        click.option("--gpu", is_flag=True, help="Let the daemons use NVIDIA's devices."),
        click.option(
            "--program",
            metavar="PATH",
            type=click.Path(path_type=Path),
            help="The installed command.  [default: this one]",
        ),
    ):
        command = option(command)
    return command


@units_group.command(name="print")
@_common
def print_command(*, user: bool, gpu: bool, program: Path | None) -> None:
    """Print all files, each behind its name."""
    files = unit_files(choose(program, user=user, gpu=gpu))
    click.echo("\n".join(f"# --- {name}\n{text}" for name, text in files.items()), nl=False)


@units_group.command(name="install")
@_common
@click.option(
    "--base",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where systemd's folders lie.  [default: /etc, or the user's settings]",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--force", is_flag=True, help="Replace files that were changed by hand.")
def install_command(
    *, user: bool, gpu: bool, program: Path | None, base: Path | None, dry_run: bool, force: bool
) -> None:
    """Write the files; what was changed by hand is kept, and then nothing is written."""
    choice = choose(program, user=user, gpu=gpu)
    planned = plan(choice, base or default_base(os.environ, user=user))
    if not dry_run:
        install(planned, force=force)
    for each in planned:
        click.echo(f"{each.path}: {(WOULD if dry_run else WORDS)[each.state]}")
    if not dry_run and any(each.state != "same" for each in planned):
        click.echo(_next(choice, planned))


@units_group.command(name="verify")
@_common
def verify_command(*, user: bool, gpu: bool, program: Path | None) -> int:
    """Ask systemd whether the files are well formed, and how exposed the services are.

    Exit code 78 when something is wrong with one, 69 when systemd is not installed here.
    """
    checked = check(choose(program, user=user, gpu=gpu))
    widest = max(len(each.name) for each in checked)
    for each in checked:
        level = "" if each.exposure is None else f", exposure {each.exposure} of {MOST_EXPOSED}"
        click.echo(f"{each.name:<{widest}}  {'good' if each.good else 'NOT good'}{level}")
        for defect in each.defects:
            click.echo(f"  {defect}")
    return exit_codes.OK if all(each.good for each in checked) else exit_codes.CONFIG


def _next(choice: Choice, planned: list[Planned]) -> str:
    """What to do now, in the words of a shell."""
    control = "systemctl --user" if choice.user else "systemctl"
    users = [str(each.path) for each in planned if each.path.parent.name == "sysusers.d"]
    first = [f"systemd-sysusers {path}" for path in users]
    enable = f"{control} enable --now {SUPERVISOR.replace('@.', '@NAME.')}"
    return "next: " + " && ".join([*first, f"{control} daemon-reload", enable])
