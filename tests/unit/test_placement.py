"""Which transport is chosen, and that nothing is ever chosen in another's place."""

import msgspec
import pytest

from protocol.errors import TransportRefused
from protocol.messages import HostFacts
from protocol.placement import choose

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
TARGET_GPU = msgspec.structs.replace(TARGET, device="cuda:GPU-1")
DRAFT_GPU = msgspec.structs.replace(DRAFT, device="cuda:GPU-2")


def test_auto_takes_shared_memory_under_one_kernel_and_says_why():
    placement = choose("auto", TARGET, DRAFT)
    assert placement.transport == "shm"
    assert "one kernel" in placement.reason


def test_shared_memory_needs_no_common_namespace():
    other = msgspec.structs.replace(DRAFT, pid_namespace="pid:[2]", ipc_namespace="ipc:[2]")
    assert choose("auto", TARGET, other).transport == "shm"


def test_one_side_on_a_gpu_still_shares_memory():
    assert choose("auto", TARGET_GPU, DRAFT).transport == "shm"
    assert choose("auto", TARGET, DRAFT_GPU).transport == "shm"


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
        ("cuda-ipc", DRAFT, "no memory on a GPU that two processes share.*use shm"),
        ("tcp", ELSEWHERE, "listens at no address of a network; have the target listen at"),
        ("tcp", DRAFT, "listens at no address of a network"),
        ("carrier-pigeon", DRAFT, "unknown; choose one of auto, shm, cuda-ipc, tcp, local"),
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
        (TARGET_GPU, DRAFT_GPU, "both on GPUs"),
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
