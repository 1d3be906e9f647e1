"""A pair of daemons that a supervisor runs already; this command is one of its clients."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.commands.output import ProgressLine
from launch.commands.receiver import Receiver
from launch.interrupts import Interrupts
from launch.remote import Remote
from launch.tokenizer import TextTokenizer
from protocol.errors import Unavailable, UsageError
from protocol.messages import Cancel, Submit


class RunningPair:
    """The supervisor whose socket `find` finds; entered when it has said what it serves."""

    def __init__(self, find: Callable[[], Path], line: ProgressLine) -> None:
        self._find = find
        self._remote = Remote(find())
        self._line = line

    def __enter__(self) -> Self:
        self._remote.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        self._remote.close()

    @property
    def model(self) -> Path:
        return Path(self._remote.welcome.model)

    @property
    def max_positions(self) -> int:
        return self._remote.welcome.max_positions

    @property
    def vocab_size(self) -> int:
        return self._remote.welcome.vocab_size

    def close(self) -> None:
        """It goes on without this command."""

    def get_ready(self, tokenizer: TextTokenizer, interrupts: Interrupts) -> bool:
        """Whether it can be asked: it serves already."""
        del tokenizer, interrupts
        return True

    def run(
        self, submit: Submit, tokenizer: TextTokenizer, receiver: Receiver, interrupts: Interrupts
    ) -> float:
        """Run the request to its end; nothing is loaded for it, so that this takes 0 seconds.

        A signal, or a reader of standard output that went away, cancels the request. Raises
        Unavailable when the supervisor goes away, with how much came before that; the next
        request looks for one in its place.
        """
        del tokenizer  # the supervisor has its own
        if self._remote.ended:
            self._join_again()
        try:
            self._run(submit, receiver, interrupts)
        except Unavailable as error:
            raise Unavailable(f"{error} after {len(receiver.ids)} tokens of the text") from error
        return 0.0

    def _join_again(self) -> None:
        """Raises what finding and entering do, and UsageError where it serves another model."""
        remote = Remote(self._find())
        with ExitStack() as stack:
            model = Path(stack.enter_context(remote).welcome.model)
            if model != self.model:
                raise UsageError(f"the supervisor serves {model} now, and no more {self.model}")
            stack.pop_all()
        self._remote.close()
        self._remote = remote

    def _run(self, submit: Submit, receiver: Receiver, interrupts: Interrupts) -> None:

        def stopping() -> bool:
            return interrupts.number is not None or receiver.closed

        remote = self._remote
        with remote.watching(interrupts.fd, interrupts.on_ready):
            remote.send(submit)
            self._line.say("waiting for the supervisor")
            remote.run_until(lambda: receiver.ended or stopping(), receiver)
            if not receiver.ended:
                # It has been accepted before anything else that the supervisor reads.
                remote.run_until(lambda: receiver.request is not None, receiver)
                remote.send(Cancel(request=receiver.request or 0))
                remote.run_until(lambda: receiver.ended, receiver)
