"""Models from a hub: the real client library against a hub on the loopback."""

import json
from pathlib import Path

import pytest
from support.command import dflashd
from support.gguf_files import TinyGGUF
from support.hub_server import COMMIT, running_hub
from support.tiny_draft import Z_LAB, write_draft

from launch.gguf_import import import_gguf
from protocol.checkpoints.draft_config import read_draft_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A complete model's files, with a pickle and code next to them."""
    place = tmp_path_factory.mktemp("hub")
    folder = place / "folder"
    folder.mkdir()
    import_gguf(TinyGGUF(layers=1).write(place / "t.gguf"), folder, lambda _done, _total: None)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {"pytorch_model.bin": b"\x80\x04", "modeling.py": b"raise SystemExit"}


@pytest.fixture
def hub():
    with running_hub() as running:
        yield running


def pull(hub, tmp_path, *arguments, **more):
    env = {
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return dflashd("pull", *arguments, env=env | more)


def test_a_model_is_fetched_once_and_without_code_or_pickles(hub, tmp_path, files):
    hub.files["some/model"] = files
    first = pull(hub, tmp_path, "some/model", "--json")
    assert first.code == 0, first.err
    assert first.err == "fetching some/model from the hub\n"
    answer = json.loads(first.out)
    assert (answer["source"], answer["fetched"], answer["checked"]) == ("hub", True, "files")
    assert answer["path"].endswith(COMMIT)
    served = {path.rsplit("/", 1)[-1] for path in hub.served if "/resolve/" in path}
    assert served == {name for name in files if name not in ("pytorch_model.bin", "modeling.py")}
    hub.served.clear()
    again = pull(None, tmp_path, "some/model", "--json")  # no network is needed
    assert json.loads(again.out)["path"] == answer["path"]
    assert not json.loads(again.out)["fetched"]


def test_a_model_that_lacks_files_is_refused_by_the_file(hub, tmp_path, files):
    hub.files["some/model"] = {k: v for k, v in files.items() if k != "tokenizer.json"}
    outcome = pull(hub, tmp_path, "some/model")
    assert outcome.code == 78
    assert "no tokenizer.json" in outcome.err


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("some/unknown", 78, "the hub has no model some/unknown"),
        ("some/gated", 77, "accept its terms on the hub and set HF_TOKEN"),
        ("some/model@nowhere", 78, "no such revision"),
        ("some/two--dashes", 78, "no valid hub id"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub, tmp_path, files, name, code, sentence):
    hub.files["some/model"] = files
    hub.gated.add("some/gated")
    outcome = pull(hub, tmp_path, name, "--quiet")
    assert outcome.code == code
    assert sentence in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "the hub at http://127.0.0.1:9 cannot be reached; some/model was not fetched"),
        (
            {"HF_HUB_OFFLINE": "1"},
            "some/model is not in the cache of the hub, and HF_HUB_OFFLINE forbids to fetch it",
        ),
    ],
)
def test_an_unreachable_hub_is_said_in_one_sentence_of_ours(tmp_path, more, sentence):
    outcome = pull(None, tmp_path, "some/model", "--quiet", **more)
    assert (outcome.code, outcome.err) == (69, f"dflashd: {sentence}\n")


def test_a_hub_that_fails_is_said_with_its_status(hub, tmp_path, files):
    hub.files["some/model"] = files
    hub.broken = True
    outcome = pull(hub, tmp_path, "some/model", "--quiet")
    sentence = f"the hub at {hub.url} answered 500 for some/model"
    assert (outcome.code, outcome.err) == (69, f"dflashd: {sentence}\n")


def test_a_hub_model_is_not_fetched_where_that_is_not_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from launch.hub import fetch_from_hub
    from launch.progress import Silent
    from protocol.errors import ModelNotFound

    with pytest.raises(ModelNotFound, match="dflashd pull nobody/has-this"):
        fetch_from_hub("nobody/has-this", Silent(), allow_pull=False)


@pytest.fixture
def draft_files(tmp_path):
    folder = write_draft(tmp_path / "draft", Z_LAB)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_draft_of_the_hub_is_fetched_once_and_found_by_its_id(hub, tmp_path, draft_files):
    hub.files["some/draft"] = draft_files
    first = pull(hub, tmp_path, "--draft", "some/draft", "--json")
    assert first.code == 0, first.err
    answer = json.loads(first.out)
    assert (answer["source"], answer["fetched"]) == ("hub", True)
    assert read_draft_config(Path(answer["path"])).block_size == Z_LAB["block_size"]
    again = pull(None, tmp_path, "--draft", "some/draft", "--json")  # no network is needed
    assert json.loads(again.out) == answer | {"fetched": False}
    as_model = pull(hub, tmp_path, "some/draft", "--quiet")
    assert as_model.code == 78  # it has no tokenizer


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"model.safetensors": None}, 78, "holds neither model.safetensors nor"),
        ({"model.safetensors": b""}, 78, "model.safetensors is missing or empty"),
        ({"config.json": b"{}"}, 78, "config.json"),
    ],
)
def test_what_is_no_draft_is_refused(hub, tmp_path, draft_files, change, code, sentence):
    hub.files["some/draft"] = {k: v for k, v in (draft_files | change).items() if v is not None}
    outcome = pull(hub, tmp_path, "--draft", "some/draft", "--quiet")
    assert (outcome.code, outcome.err.count("\n")) == (code, 1)
    assert sentence in outcome.err


@pytest.mark.parametrize("words", [("--draft",), ("--draft", "some/draft", "--verify")])
def test_a_draft_must_be_named_and_has_no_checksums(tmp_path, words):
    outcome = pull(None, tmp_path, *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_the_installed_draft_is_found_by_its_name(tmp_path):
    outcome = pull(None, tmp_path, "--draft", "smollm2-135m-dflash", "--json")
    assert json.loads(outcome.out)["source"] == "installed"
