"""No core dumps: memory holds prompts, texts and keys, and a core file would keep them."""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

FILTER: Final = Path("/proc/self/coredump_filter")


def refuse_core_dumps() -> None:
    """Have the kernel write no core of this process and of those that it starts.

    A collector that takes cores through a pipe gets them whatever the limit says; the filter leaves
    all memory out of those. (PR_SET_DUMPABLE would keep debuggers and CUDA IPC out as well.)
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    with suppress(OSError):  # a sandbox without the file; the limit remains
        FILTER.write_text("0", encoding="ascii")
