"""Stage ``engines``: the same engines as on the CPU, over tiny checkpoints, on one GPU."""

import pytest
import torch
from support.plain_host import PlainHost
from support.tiny_draft import Z_LAB, write_draft
from support.tiny_target import write_tiny_target
from torch.nn.attention import SDPBackend, sdpa_kernel

from draft_daemon.checkpoint import load_draft
from draft_daemon.context import DraftContext
from protocol.config import TargetConfig
from protocol.kernels.attention import attend_folded, causal_mask
from target_daemon.families.base import load_target

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class There(PlainHost):
    """Rows and weights on the GPU, without another process."""

    def create_ring(self, shape):
        ring = super().create_ring(shape)
        object.__setattr__(ring, "rows", ring.rows.to(CUDA))
        return ring

    def create_weights(self, specs):
        return {name: each.to(CUDA) for name, each in super().create_weights(specs).items()}


def loaded(folder, device, dtype="float32", *, graphs=False, weights="dtype", others=()):
    config = TargetConfig(
        model=str(folder),
        run_dir="",
        life=0,
        dtype=dtype,
        weights=weights,
        taps=(0, 2),
        block_size=8,
        prefill_chunk=16,
        ring_window=64,
        max_positions=256,
        graphs=graphs,
    )
    host = There() if device == CUDA else PlainHost()
    return load_target(config, host, device=device, others=others)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen2", "mistral-window"])
def test_fp32_logits_and_features_are_the_cpus(runtime, tmp_path, family):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_tiny_target(tmp_path, family)
    ids = torch.arange(40) % 97
    here, there = loaded(folder, CPU), loaded(folder, CUDA)
    for start, stop, wanted in ((0, 16, "none"), (16, 32, "last"), (32, 40, "all")):
        one = here.verify_batch(0, ids[start:stop], start, wanted)
        other = there.verify_batch(0, ids[start:stop], start, wanted)
        if one is not None:
            torch.testing.assert_close(other.cpu(), one, atol=2e-4, rtol=2e-4)
            assert torch.equal(other.argmax(-1).cpu(), one.argmax(-1))
    torch.testing.assert_close(there.ring.rows.cpu(), here.ring.rows, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_load_time_probe_runs_here_and_says_what_it_found(runtime, tmp_path, dtype):
    target = loaded(write_tiny_target(tmp_path), CUDA, dtype)
    assert target.exactness.kind in ("native", "padded", "no")
    print(dtype, target.exactness)  # the table of docs/gpu.md wants it


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_give_the_cpus_logits_but_for_bfloat16(runtime, tmp_path, weights):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_tiny_target(tmp_path, "qwen3", intermediate_size=64)
    ids = torch.arange(40) % 97
    here, there = (loaded(folder, device, weights=weights) for device in (CPU, CUDA))
    print(weights, there.exactness)  # the table of docs/gpu.md wants it
    one, other = (target.verify_batch(0, ids, 0, "last") for target in (here, there))
    assert float((other.cpu() - one).norm() / one.norm()) < 0.02


def test_layers_on_two_gpus_give_what_one_gives(runtime, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is seen; layers are split over two")
    folder = write_tiny_target(tmp_path, "qwen3")
    ids, other = torch.arange(40) % 97, torch.device("cuda", 1)
    one, two = loaded(folder, CUDA), loaded(folder, CUDA, others=(other,))
    assert two.weights.layers[-1].qkv.weight.device == other
    answers = [target.verify_batch(0, ids, 0, "last") for target in (one, two)]
    assert torch.equal(*answers)
    torch.cuda.synchronize()
    assert torch.equal(one.ring.rows, two.ring.rows)


def test_recorded_forwards_give_what_plain_ones_give(runtime, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_tiny_target(tmp_path, "qwen3")
    plain, static = loaded(folder, CUDA), loaded(folder, CUDA, graphs=True)
    ids = torch.arange(200) % 97
    for target in (plain, static):
        for start in range(0, 96, 16):
            target.verify_batch(0, ids[start : start + 16], start, "none")
    at = 96
    for width in (1, 8, 3, 8, 5, 1, 8):
        one = plain.verify_batch(0, ids[at : at + width], at, "all")
        other = static.verify_batch(0, ids[at : at + width], at, "all")
        torch.testing.assert_close(other, one, atol=2e-4, rtol=2e-4)
        at += width
    rows = [position % plain.ring.shape.capacity for position in range(at - 40, at)]
    torch.testing.assert_close(
        static.ring.rows[0, rows], plain.ring.rows[0, rows], atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("width", [1, 8, 16])
def test_attention_never_needs_the_math_backend(runtime, width):
    """bf16 in the shape of an 8B target: 8 K/V heads, 4 query heads each, 128 wide."""
    query = torch.randn(1, 8, 4 * width, 128, device=CUDA, dtype=torch.bfloat16)
    key, value = (torch.randn(1, 8, 1024, 128, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
    mask = causal_mask(1000, width, 1024, window=None, group=4, dtype=torch.bfloat16, device=CUDA)[
        None, None
    ]
    others = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    with sdpa_kernel(others):
        attend_folded(query, key, value, mask, 128**-0.5)


def test_a_drafts_block_is_the_cpus(runtime, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_draft(tmp_path / "draft", Z_LAB)
    found = []
    for device in (CPU, CUDA):
        draft = load_draft(folder, torch.float32, device)
        config, network = draft.config, draft.network
        context = DraftContext(config, 1, 64, torch.float32, device)
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(5, config.feature_width, generator=generator)
        context.write(0, 0, *network.project_context(features, 0))
        embedded = torch.randn(4, config.hidden_size, generator=generator).to(device)
        found.append(network.block(embedded, context.view(0, 5, 4, 64)).cpu())
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)
