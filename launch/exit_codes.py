"""Every exit status of `dflashd`; the README's table is checked against this one."""

import signal
from typing import Final

OK: Final = 0
CANCELLED: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 69
SOFTWARE: Final = 70
TEMPORARY: Final = 75
PERMISSION: Final = 77
CONFIG: Final = 78
HUNG_UP: Final = 129
INTERRUPTED: Final = 130
CLOSED_OUTPUT: Final = 141
TERMINATED: Final = 143

MEANING: Final[dict[int, str]] = {
    OK: "success",
    CANCELLED: "the request was ended by `dflashd cancel`; the text so far was written",
    USAGE: "an argument or the prompt is unusable: empty, too long, out of range, unreadable",
    UNAVAILABLE: "a registry, server or file that is needed cannot be reached now",
    SOFTWARE: "a defect, or a daemon that died",
    TEMPORARY: "try again later: not enough memory, a full disk, not ready, too busy, too slow",
    PERMISSION: "a file, socket or peer belongs to somebody else",
    CONFIG: "the model, the draft or the settings cannot be used as they are",
    HUNG_UP: "ended by a hang-up (128 + SIGHUP), like 130",
    INTERRUPTED: "ended by Ctrl-C (128 + SIGINT); the text so far was written",
    CLOSED_OUTPUT: "the reader of standard output went away (128 + SIGPIPE)",
    TERMINATED: "ended by a termination signal (128 + SIGTERM), like 130",
}

SIGNALS: Final[dict[int, int]] = {
    signal.SIGHUP: HUNG_UP,
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
}
