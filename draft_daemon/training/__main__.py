"""``python -I -m draft_daemon.training CONFIG.json``: run by `dflashd train`, or by torchrun."""

import sys

from draft_daemon.training.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
