"""The trials of `support.trials` over daemons that are services, and a manager that tends them."""

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from support.services import Service, draft_config, target_config
from support.supervised import DEADLINES, Client, attach_plan
from support.trials import PROMPTS, RESTARTS, TOKENS, Trials, combinations, command_for, sent

from launch.supervisor import Supervisor
from protocol.config import write_config

WATCHDOG_SECONDS = 1.0  # at first; a start that takes longer is waited for twice as long, and so on


class Manager:
    """Starts a service that has ended again, and kills one that shows no life, as systemd does."""

    def __init__(self, services):
        self._services = services
        self._lively = dict.fromkeys(services, time.monotonic())
        self._patience = dict.fromkeys(services, WATCHDOG_SECONDS)

    def tend(self, status):
        for service in self._services:
            now = time.monotonic()
            if service.process.poll() is not None:
                service.start()
                self._lively[service] = now
            elif getattr(status, service.role).stage in ("ready", "pairing", "failed"):
                self._lively[service] = now
                self._patience[service] = WATCHDOG_SECONDS
            elif now - self._lively[service] > self._patience[service]:
                sent(service.pid, signal.SIGKILL)
                self._patience[service] *= 2


class Tended(Supervisor):
    """A supervisor in whose loop the manager has its turn."""

    manager = None

    def step(self, timeout=None):
        if self.manager is not None:
            self.manager.tend(self.describe())
        super().step(0.05 if timeout is None else min(0.05, timeout))


def run_attached_trials(folder: Path, runtime_dir: Path, count: int, **deadlines) -> Trials:
    """`count` trials over one attached supervisor and the model daemons."""
    made = {"target": target_config, "draft": draft_config}
    times = {name: getattr(DEADLINES, name) for name in DEADLINES.__struct_fields__} | deadlines
    with ExitStack() as stack:
        notes = Path(stack.enter_context(TemporaryDirectory()))
        services = []
        for role, config_of in made.items():
            run_dir, path = runtime_dir / f"{role}.d", notes / f"{role}.json"
            write_config(config_of(run_dir), path)
            command = command_for("model")(role, path)
            services.append(Service(role, run_dir, notes / f"{role}.log", command))
            stack.callback(services[-1].end)
            services[-1].start()
        dirs = [service.run_dir for service in services]
        plan = attach_plan(*dirs, restarts=RESTARTS, deadlines=type(DEADLINES)(**times))
        supervisor = stack.enter_context(Tended(plan))
        supervisor.wait_ready()
        supervisor.manager = Manager(services)
        expected = {}
        for number, prompt in enumerate(PROMPTS):
            client = Client(supervisor, 10_000_000 + number).submit(prompt, TOKENS).finish()
            expected[tuple(prompt)] = client.tokens
        source, text = random.Random(count), (PROMPTS, expected, TOKENS)
        trials = Trials(supervisor, folder / "trial", *text, source, combinations())
        trials.run(count)
        trials.check(supervisor.describe())
    return trials
