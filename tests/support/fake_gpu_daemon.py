"""Our own daemons with a fake GPU beneath: ``fake_gpu_daemon.py ROLE CONFIG``.

The transports, handles, events and leases are the real ones, over the fake that enforces CUDA's
rules; a violation ends the daemon. Tensors are the CPU's.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # isolated: nothing else adds it

import torch
from support.fake_cuda import TWO, FakeCuda, Violation

from draft_daemon import daemon as draft
from protocol import gpu
from protocol.daemon_main import run_draft, run_target
from protocol.transports import devices
from protocol.transports.cuda_host import CudaHostMemory
from protocol.transports.cuda_ipc import CudaIpc
from target_daemon import daemon as target


def command(role, config):
    """How a supervisor starts it."""
    return (sys.executable, "-I", __file__, role, str(config))


class Strict(FakeCuda):
    """What CUDA leaves undefined ends the process: nothing may catch it."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return _guarded(found) if callable(found) and not name.startswith("_") else found


def _guarded(call):
    def guarded(*arguments, **options):
        try:
            return call(*arguments, **options)
        except Violation as error:
            sys.stderr.write(f"violation: {error}\n")
            sys.stderr.flush()
            os._exit(99)

    return guarded


def main(role, *arguments):
    fake = Strict(devices_seen=TWO)
    for kind in (CudaIpc, CudaHostMemory):
        kind.runtime = staticmethod(lambda: fake)

    def open_device(wanted):
        if not gpu.is_gpu(wanted):
            return devices.HOST
        info = devices.find_device(fake, wanted)
        fake.set_device(info.index)
        facts = devices.gather(fake, info)
        return devices.Device(torch.device("cpu"), f"cuda:{info.uuid}", facts, fake.free_bytes())

    target.open_device = draft.open_device = open_device
    if role == "target":
        return run_target(arguments, target.load_daemon)
    return run_draft(arguments, draft.load_daemon)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
