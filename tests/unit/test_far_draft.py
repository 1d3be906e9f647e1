"""A draft that shares no memory with its target: rows, embedding and head, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drive import unpack
from support.gguf_files import TinyGGUF
from support.local_pair import LocalPair
from support.plain_host import PlainHost
from support.targets import load
from support.tiny_pair import VOCAB, write_pair
from support.tiny_target import write_tiny_target

from draft_daemon.checkpoint import LoadedDraft, OwnHead
from draft_daemon.lexicon import Asked, check_same
from draft_daemon.models.dflash import DFlash
from protocol.checkpoints.identity import MAX_TOKENIZER_BYTES, identify
from protocol.errors import (
    CheckpointError,
    ConfigError,
    DraftMismatch,
    ProtocolError,
    UnsupportedModel,
)
from protocol.kernels.linear import pack
from protocol.lent_weights import EMBED, HEAD, lent_weights, weights_hash
from protocol.messages import MAX_RAW_BYTES, Embed, Project, Sampling
from protocol.transports.local import TRANSPORT as LOCAL
from protocol.transports.tcp import TRANSPORT as TCP

PROMPT = [(7 * i) % (VOCAB - 4) + 4 for i in range(30)]
ROUNDS = 6
OFFERED = (1234, 7)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(runtime_dir, checkpoints):
    with LocalPair(runtime_dir, *checkpoints) as pair:
        yield pair


def ids(proposed):
    return [unpack(item.tokens) for item in proposed]


def test_a_draft_elsewhere_proposes_what_one_with_shared_memory_does(pair):
    model = str(pair.model)
    text, proposed = pair.generate(pair.draft(LOCAL), PROMPT, ROUNDS)
    assert sum(item.moved_bytes for item in proposed) == 0
    settings = ({"target_model": model}, {"draft_head": "target"})
    for number, setting in enumerate(settings, start=2):
        far, theirs = pair.generate(pair.draft(TCP, **setting), PROMPT, ROUNDS, sequence=number)
        assert (far, ids(theirs)) == (text, ids(proposed))
        row = pair.target.ring.shape.row_width * 4
        for item, rows in zip(theirs, [len(PROMPT)] + [1] * (ROUNDS - 1), strict=True):
            assert item.moved_bytes > rows * row


def test_a_draft_with_a_head_of_its_own_does_not_ask_for_ids(pair):
    plain, table = pair.loaded, pair.target.weights.embed
    reduced = torch.arange(0, VOCAB, 2)
    own = OwnHead(pack(table[reduced], torch.float32), reduced)
    asked = Asked(LoadedDraft(plain.config, plain.network, own, (), 0), pair.guest())
    ids = torch.tensor([3, 96, 0])
    assert torch.equal(asked.embed(ids), table[ids])
    hidden = torch.randn(3, table.shape[1], generator=torch.Generator().manual_seed(1))
    best = (hidden @ table[reduced].T).argmax(dim=-1)
    assert asked.best(hidden).ids == tuple(reduced[best].tolist())
    assert asked.drawn(hidden, 5, Sampling(seed=1), (1.0, 1.0, 1.0)) == asked.best(hidden)
    assert not [message for message in pair.host.handled if isinstance(message, Project)]


def test_a_head_that_needs_logits_is_refused_by_name(pair):
    class Correcting(DFlash):
        needs_logits = True

    network = object.__new__(Correcting)
    draft = LoadedDraft(pair.loaded.config, network, None, (), 0)
    with pytest.raises(UnsupportedModel, match="the head of Correcting needs the target's logits"):
        Asked(draft, pair.guest())


def test_a_target_that_scales_its_embeddings_cannot_be_asked_for_them(pair):
    pair.target.embedding_scale = 2.0
    with pytest.raises(UnsupportedModel, match="this target scales its embeddings by 2"):
        Asked(pair.loaded, pair.guest())


def test_settings_that_do_not_fit_the_transport_are_refused(pair):
    with pytest.raises(ConfigError, match="for a target on another host; local shares"):
        pair.lexicon(pair.guest(LOCAL), transport="local", draft_head="target")
    with pytest.raises(ConfigError, match=r"--target-model.*--draft-head target"):
        pair.lexicon(pair.guest())


def changed(model, folder, what):
    shutil.copytree(model, folder)
    if what == "config":
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}))
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    else:
        tensors = load_file(folder / "model.safetensors")
        tensors[what][VOCAB - 1, 0] += 1
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("config", "config"),
        ("tokenizer", "tokenizer"),
        (EMBED, "embedding and head"),
        (HEAD, "embedding and head"),
    ],
)
def test_another_checkpoint_is_refused_by_what_differs(pair, tmp_path, what, named):
    other = changed(pair.model, tmp_path / "other", what)
    with pytest.raises(DraftMismatch, match=f"the digest of its {named} is"):
        pair.lexicon(pair.guest(), target_model=str(other))


def test_a_config_is_compared_as_it_is_understood(pair, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(pair.model, other)
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"transformers_version": "9"}, indent=7))
    check_same(other, pair.guest().facts)


def test_a_checkpoint_of_gguf_has_an_identity_too(tmp_path):
    path = TinyGGUF(layers=1).write(tmp_path / "tiny.gguf")
    assert identify(path) == identify(path)
    assert len(identify(path).config) == 64


def test_a_tokenizer_that_cannot_be_read_is_a_checkpoint_error(pair, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(pair.model, other)
    with (other / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(CheckpointError, match="more than"):
        identify(other)
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        identify(other)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lent_weights_are_laid_out_as_the_target_shares_them(tmp_path, tied, dtype):
    folder = write_tiny_target(tmp_path, "llama2", dtype=dtype, tie_word_embeddings=tied)
    host = PlainHost()
    load(folder, host, dtype=str(dtype).removeprefix("torch."))
    lent = lent_weights(folder, dtype)
    assert lent.keys() == host.weights.keys()
    for name, tensor in lent.items():
        assert torch.equal(tensor, host.weights[name]), name


def test_names_that_only_a_family_knows_cannot_be_lent(tmp_path):
    folder = write_tiny_target(tmp_path, "llama2")
    tensors = load_file(folder / "model.safetensors")
    tensors["wte.weight"] = tensors.pop(EMBED)
    save_file(tensors, folder / "model.safetensors")
    assert weights_hash(folder) == ""
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight.*--draft-head"):
        lent_weights(folder, torch.float32)


def lives(**fields):
    return {"target_life": OFFERED[1], "pull": 1, **fields}


def test_what_cannot_be_embedded_or_projected_is_refused(pair):
    handle, width = pair.lender.handle, pair.target.hidden_size * 4
    with pytest.raises(ProtocolError, match="bytes are no hidden rows"):
        handle(Project(**lives(raw=b"")), OFFERED)
    with pytest.raises(ProtocolError, match=f"{width + 4} bytes are no hidden rows of {width}"):
        handle(Project(**lives(raw=bytes(width + 4))), OFFERED)
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        handle(Project(**lives(raw=b"\xff" * width)), OFFERED)
    with pytest.raises(ProtocolError, match="do not fit a message"):
        handle(Embed(**lives(tokens=bytes(4 * (MAX_RAW_BYTES // width + 1)))), OFFERED)
    with pytest.raises(ProtocolError, match="vocabulary"):
        handle(Embed(**lives(tokens=(VOCAB + 1000).to_bytes(4, "little"))), OFFERED)
    pair.target.embedding_scale = 2.0
    with pytest.raises(UnsupportedModel, match="scales its embeddings by 2"):
        handle(Embed(**lives(tokens=bytes(4))), OFFERED)
