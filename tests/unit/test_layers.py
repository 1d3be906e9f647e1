"""The rules of the layout that a machine can check."""

import ast
import io
import logging.config
import re
import sys
import tokenize
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "target_daemon", "draft_daemon", "launch")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))

TORCH_PLACES = (
    "target_daemon/",
    "draft_daemon/",
    "protocol/transports/",
    "protocol/kernels/",
    "protocol/choice.py",
    "protocol/checkpoints/tensors.py",
    "protocol/lent_weights.py",
)
# Both ends of a link over a network, and what they are made of.
ZMQ_PLACES = (
    "protocol/network_ends.py",
    "protocol/sockets.py",
    "protocol/gate.py",
    "protocol/monitor.py",
)
CUPY_PLACES = ("protocol/transports/cupy_runtime.py",)
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "asyncio"}
FORBIDDEN_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}

# messages.py is the one document of all messages, in the order of a request's life.
LONG_MODULES = {"protocol/messages.py"}


def _name(path):
    return path.relative_to(ROOT).as_posix()


def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path):
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports relatively"
            yield node.module


def _roots(path):
    return {name.partition(".")[0] for name in _imports(path)}


def test_the_import_contracts_hold(monkeypatch):
    monkeypatch.chdir(ROOT)
    # The library's own configuration would silence every logger that there is, for later tests.
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)
    out = io.StringIO()
    with redirect_stdout(out):
        code = lint_imports(no_cache=True)
    assert code == 0, out.getvalue()


@pytest.mark.parametrize(
    ("module", "places"),
    [("torch", TORCH_PLACES), ("zmq", ZMQ_PLACES), ("cupy", CUPY_PLACES)],
    ids=["torch", "zmq", "cupy"],
)
def test_a_heavy_import_stands_only_where_it_belongs(module, places):
    users = [_name(path) for path in MODULES if module in _roots(path)]
    assert [name for name in users if not name.startswith(places)] == []


def test_nothing_reads_code_from_a_peer_or_a_file():
    found = []
    for path in MODULES:
        found += [f"{_name(path)}: imports {name}" for name in _roots(path) & FORBIDDEN_MODULES]
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "torch.load" or called.rpartition(".")[2] in FORBIDDEN_CALLS:
                    found.append(f"{_name(path)}:{node.lineno}: {called}")
    # Modules of torch have a method named eval, which runs no code.
    assert [line for line in found if not re.search(r"\w\.eval$", line)] == []


def test_no_module_is_longer_than_300_lines_and_no_function_than_40():
    found = []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > 300 and _name(path) not in LONG_MODULES:
            found.append(f"{_name(path)}: {lines} lines")
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef):
                length = _code_lines(node)
                if length > 40:
                    found.append(f"{_name(path)}:{node.lineno} {node.name}: {length} lines")
    assert found == []


def _code_lines(node):
    """Lines of a function's body, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_module_is_named_utils_and_every_init_says_nothing():
    assert [_name(path) for path in MODULES if "util" in path.stem] == []
    for path in MODULES:
        if path.name == "__init__.py":
            body = _tree(path).body
            only_facts = all(
                isinstance(node, ast.Assign)
                or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                for node in body
            )
            assert only_facts, f"{_name(path)} does more than state facts"


def test_tests_are_no_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_comment_promises_later_work_without_an_issue():
    found = []
    for path in MODULES:
        with path.open("rb") as stream:
            found += [
                f"{_name(path)}:{token.start[0]}"
                for token in tokenize.tokenize(stream.readline)
                if token.type == tokenize.COMMENT and re.search("TODO|FIXME|XXX", token.string)
            ]
    assert found == []


def test_every_public_class_states_its_contract():
    found = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert found == []


def test_no_module_of_the_tests_hides_one_of_the_standard_library():
    """A script that is run from its folder would import it instead."""
    names = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    assert names & sys.stdlib_module_names == set()
