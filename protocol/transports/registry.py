"""Transports by the name that placement, status and messages use."""

from typing import Final

from protocol import plugins
from protocol.errors import TransportRefused
from protocol.transports.base import FeatureTransport

PACKAGE: Final = "protocol.transports"


def find_transport(name: str) -> type[FeatureTransport]:
    """The transport called `name`; TransportRefused, with the known names, for any other."""
    known: dict[str, type[FeatureTransport]] = {}
    for module in plugins.names(PACKAGE, "TRANSPORT"):
        kind: type[FeatureTransport] = plugins.load(PACKAGE, module, "TRANSPORT", FeatureTransport)
        known[kind.name] = kind
    if name not in known:
        raise TransportRefused(f"transport {name}: unknown here; known: {', '.join(sorted(known))}")
    return known[name]
