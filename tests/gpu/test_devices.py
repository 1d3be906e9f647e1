"""Stage ``devices``: facts, names, and memory of the GPUs themselves."""

import pytest
import torch

from protocol.errors import DeviceAbsent
from protocol.transports import cuda_probe
from protocol.transports.cuda_memory import Arena
from protocol.transports.cuda_runtime import find_device, wait_for
from protocol.transports.devices import open_device

pytestmark = pytest.mark.gpu


def test_every_gpu_says_what_it_is_and_that_its_memory_can_be_shared(gpus):
    for facts in gpus:
        assert facts.uuid.startswith(("GPU-", "MIG-"))
        assert facts.driver
        assert facts.obstacle == ""


def test_torch_and_cuda_mean_the_same_gpu_by_a_uuid(gpus):
    for number, facts in enumerate(gpus):
        assert str(torch.cuda.get_device_properties(number).uuid) in facts.uuid
        assert open_device(f"cuda:{facts.uuid}").torch == torch.device("cuda", number)


def test_a_gpu_that_is_not_there_is_refused(runtime):
    with pytest.raises(DeviceAbsent, match="no CUDA device"):
        find_device(runtime, "cuda:99")


def test_own_memory_is_a_tensor_without_a_copy_and_a_probe_finds_its_pattern(runtime):
    before = runtime.free_bytes()
    arena = Arena(runtime, cuda_probe.TENSORS)
    place = arena.tensors[cuda_probe.HOST]
    assert place.is_cuda
    cuda_probe.write(runtime, place, 5)
    assert torch.equal(place.cpu(), cuda_probe.pattern(5))
    cuda_probe.check(runtime, place, 5, "test")
    assert len(arena.exported().handle) == 64
    del place
    arena.free()
    assert runtime.free_bytes() >= before - (4 << 20)


def test_an_event_is_complete_once_the_work_before_it_is(runtime):
    event = runtime.create_event(shared=False)
    numbers = torch.ones(1 << 20, device="cuda")
    for _ in range(50):
        numbers.mul_(1.0001)
    runtime.record_event(event)
    wait_for(runtime, event, 10.0, "the test's work")
    assert runtime.is_complete(event)
    runtime.destroy_event(event)
