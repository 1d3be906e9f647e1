"""Weights in the processor's own order: the bits of `F.linear`, where there is such an order."""

import pytest
import torch
from support.targets import load, prompt
from support.tiny_target import write_tiny_target
from torch.nn import functional

from protocol.kernels import blocked as module
from protocol.kernels.blocked import Blocked, blocked, is_blocked
from protocol.kernels.linear import pack

needed = pytest.mark.skipif(
    not is_blocked(torch.bfloat16, "cpu"), reason="this processor has no bf16 of its own"
)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@needed
@pytest.mark.parametrize("shape", [(96, 64), (576, 1536), (33, 40), (8192, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_has_the_bits_of_the_plain_one(shape, biased):
    weight, bias = random(*shape) * 0.05, random(shape[0], seed=1) if biased else None
    plain = pack(weight, torch.bfloat16, bias)
    product = blocked(plain)
    assert isinstance(product, Blocked)
    assert (
        (product.dtype, product.outputs)
        == (plain.dtype, plain.outputs)
        == (
            torch.bfloat16,
            shape[0],
        )
    )
    for rows in (1, 2, 8, 11, 32, 256):
        x = random(rows, shape[1], seed=2)
        assert product(x).equal(plain(x))
        assert rows > 32 or product(x)[:1].equal(product(x[:1]))
        residual = random(rows, shape[0], seed=3)
        added = residual.clone()
        assert product.add_to(added, x) is added
        assert added.equal(residual + functional.linear(x, weight, bias))


@needed
def test_the_weight_is_a_copy_of_the_same_size():
    weight = random(96, 64)
    product = blocked(pack(weight, torch.bfloat16))
    (held,) = product.tensors()
    assert held.numel() * held.element_size() == weight.numel() * 2
    assert held.to_dense().equal(weight)


@needed
def test_a_target_gives_the_same_with_its_weights_in_either_order(tmp_path, monkeypatch):
    folder = write_tiny_target(tmp_path, "qwen3", dtype=torch.bfloat16)
    ids = prompt(40)
    laid_out = load(folder, dtype="bfloat16")
    assert all(isinstance(one, Blocked) for one in laid_out.weights.layers[0].products())
    assert isinstance(laid_out.weights.head, Blocked)
    monkeypatch.setattr(module, "_is_had", lambda: False)
    plain = load(folder, dtype="bfloat16")
    assert not any(isinstance(one, Blocked) for one in plain.weights.layers[0].products())
    for target in (laid_out, plain):
        target.verify_batch(0, ids[:32], 0, "none")
    assert laid_out.verify_batch(0, ids[32:], 32, "all").equal(
        plain.verify_batch(0, ids[32:], 32, "all")
    )
    assert laid_out.weight_bytes - plain.weight_bytes == 97 * 32 * 2  # the head's copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype):
    plain = pack(random(8, 8), dtype)
    assert blocked(plain) is plain
    assert not is_blocked(dtype, "cpu")
    assert not is_blocked(torch.bfloat16, "cuda")


def test_a_processor_without_bf16_and_a_torch_without_the_operators_have_none(monkeypatch):
    module._is_had.cache_clear()
    monkeypatch.setattr(module, "fast_bf16", lambda: False)
    assert not is_blocked(torch.bfloat16, "cpu")
    module._is_had.cache_clear()
    monkeypatch.setattr(module, "fast_bf16", lambda: True)
    monkeypatch.setattr(module, "MULTIPLY", "_no_such_operator")
    assert not is_blocked(torch.bfloat16, "cpu")
    module._is_had.cache_clear()
