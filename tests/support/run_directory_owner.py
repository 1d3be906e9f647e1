"""A process that owns the run directory named by its argument until its parent is gone."""

import os
import sys
from pathlib import Path

from protocol.run_directory import RunDirectory

if __name__ == "__main__":
    with RunDirectory(Path(sys.argv[1])):
        os.write(1, b'{"event":"ready"}\n')
        while os.read(0, 100):
            pass
