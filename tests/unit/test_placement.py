"""Which transport is chosen, and that nothing is ever chosen in another's place."""

import msgspec
import pytest

from protocol.errors import TransportRefused
from protocol.messages import GpuFacts, HostFacts
from protocol.placement import RULES, choose, host_transport, is_tied

TARGET = HostFacts(
    pid=10,
    boot_id="aaaaaaaa-1",
    pid_namespace="pid:[1]",
    ipc_namespace="ipc:[1]",
    device="cpu",
    threads=2,
    versions={},
)
DRAFT = msgspec.structs.replace(TARGET, pid=11)
LISTENING = msgspec.structs.replace(TARGET, listens="tcp://10.0.0.1:7000")
ELSEWHERE = msgspec.structs.replace(DRAFT, boot_id="bbbbbbbb-2")
UNKNOWN = msgspec.structs.replace(DRAFT, boot_id="")
GPU = GpuFacts(uuid="GPU-1", name="one", driver="13.0", mig=False, mps=False)
TARGET_GPU = msgspec.structs.replace(TARGET, device="cuda:GPU-1", gpu=GPU)
DRAFT_GPU = msgspec.structs.replace(
    DRAFT, device="cuda:GPU-2", gpu=msgspec.structs.replace(GPU, uuid="GPU-2")
)
NO_IPC = msgspec.structs.replace(
    DRAFT_GPU, gpu=msgspec.structs.replace(GPU, obstacle="no legacy IPC")
)


def test_auto_takes_shared_memory_under_one_kernel_and_says_why():
    placement = choose("auto", TARGET, DRAFT)
    assert placement.transport == "shm"
    assert "one kernel" in placement.reason


def test_shared_memory_needs_no_common_namespace():
    other = msgspec.structs.replace(DRAFT, pid_namespace="pid:[2]", ipc_namespace="ipc:[2]")
    assert choose("auto", TARGET, other).transport == "shm"


def test_a_draft_on_a_gpu_reads_the_memory_of_a_target_on_the_cpu():
    assert choose("auto", TARGET, DRAFT_GPU).transport == "shm"


def test_a_target_on_a_gpu_copies_its_rows_for_a_draft_on_the_cpu():
    placement = choose("auto", TARGET_GPU, DRAFT)
    assert placement.transport == "cuda-host"
    assert "copied once" in placement.reason


def test_two_gpus_of_one_machine_share_by_cuda_ipc_and_so_does_one():
    assert choose("auto", TARGET_GPU, DRAFT_GPU).transport == "cuda-ipc"
    same = msgspec.structs.replace(DRAFT_GPU, device=TARGET_GPU.device, gpu=TARGET_GPU.gpu)
    assert choose("auto", TARGET_GPU, same).transport == "cuda-ipc"


def changed(facts, **gpu):
    return msgspec.structs.replace(facts, gpu=msgspec.structs.replace(facts.gpu, **gpu))


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (TARGET_GPU, changed(DRAFT_GPU, obstacle="WSL2 has none"), "WSL2 has none"),
        (changed(TARGET_GPU, obstacle="no handle"), DRAFT_GPU, "no handle"),
        (changed(TARGET_GPU, mig=True), DRAFT_GPU, "different MIG instances.*put both"),
        (TARGET_GPU, changed(DRAFT_GPU, driver="12.4"), r"different drivers \(13.0, 12.4\)"),
        (
            TARGET_GPU,
            msgspec.structs.replace(DRAFT_GPU, pid_namespace="pid:[2]"),
            r"different pid namespaces \(pid:\[1\], pid:\[2\]\); .*--pid=host",
        ),
        (
            TARGET_GPU,
            msgspec.structs.replace(DRAFT_GPU, ipc_namespace=""),
            r"different ipc namespaces .*unknown.*--ipc=container:TARGET",
        ),
        (TARGET_GPU, msgspec.structs.replace(DRAFT_GPU, gpu=None), "does not say"),
        (TARGET_GPU, msgspec.structs.replace(DRAFT_GPU, boot_id="b"), "different kernels"),
    ],
)
def test_gpus_that_cannot_share_are_refused_with_reason_and_remedy(target, draft, words):
    for requested in ("cuda-ipc", "auto"):
        with pytest.raises(TransportRefused, match=words):
            choose(requested, target, draft)


def test_the_half_that_a_target_offers_follows_from_the_devices():
    assert host_transport("cpu", "cpu") == host_transport("cpu", "cuda:0") == "shm"
    assert host_transport("cuda:0", "cuda:1") == "cuda-ipc"
    assert host_transport("cuda:0", "cpu") == "cuda-host"


def test_only_mapped_memory_of_a_gpu_ties_a_draft_to_its_target():
    assert [rule.name for rule in RULES if is_tied(rule.name)] == ["cuda-ipc"]


def test_an_explicit_choice_is_honoured_and_marked_as_such():
    placement = choose("shm", TARGET, DRAFT)
    assert placement.transport == "shm"
    assert placement.reason.startswith("asked for")


def test_local_is_only_for_two_objects_of_one_process():
    assert choose("local", TARGET, TARGET).transport == "local"
    with pytest.raises(TransportRefused, match=r"two processes \(10 and 11\).*use shm"):
        choose("local", TARGET, DRAFT)
    other = msgspec.structs.replace(TARGET, pid_namespace="pid:[2]")
    with pytest.raises(TransportRefused):
        choose("local", TARGET, other)


def test_auto_never_takes_local():
    assert choose("auto", TARGET, TARGET).transport == "shm"


@pytest.mark.parametrize(
    ("requested", "draft", "words"),
    [
        ("shm", ELSEWHERE, r"different kernels \(boot ids aaaaaaaa and bbbbbbbb\).*one machine"),
        ("shm", UNKNOWN, "boot id .* cannot be read"),
        ("cuda-ipc", DRAFT, "the target computes on the CPU.*--draft-device cpu"),
        ("cuda-host", DRAFT, "the target computes on the CPU"),
        ("tcp", ELSEWHERE, "listens at no address of a network; have the target listen at"),
        ("tcp", DRAFT, "listens at no address of a network"),
        ("carrier-pigeon", DRAFT, "unknown; choose one of auto, shm, cuda-ipc, cuda-host, tcp"),
        ("", DRAFT, "unknown"),
    ],
)
def test_what_cannot_work_is_refused_with_reason_and_remedy(requested, draft, words):
    with pytest.raises(TransportRefused, match=words):
        choose(requested, TARGET, draft)


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (TARGET, ELSEWHERE, "different kernels"),
        (TARGET, UNKNOWN, "cannot be read"),
        (TARGET_GPU, NO_IPC, "no legacy IPC"),
    ],
)
def test_auto_lists_every_obstacle_when_nothing_fits(target, draft, words):
    with pytest.raises(TransportRefused, match="no transport fits") as caught:
        choose("auto", target, draft)
    for part in (words, "shm: ", "cuda-ipc: ", "tcp: "):
        assert part in str(caught.value)


@pytest.mark.parametrize("draft", [DRAFT, ELSEWHERE, UNKNOWN, DRAFT_GPU])
def test_a_target_that_listens_on_a_network_is_asked_there_wherever_the_draft_runs(draft):
    placement = choose("auto", LISTENING, draft)
    assert placement.transport == "tcp"
    assert "the draft pulls its rows" in placement.reason
    assert choose("tcp", LISTENING, draft).reason.startswith("asked for")
    with pytest.raises(TransportRefused, match=r"met over a network, at tcp://10\.0\.0\.1:7000"):
        choose("shm", LISTENING, draft)
