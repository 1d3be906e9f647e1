"""`docs/proof.json`: what was proved, where, of which code; and whether that has changed since."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol.cpu import flags, usable_cores

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "proof.json"
KEPT = ".proof"  # folder of what each part has found
FOLDERS = ("protocol", "target_daemon", "draft_daemon", "launch")
LIBRARIES = ("torch", "safetensors", "tokenizers", "numpy", "msgspec", "pyzmq")
TELLING_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def digests(root: Path = ROOT) -> dict[str, str]:
    """A digest of the Python code of each of our packages, as it lies in `root` now."""
    return {name: _digest(root / name) for name in FOLDERS}


def stale(report: Path = REPORT, root: Path = ROOT) -> str:
    """Why the report does not speak of this code, as a sentence; empty where it does."""
    if not report.exists():
        return f"{report.name} is not written yet: run `make proof`"
    stated = json.loads(report.read_text(encoding="utf-8"))["code"]
    changed = [name for name, digest in digests(root).items() if stated.get(name) != digest]
    if not changed:
        return ""
    return f"{report.name} is older than the code in {', '.join(changed)}: run `make proof`"


def keep(part: str, outcomes: Mapping[str, Any], seconds: float, root: Path = ROOT) -> None:
    """Keep what one part has found, for the report and for a run that goes on after this one.

    `outcomes` are those of `support.proofs`, by name; that module takes torch, and this one not.
    """
    content = {
        "commit": commit(),
        "uncommitted": _git("status", "--porcelain", "--", *FOLDERS).splitlines(),
        "code": digests(root),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "seconds": round(seconds),
        "proofs": {name: found.record() for name, found in outcomes.items()},
    }
    (root / KEPT).mkdir(exist_ok=True)
    _write(root / KEPT / f"{part}.json", content)


def kept(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """What parts have found about the code as it is now, by part."""
    found = {}
    for path in sorted((root / KEPT).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["code"] == digests(root):
            found[path.stem] = content
    return found


def write(parts: Mapping[str, dict[str, Any]], report: Path = REPORT) -> None:
    """Write the report of all parts; `seconds` are theirs together."""
    last = max(parts.values(), key=lambda part: part["date"])
    proofs = {name: found for part in parts.values() for name, found in part["proofs"].items()}
    seconds = sum(part["seconds"] for part in parts.values())
    _write(report, last | {"seconds": seconds, "proofs": proofs})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def commit() -> str:
    """The commit whose code is measured."""
    return _git("rev-parse", "HEAD")


def machine() -> dict[str, object]:
    """What the numbers may depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags()],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
    }


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        raw = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(raw)}\n".encode())
        found.update(raw)
    return found.hexdigest()[:16]


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
