"""A pair of daemons of one command's own: started for it, and gone when it ends."""

from contextlib import ExitStack
from pathlib import Path

import msgspec

from launch.commands.output import ProgressLine
from launch.commands.receiver import Receiver
from launch.golden import golden_ids
from launch.interrupts import Interrupts
from launch.plan import Loading, Plan
from launch.statistics import Clock, Tally, statistics
from launch.stops import find_stops
from launch.supervisor import Supervisor
from launch.tokenizer import TextTokenizer
from protocol.checkpoints.target_config import read_model_config
from protocol.closing import Closing
from protocol.codec import unpack_tokens
from protocol.errors import InternalError
from protocol.messages import Cancel, Finished, Submit
from protocol.status import WARNING


class OwnPair(Closing):
    """What `plan` says; nothing is started before `run` or `get_ready`.

    Both daemons are gone when its ``with`` is left. Raises where the model is unusable.
    """

    def __init__(self, plan: Plan, line: ProgressLine) -> None:
        self._plan = plan
        self._line = line
        self._stack = ExitStack()
        self._supervisor: Supervisor | None = None
        self.model = Path(plan.model)
        config = read_model_config(self.model)
        self.max_positions = config.max_positions
        self.vocab_size = config.vocab_size

    def close(self) -> None:
        """End both daemons, if they run."""
        self._stack.close()
        self._supervisor = None

    def _started(self, tokenizer: TextTokenizer) -> Supervisor:
        if self._supervisor is None:
            plan = msgspec.structs.replace(self._plan, golden=golden_ids(tokenizer))
            supervisor = Supervisor(plan, on_loading=self._on_loading)
            self._supervisor = self._stack.enter_context(supervisor)
        return self._supervisor

    def get_ready(self, tokenizer: TextTokenizer, interrupts: Interrupts) -> bool:
        """Load both daemons; False when a signal came first. Raises the target's own error."""
        supervisor = self._started(tokenizer)
        with supervisor.watching(interrupts.fd, interrupts.on_ready):
            return supervisor.wait_ready(lambda: interrupts.number is not None)

    def run(
        self, submit: Submit, tokenizer: TextTokenizer, receiver: Receiver, interrupts: Interrupts
    ) -> float:
        """Run the request to its end; return the seconds that loading took.

        A signal, or a reader of standard output that went away, cancels the request.
        """

        def stopping() -> bool:
            return interrupts.number is not None or receiver.closed

        supervisor = self._started(tokenizer)
        with supervisor.watching(interrupts.fd, interrupts.on_ready):
            if supervisor.wait_ready(stopping):
                supervisor.submit(submit, receiver, find_stops(submit, tokenizer))
                supervisor.run_until(lambda: receiver.ended or stopping())
                if not receiver.ended:
                    supervisor.cancel(Cancel(request=submit.request))
                    supervisor.run_until(lambda: receiver.ended)
        if not receiver.ended:
            receiver(_never_begun(submit))
        if isinstance(receiver.error, InternalError) and supervisor.log("target"):
            self._line.print(f"the end of the target daemon's log:\n{supervisor.log('target')}")
        return supervisor.describe().load_seconds

    def _on_loading(self, step: Loading) -> None:
        if not step.total and step.detail.startswith(WARNING):
            self._line.print(f"{step.role} daemon: {step.detail}")
        count = f" {step.done} of {step.total}" if step.total else ""
        self._line.say(f"{step.role} daemon: {step.stage}{count}")


def _never_begun(submit: Submit) -> Finished:
    """The end of a request that was cancelled while the daemons were loading."""
    figures = statistics(
        Tally(),
        Clock(0.0),
        tokens=(len(unpack_tokens(submit.prompt)), 0),
        mode=("autoregressive", "cancelled while the daemons were loading"),
        transport="",
        target=("no", ""),
        stale=0,
    )
    return Finished(request=submit.request, finish_reason="cancelled", statistics=figures)
