"""Two hosts with a wire between them: network namespaces, and packets that this process carries.

The wire delays every packet, loses some, and can be cut and mended. It is a thread here, since not
every kernel has netem.
"""

import heapq
import itertools
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

END = Path(__file__).with_name("wire_end.py")
MTU = 65536


def obstacle():
    """Why there can be no such hosts here; empty where there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(
        ("unshare", "-n", "ip", "tuntap", "add", "dev", "wire", "mode", "tun"),
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"network namespaces are refused: {tried.stderr!r}"


class Host:
    """One namespace; `prefix` runs a command in it."""

    def __init__(self, address):
        self.address = address
        self.tun = -1

    def __enter__(self):
        ours, theirs = socket.socketpair()
        self._link = ours
        with theirs:
            self._process = subprocess.Popen(
                ("unshare", "-n", sys.executable, "-I", END, self.address, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(20.0)
        _, (self.tun,), _, _ = socket.recv_fds(ours, 16, 1)
        os.set_blocking(self.tun, False)
        return self

    def __exit__(self, *_):
        os.close(self.tun)
        self._link.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    @property
    def prefix(self):
        return ("nsenter", "-t", str(self._process.pid), "-n")


class Wire:
    """Carries packets between two hosts: `delay` seconds each way, losing `loss` of them."""

    def __init__(self, one, other, *, delay, loss, seed=0):
        self._across = {one.tun: other.tun, other.tun: one.tun}
        self._delay, self._loss = delay, loss
        self._random = random.Random(seed)
        self._cut, self._end = threading.Event(), threading.Event()
        self.carried = self.lost = 0
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def cut(self):
        self._cut.set()

    def mend(self):
        self._cut.clear()

    def _carry(self):
        waiting, order = [], itertools.count()
        while not self._end.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, to, packet = heapq.heappop(waiting)
                if not self._cut.is_set():
                    self._write(to, packet)
            left = min(0.02, waiting[0][0] - now) if waiting else 0.02
            for fd in select.select(list(self._across), [], [], max(0.0, left))[0]:
                packet = os.read(fd, MTU)
                if self._cut.is_set() or self._random.random() < self._loss:
                    self.lost += 1
                else:
                    due = time.monotonic() + self._delay
                    heapq.heappush(waiting, (due, next(order), self._across[fd], packet))

    def _write(self, to, packet):
        try:
            os.write(to, packet)
            self.carried += 1
        except OSError:  # as a full queue or an interface that is down would lose it
            self.lost += 1
