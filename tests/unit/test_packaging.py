"""What is installed is ours, whole, and nothing else."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

from launch.doctor import DISTRIBUTION, IMPORT_NAMES
from protocol import __version__

ROOT = Path(__file__).resolve().parents[2]
DRAFT = "draft_daemon/checkpoints/smollm2-135m-dflash/"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, so that nothing is written beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in (*IMPORT_NAMES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


def _names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_version_equals_the_installed_metadata():
    assert metadata.version(DISTRIBUTION) == __version__


def test_the_changelog_names_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in text


def test_the_four_import_names_belong_to_our_distribution_alone():
    claims = metadata.packages_distributions()
    assert {name: set(claims.get(name, ())) for name in IMPORT_NAMES} == {
        name: {DISTRIBUTION} for name in IMPORT_NAMES
    }


def test_a_child_started_in_isolated_mode_imports_ours_from_any_folder(tmp_path):
    for name in IMPORT_NAMES:  # a trap: what PYTHONPATH and the working folder would offer
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a foreign module')\n")
    code = (
        "import importlib, sys; [print(importlib.import_module(n).__file__) for n in sys.argv[1:]]"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *IMPORT_NAMES],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = [Path(line).parent for line in done.stdout.split()]
    assert (done.returncode, found) == (0, [ROOT / name for name in IMPORT_NAMES]), done.stderr


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel):
    roots = {name.partition("/")[0] for name in _names(wheel)}
    assert roots == {*IMPORT_NAMES, f"dflash_daemons-{__version__}.dist-info"}


def test_the_wheel_holds_every_module_that_lies_in_the_packages(wheel):
    shipped = set(_names(wheel))
    modules = {
        path.relative_to(ROOT).as_posix()
        for name in IMPORT_NAMES
        for path in (ROOT / name).rglob("*.py")
    }
    assert modules - shipped == set()


def test_the_wheel_holds_the_default_draft_and_the_type_marks(wheel):
    shipped = set(_names(wheel))
    assert {DRAFT + "config.json", DRAFT + "model.safetensors"} <= shipped
    assert {f"{name}/py.typed" for name in IMPORT_NAMES} <= shipped
    data = {name for name in shipped if not name.endswith((".py", "/py.typed"))}
    assert all(name.startswith((DRAFT, "dflash_daemons-")) for name in data)


def test_the_command_is_dflashd_and_no_other(wheel):
    (point,) = [p for p in metadata.entry_points(group="console_scripts") if p.name == "dflashd"]
    assert point.dist.name == DISTRIBUTION
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"dflash_daemons-{__version__}.dist-info/entry_points.txt").decode()
    assert text.split() == ["[console_scripts]", "dflashd", "=", "launch.cli:main"]


def test_every_import_of_another_package_is_a_declared_requirement():
    from ast import Import, ImportFrom, parse, walk

    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = {
        re.split(r"[<>=;\[ ]", line, maxsplit=1)[0].lower()
        for line in config["options"]["install_requires"].split("\n")
        if line
    }
    extras = {"transformers", "cupy-cuda12x", "cupy-cuda13x", "matplotlib"}
    claims = {"cupy": ["cupy-cuda13x"], **metadata.packages_distributions()}
    missing = set()
    for name in IMPORT_NAMES:
        for path in (ROOT / name).rglob("*.py"):
            for node in walk(parse(path.read_text(encoding="utf-8"))):
                modules = [node.module] if isinstance(node, ImportFrom) else []
                modules += [a.name for a in node.names] if isinstance(node, Import) else []
                for root in {m.partition(".")[0] for m in modules}:
                    if root not in {*sys.stdlib_module_names, *IMPORT_NAMES}:
                        owners = {owner.lower() for owner in claims.get(root, [root])}
                        if not owners & (declared | extras):
                            missing.add(f"{path.relative_to(ROOT)}: {root}")
    assert missing == set()


def test_tools_read_their_settings_and_the_settings_know_only_existing_markers():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {line.partition(":")[0] for line in settings["tool"]["pytest"]["markers"]}
    used = set()
    for path in (ROOT / "tests").rglob("*.py"):
        used |= set(re.findall(r"pytest\.mark\.([a-z]+)\b", path.read_text(encoding="utf-8")))
    builtin = {"parametrize", "skipif", "skip", "xfail", "usefixtures", "filterwarnings", "timeout"}
    assert used - builtin <= known
