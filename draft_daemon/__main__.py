"""``python -I -m draft_daemon CONFIG.json``: run by the supervisor."""

import sys

from draft_daemon.daemon import load_daemon
from protocol.daemon_main import run_draft

if __name__ == "__main__":
    sys.exit(run_draft(sys.argv[1:], load_daemon))
