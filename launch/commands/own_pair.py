"""A pair of daemons for one request: started for it, and gone when it has its end."""

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
from protocol.codec import unpack_tokens
from protocol.errors import InternalError
from protocol.messages import Cancel, Finished, Submit


class OwnPair:
    """What `plan` says; nothing is started before `run`. Raises where the model is unusable."""

    def __init__(self, plan: Plan, line: ProgressLine) -> None:
        self._plan = plan
        self._line = line
        self.model = Path(plan.model)
        config = read_model_config(self.model)
        self.max_positions = config.max_positions
        self.vocab_size = config.vocab_size

    def run(
        self, submit: Submit, tokenizer: TextTokenizer, receiver: Receiver, interrupts: Interrupts
    ) -> float:
        """Run the request to its end; return the seconds that loading took.

        A signal, or a reader of standard output that went away, cancels the request; both daemons
        are gone when this returns.
        """

        def stopping() -> bool:
            return interrupts.number is not None or receiver.closed

        plan = msgspec.structs.replace(self._plan, golden=golden_ids(tokenizer))
        with Supervisor(plan, on_loading=self._on_loading) as supervisor:
            supervisor.watch(interrupts.fd, interrupts.on_ready)
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
            supervisor.unwatch(interrupts.fd)
            return supervisor.describe().load_seconds

    def _on_loading(self, step: Loading) -> None:
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
