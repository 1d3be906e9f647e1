"""Run the tests of adapted models at both ends of the versions of `transformers` in setup.cfg.

``python tests/adapters/run.py [VERSION ...]``: the lowest that the extra admits and the one that
constraints.txt pins, which is of the highest admitted minor; or the named ones, of any number. Each
has an environment of its own in ``.adapters/``, made once. It sees the packages of the running one
behind its `transformers` and what that wants in other versions. Ends with 1 where a test fails.
"""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".adapters"
TESTS = (
    "tests/contract/test_proven_targets.py",
    "tests/contract/test_transformers_family.py",
    "tests/process/test_transformers_target.py",
    "tests/unit/test_transformers_adapter.py",
)


def admitted():
    """The extra's requirement, such as ``transformers>=5.15,<5.25``."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options.extras_require"]["transformers"].strip()


def ends():
    """The lowest version that is admitted, and the highest that is pinned."""
    lowest = re.search(r">=([0-9.]+)", admitted())[1]
    lowest += ".0" * (2 - lowest.count("."))
    pinned = re.search(
        r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    return lowest, pinned[1]


def environment(version):
    """The interpreter of the environment with this version, made on the first call."""
    folder = PLACE / version
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True
        )
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        seen = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
        (Path(paths["purelib"]) / "seen.pth").write_text("\n".join(seen) + "\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        subprocess.run([*pip, "install", "--quiet", f"transformers=={version}"], check=True)
        mark.touch()
    return python


def main():
    failed = []
    for version in sys.argv[1:] or ends():
        python = environment(version)
        shown = "import transformers; print(transformers.__version__)"
        found = subprocess.run([python, "-c", shown], check=True, capture_output=True, text=True)
        assert found.stdout.split()[-1] == version, found.stdout
        print(f"--- transformers {version}", flush=True)
        command = [python, "-m", "pytest", "-q", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, check=False)
        failed += [version] * (done.returncode != 0)
    print("failed with", ", ".join(failed)) if failed else print("passed with all of them")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
