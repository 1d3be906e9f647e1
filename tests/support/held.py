"""What this process holds of the kernel: mappings of our memory, and descriptors."""

import os
from pathlib import Path


def mappings():
    return sum("memfd:dflash" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors():
    return len(os.listdir("/proc/self/fd"))
