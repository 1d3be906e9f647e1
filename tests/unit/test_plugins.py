import sys

import pytest

from protocol import plugins
from protocol.errors import ConfigError, InternalError, Unavailable

SOURCES = {
    "__init__": "",
    "base": "class Shape: ...\n",
    "round": "from shapes.base import Shape\nclass Round(Shape): ...\nSHAPE: type[Shape] = Round\n",
    "square": "from shapes.base import Shape\nclass Square(Shape): ...\nSHAPE = Square()\n",
    "needy": "import no_such_library\nSHAPE = 1\n",
    "wrong": "SHAPE = 1\n",
    "declared": "SHAPE: int\n",
}


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A package of plug-ins, importable for one test."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()
    yield __import__("shapes.base").base.Shape
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        del sys.modules[name]


def test_listing_names_the_modules_that_define_the_constant_and_imports_none(shapes):
    assert plugins.names("shapes", "SHAPE") == ("needy", "round", "square", "wrong")
    assert "shapes.wrong" not in sys.modules


def test_a_plugin_is_a_class_or_an_object_of_its_base(shapes):
    assert issubclass(plugins.load("shapes", "round", "SHAPE", shapes), shapes)
    assert isinstance(plugins.load("shapes", "square", "SHAPE", shapes), shapes)


@pytest.mark.parametrize("name", ["sqare", "base", "declared", "../x", "os.path", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(shapes, name):
    with pytest.raises(ConfigError, match="round, square"):
        plugins.load("shapes", name, "SHAPE", shapes)


def test_the_nearest_name_is_offered(shapes):
    with pytest.raises(ConfigError, match="did you mean square"):
        plugins.load("shapes", "sqare", "SHAPE", shapes)


def test_a_missing_library_is_named(shapes):
    with pytest.raises(Unavailable, match="no_such_library"):
        plugins.load("shapes", "needy", "SHAPE", shapes)


def test_a_constant_of_another_kind_is_a_defect(shapes):
    with pytest.raises(InternalError, match="Shape"):
        plugins.load("shapes", "wrong", "SHAPE", shapes)


@pytest.mark.parametrize("package", ["no_such_package", "protocol.errors"])
def test_a_package_that_is_none_is_a_defect(package):
    with pytest.raises(InternalError, match=package):
        plugins.names(package, "X")


def test_a_literal_is_read_without_importing(tmp_path, monkeypatch):
    folder = tmp_path / "unseen"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "one.py").write_text(
        "import no_such_library\nSAID: Final = {'a': (1, 2)}\nX = len('')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.names("unseen", "SAID") == ("one",)
    assert plugins.literal("unseen", "one", "SAID") == {"a": (1, 2)}
    assert plugins.literal("unseen", "one", "ELSE") is None
    assert plugins.literal("unseen", "two", "SAID") is None
    with pytest.raises(InternalError, match=r"unseen\.one\.X is no literal"):
        plugins.literal("unseen", "one", "X")
