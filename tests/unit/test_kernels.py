"""The shared arithmetic against its formulas in float64."""

import math

import pytest
import torch

from protocol.errors import UnsupportedModel
from protocol.kernels.attention import attend, attend_folded, causal_mask, padded_length
from protocol.kernels.linear import adopt, fuse, pack
from protocol.kernels.norm import fold, pack_norm, rms_norm
from protocol.kernels.rope import Turner, interleave, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype):
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.03}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_the_product(dtype, biased):
    weight, x, residual = random(6, 5), random(3, 5, seed=1).to(dtype), random(3, 6, seed=3)
    bias = random(6, seed=2) if biased else None
    packed = pack(weight, dtype, bias)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    torch.testing.assert_close(packed(x).double(), expected, **tolerance(dtype))
    total = residual.to(dtype, copy=True)
    assert packed.add_to(total, x) is total
    torch.testing.assert_close(total.double(), residual.double() + expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_products_lie_side_by_side_and_are_read_one_by_one(dtype):
    first, second, x = random(4, 5), random(2, 5, seed=1), random(3, 5, seed=2).to(dtype)
    asked = []

    def weights():
        for name, weight in (("first", first), ("second", second)):
            asked.append(name)
            yield weight

    fused = fuse(weights(), (6, 5), dtype)
    assert asked == ["first", "second"]
    expected = x.double() @ torch.cat((first, second)).double().t()
    torch.testing.assert_close(fused(x).double(), expected, **tolerance(dtype))


def test_packing_shares_no_memory_and_adopting_does():
    weight = random(4, 4)
    packed, adopted = pack(weight, torch.float32), adopt(weight, transposed=False)
    before = weight.clone()
    weight.zero_()
    assert packed(torch.eye(4)).equal(before.t())
    assert not adopted(torch.eye(4)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_is_its_formula(dtype, scale):
    x, weight, eps = (random(3, 40) * scale).to(dtype), random(40, seed=1), 1e-5
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    packed = pack_norm(weight, eps, dtype)
    for ours in (packed(x), rms_norm(x, weight.to(dtype), eps)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, **tolerance(dtype))


def test_a_zero_row_stays_zero():
    assert not pack_norm(torch.ones(8), 1e-6, torch.float32)(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [33, 34, 36, 39, 42, 66, 97, 193, 257])
def test_rows_left_over_behind_whole_blocks_keep_the_bits_they_have_among_more(rows, dim):
    """11 rows of 3 heads a group are 33: the one left over is a product that rounds otherwise."""
    query, key, value = random(1, 2, 288, dim), random(1, 2, 128, dim), random(1, 2, 128, dim)
    mask = causal_mask(0, 288, 128, window=None, group=1, dtype=torch.float32)[None, None]

    def attended(count):
        return attend_folded(query[:, :, :count], key, value, mask[:, :, :count], dim**-0.5)

    assert attended(rows).equal(attended(288)[:, :, :rows])
    assert attended(rows).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_a_folded_norm_and_its_product_give_the_same(dtype, transposed):
    x, weight = random(3, 8).to(dtype), 1 + 0.1 * random(8, seed=1)
    matrix = random(5, 8, seed=2)
    product = pack(matrix, dtype) if transposed else adopt(matrix.to(dtype), transposed=False)
    norm = pack_norm(weight, 1e-5, dtype)
    expected = product(norm(x))
    folded = fold(norm, product)
    assert (folded.scaled is None) == (dtype == torch.float32)
    torch.testing.assert_close(product(folded(x)), expected, **tolerance(dtype))
    assert fold(folded, product) is folded


def rotated(x, theta, positions):
    """Pairs (i, i + d/2) turned by ``position * theta^(-2i/d)``, one by one."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x, dtype=torch.float64)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[-1])
            a, b = x[row, :, i].double(), x[row, :, i + half].double()
            out[row, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[row, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_turning_in_place_keeps_scores(dtype):
    x = random(4, 2, 8).to(dtype)
    turner = Turner(table(8, 100.0, 32, dtype), dtype)
    ours = x.clone()
    if turner.interleaved:
        ours = interleave(ours.reshape(4, 16).t(), 8).t().reshape(4, 2, 8).contiguous()
    turner.turn_(ours, turner.at(5, 9))
    expected = rotated(x, 100.0, range(5, 9))
    scores = torch.einsum("ahd,bhd->hab", ours.double(), ours.double())
    wanted = torch.einsum("ahd,bhd->hab", expected, expected)
    loose = {"atol": 0.2, "rtol": 0.05} if dtype == torch.bfloat16 else tolerance(dtype)
    torch.testing.assert_close(scores, wanted, **loose)


def test_interleaving_alternates_the_halves_of_every_head():
    order = interleave(torch.arange(12), 6)
    assert order.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_linear_scaling_divides_positions():
    plain, scaled = (
        table(8, 100.0, 32, torch.float32, scaling)
        for scaling in (None, {"rope_type": "linear", "factor": 4.0})
    )
    torch.testing.assert_close(scaled.cos[::4][:8], plain.cos[:8])


def test_unknown_scaling_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        table(8, 100.0, 4, torch.float32, {"rope_type": "yarn", "factor": 4.0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_its_formula(dtype, window):
    kv, group, rows, dim, base, length = 2, 3, 4, 8, 5, 16
    query = random(kv, group, rows, dim).to(dtype)
    key, value = (random(kv, length, dim, seed=seed).to(dtype) for seed in (1, 2))
    mask = causal_mask(base, rows, length, window=window, group=group, dtype=dtype)
    ours = attend(query, key, value, mask, 0.5)
    for row in range(rows):
        first = 0 if window is None else base + row - window + 1
        seen = slice(first, base + row + 1)
        scores = query[:, :, row].double() @ key[:, seen].double().transpose(1, 2) * 0.5
        expected = scores.softmax(dim=-1) @ value[:, seen].double()
        torch.testing.assert_close(ours[:, :, row].double(), expected, **tolerance(dtype))


def test_k_lengths_are_padded_to_a_multiple_within_the_capacity():
    assert [padded_length(n, 200) for n in (1, 64, 65, 128, 199)] == [64, 64, 128, 128, 200]
    assert padded_length(513, 2048, 512) == 1024


def test_the_mean_square_of_a_row_in_float16_may_be_beyond_its_range():
    x = torch.full((2, 64), 400.0, dtype=torch.float16)  # its square is beyond 65,504
    made = pack_norm(torch.ones(64), 1e-5, torch.float16)(x)
    assert torch.equal(made, torch.ones(2, 64, dtype=torch.float16))
