"""What a model's name leads to: a complete folder, or a sentence that says what is wrong."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from support.gguf_files import TinyGGUF
from support.waiting import until

from launch import store
from launch.models import DEFAULT_NAME, resolve_model
from launch.progress import Silent
from launch.store import MANIFEST, default_home, defect_of, locked, make_folder, new_folder
from protocol.checkpoints.folder import check_folder
from protocol.checkpoints.json_file import MAX_JSON_BYTES
from protocol.errors import (
    CheckpointError,
    ModelNotFound,
    PermissionRefused,
    TemporaryFailure,
    Unavailable,
    UnsupportedModel,
)


class Notes(Silent):
    def __init__(self):
        self.notes = []
        self.stages = []

    def note(self, text):
        self.notes.append(text)

    def update(self, stage, done, total):
        assert 0 <= done <= total
        self.stages.append(stage)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path):
    return TinyGGUF(layers=1).write(tmp_path / "a tiny model.gguf")


def test_a_gguf_file_is_converted_once(home, gguf):
    progress = Notes()
    first = resolve_model(str(gguf), home=home, progress=progress)
    assert (first.source, first.fetched, first.name) == ("gguf", True, "a tiny model")
    assert set(progress.stages) == {"checksum", "convert"}
    check_folder(first.path)
    assert defect_of(first.path, checksums=True) is None
    again = resolve_model(str(gguf), home=home, verify=True)
    assert (again.path, again.fetched) == (first.path, False)
    copy = gguf.with_name("copy.gguf")
    copy.write_bytes(gguf.read_bytes())
    assert resolve_model(str(copy), home=home).fetched  # another name is another folder
    folder = resolve_model(str(first.path), home=home, verify=True)
    assert (folder.source, folder.path) == ("folder", first.path)


def test_a_file_that_did_not_change_is_not_read_again(home, gguf):
    path = resolve_model(str(gguf), home=home).path
    progress = Notes()
    assert resolve_model(str(gguf), home=home, progress=progress).path == path
    assert progress.stages == []
    gguf.touch()
    assert resolve_model(str(gguf), home=home, progress=progress).path == path
    assert set(progress.stages) == {"checksum"}
    TinyGGUF(layers=1, seed=7).write(gguf)
    changed = resolve_model(str(gguf), home=home)
    assert changed.fetched
    assert changed.path != path


def test_a_folder_with_one_gguf_file_is_that_file(home, gguf):
    assert resolve_model(str(gguf.parent), home=home).source == "gguf"


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "gone", "no manifest"])
def test_a_damaged_conversion_is_made_again(home, gguf, damage):
    path = resolve_model(str(gguf), home=home).path
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    if damage == "shorter":
        weights.write_bytes(content[:-1])
    elif damage == "other bytes":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "gone":
        weights.unlink()
    else:
        (path / MANIFEST).write_text("[]")
    if damage == "other bytes":  # sizes agree: only --verify looks closer
        assert not resolve_model(str(gguf), home=home).fetched
        with pytest.raises(CheckpointError, match="another sha256"):
            resolve_model(str(path), home=home, verify=True)
    assert resolve_model(str(gguf), home=home, verify=True).fetched
    assert weights.read_bytes() == content
    assert sorted(os.listdir(home / "models")) == sorted([path.name, f".{path.name}.lock"])


def test_what_an_interrupted_conversion_left_is_swept(home, gguf):
    path = resolve_model(str(gguf), home=home).path
    (path / MANIFEST).unlink()
    leftover = home / "models" / f".partial-{path.name}-1"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    resolve_model(str(gguf), home=home)
    assert not leftover.exists()


def test_a_conversion_that_fails_leaves_nothing(home, tmp_path):
    bad = TinyGGUF(layers=1, pre="unheard-of").write(tmp_path / "bad.gguf")
    with pytest.raises(UnsupportedModel, match="unheard-of"):
        resolve_model(str(bad), home=home)
    assert [name for name in os.listdir(home / "models") if not name.endswith(".lock")] == []


def test_a_full_disk_is_a_temporary_failure_and_leaves_nothing(home, gguf, monkeypatch):
    def full(*_arguments, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launch.gguf_import._write_json", full)
    with pytest.raises(TemporaryFailure, match="No space left"):
        resolve_model(str(gguf), home=home)
    assert [name for name in os.listdir(home / "models") if not name.endswith(".lock")] == []


def test_two_at_once_convert_once_and_the_second_waits(home, gguf):
    key = resolve_model(str(gguf), home=home).path.name
    (home / "models" / key / MANIFEST).unlink()
    progress = Notes()
    found = []
    with locked(home, key, lambda _text: None):
        thread = threading.Thread(
            target=lambda: found.append(resolve_model(str(gguf), home=home, progress=progress))
        )
        thread.start()
        until(lambda: progress.notes, what="the note that somebody else is at it")
        assert found == []
        with new_folder(home, key) as partial:
            from launch.gguf_import import import_gguf

            import_gguf(gguf, partial, lambda _done, _total: None)
            store.write_manifest(partial, key, {})
    thread.join(20)
    assert "another process is preparing" in progress.notes[0]
    assert not found[0].fetched


def test_waiting_for_a_lock_ends(home, monkeypatch):
    monkeypatch.setattr(store, "LOCK_WAIT_SECONDS", 0.0)
    make_folder(home / "models")
    with (home / "models" / ".x.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TemporaryFailure, match="another process"), locked(home, "x", print):
            pass


def test_a_home_that_cannot_be_written_is_named(tmp_path, gguf):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PermissionRefused, match="cannot write"):
        resolve_model(str(gguf), home=tmp_path / "file" / "home")


def test_a_lock_that_cannot_be_opened_is_named(home, gguf):
    make_folder(home / "models")
    with pytest.raises(Unavailable, match="cannot write"):
        store._open_lock(home / "models")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm2-135", f"did you mean {DEFAULT_NAME}"),
        ("no-such-model", f"known by name: {DEFAULT_NAME}"),
        ("./nowhere/at/all", "no such folder"),
        ("some/where.gguf", "no such folder, GGUF file"),
        ("~nobody-of-that-name/x", "no such folder"),
        ("x" * 5000, r"x\.\.\.'"),
    ],
)
def test_an_unknown_name_says_what_a_name_can_be(home, name, sentence):
    with pytest.raises(ModelNotFound, match=sentence):
        resolve_model(name, home=home)


def test_the_default_model_is_not_fetched_where_that_is_not_allowed(home):
    with pytest.raises(ModelNotFound, match=f"dflashd pull {DEFAULT_NAME}"):
        resolve_model(DEFAULT_NAME, home=home, allow_pull=False)
    assert not home.exists()


def test_a_file_that_is_no_model_is_refused(home, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelNotFound, match="is a file; a model is a folder"):
        resolve_model(str(tmp_path / "model.bin"), home=home)


def complete(tmp_path):
    folder = tmp_path / "complete"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def shards(folder, table):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


FOLDERS = {
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, "no config.json"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), CheckpointError, "JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), CheckpointError, "object"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        CheckpointError,
        "neither model.safetensors",
    ),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        CheckpointError,
        "missing or empty",
    ),
    "pickles only": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        UnsupportedModel,
        "pickled",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        UnsupportedModel,
        "no tokenizer.json",
    ),
    "a missing shard": (lambda f: shards(f, {"a": "1.safetensors"}), CheckpointError, "1.safet"),
    "an empty index": (lambda f: shards(f, {}), CheckpointError, "weight_map is missing"),
    "a shard elsewhere": (lambda f: shards(f, {"a": "../b"}), CheckpointError, "not a plain"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_incomplete_folder_is_refused_by_the_file(home, tmp_path, name):
    damage, kind, sentence = FOLDERS[name]
    folder = complete(tmp_path)
    assert resolve_model(str(folder), home=home).name == "complete"
    damage(folder)
    with pytest.raises(kind, match=sentence):
        resolve_model(str(folder), home=home)


def test_a_sharded_folder_is_complete_with_its_shards(home, tmp_path):
    folder = complete(tmp_path)
    shards(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    for shard in ("1.safetensors", "2.safetensors"):
        (folder / shard).write_bytes(b"x")
    assert resolve_model(str(folder), home=home, verify=True).path == folder


def test_a_path_that_is_no_folder_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match="no folder"):
        check_folder(tmp_path / "none")


def test_huge_or_unreadable_json_is_refused(tmp_path):
    folder = complete(tmp_path)
    (folder / "config.json").write_bytes(b" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(CheckpointError, match=f"larger than {MAX_JSON_BYTES} bytes"):
        check_folder(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        check_folder(folder)


def test_the_folder_of_a_cache_names_the_snapshot_that_may_be_meant(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/4f2c").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no config\.json.*/snapshots/4f2c may be meant"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DFLASH_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"DFLASH_HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/dflash"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/dflash"),
        ({}, "~/.cache/dflash"),
        ({"DFLASH_HOME": "~/models"}, "~/models"),
    ],
)
def test_models_live_where_the_environment_says(environment, expected):
    assert default_home(environment) == Path(expected).expanduser()


def test_a_checksum_of_an_unreadable_file_is_a_typed_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read"):
        store.sha256_of(tmp_path)
