"""One operation at a running supervisor, for the verbs that change what runs."""

import signal

import click

from launch.interrupts import Interrupts
from launch.remote import Remote
from protocol.instances import find
from protocol.messages import Message


def operate(message: Message, connect: str | None) -> signal.Signals | None:
    """Print what was done; the signal that ended the waiting before that, if one did.

    The operation goes on then. Raises the error that it was refused with.
    """
    with Interrupts() as interrupts, Remote(find(connect or "")) as remote:
        remote.watch(interrupts.fd, interrupts.on_ready)
        done = remote.operate(message, lambda: interrupts.number is not None)
    if done is not None:
        click.echo(done)
        return None
    return interrupts.number
