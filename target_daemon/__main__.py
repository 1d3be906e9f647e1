"""``python -I -m target_daemon CONFIG.json``, or ``--facts``."""

import json
import sys

from protocol.daemon_main import run_target
from target_daemon.daemon import load_daemon
from target_daemon.facts import gather


def main(arguments: list[str]) -> int:
    """Run the daemon to its end, or print facts; returns the exit code."""
    if arguments == ["--facts"]:
        sys.stdout.write(json.dumps(gather()) + "\n")
        return 0
    return run_target(arguments, load_daemon)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
