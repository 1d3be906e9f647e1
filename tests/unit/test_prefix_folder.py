"""Prefixes on disk: what is read back is what was written, and what is damaged is never used."""

import logging
import os

import pytest
import torch
from safetensors import safe_open

from protocol.errors import ConfigError, PermissionRefused
from target_daemon import prefix_file, prefix_folder
from target_daemon.prefix_file import MAX_HEADER
from target_daemon.prefix_folder import PrefixFolder
from target_daemon.prefixes import Prefix, PrefixStore
from target_daemon.target import StateCopy

FACTS = {"length": 6, "fields": {"items": [[0, {"plain": None}]]}}
ROOM = 64 << 20


def prefix(first=100, length=6, size=4):
    generator = torch.Generator().manual_seed(first)
    state = {
        "kv": torch.randn(2, 3, length, size, generator=generator).transpose(0, 1),
        "half": torch.randn(length, generator=generator).bfloat16(),
        "none": torch.zeros(0, 3),
    }
    rows = torch.randn(min(4, length), 5, generator=generator)
    return Prefix(torch.arange(first, first + length), StateCopy(state, FACTS), rows, 7)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def opened(place, identity="one", budget=ROOM):
    return PrefixFolder.open(place, identity, budget)


def saved(place, *prefixes, **options):
    folder = opened(place, **options)
    for each in prefixes:
        folder.save(each, cuttable=True)
    return folder


def firsts(folder):
    return [int(entry.tokens[0]) for entry in folder.entries]


def test_what_is_read_back_is_what_was_written(place):
    one = prefix()
    saved(place, one)
    (entry,) = opened(place).entries
    assert (entry.committed, entry.oldest, entry.number) == (6, 2, -1)
    assert torch.equal(entry.tokens, one.tokens)
    found = opened(place).load(entry)
    assert torch.equal(found.rows, one.rows)
    assert found.state.facts == FACTS
    assert found.state.tensors.keys() == one.state.tensors.keys()
    for name, tensor in one.state.tensors.items():
        assert torch.equal(found.state.tensors[name], tensor)
        assert found.state.tensors[name].dtype == tensor.dtype


def test_files_are_safetensors_for_their_owner_alone(place):
    saved(place, prefix())
    (file,) = place.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert place.stat().st_mode & 0o777 == 0o700
    with safe_open(file, "pt") as tensors:
        assert set(tensors.keys()) == {
            *("tokens", "rows", "digest"),
            *("state.kv", "state.half", "state.none"),
        }
        assert tensors.metadata()["version"] == "1"


def test_a_folder_that_others_can_look_into_is_refused(place, tmp_path):
    place.mkdir(mode=0o755)
    with pytest.raises(PermissionRefused, match=f"a folder of user {os.getuid()} with mode 0755"):
        opened(place)
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(PermissionRefused, match="a symbolic link"):
        opened(place)
    place.unlink()
    place.write_text("a file")
    with pytest.raises(ConfigError, match="File exists"):
        opened(place)


def damages():
    def cut(data):
        return data[:-40]

    def turn(at):
        def change(data):
            changed = bytearray(data)
            changed[at] ^= 1
            return bytes(changed)

        return change

    def longer(data):
        return data + b"x"

    def huge(data):
        return (MAX_HEADER + 1).to_bytes(8, "little") + data[8:]

    def stretched(data):
        return data.replace(b'"shape":[6]', b'"shape":[7]')

    def unknown(data):
        return data.replace(b'"I64"', b'"I99"')

    return {
        "cut off": cut,
        "another bit of the state": turn(-100),
        "another bit of the checksum": turn(-1),
        "more than it says": longer,
        "an endless header": huge,
        "no header": lambda data: data[:5],
        "no JSON": turn(8),
        "another shape": stretched,
        "an unknown dtype": unknown,
        "empty": lambda _: b"",
    }


@pytest.mark.parametrize("damage", damages().values(), ids=damages())
def test_a_damaged_file_is_ignored_with_a_warning(place, damage, caplog):
    saved(place, prefix())
    (file,) = place.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        folder = opened(place)
        found = [folder.load(entry) for entry in list(folder.entries)]
    assert all(each is None for each in found)
    assert folder.entries == []
    assert f"kept prefix {file.name} is damaged, and is ignored" in caplog.text
    assert not file.exists()
    told = folder.warning or opened(place).warning  # found in use: told by the next start
    assert told == f"damaged files of the prefix store {place}, which are not used: 1"
    assert opened(place).warning == ""
    assert list(place.iterdir()) == []


def test_files_of_others_and_of_other_names_are_left_alone(place, caplog):
    saved(place, prefix())
    theirs = place / "model.safetensors"
    theirs.write_bytes(b"x" * 5000)
    (place / "x.unfinished").write_bytes(b"x")
    assert opened(place, budget=0).warning == ""
    assert {file.name for file in place.iterdir()} == {"model.safetensors", "x.unfinished"}
    assert caplog.text == ""


def test_the_limit_holds_from_the_start_on(place):
    saved(place, prefix(), prefix(200), prefix(300))
    for file in place.iterdir():
        size = file.stat().st_size
    for age, entry in enumerate(opened(place).entries):
        os.utime(entry.path, (1000 + age, 1000 + age))
    newest = max(place.iterdir(), key=lambda file: file.stat().st_mtime)
    assert len(opened(place, budget=size + 20).entries) == 1
    assert list(place.iterdir()) == [newest]


def test_a_file_that_others_may_read_is_closed_to_them(place):
    saved(place, prefix())
    (file,) = place.iterdir()
    file.chmod(0o644)
    assert len(opened(place).entries) == 1
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(place, tmp_path, caplog):
    saved(place, prefix())
    (file,) = place.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert opened(place).entries == []
    assert "is ignored" in caplog.text


def test_a_file_that_is_gone_is_ignored(place, caplog):
    folder = saved(place, prefix())
    next(place.iterdir()).unlink()
    assert folder.load(folder.entries[0]) is None
    assert "is ignored" in caplog.text


def test_what_another_model_or_version_has_left_is_not_looked_at(place, monkeypatch, caplog):
    saved(place, prefix())
    assert opened(place, identity="two").entries == []
    for module in (prefix_file, prefix_folder):
        monkeypatch.setattr(module, "VERSION", "2")
    assert opened(place).entries == []
    assert caplog.text == ""
    (file,) = place.iterdir()
    data = file.read_bytes().replace(b'"version":"1"', b'"version":"3"')
    file.write_bytes(data.replace(b'"rows"', b'"cols"'))  # of a layout that is not known here
    assert opened(place).entries == []
    assert file.exists()


def test_the_least_used_files_give_way(place):
    one = prefix()
    room = 3 * next(iter(saved(place, one)._files())).stat().st_size + 20  # ids differ in length
    for age, first in enumerate((200, 300)):
        folder = saved(place, prefix(first), budget=ROOM)
        newest = next(entry for entry in folder.entries if int(entry.tokens[0]) == first)
        os.utime(newest.path, (1000 + age, 1000 + age))
    folder = opened(place, budget=room)
    folder.load(next(entry for entry in folder.entries if int(entry.tokens[0]) == 200))
    folder.save(prefix(400), cuttable=True)
    left = opened(place)
    assert sorted(firsts(left)) == [100, 200, 400]
    assert sum(file.stat().st_size for file in place.iterdir()) <= room


def test_what_a_killed_writer_has_left_counts_and_goes_first(place):
    saved(place, prefix())
    left = place / f"{0:040}.unfinished"
    left.write_bytes(b"x" * 2000)
    os.utime(left, (1, 1))
    folder = opened(place, budget=2500)
    folder.save(prefix(200), cuttable=True)
    assert not left.exists()


def test_what_does_not_fit_is_not_written(place, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        saved(place, prefix(), prefix(200), budget=10)
    assert caplog.text.count("is not written: a file has at most 10") == 1
    monkeypatch.setattr(prefix_folder, "MAX_BYTES", 10)
    saved(place, prefix())
    assert list(place.iterdir()) == []
    monkeypatch.undo()
    folder = opened(place)
    place.rmdir()
    folder.save(prefix(), cuttable=True)
    assert "cannot be written" in caplog.text
    odd = StateCopy({"kv": torch.zeros(3, dtype=torch.complex64)})
    opened(place).save(Prefix(torch.arange(3), odd, torch.zeros(0, 0), 1), cuttable=True)
    assert "complex64" in caplog.text
    assert list(place.iterdir()) == []


def test_a_prefix_that_goes_on_from_another_takes_its_place(place):
    folder = saved(place, prefix(length=5), prefix(length=9), prefix(length=7))
    assert [entry.committed for entry in folder.entries] == [9]
    assert len(list(place.iterdir())) == 1
    folder = opened(place / "other")
    for length in (5, 9, 7, 9):
        folder.save(prefix(length=length), cuttable=False)
    assert [entry.committed for entry in folder.entries] == [5, 9, 7]


# --- with memory in front of it


def test_what_memory_drops_lies_on_disk_and_comes_back(place):
    one = prefix()
    store = PrefixStore(one.bytes, cuttable=True, shelf=opened(place))
    store.put(one)
    store.put(prefix(200))
    (entry,) = [each for each in store if int(each.tokens[0]) == 100]
    assert not isinstance(entry, Prefix)
    assert store.has_shelf
    found = store.get(entry)
    assert torch.equal(found.rows, one.rows)
    assert [int(each.tokens[0]) for each in store.held] == [100]  # and the other one went


def test_without_memory_everything_lies_on_disk(place):
    store = PrefixStore(0, cuttable=True, shelf=opened(place))
    store.put(prefix())
    (entry,) = store
    assert store.get(entry) is not None
    assert store.held == []
