"""The keys of one process: its own pair, and the public keys of whom it talks to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from protocol.addresses import is_tcp, parse_tcp
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


def keyring_for(
    role: Role, folder: str, places: Iterable[str], environment: Mapping[str, str]
) -> Keyring | None:
    """The keys of who listens at, or connects to, these places; None where none are needed.

    They are where a `folder` is named, and where a place is on a network beyond this host. Raises
    ConfigError or PermissionRefused.
    """
    far = any(is_tcp(place) and not parse_tcp(place, listens=True).is_loopback for place in places)
    if not folder and not far:
        return None
    return read_keyring(role, Path(folder) if folder else None, environment)
