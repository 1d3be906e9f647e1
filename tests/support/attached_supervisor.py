"""A supervisor attached to services, decoding for ever: ``attached_supervisor.py TARGET DRAFT``.

Prints its pid's state of things once both slots are taken, and then waits to be killed. One that
is refused says why, and ends with the error's exit code.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.supervised import Client, attach_plan

from launch.supervisor import Supervisor
from protocol.errors import DaemonError


def main(target, draft):
    try:
        with Supervisor(attach_plan(target, draft)) as supervisor:
            supervisor.wait_ready()
            clients = [Client(supervisor, n).submit([1, 2, 3], 450) for n in (1, 2)]
            supervisor.run_until(lambda: all(client.pieces for client in clients))
            print("driving", flush=True)
            number = 2
            while True:
                number += 1
                again = Client(supervisor, number).submit([1, 2, 3], 450)
                supervisor.run_until(lambda again=again: bool(again.pieces))
    except DaemonError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
