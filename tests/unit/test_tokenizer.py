"""From text to ids: special tokens, what ends a text, and prompts with and without a template."""

import json

import pytest
from support.gguf_files import EOS, SPECIAL, TinyGGUF, byte_level_vocabulary
from tokenizers import Tokenizer

from launch.chat_template import ChatTemplate
from launch.gguf_import import import_gguf
from launch.gguf_tokenizer import tokenizer_from_gguf
from launch.tokenizer import TextTokenizer, encode_prompt, load_text_side
from protocol.errors import CheckpointError, UnsupportedModel, UsageError


def model_folder(tmp_path, **what):
    folder = tmp_path / "folder"
    folder.mkdir()
    source = TinyGGUF(**({"layers": 1} | what)).write(tmp_path / "tiny.gguf")
    import_gguf(source, folder, lambda _done, _total: None)
    return folder


def test_text_comes_back_from_its_ids(tmp_path):
    tokenizer = TextTokenizer.load(model_folder(tmp_path))
    text = "hello 😀  world\n日本 é"
    assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text
    assert tokenizer.vocab_size == len(byte_level_vocabulary()[0])
    assert tokenizer.token(EOS) == SPECIAL[EOS]
    assert tokenizer.token(1 << 20) is None
    assert tokenizer.run_ids == frozenset()


def test_special_tokens_in_the_text_are_those_tokens_and_do_not_show(tmp_path):
    tokenizer = TextTokenizer.load(model_folder(tmp_path))
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special=False)
    assert (ids[0], ids[-1]) == (1, EOS)
    assert tokenizer.decode(ids) == "hello"


def test_a_bos_is_added_to_raw_text_only(tmp_path):
    tokenizer, template = load_text_side(model_folder(tmp_path, add_bos=True))
    raw = encode_prompt(tokenizer, template, "hello", raw=True)
    assert raw.ids[0] == 1
    assert not raw.templated
    chat = encode_prompt(tokenizer, template, "hello")
    assert chat.ids.count(1) == 2  # one per turn, both written by the template
    assert chat.templated
    assert chat.reason == ""


def test_the_system_text_comes_first(tmp_path):
    tokenizer, template = load_text_side(model_folder(tmp_path))
    prompt = encode_prompt(tokenizer, template, "Q", system="S")
    assert tokenizer.decode(prompt.ids) == "system\nS\nuser\nQ\nassistant\n"


def test_a_model_without_a_template_takes_the_prompt_raw_and_says_so(tmp_path):
    tokenizer, template = load_text_side(model_folder(tmp_path, template=None))
    prompt = encode_prompt(tokenizer, template, "hello")
    assert list(prompt.ids) == tokenizer.encode("hello", add_special=True)
    assert prompt.reason == "the model has no chat template"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x", "system": "S", "raw": True}, "system text needs a chat template"),
        ({"prompt": "x\udc80"}, "lone surrogates"),
    ],
)
def test_a_prompt_that_cannot_be_honoured_is_refused(tmp_path, options, sentence):
    tokenizer, template = load_text_side(model_folder(tmp_path))
    with pytest.raises(UsageError, match=sentence):
        encode_prompt(tokenizer, template, **options)


def test_a_template_that_writes_nothing_is_refused(tmp_path):
    tokenizer = TextTokenizer.load(model_folder(tmp_path))
    with pytest.raises(UsageError, match="made an empty prompt"):
        encode_prompt(tokenizer, ChatTemplate("", {}, where="t"), "x")


def test_a_prompt_without_tokens_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
    )
    with pytest.raises(UsageError, match="no tokens"):
        encode_prompt(TextTokenizer.load(tmp_path), None, "x")


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": [0, 5]}, {"eos_token_id": 7}, {}, {0, 5}),
        ({}, {"eos_token_id": 7}, {}, {7}),
        ({}, {}, {"eos_token": "<|im_end|>"}, {2}),
        ({"eos_token_id": 0}, {}, {"eos_token": {"content": "<|im_end|>"}}, {0, 2}),
        ({}, {}, {"eos_token": "<|unheard of|>"}, set()),
    ],
)
def test_what_ends_a_text(tmp_path, generation, config, tokenizer_config, expected):
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert TextTokenizer.load(folder).eos_ids == expected


@pytest.mark.parametrize("eos", ["two", -1, True, list(range(99)), [1.5]])
def test_a_bad_eos_is_a_checkpoint_error(tmp_path, eos):
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        TextTokenizer.load(folder)


def test_a_bare_tokenizer_file_is_enough(tmp_path):
    folder = model_folder(tmp_path)
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    assert TextTokenizer.load(folder).eos_ids == frozenset()


def test_limits_of_a_training_run_in_the_file_do_not_cut_prompts(tmp_path):
    folder = model_folder(tmp_path)
    path = folder / "tokenizer.json"
    stored = Tokenizer.from_file(str(path))
    stored.enable_truncation(3)
    stored.enable_padding(length=7)
    stored.save(str(path))
    assert len(TextTokenizer.load(folder).encode("hello world, hello you", add_special=False)) > 7
    assert len(TextTokenizer.load(folder).encode("h", add_special=False)) == 1


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        TextTokenizer.load(tmp_path)
    monkeypatch.setattr("launch.tokenizer.MAX_TOKENIZER_BYTES", 1)
    with pytest.raises(CheckpointError, match="more than 1 bytes"):
        TextTokenizer.load(tmp_path)


def metadata(**changes):
    tokens, kinds = byte_level_vocabulary()
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e"],
    }
    return base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"model": "bert"}, UnsupportedModel, "'bert'"),
        ({"pre": "unheard-of"}, UnsupportedModel, "'unheard-of' is not known"),
        ({"tokens": []}, CheckpointError, "tokens is missing"),
        ({"merges": ["h e y"]}, CheckpointError, "not a pair"),
        ({"merges": ["q z"]}, CheckpointError, "out of vocabulary"),
        ({"add_bos_token": True}, CheckpointError, "bos token is to be added"),
        ({"model": "llama", "merges": [1]}, CheckpointError, "no list of texts"),
    ],
)
def test_a_gguf_tokenizer_that_is_wrong_is_refused(changes, kind, sentence):
    with pytest.raises(kind, match=sentence):
        tokenizer_from_gguf(metadata(**changes), where="f.gguf")


def test_sentencepiece_without_scores_is_refused():
    values = metadata(model="llama")
    del values["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match="score for each"):
        tokenizer_from_gguf(values, where="f.gguf")


def test_user_defined_tokens_stay_whole_and_show():
    values = metadata()
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "<think>"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 4]
    tokenizer = TextTokenizer(tokenizer_from_gguf(values, where="f"), frozenset(), "")
    ids = tokenizer.encode("a<think>b", add_special=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<think>b"


def test_a_vocabulary_without_token_types_is_read():
    values = metadata()
    del values["tokenizer.ggml.token_type"]
    tokenizer = TextTokenizer(tokenizer_from_gguf(values, where="f"), frozenset(), "")
    assert tokenizer.decode(tokenizer.encode("hey", add_special=False)) == "hey"


def test_sentencepiece_with_merges_uses_them():
    values = metadata(model="llama", tokens=["<unk>", "▁", "h", "e", "he", "▁he"])
    values |= {"tokenizer.ggml.merges": ["h e", "▁ he"], "tokenizer.ggml.token_type": [2] + [1] * 5}
    values |= {"tokenizer.ggml.add_bos_token": False}
    tokenizer = tokenizer_from_gguf(values, where="f")
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["▁he"]
