"""Holds the right to drive until it is killed: ``lock_holder.py RUN_DIR LIFE``."""

import sys
from pathlib import Path

from protocol.driving import DriverLock

if __name__ == "__main__":
    lock = DriverLock(Path(sys.argv[1]))
    lock.take(int(sys.argv[2]))
    print("held", flush=True)
    sys.stdin.read()
    lock.release()
