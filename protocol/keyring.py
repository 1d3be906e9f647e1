"""The keys of one process: its own pair, and the public keys of whom it talks to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from protocol.errors import ConfigError
from protocol.keys import KeyPair, Role, read_allowed, read_pair


@dataclass(frozen=True)
class Keyring:
    """The pair of this process, and the role of each public key that it knows."""

    own: KeyPair
    allowed: Mapping[bytes, Role] = field(default_factory=lambda: MappingProxyType({}))

    def server(self, role: Role) -> bytes:
        """The key that the daemon to connect to must prove to have."""
        keys = [key for key, owner in self.allowed.items() if owner == role]
        if len(keys) != 1:
            raise ConfigError(
                f"{len(keys)} public keys of a {role} are known; one is needed to connect to it"
            )
        return keys[0]


def read_keyring(role: Role, folder: Path | None, environment: Mapping[str, str]) -> Keyring:
    """As `protocol.keys` finds them; ConfigError or PermissionRefused says what is wrong."""
    return Keyring(
        read_pair(role, folder, environment), MappingProxyType(read_allowed(folder, environment))
    )
