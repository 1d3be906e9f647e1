"""Checkpoints and ring layouts with damage that nobody thought of: read, or a typed error."""

import contextlib
import json
import resource
import struct

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.tiny_draft import Z_LAB
from support.tiny_target import BASE
from support.tiny_text import CHARACTERS, SPECIAL, TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from launch.chat_template import load_chat_template
from launch.tokenizer import TextTokenizer
from protocol import arena_layout
from protocol.arena_layout import Ask, Layout, Place, Refusal
from protocol.checkpoints.draft_config import read_draft_config
from protocol.checkpoints.target_config import read_model_config
from protocol.checkpoints.tensors import open_tensors
from protocol.errors import CheckpointError, DaemonError, ProtocolError, TransportRefused
from protocol.feature_ring import plan

ANY_FILE = settings(
    max_examples=150,
    deadline=5000,  # milliseconds: bounded time
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MOST_BYTES = 256 << 20  # that reading a damaged file may take beyond what the process had

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def _bounded_memory():
    """Fail where reading took much more memory than the process had ever held before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_BYTES


@st.composite
def damage(draw, whole):
    """`whole` with bytes overwritten, cut off, doubled or added."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(("write", "cut", "double", "insert")))
        if kind == "write":
            data[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[max(1, place) :]
        elif kind == "double":
            data += data[place : place + 4096]
        else:
            data[place:place] = draw(st.binary(max_size=12))
    return bytes(data)


@st.composite
def changed(draw, tree):
    """A JSON object in which some values, at any depth, are something else, or are gone."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 4))):
        here = tree
        while True:
            places = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            if isinstance(here[place], dict | list) and here[place] and draw(st.booleans()):
                here = here[place]
                continue
            if draw(st.booleans()):
                here[place] = draw(anything)
            else:
                del here[place]
            break
    return tree


def read_or_refused(call, *arguments):
    """No other exception, and no end of the process."""
    with contextlib.suppress(DaemonError):
        call(*arguments)


# --- configs -------------------------------------------------------------------------------------

LLAMA = BASE | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("raw", "read"),
    [(LLAMA, read_model_config), (Z_LAB, read_draft_config)],
    ids=["target", "draft"],
)
def test_a_config_with_any_values_is_read_or_refused(tmp_path, raw, read):
    @ANY_FILE
    @given(changed(raw))
    def check(tree):
        (tmp_path / "config.json").write_text(json.dumps(tree))
        read_or_refused(read, tmp_path)

    check()


@pytest.mark.parametrize(
    ("raw", "read"),
    [(LLAMA, read_model_config), (Z_LAB, read_draft_config)],
    ids=["target", "draft"],
)
def test_a_config_with_damaged_bytes_is_read_or_refused(tmp_path, raw, read):
    @ANY_FILE
    @given(damage(json.dumps(raw).encode()))
    def check(data):
        (tmp_path / "config.json").write_bytes(data)
        read_or_refused(read, tmp_path)

    check()


# --- tensors -------------------------------------------------------------------------------------


def test_a_damaged_safetensors_file_is_read_or_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    (head,) = struct.unpack("<Q", whole[:8])

    def everything():
        with open_tensors(tmp_path) as tensors:
            for name in sorted(tensors.names()):
                tensors.shape(name)
                tensors.get(name).float().sum()

    @ANY_FILE
    @given(st.one_of(damage(whole), damage(whole[: 8 + head]), changed_header(whole)))
    def check(data):
        path.write_bytes(data)
        read_or_refused(everything)

    check()


def changed_header(whole):
    """Well-formed JSON in the header, with other values."""
    (size,) = struct.unpack("<Q", whole[:8])
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]

    def pack(tree):
        text = json.dumps(tree).encode()
        return struct.pack("<Q", len(text)) + text + body

    return changed(header).map(pack)


# --- tokenizer -----------------------------------------------------------------------------------


def tokenizer_json():
    tokenizer = Tokenizer(models.WordLevel({**SPECIAL, **CHARACTERS}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer.to_str()


def use(folder):
    tokenizer = TextTokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("a b", add_special=True))


@pytest.mark.parametrize("how", ["bytes", "values"])
def test_a_damaged_tokenizer_is_used_or_refused(tmp_path, how):
    whole = tokenizer_json()
    bad = damage(whole.encode())
    if how == "values":
        bad = changed(json.loads(whole)).map(lambda tree: json.dumps(tree).encode())

    @ANY_FILE
    @given(bad)
    def check(data):
        (tmp_path / "tokenizer.json").write_bytes(data)
        read_or_refused(use, tmp_path)

    check()


def test_a_tokenizer_that_fails_at_a_text_is_a_typed_error(tmp_path):
    tree = json.loads(tokenizer_json())
    tree["model"]["vocab"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"cannot encode this text: .*UNK"):
        use(tmp_path)


def test_a_damaged_tokenizer_config_is_used_or_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    raw = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}

    def both(folder):
        use(folder)
        template = load_chat_template(folder)
        if template is not None:
            template.render([{"role": "user", "content": "x"}])

    @ANY_FILE
    @given(changed(raw))
    def check(tree):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tree))
        read_or_refused(both, tmp_path)

    check()


# --- the ring's layout ---------------------------------------------------------------------------

SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


def layout():
    places, size = arena_layout.arrange(arena_layout.ring_tensors(SHAPE), 0)
    return Layout(arenas=(size,), places=tuple(places))


@ANY_FILE
@given(st.binary(max_size=200) | damage(arena_layout.encode(layout())))
def test_any_bytes_are_parts_of_a_ring_or_refused(data):
    for read in (arena_layout.decode_ask, arena_layout.decode_answer):
        try:
            part = read(data)
        except ProtocolError:
            continue
        assert isinstance(part, Ask | Layout | Refusal)
        if isinstance(part, Layout):
            check_inside(part)


small = st.integers(0, 1 << 20) | st.integers(0, (1 << 63) - 1)


@ANY_FILE
@given(st.data())
def test_a_layout_with_any_numbers_stays_inside_its_arenas_or_is_refused(data):
    good = layout()
    places = list(good.places)
    index = data.draw(st.integers(0, len(places) - 1))
    field, value = data.draw(
        st.one_of(
            st.tuples(st.just("offset"), small),
            st.tuples(st.just("arena"), st.integers(0, 5)),
            st.tuples(st.just("shape"), st.tuples(small, small)),
        )
    )
    tree = msgspec.to_builtins(places[index]) | {field: value}
    try:
        places[index] = msgspec.convert(tree, Place)
    except msgspec.ValidationError:
        return
    arenas = data.draw(st.sampled_from([good.arenas, (), (0,), (64,), (1 << 62,)]))
    check_inside(msgspec.structs.replace(good, places=tuple(places), arenas=arenas))


def check_inside(part):
    try:
        found = arena_layout.check_places(part, SHAPE)
    except TransportRefused:
        return
    for place in found.values():
        assert 0 <= place.offset <= place.offset + place.size <= part.arenas[place.arena]
