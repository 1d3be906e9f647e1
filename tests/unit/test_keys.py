"""Keys: made once, closed to others, read from one place, and never shown."""

import json
import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth
from support.command import InProcess

from launch import whole_file
from launch.whole_file import write_whole
from protocol import keys, sockets
from protocol.errors import ConfigError, PermissionRefused
from protocol.keys import KeyPair, default_folder, encode_pair, read_allowed, read_pair

NOWHERE = {}


@pytest.fixture
def dflashd(capsys, monkeypatch):
    return InProcess(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "keys"


@pytest.fixture
def made(folder, dflashd):
    outcome = dflashd("keys", "new", "--keys", str(folder))
    assert outcome.code == 0, outcome.err
    return folder


def _pair(role="target"):
    return KeyPair(role, *sockets.new_curve_keys())


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def _write(path, pair):
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(encode_pair(pair))


def test_new_makes_a_pair_for_each_role_that_only_its_owner_can_read(made):
    assert _mode(made) == 0o700
    assert sorted(os.listdir(made)) == [
        *("allowed", "draft.secret", "supervisor.secret", "target.secret")
    ]
    assert {_mode(path) for path in made.iterdir()} == {0o600}
    pairs = [read_pair(role, made, NOWHERE) for role in keys.ROLES]
    assert {each.public: each.role for each in pairs} == read_allowed(made, NOWHERE)
    for each in pairs:
        assert zmq.curve_public(each.secret) == each.public


def test_a_secret_file_is_a_certificate_of_zeromq(made):
    pair = read_pair("draft", made, NOWHERE)
    assert zmq.auth.load_certificate(made / "draft.secret") == (pair.public, pair.secret)


def test_no_secret_is_ever_shown(made, dflashd):
    secrets = [read_pair(role, made, NOWHERE).secret.decode() for role in keys.ROLES]
    shown = dflashd("keys", "show", "--keys", str(made))
    shown_json = dflashd("keys", "show", "--json", "--keys", str(made))
    again = dflashd("keys", "new", "--keys", str(made))
    texts = [str(shown), str(shown_json), str(again), repr(read_pair("target", made, NOWHERE))]
    assert not any(secret in text for secret in secrets for text in texts)
    listed = json.loads(shown_json.out)["keys"]
    assert [(key["role"], key["allowed"], key["secret"]) for key in listed] == [
        (role, True, True) for role in keys.ROLES
    ]
    assert all(key["public"] in shown.out for key in listed)


def test_keys_that_are_there_are_replaced_only_by_force(made, dflashd):
    before = read_pair("draft", made, NOWHERE)
    outcome = dflashd("keys", "new", "draft", "--keys", str(made))
    assert outcome.code == 78
    assert "draft.secret there already; --force" in outcome.err
    assert read_pair("draft", made, NOWHERE) == before
    assert dflashd("keys", "new", "draft", "--force", "--keys", str(made)).code == 0
    after, allowed = read_pair("draft", made, NOWHERE), read_allowed(made, NOWHERE)
    assert after.public in allowed
    assert before.public not in allowed
    assert len(allowed) == 3


def test_a_damaged_pair_can_be_replaced_and_lines_of_others_stay(made, dflashd):
    (made / "draft.secret").write_text("damaged")
    other = _pair("draft").public
    with (made / "allowed").open("ab") as file:
        file.write(b"draft %s the second host" % other)  # without its newline
    assert dflashd("keys", "new", "draft", "--force", "--keys", str(made)).code == 0
    assert read_allowed(made, NOWHERE)[other] == "draft"
    assert b"the second host\n" in (made / "allowed").read_bytes()


def test_show_says_whose_keys_are_known_without_their_secret(made, dflashd):
    (made / "draft.secret").unlink()
    supervisor = read_pair("supervisor", made, NOWHERE).public.decode()
    lines = (made / "allowed").read_text().splitlines(keepends=True)
    (made / "allowed").write_text("".join(line for line in lines if supervisor not in line))
    out = dflashd("keys", "show", "--keys", str(made)).out
    assert "may connect, secret key elsewhere" in out
    assert f"supervisor  {supervisor}  may not connect, secret key here" in out


def test_show_of_an_empty_place_says_how_keys_are_made(folder, dflashd):
    outcome = dflashd("keys", "show", "--keys", str(folder))
    assert (outcome.code, outcome.out) == (0, f"{folder}: no keys; `dflashd keys new` makes them\n")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_secret_file_that_others_could_open_is_refused(folder, mode):
    path = folder / "target.secret"
    _write(path, _pair())
    path.chmod(mode)
    with pytest.raises(
        PermissionRefused, match=f"mode {mode:04o}, open to others; chmod it to 0600"
    ):
        read_pair("target", folder, NOWHERE)


def test_a_folder_that_others_could_open_is_refused(made, dflashd):
    made.chmod(0o750)
    with pytest.raises(PermissionRefused, match="mode 0750, open to others; chmod it to 0700"):
        read_pair("target", made, NOWHERE)
    outcome = dflashd("keys", "new", "--force", "--keys", str(made))
    assert outcome.code == 77
    assert "mode 0750" in outcome.err


def test_a_list_that_others_could_write_is_refused(made):
    (made / "allowed").chmod(0o644)
    assert len(read_allowed(made, NOWHERE)) == 3
    (made / "allowed").chmod(0o664)
    with pytest.raises(PermissionRefused, match="mode 0664"):
        read_allowed(made, NOWHERE)


def test_a_file_of_somebody_else_is_refused(made, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    if made.stat().st_uid == 0:
        assert read_pair("target", made, NOWHERE).role == "target"  # root may have written it
        os.chown(made / "target.secret", 4711, -1)
    with pytest.raises(PermissionRefused, match="belongs to user"):
        read_pair("target", made, NOWHERE)


def test_a_link_and_what_is_no_plain_file_are_refused(folder, tmp_path):
    _write(folder / "real", _pair())
    (folder / "target.secret").symlink_to(folder / "real")
    with pytest.raises(ConfigError, match="cannot read"):
        read_pair("target", folder, NOWHERE)
    os.mkfifo(folder / "draft.secret", 0o600)
    with pytest.raises(PermissionRefused, match="no plain file"):
        read_pair("draft", folder, NOWHERE)


def test_credentials_are_the_only_place_where_a_manager_gives_them(made, tmp_path):
    credentials = tmp_path / "credentials"
    credentials.mkdir(mode=0o700)
    environment = {"CREDENTIALS_DIRECTORY": str(credentials), "XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"credentials/target\.secret is not there"):
        read_pair("target", None, environment)
    pair = _pair()
    _write(credentials / "target.secret", pair)
    (credentials / "target.secret").chmod(0o440)  # as an access list shows itself
    credentials.chmod(0o550)
    assert read_pair("target", None, environment) == pair
    assert read_pair("target", made, environment) != pair
    (credentials / "target.secret").chmod(0o444)
    with pytest.raises(PermissionRefused, match="mode 0444"):
        read_pair("target", None, environment)


def test_the_default_place_is_the_systems_for_root_and_the_users_otherwise(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_folder({"XDG_CONFIG_HOME": "/x"}) == Path("/etc/dflash/keys")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_folder({"XDG_CONFIG_HOME": "/x"}) == Path("/x/dflash/keys")
    for environment in ({}, {"XDG_CONFIG_HOME": "relative"}):
        assert default_folder(environment) == Path.home() / ".config/dflash/keys"


@pytest.mark.parametrize("content", [b"", b"public-key = 3", b'secret-key = "short"', b"\xff" * 99])
def test_a_file_that_holds_no_pair_says_so_and_nothing_of_its_content(folder, content):
    _write(folder / "target.secret", _pair())
    (folder / "target.secret").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_pair("target", folder, NOWHERE)
    sentence = f"{folder}/target.secret holds no pair of keys; `dflashd keys new target` makes one"
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sing {key}", "line 1: expected one of target, draft, supervisor and a public key"),
        ("# fine\n\ntarget", "line 3: expected"),
        ("target short", "line 1: expected"),
        ("target {key}\ndraft {key}", "line 2: this key is that of a target already"),
        ("x" * (keys.MAX_BYTES + 1), "larger than 64 KiB"),
    ],
)
def test_a_list_that_is_wrong_is_refused_with_its_line(folder, text, words):
    folder.mkdir(mode=0o700)
    path = folder / "allowed"
    path.touch(mode=0o600)
    path.write_text(text.replace("{key}", "k" * 40))
    with pytest.raises(ConfigError, match=words):
        read_allowed(folder, NOWHERE)


def test_a_list_beyond_its_bound_is_refused(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    path = folder / "allowed"
    path.touch(mode=0o600)
    path.write_text("".join(f"draft {n:040}\n" for n in range(keys.MAX_ALLOWED + 1)))
    with pytest.raises(ConfigError, match="holds 257 keys; at most 256"):
        read_allowed(folder, NOWHERE)


def test_a_zeromq_that_makes_no_keys_is_said(monkeypatch):
    def refuse():
        raise zmq.ZMQError(zmq.ENOTSUP)

    monkeypatch.setattr(zmq, "curve_keypair", refuse)
    with pytest.raises(ConfigError, match="this ZeroMQ makes no keys"):
        sockets.new_curve_keys()


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old", mode=0o600, replace=False)
    with pytest.raises(FileExistsError):
        write_whole(path, b"new", mode=0o600, replace=False)

    def fail(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(whole_file.os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_whole(path, b"new", mode=0o600, replace=True)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])
    write_whole(path, b"new", mode=0o644, replace=True)
    assert (path.read_bytes(), _mode(path)) == (b"new", 0o644)
