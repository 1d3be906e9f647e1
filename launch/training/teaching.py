"""The second stage: a child, or several under `torch.distributed.run`, trains and validates."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from launch.process import daemon_command
from launch.training.watch import Watch
from launch.training.worker import Worker
from protocol.errors import DaemonDied
from protocol.lifeline import PARENT_VARIABLE
from protocol.training import Report, Trained, TrainLine, Validated

MODULE: Final = "draft_daemon.training"
STEPPING: Final = "train"  # the stage whose bar stays while others come and go
TICK_SECONDS: Final = 0.5


def command(config: Path, ranks: int) -> tuple[str, ...]:
    """The command line of our own child; of several ranks that of PyTorch's launcher."""
    one = daemon_command(MODULE, config)
    if ranks == 1:
        return one
    # --no-python: each rank is started isolated, as a child of ours alone would be.
    launcher = (sys.executable, "-I", "-m", "torch.distributed.run", "--standalone")
    return (*launcher, f"--nproc-per-node={ranks}", "--no-python", *one)


def environment(ranks: int) -> Mapping[str, str]:
    """What the child's differs in: behind the launcher its parent is another than this process."""
    return {} if ranks == 1 else {PARENT_VARIABLE: ""}


def teach(line: Sequence[str], ranks: int, watch: Watch) -> Trained:
    """Run the child to its end; raises what is wrong with it, or Stopped."""
    trained: Trained | None = None
    shown = ""
    worker: Worker[Report | Validated | Trained] = Worker(
        "training", line, TrainLine, deadlines=watch.deadlines, environment=environment(ranks)
    )
    with worker:
        while not worker.has_ended:
            watch.check()
            for said in worker.poll(TICK_SECONDS, watch.interrupts.fd):
                match said:
                    case Report():
                        if shown not in (said.stage, STEPPING):
                            watch.stages.end(shown)
                        shown = said.stage
                        watch.stages.update(said.stage, said.done, said.total, said.detail)
                    case Validated():
                        watch.stages.end("validate")
                        watch.stages.note(validated_line(said))
                    case Trained():
                        trained = said
        worker.check()
    if trained is None:
        raise DaemonDied("the training process ended without a word about its result")
    return trained


def validated_line(said: Validated) -> str:
    """One validation, for a person."""
    tasks = ", ".join(f"{task} {length:.2f}" for task, length in sorted(said.by_task.items()))
    best = " (best so far)" if said.best else ""
    return f"step {said.step}: acceptance length {said.mean_acceptance_length:.3f}{best}: {tasks}"
