"""ZeroMQ sockets of links over a network, with every option that both ends set, and CURVE.

CURVE alone encrypts, and admits every key: who may connect is decided by `protocol.gate`, whose
handler must be bound in the same context before a secured socket is.
"""

import os
from typing import Final

import zmq

from protocol.addresses import TcpAddress
from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import ConfigError, ProtocolError
from protocol.keys import KeyPair
from protocol.link_settings import (
    CONNECT_MILLISECONDS,
    HEARTBEAT_MILLISECONDS,
    HEARTBEAT_TIMEOUT_MILLISECONDS,
    HIGH_WATER_MARK,
    NETWORK_HANDSHAKE_MILLISECONDS,
    RECONNECT_MAX_MILLISECONDS,
    RECONNECT_MILLISECONDS,
)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

ZAP_DOMAIN: Final = b"dflash"
_BOTH: Final[dict[int, int]] = {
    zmq.LINGER: 0,
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MILLISECONDS,
}
_DAEMON: Final[dict[int, int]] = {
    zmq.ROUTER_MANDATORY: 1,
    # Who reconnects keeps its random 128-bit name; only the admitted can connect at all.
    zmq.ROUTER_HANDOVER: 1,
}
_NETWORK: Final[dict[int, int]] = {
    zmq.HANDSHAKE_IVL: NETWORK_HANDSHAKE_MILLISECONDS,
    zmq.CONNECT_TIMEOUT: CONNECT_MILLISECONDS,
    zmq.TCP_KEEPALIVE: 1,
}
_PEER: Final[dict[int, int]] = {
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: RECONNECT_MILLISECONDS,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MILLISECONDS,
}


def listen_tcp(context: Context, address: TcpAddress, keys: KeyPair | None) -> Socket:
    """A bound ROUTER; ConfigError without keys where another host could connect."""
    if keys is None and not address.is_loopback:
        raise ConfigError(
            f"{address} can be reached from other hosts: keys are needed to listen there "
            "(or listen at tcp://127.0.0.1:PORT)"
        )
    socket = context.socket(zmq.ROUTER)
    _set(socket, _BOTH | _DAEMON | _NETWORK | {zmq.IPV6: int(address.is_ipv6)})
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.zap_domain = ZAP_DOMAIN
    _bind(socket, str(address))
    return socket


def dealer_tcp(
    context: Context, address: TcpAddress, keys: KeyPair | None, server: bytes
) -> Socket:
    """A DEALER for `connect_tcp`; `server` is the public key that the daemon must prove to have."""
    if keys is None and not address.is_loopback:
        raise ConfigError(f"{address} is another host: keys are needed to connect to it")
    socket = context.socket(zmq.DEALER)
    _set(socket, _BOTH | _PEER | _NETWORK | {zmq.IPV6: int(address.is_ipv6)})
    if keys is not None:
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
        socket.curve_serverkey = server
    return socket


def connect_tcp(socket: Socket, address: TcpAddress) -> None:
    """Connect what `dealer_tcp` made, once its monitor listens."""
    _connect(socket, str(address))


def _connect(socket: Socket, address: str) -> None:
    # One name for all connections of a link: a reconnection needs no second Hello.
    socket.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(16))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ProtocolError(f"cannot connect to {address}: {error.strerror}") from error


def new_curve_keys() -> tuple[bytes, bytes]:
    """A new public and secret key, in Z85; ConfigError where ZeroMQ was built without CURVE."""
    try:
        return zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise ConfigError(f"this ZeroMQ makes no keys: {error.strerror}") from error


def _bind(socket: Socket, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error


def _set(socket: Socket, options: dict[int, int]) -> None:
    for option, value in options.items():
        socket.setsockopt(option, value)
