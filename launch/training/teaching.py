"""The second stage: a child, or several that meet in a file, trains and validates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from launch.process import daemon_command
from launch.training.watch import Watch
from launch.training.worker import Worker
from protocol.errors import DaemonDied
from protocol.training import MEETING_VARIABLE, Report, Trained, TrainLine, Validated

MODULE: Final = "draft_daemon.training"
STEPPING: Final = "train"  # the stage whose bar stays while others come and go
TICK_SECONDS: Final = 0.5
LOOPBACK: Final = "lo"
# Where the libraries listen by which ranks add up gradients: no other host is let in.
INTERFACES: Final = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}

Said: TypeAlias = Report | Validated | Trained  # `Worker` raises a Problem


def command(config: Path) -> tuple[str, ...]:
    """The command line of our own child, and of each rank."""
    return daemon_command(MODULE, config)


def places(ranks: int, meeting: Path) -> list[Mapping[str, str]]:
    """What the environment of each rank differs in; they meet at the file `meeting`, not by TCP.

    PyTorch's own launcher would open ports to everybody, and unpickle what it reads from them.
    """
    if ranks == 1:
        return [{"WORLD_SIZE": "1"}]
    shared = {"WORLD_SIZE": str(ranks), MEETING_VARIABLE: str(meeting), **INTERFACES}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def teach(
    line: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    watch: Watch,
    accepted: Callable[[], None],
) -> Trained:
    """Run a child in each environment, to the end of the first, which alone reports.

    `accepted` is called once, when it has taken the data. Raises what is wrong with any of them,
    or Stopped.
    """
    is_loading = True
    trained: Trained | None = None
    shown = ""
    with _team(line, environments, watch) as (first, *others):
        while not first.has_ended:
            watch.check()
            for said in _said(first, others, watch):
                if is_loading and not _loads(said):
                    is_loading = False
                    accepted()
                match said:
                    case Report():
                        if shown not in (said.stage, STEPPING):
                            watch.stages.end(shown)
                        shown = said.stage
                        watch.stages.report(said)
                    case Validated():
                        watch.stages.end("validate")
                        watch.stages.note(validated_line(said))
                    case Trained():
                        trained = said
        first.check()
    if trained is None:
        raise DaemonDied("the training process ended without a word about its result")
    return trained


@contextmanager
def _team(
    line: Sequence[str], environments: Sequence[Mapping[str, str]], watch: Watch
) -> Iterator[list[Worker[Said]]]:
    with ExitStack() as stack:
        team: list[Worker[Said]] = []
        for each in environments:
            worker: Worker[Said] = Worker(
                "training",
                line,
                TrainLine,
                deadlines=watch.deadlines,
                environment=each,
                reports=not team,
                inherited=watch.held,
            )
            team.append(stack.enter_context(worker))
        try:
            yield team
        finally:
            for worker in team:  # all before the first is waited for: they end at the same step
                worker.terminate()


def _loads(said: Said) -> bool:
    """Whether its data may still be refused."""
    return isinstance(said, Report) and said.stage == "load" and said.done < said.total


def _said(first: Worker[Said], others: Sequence[Worker[Said]], watch: Watch) -> list[Said]:
    """What the first says, waiting for it or for an end of the others."""
    for other in others:  # before the first, which only sees that a connection is lost
        other.poll(0.0)
    ends = (fd for other in others for fd in other.fds)
    return first.poll(TICK_SECONDS, watch.interrupts.fd, *ends)


def validated_line(said: Validated) -> str:
    """One validation, for a person."""
    tasks = ", ".join(f"{task} {length:.2f}" for task, length in sorted(said.by_task.items()))
    best = " (best so far)" if said.best else ""
    return f"step {said.step}: acceptance length {said.mean_acceptance_length:.3f}{best}: {tasks}"
