"""The real runtime over a stand-in for cupy: which calls it makes, and what it makes of answers.

It cannot run here. Where cupy itself is installed, the names that are used are looked up in it.
"""

import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from protocol.transports import cuda_runtime
from protocol.transports.cuda_runtime import CudaError

SOURCE = Path(cuda_runtime.__file__).with_name("cupy_runtime.py")
UUID = bytes(range(16))


class CUDARuntimeError(RuntimeError):
    pass


class StandIn(types.ModuleType):
    """``cupy.cuda.runtime``: notes every call; answers from `answers`, raises what is an error."""

    eventDisableTiming, eventInterprocess, memcpyDefault = 2, 4, 4  # noqa: N815 -- cupy's names

    def __init__(self):
        super().__init__("cupy.cuda.runtime")
        self.CUDARuntimeError = CUDARuntimeError
        self.calls = []
        self.answers = {
            "getDeviceCount": 1,
            "getDeviceProperties": {
                "name": b"Some GPU",
                "uuid": UUID,
                "totalGlobalMem": 1 << 30,
                "major": 9,
                "minor": 0,
            },
            "deviceGetAttribute": 1,
            "driverGetVersion": 13010,
            "memGetInfo": (5, 9),
            "deviceCanAccessPeer": 1,
            "malloc": 4096,
            "ipcGetMemHandle": b"h" * 64,
            "ipcOpenMemHandle": 8192,
            "eventCreateWithFlags": 77,
            "ipcGetEventHandle": b"e" * 64,
            "ipcOpenEventHandle": 78,
            "eventQuery": 0,
            "getDevice": 0,
        }

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def cuda(monkeypatch):
    runtime = StandIn()
    package, module = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    module.runtime, package.cuda, package.uint8 = runtime, module, "uint8"
    module.UnownedMemory = lambda *arguments: arguments
    module.MemoryPointer = lambda memory, offset: (memory, offset)
    package.ndarray = lambda shape, dtype, pointer: torch.zeros(shape, dtype=torch.uint8)
    for name, found in (("cupy", package), ("cupy.cuda", module), (runtime.__name__, runtime)):
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.delitem(sys.modules, "protocol.transports.cupy_runtime", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    stream = types.SimpleNamespace(cuda_stream=55)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    yield runtime
    sys.modules.pop("protocol.transports.cupy_runtime", None)


@pytest.fixture
def runtime(cuda):
    return cuda_runtime.load_runtime()


def test_a_gpu_is_named_by_the_uuid_that_every_process_sees(runtime):
    (device,) = runtime.devices()
    assert device.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (device.name, device.mig, device.ipc_events) == ("Some GPU", False, True)
    assert (device.capability, runtime.driver_version()) == ((9, 0), "13.1")


def test_a_mig_instance_is_known_by_its_name(runtime, cuda):
    cuda.answers["getDeviceProperties"]["name"] = b"NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert runtime.devices()[0].mig
    assert runtime.devices()[0].uuid.startswith("MIG-")


def test_memory_is_allocated_by_cuda_itself_and_zeroed(runtime, cuda):
    assert runtime.malloc(64) == 4096
    assert cuda.calls == [("malloc", 64), ("memset", 4096, 0, 64)]


def test_every_other_call_is_cudas_own_with_torchs_stream(runtime, cuda):
    runtime.set_device(0)
    assert runtime.free_bytes() == 5
    assert runtime.can_access_peer(0, 1)
    assert runtime.export_memory(4096) == b"h" * 64
    assert runtime.open_memory(b"h" * 64) == 8192
    runtime.close_memory(8192)
    runtime.free(4096)
    assert runtime.create_event(shared=True) == runtime.create_event(shared=False) == 77
    assert runtime.export_event(77) == b"e" * 64
    assert runtime.open_event(b"e" * 64) == 78
    runtime.record_event(77)
    runtime.copy_async(1, 2, 3)
    runtime.register_host(4096, 64)
    runtime.unregister_host(4096)
    runtime.destroy_event(78)
    assert ("setDevice", 0) in cuda.calls
    assert ("ipcOpenMemHandle", b"h" * 64, 1) in cuda.calls
    assert [call for call in cuda.calls if call[0] == "eventCreateWithFlags"] == [
        ("eventCreateWithFlags", 6),
        ("eventCreateWithFlags", 2),
    ]
    assert ("eventRecord", 77, 55) in cuda.calls
    assert ("memcpyAsync", 1, 2, 3, 4, 55) in cuda.calls


def test_an_event_is_complete_whether_the_status_is_returned_or_raised(runtime, cuda):
    assert runtime.is_complete(77)
    cuda.answers["eventQuery"] = 600
    assert not runtime.is_complete(77)
    cuda.answers["eventQuery"] = CUDARuntimeError("cudaErrorNotReady: device not ready")
    assert not runtime.is_complete(77)
    cuda.answers["eventQuery"] = CUDARuntimeError("cudaErrorIllegalAddress: an illegal address")
    with pytest.raises(CudaError, match="cudaEventQuery: cudaErrorIllegalAddress"):
        runtime.is_complete(77)


def test_an_error_keeps_cudas_name(runtime, cuda):
    cuda.answers["getDeviceCount"] = CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device")
    with pytest.raises(CudaError) as caught:
        runtime.devices()
    assert caught.value.name == "cudaErrorNoDevice"


def test_views_are_made_by_dlpack_without_a_copy(runtime):
    view = runtime.view(4096, 64)
    assert (view.shape, view.dtype) == ((64,), torch.uint8)


def test_private_tensors_come_from_torch_on_the_current_device(runtime, monkeypatch):
    made = {}
    monkeypatch.setattr(torch, "empty", lambda shape, **options: made.update(options, shape=shape))
    runtime.empty((2, 3), torch.float16)
    assert made == {"shape": (2, 3), "dtype": torch.float16, "device": "cuda:0"}


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
def test_every_name_that_is_used_exists_in_cupy():
    found = importlib.import_module("cupy.cuda.runtime")
    used = set(re.findall(r"(?<![.\w])cuda\.(\w+)", SOURCE.read_text()))
    assert len(used) > 20
    assert [name for name in sorted(used) if not hasattr(found, name)] == []
