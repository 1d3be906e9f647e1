"""Daemons that run as services of their own: real processes that no supervisor has started."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from support.waiting import until

from protocol.config import DRAFT_SOCKET, TARGET_SOCKET, DraftConfig, TargetConfig, write_config
from protocol.run_directory import remove_if_orphaned

SOCKETS = {"target": TARGET_SOCKET, "draft": DRAFT_SOCKET}
MODEL_DAEMON = Path(__file__).parent / "model_daemon.py"


class Service:
    """One daemon, started and started again as a service manager would."""

    def __init__(self, role, run_dir, log, command, faults=""):
        self.role, self.run_dir, self.log = role, Path(run_dir), Path(log)
        self._command = command
        self._faults = faults
        self.process = None

    @classmethod
    def of_models(cls, role, config, notes, faults=""):
        """One of the daemons of `support.model_daemon`, which load in a moment."""
        path = Path(notes) / f"{role}.json"
        write_config(config, path)
        command = (sys.executable, "-I", str(MODEL_DAEMON), role, str(path))
        return cls(role, config.run_dir, Path(notes) / f"{role}.log", command, faults)

    @property
    def socket(self):
        return self.run_dir / SOCKETS[self.role]

    @property
    def pid(self):
        return self.process.pid

    def start(self, faults=None):
        self._faults = self._faults if faults is None else faults
        environment = os.environ | {"DFLASH_TEST_FAULTS": self._faults}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        return self

    def until_ready(self):
        def ready():
            assert self.process.poll() is None, self.said()
            last = self.said().rstrip().rpartition("\n")[2]
            return last.endswith("ready")

        until(ready, seconds=60.0, what=f"the {self.role} being ready")
        return self

    def kill(self, number=signal.SIGKILL):
        """End it; returns its exit code, negative for a signal."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        return self.process.wait(timeout=60)

    def said(self):
        return self.log.read_text()

    def end(self):
        """Ends it in good order; what a killed one left is removed as the next start would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill(signal.SIGTERM)
        remove_if_orphaned(self.run_dir)


def target_config(run_dir, **changes):
    facts = {"taps": (0, 2, 3), "block_size": 6, "mask_token_id": 3, "threads": 1}
    settings = {"model": "model", "run_dir": str(run_dir), "life": 0, "service": True}
    return TargetConfig(**(settings | facts | changes))


def draft_config(run_dir, **changes):
    settings = {"draft": "model", "run_dir": str(run_dir), "life": 0, "service": True}
    return DraftConfig(**(settings | {"threads": 1} | changes))


@contextmanager
def model_services(folder, *, faults="", roles=("target", "draft")):
    """Both model daemons, serving; they are ended at the end."""
    made = {"target": target_config, "draft": draft_config}
    with ExitStack() as stack:
        notes = stack.enter_context(TemporaryDirectory())
        services = []
        for role in roles:
            config = made[role](Path(folder) / f"{role}.d")
            services.append(Service.of_models(role, config, notes, faults))
            stack.callback(services[-1].end)
            services[-1].start()
        yield [service.until_ready() for service in services]
