"""A supervisor over the model daemons, decoding for ever: ``running_supervisor.py TARGET DRAFT``.

Prints both daemons' pids once a request runs, and then waits to be killed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.supervised import Client, model_command, plan_for

from launch.supervisor import Supervisor


def main(target, draft):
    plan = plan_for(Path(target), Path(draft))
    with Supervisor(plan, command=model_command) as supervisor:
        supervisor.wait_ready()
        number, said = 0, False
        while True:
            number += 1
            client = Client(supervisor, number).submit([1, 2, 3], 400)
            supervisor.run_until(lambda client=client: bool(client.pieces))
            if not said:
                status = supervisor.describe()
                print(status.target.pid, status.draft.pid, flush=True)
                said = True
            client.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
