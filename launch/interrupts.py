"""Signals as events of the poll loop: a handler only records, and the loop decides."""

import signal

from protocol.signals import CaughtSignals


class Interrupts(CaughtSignals):
    """Inside a ``with`` in the main thread, an ending signal is recorded instead of raised.

    Put `fd` and `on_ready` into the loop (`Supervisor.watch`), so that a signal wakes it, and ask
    `number` between steps. No message is ever cut in two by a Ctrl-C this way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: signal.Signals | None = None  # the first signal that came

    def on_ready(self) -> None:
        """Take what woke the loop."""
        self.drain()

    def _record(self, number: signal.Signals) -> None:
        if self.number is None:
            self.number = number
