"""A command becomes a daemon: same process, so that who started it has the daemon itself.

The config goes through memory that the new program inherits, and is left on no disk.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from launch.events import Role
from launch.idle_threads import spin_settings
from launch.starter import MODULES
from protocol.config import FrozenConfig
from protocol.errors import Unavailable


def become(role: Role, config: FrozenConfig, environment: Mapping[str, str]) -> NoReturn:
    """Run the daemon in place of this program; raises Unavailable when the system refuses."""
    fd = os.memfd_create(f"dflashd-{role}-config", 0)  # not closed by exec
    os.write(fd, msgspec.json.encode(config))
    command = (sys.executable, "-I", "-m", MODULES[role], f"/proc/self/fd/{fd}")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, {**environment, **spin_settings(environment)})  # noqa: S606 -- our own interpreter and modules
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"cannot start {command[0]}: {error.strerror}") from error
