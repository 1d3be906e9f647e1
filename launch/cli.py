"""The command `dflashd`: finds a verb, runs it, and turns what goes wrong into one sentence.

A verb's module is imported only when that verb is run, so that `--help` and `--version` answer at
once; nothing here or below imports torch.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from launch import exit_codes
from protocol import __version__
from protocol.errors import DaemonError, PermissionRefused

# verb: module, the command in it, and what the list of verbs says about it
VERBS: Final[dict[str, tuple[str, str, str]]] = {
    "generate": (
        "launch.commands.generate",
        "generate_command",
        "Generate text from a prompt through two daemons.",
    ),
    "chat": ("launch.commands.chat", "chat_command", "Talk with a model, turn by turn."),
    "supervisor": (
        "launch.commands.supervisor",
        "supervisor_command",
        "Run the two daemons and serve clients.",
    ),
    "target": ("launch.commands.daemons", "target_command", "Run a target daemon as a service."),
    "draft": ("launch.commands.daemons", "draft_command", "Run a draft daemon as a service."),
    "ps": (
        "launch.commands.ps",
        "ps_command",
        "List supervisors and their requests.",
    ),
    "status": ("launch.commands.status", "status_command", "Say what a supervisor does, and why."),
    "park": ("launch.commands.park", "park_command", "End a daemon to free its memory."),
    "unpark": ("launch.commands.park", "unpark_command", "Start a parked daemon again."),
    "cancel": ("launch.commands.cancel", "cancel_command", "End a request of a supervisor."),
    "pull": ("launch.commands.pull", "pull_command", "Fetch and convert a model."),
    "train": ("launch.commands.train", "train_command", "Make a draft for a model."),
    "doctor": (
        "launch.commands.doctor",
        "doctor_command",
        "Say what this machine offers and what would be used.",
    ),
    "keys": ("launch.commands.keys", "keys_group", "Make and show the keys of the three roles."),
    "units": ("launch.commands.units", "units_group", "Run it as services of systemd."),
    "config": ("launch.commands.config", "config_group", "Say what is set, and by what."),
}


class VerbGroup(click.Group):
    """A group whose commands are imported when they are asked for, and listed without that."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        module, name, _ = VERBS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{name} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(verb, about) for verb, (_, _, about) in VERBS.items()])


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'dflashd COMMAND --help' lists a command's options. Exit codes are in the README.",
)
@click.version_option(__version__, prog_name="dflashd", message="%(prog)s %(version)s")
def dflashd() -> None:
    """DFlash speculative decoding as a target daemon, a draft daemon and one supervisor."""


def commands() -> dict[str, click.Command]:
    """Every verb's command, imported; for what concerns all of them, such as their settings."""
    context = click.Context(dflashd)
    found = {verb: dflashd.get_command(context, verb) for verb in VERBS}
    return {verb: command for verb, command in found.items() if command is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; see `launch.exit_codes`."""
    _open_standard_streams()
    try:
        # Not `dflashd.main`: that one takes a closed standard output for itself, with status 1.
        words = list(sys.argv[1:] if arguments is None else arguments)
        with dflashd.make_context("dflashd", words) as context:
            status = dflashd.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return _flushed(error.exit_code)
    except BrokenPipeError:
        _discard_output()
        return exit_codes.CLOSED_OUTPUT
    except (KeyboardInterrupt, click.Abort):
        return exit_codes.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return exit_codes.USAGE
    except click.ClickException as error:
        return _say(error.format_message(), exit_codes.USAGE)
    except DaemonError as error:
        return _say(str(error), error.exit_code)
    except PermissionError as error:
        return _say(_os_sentence(error), PermissionRefused.exit_code)
    except OSError as error:
        code = exit_codes.TEMPORARY if error.errno == errno.ENOSPC else exit_codes.SOFTWARE
        return _say(_os_sentence(error), code)
    return status if isinstance(status, int) else exit_codes.OK


def _open_standard_streams() -> None:
    """Give a caller that closed a standard stream the null device in its place.

    Python leaves None for it, and the next file that is opened would get its number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _flushed(code: int) -> int:
    """Write out what help and version left in the buffer, while that can still be handled."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return exit_codes.CLOSED_OUTPUT
    return code


def _say(sentence: str, code: int) -> int:
    click.echo(f"dflashd: {' '.join(sentence.split())}", err=True)
    return code


def _os_sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _discard_output() -> None:
    # Whatever is still buffered can be written nowhere; without this, Python would complain about
    # it once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
