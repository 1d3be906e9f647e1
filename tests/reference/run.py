"""Compare our draft with the reference package ``dflash==0.1.0``, live, in its own environment.

``python tests/reference/run.py [--store]``: builds ``.reference/venv`` once, with the package and
exactly the torch and transformers that it pins, runs `support.draft_cases` there and here, prints
the largest difference per case, and ends with 1 where one is above 1e-4. ``--store`` writes the
reference's numbers to ``tests/data/dflash_reference.safetensors``, which the default suite reads.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from safetensors.torch import load_file, save_file  # noqa: E402
from support.draft_cases import (  # noqa: E402
    CASES,
    ROUNDS,
    SELECTING,
    anchors,
    hidden_states,
    inputs,
    selected,
)
from support.tiny_draft import head, write_draft  # noqa: E402

from draft_daemon.checkpoint import load_draft, torch  # noqa: E402

VENV = ROOT / ".reference" / "venv"
STORE = ROOT / "tests" / "data" / "dflash_reference.safetensors"
REQUIREMENTS = ("dflash[local]==0.1.0", "safetensors")
TOLERANCE = 1e-4


def environment():
    """The interpreter of the reference's environment, made on the first call."""
    python, mark = VENV / "bin" / "python", VENV / "installed"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        mark.touch()
    return python


def reference(job):
    """Write every case to `job`, run the reference there; returns case -> its hidden states."""
    for name, raw in CASES.items():
        folder = job / name
        draft = load_draft(write_draft(folder / "draft", raw), torch.float32)
        features, blocks = inputs(draft.config)
        given = {"features": features} | {f"block.{i}": block for i, block in enumerate(blocks)}
        given |= {"head": head(draft.config), "anchors": torch.tensor(anchors())}
        save_file(given, folder / "inputs.safetensors")
        (folder / "rounds.json").write_text(json.dumps(ROUNDS))
    script = Path(__file__).with_name("hidden_states.py")
    subprocess.run([environment(), "-I", script, job], check=True)
    return {name: load_file(job / name / "outputs.safetensors") for name in CASES}


def difference(draft, theirs, *, selects):
    """The largest difference of any element of any round; infinite where a token differs."""
    ours = hidden_states(draft)
    if selects:
        for number, tokens in enumerate(selected(draft, ours)):
            if not torch.equal(tokens, theirs[f"tokens.{number}"]):
                return math.inf
    return max(
        float((mine - theirs[f"hidden.{number}"]).abs().max()) for number, mine in enumerate(ours)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", action="store_true", help="write the fixture of the suite")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        job = Path(place)
        found = reference(job)
        versions = json.loads((job / "versions.json").read_text())
        print("reference:", ", ".join(f"{name} {version}" for name, version in versions.items()))
        worst = 0.0
        for name, theirs in found.items():
            apart = difference(
                load_draft(job / name / "draft", torch.float32), theirs, selects=name in SELECTING
            )
            worst = max(worst, apart)
            print(f"  {name:24} {apart:.2e}")
    if arguments.store:
        STORE.parent.mkdir(exist_ok=True)
        flat = {
            f"{name}.{key}": value for name, rows in found.items() for key, value in rows.items()
        }
        save_file(flat, STORE, metadata=versions)
        print(f"stored {STORE.relative_to(ROOT)}, {STORE.stat().st_size} bytes")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
