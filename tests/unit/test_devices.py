"""Which device a daemon computes on: what is there, what is refused, and never another one."""

import json
import sys

import msgspec
import pytest
import torch
from support import fake_cuda
from support.fake_cuda import FakeCuda, gpu
from support.plain_host import PlainHost
from support.tiny_draft import Z_LAB, write_draft
from support.tiny_target import write_tiny_target

from draft_daemon.checkpoint import load_draft
from draft_daemon.context import DraftContext
from draft_daemon.engine import first_forward
from protocol import gpu as machine
from protocol.checkpoints.target_config import read_model_config
from protocol.config import Deadlines, TargetConfig
from protocol.cpu import resolve_dtype
from protocol.errors import (
    ConfigError,
    DeviceAbsent,
    DeviceLost,
    InternalError,
    TransportRefused,
    UnsupportedModel,
)
from protocol.feature_ring import plan
from protocol.messages import GpuFacts
from protocol.transports import cuda_host, devices
from protocol.transports.base import WeightSpec
from protocol.transports.cuda_host import CudaHostMemory
from protocol.transports.registry import find_transport
from target_daemon import facts
from target_daemon.dense.key_values import KeyValues
from target_daemon.exactness import Exactness, Widths
from target_daemon.families import base
from target_daemon.memory_plan import plan as memory_plan

META = torch.device("meta")
SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


@pytest.fixture
def cuda_torch(monkeypatch):
    """As if torch were a CUDA build."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_the_cpu_needs_no_library():
    assert devices.open_device("cpu", load=None) is devices.HOST


def test_a_torch_for_the_cpu_alone_is_refused_and_not_used_instead(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"no CUDA device: cuda:0 .*built for the CPU alone"):
        devices.open_device("cuda:0")
    assert devices.survey() == ((), f"this torch ({torch.__version__}) is built for the CPU alone")


def test_a_gpu_is_opened_with_its_facts(cuda_torch):
    fake = FakeCuda(devices_seen=fake_cuda.TWO)
    device = devices.open_device("cuda:1", lambda: fake)
    assert device.torch == torch.device("cuda", 1)
    assert device.name == f"cuda:{gpu(1).uuid}"
    assert device.free_bytes == 1 << 33
    assert (device.facts.uuid, device.facts.driver, device.facts.obstacle) == (
        gpu(1).uuid,
        "13.0",
        "",
    )
    assert fake.left() == []  # what the facts were found out with


@pytest.mark.parametrize("verb", ["malloc", "export_memory"])
def test_memory_that_cannot_be_exported_is_a_fact_with_its_remedy(cuda_torch, verb):
    fake = FakeCuda(refuses={verb: "cudaErrorNotSupported"})
    (found,), nothing = devices.survey(lambda: fake)
    assert nothing == ""
    assert "WSL2, a vGPU" in found.obstacle
    assert fake.left() == []


def test_wsl_is_an_obstacle_whatever_cuda_says(cuda_torch, monkeypatch):
    monkeypatch.setattr(machine, "is_wsl", lambda: True)
    facts = devices.open_device("cuda:0", FakeCuda).facts
    assert facts.obstacle == machine.WSL_OBSTACLE


def test_a_gpu_that_fails_is_refused(cuda_torch):
    fake = FakeCuda(refuses={"free_bytes": "cudaErrorDevicesUnavailable"})
    with pytest.raises(DeviceAbsent, match=r"no CUDA device: cuda:0 cannot be used; .*Unavailable"):
        devices.open_device("cuda:0", lambda: fake)


def test_without_a_gpu_the_survey_says_why(cuda_torch):
    found, nothing = devices.survey(lambda: FakeCuda(devices_seen=()))
    assert found == ()
    assert "cudaErrorNoDevice" in nothing


def test_the_daemons_facts_say_what_is_missing(cuda_torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "protocol.transports.cupy_runtime", raising=False)
    assert "cupy" in facts.gather()["gpus"]["none"]
    found = GpuFacts(uuid="GPU-1", name="one", driver="13.0", mig=False, mps=True)
    monkeypatch.setattr(facts, "survey", lambda: ((found,), ""))
    assert facts.gather()["gpus"] == {"cuda:0": msgspec.to_builtins(found)}


# --- without any library ---------------------------------------------------------------------


def test_a_gpu_on_a_machine_without_one_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(DeviceAbsent, match="no CUDA device: --draft-device cuda:1 was asked for"):
        machine.check_devices({"--target-device": "cpu", "--draft-device": "cuda:1"}, tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    machine.check_devices({"--draft-device": "cuda:1"}, tmp_path)
    assert machine.device_nodes(tmp_path) == (str(tmp_path / "dev/nvidia0"),)


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:", "cuda:0,1", "cuda:GPU-", "CPU", ""])
def test_a_name_that_is_no_device_is_refused(device, tmp_path):
    with pytest.raises(ConfigError, match="cpu, cuda:N or cuda:<uuid> is expected"):
        machine.check_devices({"--target-device": device}, tmp_path)


def test_wsl_is_known_by_its_kernels_version(tmp_path):
    assert not machine.is_wsl(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 6.6 (microsoft-standard-WSL2)")
    assert machine.is_wsl(tmp_path)


def test_mps_is_known_by_the_pipe_of_its_control_daemon(tmp_path):
    assert not machine.mps_runs({}, tmp_path)
    for pipes, environment in (
        ("tmp/nvidia-mps", {}),
        ("run/mps", {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}),
    ):
        (tmp_path / pipes).mkdir(parents=True)
        (tmp_path / pipes / "control").touch()
        assert machine.mps_runs(environment, tmp_path)


def test_auto_is_bf16_on_a_gpu_whatever_the_processor_can():
    assert resolve_dtype("auto", "cuda:0") == "bfloat16"
    for named in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(named, "cuda:0") == resolve_dtype(named) == named


def test_an_unknown_transport_is_refused_with_the_known_ones():
    with pytest.raises(TransportRefused, match="known: cuda-host, cuda-ipc, local, shm"):
        find_transport("carrier-pigeon")


@pytest.mark.parametrize("name", ["tcp", "shm", "local"])
def test_a_transport_of_the_cpus_memory_refuses_a_target_on_a_gpu(name, runtime_dir):
    with pytest.raises(TransportRefused, match=f"{name} has no memory on cuda:GPU-1"):
        find_transport(name).host(runtime_dir, "cuda:GPU-1")


def test_a_model_that_only_transformers_runs_is_refused_on_a_gpu(tmp_path):
    folder = write_tiny_target(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "gpt2"}))
    config = TargetConfig(model=str(folder), run_dir="", life=0)
    with pytest.raises(UnsupportedModel, match=r"gpt2.*on the CPU alone"):
        base.load_target(config, PlainHost(), device=META)


def test_the_memory_plan_of_a_gpu_counts_what_is_exported(tmp_path):
    model = read_model_config(write_tiny_target(tmp_path))
    needs = {
        device: memory_plan(
            model,
            TargetConfig(model="", run_dir="", life=0, taps=(0,), device=device),
            "float16",
        ).needed
        for device in ("cpu", "cuda:0")
    }
    table = 2 * model.vocab_size * model.hidden_size * 2
    assert needs["cuda:0"] - needs["cpu"] == table


# --- rows from a GPU to a draft on the CPU ---------------------------------------------------


@pytest.fixture
def fake():
    mine = FakeCuda()
    yield mine
    assert mine.left() == []


def hosted(fake, run_dir, monkeypatch):
    monkeypatch.setattr(CudaHostMemory, "runtime", staticmethod(lambda: fake))
    return CudaHostMemory.host(run_dir)


def test_a_reply_waits_for_the_copy_to_the_host(fake, runtime_dir, monkeypatch):
    short = msgspec.structs.replace(Deadlines(), ring_copy=0.05)
    monkeypatch.setattr(cuda_host, "Deadlines", lambda: short)
    host = hosted(fake, runtime_dir, monkeypatch)
    view = host.create_ring(SHAPE)
    fake.held = True
    with pytest.raises(Exception, match="the copy of feature rows to the host"):
        view.publish(0, 0, 4)
    fake.release()
    fake.refuses["copy_async"] = "cudaErrorIllegalAddress"
    with pytest.raises(DeviceLost, match="IllegalAddress"):
        view.publish(0, 0, 4)
    host.close()


def test_a_ring_without_taps_pins_nothing(fake, runtime_dir, monkeypatch):
    host = hosted(fake, runtime_dir, monkeypatch)
    host.create_ring(plan(slots=1, window=2, widest_forward=2, row_width=0, dtype="float32"))
    assert "register_host" not in fake.calls
    host.close()
    with pytest.raises(InternalError, match="without a ring"):
        host._publish(0, 0, 1)


def test_weights_are_copied_for_the_first_draft_that_asks(fake, runtime_dir, monkeypatch):
    host = hosted(fake, runtime_dir, monkeypatch)
    host.create_ring(SHAPE)
    host.create_weights({"embed": WeightSpec((4, 6), "float32")})["embed"].fill_(3.0)
    mirror = host._mirrors["embed"]
    assert not mirror.any()
    host._layout()
    assert mirror.eq(3.0).all()
    host.close()


# --- engines: everything a forward touches lies on one device --------------------------------


class Elsewhere(PlainHost):
    """Allocates the ring's rows and the weights on the meta device, which computes nothing.

    An operation over tensors of two devices fails there as it does on a GPU.
    """

    def create_ring(self, shape):
        ring = super().create_ring(shape)
        object.__setattr__(ring, "rows", ring.rows.to(META))
        return ring

    def create_weights(self, specs):
        return {name: tensor.to(META) for name, tensor in super().create_weights(specs).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral-window", "qwen2"])
def test_every_tensor_of_a_targets_forward_is_on_its_device(tmp_path, monkeypatch, family, dtype):
    settled = (Widths(), Exactness("no", ""))
    monkeypatch.setattr("target_daemon.dense.model.settle", lambda *_, **__: settled)
    config = TargetConfig(
        model=str(write_tiny_target(tmp_path, family)),
        run_dir="",
        life=0,
        dtype=dtype,
        taps=(0, 2),
        block_size=6,
        prefill_chunk=16,
        ring_window=32,
        max_positions=128,
    )
    target = base.load_target(config, Elsewhere(), device=META)
    for width, wanted in ((16, "none"), (5, "last"), (1, "all"), (6, "all")):
        logits = target.verify_batch(0, torch.zeros(width, dtype=torch.int64), 3, wanted)
        assert (logits is None) == (wanted == "none")
        if logits is not None:
            assert logits.device == META
            assert logits.shape == (width if wanted == "all" else 1, target.vocab_size)
    tree = target.verify_tree(0, torch.zeros(5, dtype=torch.int64), 3, (0, 0, 1, 2))
    assert (tree.device, tree.shape) == (META, (5, target.vocab_size))
    target.rollback_to_tree(0, 3, (0, 2))
    assert target.probe_attention().device == META


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_of_a_drafts_block_is_on_its_device(tmp_path, dtype):
    draft = load_draft(write_draft(tmp_path / "draft", Z_LAB), dtype, META)
    network, config = draft.network, draft.config
    assert network.device == META
    first_forward(draft)
    context = DraftContext(config, 1, 64, dtype, network.device)
    features = torch.zeros(5, config.feature_width)  # as `shm` gives them: on the CPU
    keys, values = network.project_context(features, 0)
    context.write(0, 0, keys, values)
    view = context.view(0, 5, 4, 64)
    hidden = network.block(torch.zeros(4, config.hidden_size, dtype=dtype, device=META), view)
    assert (hidden.device, hidden.shape) == (META, (4, config.hidden_size))


def test_keys_and_values_lie_where_they_are_asked_for():
    state = KeyValues(
        slots=1, layers=2, kv_heads=1, head_dim=4, rows=8, dtype=torch.float32, device=META
    )
    assert all(rows.device == META for rows in state.readers(0, 8))
