"""Weights of 8 and 4 bits: what products give, what is refused, and that a text stays itself."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.drive import generate
from support.targets import load, prompt
from support.tiny_target import write_tiny_target
from torch._subclasses.fake_tensor import FakeTensorMode

from launch.commands import status_text
from launch.plan import Plan
from launch.prepare import prepare
from protocol.checkpoints.target_config import read_model_config
from protocol.config import TargetConfig
from protocol.errors import UnsupportedModel
from protocol.kernels import quantised
from protocol.kernels.quantised import GROUP, Quantised, available, packed_bytes, quantise
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.memory_plan import plan, product_shapes
from target_daemon.prefix_identity import prefix_identity

META = torch.device("meta")
KINDS = ["int8", "int4"]
ROUNDED = {8: 0.01, 4: 0.1}  # of normal numbers
FITTING = {"intermediate_size": 64}  # of which the kernels take all products
FAMILIES = ["llama3", "llama-biased", "qwen3", "qwen2-window"]


def weight(rows=48, width=96, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def distance(one, other):
    return float((one - other).norm() / other.norm())


# --- products --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_near_that_of_the_weights_as_they_were(bits, dtype):
    parts = [weight(32), weight(16, seed=1)]
    bias, x = torch.randn(48), torch.randn(5, 96).to(dtype)
    product = quantise(iter(parts), (48, 96), bits, bias)
    expected = x.float() @ torch.cat(parts).t() + bias
    made = product(x)
    assert made.dtype == dtype
    assert distance(made.float(), expected) < ROUNDED[bits] + 0.01
    residual = torch.randn(5, 48).to(dtype)
    wanted = residual.float() + expected
    assert product.add_to(residual, x) is residual
    assert distance(residual.float(), wanted) < ROUNDED[bits] + 0.01


def test_eight_bits_are_a_scale_for_each_output():
    product = quantise([weight()], (48, 96), 8)
    undone = product.weight.float() * product.scales.float()[:, None]
    step = weight().abs().amax(dim=1, keepdim=True) / 127
    assert bool(((undone - weight()).abs() <= step * 0.51).all())


def test_four_bits_are_a_scale_and_a_zero_for_each_group():
    """The identity, a row at a time, gives the weights that the kernel multiplies by."""
    undone = quantise([weight()], (48, 96), 4)(torch.eye(96)).t()
    groups = weight().view(48, -1, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 15
    far = (undone.view(48, -1, GROUP) - groups).abs() / step[..., None]
    assert float(far.max()) < 0.56  # half a step, and the rounding of scale, zero and result


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits):
    assert not quantise([torch.zeros(16, 32)], (16, 32), bits)(torch.randn(3, 32)).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_depends_on_nothing_but_itself(bits):
    product, x = quantise([weight()], (48, 96), bits), torch.randn(33, 96)
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 8, 15, 16, 32):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_with_gaps_between_them_are_taken_as_they_are(bits):
    product, x = quantise([weight()], (48, 96), bits), torch.randn(4, 192).bfloat16()
    assert torch.equal(product(x[:, :96]), product(x[:, :96].contiguous()))


@pytest.mark.parametrize(
    ("shape", "bits", "words"),
    [
        ((48, 24), 8, "int8 weights: 24 inputs of a product are no multiple of 16"),
        ((24, 48), 8, "24 outputs of a product are no multiple of 16"),
        ((48, 48), 4, "int4 weights: 48 inputs of a product are no multiple of 32"),
        ((40, 64), 4, "40 outputs of a product are no multiple of 16"),
    ],
)
def test_a_shape_that_a_kernel_would_misread_never_reaches_it(shape, bits, words):
    with pytest.raises(UnsupportedModel, match=words):
        quantise([torch.zeros(shape)], shape, bits)


def test_a_torch_without_the_kernels_is_refused_and_known(monkeypatch):
    assert available() == ("int8", "int4")
    gone = dict.fromkeys(quantised.KERNELS, ("_no_such_kernel",))
    monkeypatch.setattr(quantised, "KERNELS", gone)
    with pytest.raises(UnsupportedModel, match=r"has no _no_such_kernel; torch 2\.9"):
        quantise([weight()], (48, 96), 8)
    assert available() == ()


@pytest.mark.parametrize(("width", "tiles"), [(32, 2), (64, 4), (128, 8), (576, 4)])
def test_a_gpus_packing_has_the_shape_that_its_kernel_takes(width, tiles):
    """On `meta`, which knows CUDA's operators by their shapes and dtypes alone."""
    with FakeTensorMode():
        product = quantise([torch.empty(48, width, device=META)], (48, width), 4)
        assert product.weight.shape == (48 // 8, width // (tiles * 16), 32, tiles // 2)
        assert product.scales.shape == (width // GROUP, 48, 2)
        assert product(torch.empty(3, width, device=META)).shape == (3, 48)
        eight = quantise([torch.empty(48, width, device=META)], (48, width), 8)
        assert eight(torch.empty(3, width, device=META)).shape == (3, 48)


# --- targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_that_the_kernels_multiply_by(tmp_path, family, kind):
    folder = write_tiny_target(tmp_path, family, **FITTING)
    target, plain, ids = load(folder, weights=kind), load(folder), prompt(20)
    made = target.verify_batch(0, ids, 0, "all")
    assert not torch.equal(made, plain.verify_batch(0, ids, 0, "all"))
    for own, layer in zip(plain.weights.layers, target.weights.layers, strict=True):
        for linear, product in zip(own.products(), layer.products(), strict=True):
            assert isinstance(product, Quantised)
            # Its rows are the weights without a bias, and with the norm that was folded in.
            identity = torch.eye(linear.weight.shape[0])
            linear.weight.copy_(
                product.multiply(identity.bfloat16(), product.weight, product.scales)
            )
        for name in ("input_norm", "post_norm"):
            object.__setattr__(own, name, getattr(layer, name))
    assert distance(made, plain.verify_batch(0, ids, 0, "all")) < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_with_exact_the_text_is_the_same_whatever_a_draft_proposes(tmp_path, kind, dtype):
    folder = write_tiny_target(tmp_path, "qwen3", **FITTING)
    target = load(folder, weights=kind, dtype=dtype, exact=True)
    assert target.exactness.kind in ("native", "padded")
    engine, given = Engine(target, Limits(32, 8), target.ring), prompt(30).tolist()
    alone, _, _ = generate(engine, given, 60, chunk=32)

    def right(so_far, wanted):
        return (alone[len(so_far) - len(given) :] + [5] * wanted)[:wanted]

    def wrong_at_times(so_far, wanted):
        return [t + (len(so_far) % 3 == 0) for t in right(so_far, wanted)]

    widest = 0
    cases = itertools.product((right, wrong_at_times), (2, 5, 8))
    for sequence, (drafter, width) in enumerate(cases, start=2):
        asked = {"chunk": 32, "width": width, "drafter": drafter}
        text, rounds, _ = generate(engine, given, 60, sequence=sequence, **asked)
        assert text == alone
        widest = max(widest, *rounds)
    assert widest == 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_what_is_loaded(tmp_path, kind):
    folder = write_tiny_target(tmp_path, "llama3", **FITTING)
    target = load(folder, weights=kind)
    model = read_model_config(folder)
    config = TargetConfig(model=str(folder), run_dir="", life=1, weights=kind)
    lines = {line.name: line.size for line in plan(model, config, "float32").lines}
    norm = model.hidden_size * 4
    held = lines[f"layers, {kind}"] + lines["embedding"] + lines["head"] + norm
    assert target.weight_bytes == held
    assert lines["one product on its way to them"] > 0
    bits = quantised.BITS[kind]
    layers = sum(packed_bytes(shape, bits) for shape in product_shapes(model))
    packed = [t for layer in target.weights.layers for p in layer.products() for t in p.tensors()]
    assert sum(t.nbytes for t in packed) == model.num_layers * layers


def test_a_product_that_does_not_fit_is_named(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp: int4 weights: 48 inputs"):
        load(folder, weights="int4")


def test_what_another_kind_has_kept_is_not_gone_on_from(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3", **FITTING)
    found = [prefix_identity(load(folder, weights=kind), folder) for kind in ("dtype", *KINDS)]
    assert len(set(found)) == 3


def test_what_is_asked_for_reaches_the_daemon_and_the_status(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3", **FITTING)
    asked = Plan(model=str(folder), target_weights="int4")
    assert prepare(asked, tmp_path).target.weights == "int4"
    said = {"dtype": "float32", "weight_bytes": 12_340_000}
    assert status_text._weights(SimpleNamespace(weights="int4", **said)) == "int4, 12.3 MB"
    assert status_text._weights(SimpleNamespace(weights="dtype", **said)) == "float32, 12.3 MB"
