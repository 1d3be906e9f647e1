"""A real supervisor that starts two daemons, says their pids, and waits to be killed."""

import os
import select
import sys
from pathlib import Path

from launch.process import Child
from protocol.config import Deadlines, DraftConfig, TargetConfig, write_config
from protocol.run_directory import RunDirectory
from protocol.status import Ready

DAEMON = str(Path(__file__).parent / "counting_daemon.py")


def main(target_problem, draft_problem):
    with RunDirectory() as run:
        configs = {
            "target.json": TargetConfig(model=target_problem, run_dir=str(run.path), life=1),
            "draft.json": DraftConfig(draft=draft_problem, run_dir=str(run.path), life=1),
        }
        children = []
        for name, config in configs.items():
            write_config(config, run.path / name)
            command = (sys.executable, "-I", DAEMON, str(run.path / name))
            children.append(Child(command, deadlines=Deadlines()))
            children[-1].start()
        for child in children:
            wait_until_ready(child)
        print(run.path, *(child.pid for child in children), flush=True)
        while os.read(0, 100):
            pass
        for child in children:
            child.close()


def wait_until_ready(child):
    events = []
    while Ready() not in events:
        select.select([child.fds[0]], [], [])
        events += child.on_readable(child.fds[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
