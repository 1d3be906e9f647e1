"""Where a daemon listens for other hosts, and the list of keys that it admits there."""

import os
from dataclasses import dataclass

from protocol.addresses import TcpAddress, parse_tcp
from protocol.config import DraftConfig, TargetConfig
from protocol.keyring import Keyring, keyring_for
from protocol.keys import Role
from protocol.state import ROLES, LinkName


@dataclass(frozen=True)
class Network:
    """Where a daemon listens for other hosts, and whom it admits: nobody but those of `keyring`.

    Without keys it listens on the loopback interface only, and admits every process there.
    """

    address: TcpAddress
    keyring: Keyring | None = None

    def admitted(self, link: LinkName) -> dict[bytes, str]:
        """Role by public key, of those who have something to say on `link`."""
        known = {} if self.keyring is None else self.keyring.allowed
        return {key: role for key, role in known.items() if role in ROLES[link]}


def network(config: TargetConfig | DraftConfig, link: LinkName) -> Network:
    """Where `config` says to listen; keys are read where it names them, or where other hosts reach.

    Raises ConfigError or PermissionRefused.
    """
    return Network(parse_tcp(config.listen, listens=True), keyring(config, link))


def keyring(
    config: TargetConfig | DraftConfig, role: Role, *, connects: str = ""
) -> Keyring | None:
    """The keys of a daemon; None where it uses none: no folder is named, and no other host met.

    `connects` is an address that it connects to.
    """
    return keyring_for(role, config.keys, (config.listen, connects), os.environ)
