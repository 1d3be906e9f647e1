"""Chat templates: what published ones expect works, and a hostile one is stopped."""

import json
import re
import resource
import sys

import pytest

from launch.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate, load_chat_template
from protocol.errors import CheckpointError, UsageError

HELLO = [{"role": "user", "content": "héllo <b> & 'q'"}]


def rendered(source, messages=HELLO, special=None, **more):
    return ChatTemplate(source, special or {}, where="tpl").render(messages, **more)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages|tojson }}", '[{"role": "user", "content": "héllo <b> & \'q\'"}]'),
        ("{{ messages[0]|tojson(indent=1) }}", json.dumps(HELLO[0], indent=1, ensure_ascii=False)),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{{ bos_token }}{{ eos_token is defined }}", "<s>False"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 2 %}{{ ns.n }}", "2"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ add_generation_prompt }} {{ tools is none }}", "True True"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_what_published_templates_use_is_there(source, expected):
    found = rendered(source, special={"bos_token": "<s>"}, options={"enable_thinking": False})
    assert found == expected


def test_templates_may_ask_for_the_date():
    assert re.fullmatch(r"\d\d \w{3} \d{4}", rendered("{{ strftime_now('%d %b %Y') }}"))


def test_a_template_that_refuses_the_messages_is_the_users_error():
    with pytest.raises(UsageError, match="no system messages here"):
        rendered("{{ raise_exception('no system messages here') }}")


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(CheckpointError, match="SecurityError"):
        rendered("{{ messages[0].content.append('b') }}", messages)
    assert messages == [{"role": "user", "content": ["a"]}]


HOSTILE = {
    "endless loop": (
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "ran for more than",
    ),
    "endless recursion": (
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "RecursionError",
    ),
    "endless branching": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "ran for more than",
    ),
    "much memory at once": ("{{ 'x' * 9999999999 }}", "too much memory"),
    "memory by doubling": (
        "{% set n=namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x~n.x %}{% endfor %}",
        "too much memory",
    ),
    "memory by a filter": ("{{ 'x' | center(9999999999) }}", "too much memory"),
    "powers": ("{{ 9 ** 9 ** 9 }}", "not allowed"),
    "a way out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|Undefined"),
    "a file": ("{% include '/etc/passwd' %}", "no loader|TypeError"),
    "too much output": ("{{ 'x' * 70000000 }}", "70000000 characters"),
    "an unknown filter": ("{{ 1 | nothing }}", "nothing"),
    "broken syntax": ("{{", "bad chat template"),
    "too long": (" " * (MAX_TEMPLATE_BYTES + 1), "are allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name, monkeypatch):
    if name.startswith("endless"):
        monkeypatch.setattr("launch.chat_template.RENDER_SECONDS", 0.3)
    limits, tracer = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    source, sentence = HOSTILE[name]
    with pytest.raises(CheckpointError, match=sentence):
        rendered(source)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert sys.gettrace() is tracer


def test_an_address_space_limit_of_the_user_is_never_raised(monkeypatch):
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1 << 20, 1 << 62))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, both: set_limits.append(both))
    assert rendered("x") == "x"
    assert {soft for soft, _ in set_limits} == {1 << 20}


def folder_with(tmp_path, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
        (
            {"chat_template__jinja": "B", "tokenizer_config__json": {"chat_template": "A"}},
            "B",
        ),
        ({"chat_template__json": {"chat_template": "C"}}, "C"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "only", "template": "E"}]}},
            "E",
        ),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": "{{ bos_token }}",
                    "bos_token": {"content": "<F>"},
                    "eos_token": None,
                }
            },
            "<F>",
        ),
    ],
)
def test_the_template_is_found_where_checkpoints_keep_it(tmp_path, files, expected):
    assert load_chat_template(folder_with(tmp_path, **files)).render(HELLO) == expected


def test_a_folder_without_a_template_has_none(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(folder_with(tmp_path, tokenizer_config__json={})) is None


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"tokenizer_config__json": {"chat_template": 7}}, "is no text"),
        ({"tokenizer_config__json": "[1]"}, "expected an object, found list"),
        ({"tokenizer_config__json": "{"}, "not valid JSON"),
        ({"chat_template__jinja": "x" * (MAX_TEMPLATE_BYTES + 1)}, "more than"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]
                }
            },
            "none is named default",
        ),
    ],
)
def test_a_bad_template_file_is_named(tmp_path, files, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        load_chat_template(folder_with(tmp_path, **files))


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        load_chat_template(tmp_path)


def test_an_unreadable_template_is_named(tmp_path, monkeypatch):
    path = tmp_path / "chat_template.jinja"
    path.write_text("x")

    def refuse(*_arguments, **_more):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_text", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            load_chat_template(tmp_path)
