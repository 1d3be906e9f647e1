"""A known model of its own for tests: a tiny GGUF file in a wheel of a local package index."""

import hashlib
import zipfile

from support.gguf_files import TinyGGUF

from launch.wheel_models import WheelModel

DISTRIBUTION = "dflash-test-model"
VERSION = "1.0"
MEMBER = "dflash_test_model/tiny.gguf"
INFO = "dflash_test_model-1.0.dist-info"


def write_wheel(folder, *, damage=None):
    """(path, WheelModel) of a valid wheel in `folder`; `damage` replaces facts of the model."""
    gguf = TinyGGUF(layers=1).write(folder / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").unlink()
    files = {
        MEMBER: gguf,
        f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/LICENSE": "a licence",
        f"{INFO}/RECORD": "",
    }
    path = folder / f"dflash_test_model-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    facts = {
        "name": "tiny",
        "title": "Tiny",
        "distribution": DISTRIBUTION,
        "version": VERSION,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
        "member": MEMBER,
        "member_size": len(gguf),
        "license_member": f"{INFO}/LICENSE",
        "license": "none",
        "origin": "a test",
    }
    return path, WheelModel(**(facts | (damage or {})))
