"""GGUF files: what is read, and that no file, however damaged, does worse than a typed error."""

import math
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_files import TinyGGUF

from protocol.checkpoints.gguf import GGUFModel
from protocol.checkpoints.gguf_file import round_to_bfloat16
from protocol.checkpoints.gguf_header import MAGIC
from protocol.errors import CheckpointError, UnsupportedModel

BAD = (CheckpointError, UnsupportedModel)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyGGUF(layers=1).write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def written(tmp_path, **what):
    return TinyGGUF(**({"layers": 1} | what)).write(tmp_path / "tiny.gguf")


def header(*, version=3, tensors=0, keys=0, body=b""):
    return MAGIC + struct.pack("<IQQ", version, tensors, keys) + body


def text(value):
    return struct.pack("<Q", len(value)) + value


def row(name=b"t", dims=(32,), kind=0, offset=0):
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
HOSTILE = {
    "no magic": b"GGML" + bytes(64),
    "version 1": header(version=1),
    "big-endian": MAGIC + struct.pack(">IQQ", 3, 0, 0),
    "absurd tensor count": header(tensors=1 << 60),
    "absurd key count": header(keys=1 << 60),
    "key of 2^63 bytes": header(keys=1, body=struct.pack("<Q", 1 << 63)),
    "string beyond the file": header(
        keys=1, body=text(b"k") + struct.pack("<IQ", 8, 1 << 20) + b"short"
    ),
    "absurd array": header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 40)),
    "array beyond the file": header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 10, 1 << 20)),
    "array of arrays": header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
    "unknown value type": header(keys=1, body=text(b"k") + struct.pack("<I", 77)),
    "key that is no text": header(keys=1, body=text(b"\xff\xfe") + struct.pack("<I", 7)),
    "the same key twice": header(keys=2, body=ARCHITECTURE * 2),
    "too many dimensions": header(tensors=1, body=row(dims=(1,) * 5)),
    "no dimension": header(tensors=1, body=row(dims=())),
    "empty dimension": header(tensors=1, body=row(dims=(32, 0))),
    "product overflows": header(tensors=1, body=row(dims=(1 << 32, 1 << 32))),
    "unknown tensor type": header(tensors=1, body=row(kind=999)),
    "row that is no whole block": header(tensors=1, body=row(dims=(31,), kind=int(Kind.Q8_0))),
    "offset beyond the file": header(tensors=1, body=row(offset=1 << 40) + bytes(256)),
    "size beyond the file": header(tensors=1, body=row(dims=(1 << 30,)) + bytes(256)),
    "crooked offset": header(tensors=1, body=row(offset=8) + bytes(256)),
    "the same tensor twice": header(tensors=2, body=row() * 2 + bytes(512)),
    "alignment of three": header(
        keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3)
    ),
    "no architecture": header(),
    "empty file": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_a_typed_error(name, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(BAD, match=r"bad\.gguf"):
        GGUFModel(path)


def test_a_file_cut_anywhere_is_a_typed_error(tiny, tmp_path):
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    # densely where the fixed fields are, sparsely in lists and data
    for size in [*range(64), *range(64, len(whole), 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(BAD):
            GGUFModel(path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused(tiny, tmp_path_factory, data):
    whole = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(whole)
    try:
        model = GGUFModel(path)
        for name in model.names():
            model.get_bfloat16(name)
    except BAD:
        pass


def test_a_missing_file_is_a_typed_error(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFModel(tmp_path / "none.gguf")


def test_a_file_that_shrinks_while_it_is_read_is_a_typed_error(tmp_path):
    path = written(tmp_path)
    model = GGUFModel(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    last = max(model.names(), key=lambda name: model._info(name).offset)
    with pytest.raises(CheckpointError, match="shrank"):
        model.get(last)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_rounding_equals_torch(bits):
    import torch

    values = np.array(bits, np.uint32).view(np.float32)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    nan = np.isnan(values)
    ours = torch.from_numpy(round_to_bfloat16(values).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(ours[~nan].view(torch.int16), theirs[~nan].view(torch.int16))
    assert torch.isnan(ours[nan]).all()


def test_bfloat16_is_the_float32_tensor_rounded_for_every_tensor(tiny):
    model = GGUFModel(tiny)
    for name in model.names():
        assert np.array_equal(model.get_bfloat16(name), round_to_bfloat16(model.get(name)))
        assert model.get(name).shape == model.shape(name)


def test_large_tensors_are_read_in_slabs_with_the_same_result(tiny, monkeypatch):
    name = "model.embed_tokens.weight"
    whole = GGUFModel(tiny).get(name)
    monkeypatch.setattr("protocol.checkpoints.gguf_file.SLAB_BYTES", 300)
    assert np.array_equal(GGUFModel(tiny).get(name), whole)


def test_query_and_key_rows_of_a_llama_return_to_their_order(tmp_path):
    # llama.cpp stores row (half, pair) of each head at (pair, half)
    original = np.arange(4 * 16, dtype=np.float32)
    stored = original.reshape(4, 2, 8).swapaxes(1, 2).reshape(64)
    bias = {f"blk.0.attn_{x}.bias": np.zeros(n, np.float32) for x, n in (("k", 32), ("v", 32))}
    path = written(
        tmp_path,
        tensors={
            **bias,
            "blk.0.attn_q.bias": stored,
            "blk.0.attn_output.bias": np.zeros(64, np.float32),
        },
    )
    model = GGUFModel(path)
    assert np.array_equal(model.get("model.layers.0.self_attn.q_proj.bias"), original)
    assert model.config()["attention_bias"] is True
    assert model.architecture == "llama"


def test_an_unknown_tensor_name_is_refused_when_asked_for(tiny):
    with pytest.raises(CheckpointError, match="nonsense is missing"):
        GGUFModel(tiny).get("nonsense")


ZEROS = np.zeros((32, 64), np.float32)
REFUSED = {
    "a missing tensor": ({"tensors": {"blk.0.ffn_up.weight": None}}, "up_proj.weight is missing"),
    "a misshapen tensor": (
        {"tensors": {"blk.0.ffn_up.weight": ZEROS}},
        r"expected shape \[96, 64\], found \[32, 64\]",
    ),
    "a tensor with no place": ({"tensors": {"blk.0.extra.weight": ZEROS}}, "no place"),
    "a layer too many": ({"tensors": {"blk.7.ffn_up.weight": ZEROS}}, "model of 1 layers"),
    "an adapter's tensor": ({"tensors": {"blk.0.attn_q_norm.weight": ZEROS[0]}}, "no place"),
    "an unknown architecture": ({"arch": "mamba"}, "'mamba' is not supported"),
    "experts": ({"extra": {"expert_count": 8}}, "mixture of 8 experts"),
    "partial rotation": (
        {"extra": {"rope.dimension_count": 8, "attention.key_length": 16}},
        "8 rotary",
    ),
    "heads per layer": ({"extra": {"attention.head_count_kv": [1, 2]}}, "2 values"),
    "zero heads": ({"extra": {"attention.head_count": 0}}, "head_count is 0"),
    "an infinite theta": ({"extra": {"rope.freq_base": math.inf}}, "positive number"),
    "yarn": ({"extra": {"rope.scaling.type": "yarn"}}, "'yarn' is not supported"),
    "an old kind of scaling": ({"extra": {"rope.scale_linear": 2.0}}, "scale_linear"),
    "foreign rope factors": (
        {"tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}},
        "not Llama 3's",
    ),
    "an eos outside the vocabulary": (
        {"raw": {"tokenizer.ggml.eos_token_id": 99999}},
        "outside 0..269",
    ),
    "biases on three of four": ({"biases": ("attn_q", "attn_k", "attn_v")}, "biases on q, k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name, tmp_path):
    what, sentence = REFUSED[name]
    with pytest.raises(BAD, match=sentence):
        GGUFModel(written(tmp_path, **what))


def test_linear_scaling_is_carried_over(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    config = GGUFModel(written(tmp_path, extra=scaling)).config()
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_the_scaling_of_llama_3_is_recovered_from_its_factors(tmp_path):
    # as computed by transformers for the same parameters
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters={"rope_theta": 500000.0, **scaling},
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    path = written(
        tmp_path,
        head_dim=128,
        extra={"rope.freq_base": 500000.0},
        tensors={"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)},
    )
    found = GGUFModel(path).config()["rope_scaling"]
    assert found == {**scaling, "factor": pytest.approx(32.0, rel=1e-5)}


@pytest.mark.parametrize(
    ("arch", "window", "expected"),
    [
        ("llama", 64, {"model_type": "mistral", "sliding_window": 64}),
        ("llama", 4096, {"model_type": "llama"}),
        ("qwen3", 64, {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True}),
    ],
)
def test_a_sliding_window_is_stated_where_it_matters(arch, window, expected, tmp_path):
    path = written(tmp_path, arch=arch, extra={"attention.sliding_window": window})
    config = GGUFModel(path).config()
    assert {key: config[key] for key in expected} == expected
    assert ("sliding_window" in config) == ("sliding_window" in expected)
