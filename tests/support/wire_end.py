"""A network namespace with one interface, whose packets another process carries.

``unshare -n python wire_end.py ADDRESS SOCKET_FD``: the descriptor of a TUN device goes out over
the socket, and the namespace lasts until the other end of it is closed.
"""

import fcntl
import socket
import struct
import subprocess
import sys
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def main(address, fd):
    with TUN.open("r+b", buffering=0) as device, socket.socket(fileno=int(fd)) as link:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
        for words in (
            ("addr", "add", f"{address}/24", "dev", "wire"),
            ("link", "set", "wire", "up", "mtu", "1400"),
            ("link", "set", "lo", "up"),
        ):
            subprocess.run(("ip", *words), check=True)
        socket.send_fds(link, [b"up"], [device.fileno()])
        link.recv(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
