"""Turns as ids: each prompt begins with what was run, as far as the template shows it again."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from launch.chat_template import ChatTemplate
from launch.conversation import Conversation
from launch.tokenizer import TextTokenizer
from protocol.errors import UsageError

# "ab" is one token by the tokenizer's own way, and two as the model may well say it.
VOCAB = {"</s>": 0, "a": 1, "b": 2, "ab": 3, "[": 4, "]": 5, "u": 6, " ": 7, "<x>": 8}
ENDING = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if m.role == 'assistant' %}</s>"
TEMPLATE = ENDING + "{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


@pytest.fixture
def tokenizer(tmp_path):
    raw = Tokenizer(models.BPE(VOCAB, [("a", "b")]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["</s>", "<x>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return TextTokenizer.load(tmp_path)


def talk(tokenizer, source=TEMPLATE, system=None):
    return Conversation(tokenizer, ChatTemplate(source, {}, where="here"), system)


def spelled(tokenizer, ids):
    return [tokenizer.token(one) for one in ids]


QUESTION = ["[", "u", "]", "b", "[", "a", "]"]


def test_an_answer_stays_as_it_was_generated(tokenizer):
    said = talk(tokenizer)
    first = said.ask("b")
    assert spelled(tokenizer, first) == QUESTION
    said.answered("ab", [1, 2, 0])
    second = said.ask("b")
    assert second[: len(first) + 2] == (*first, 1, 2)  # and not the one token "ab"
    assert spelled(tokenizer, second[len(first) + 2 :]) == ["</s>", *QUESTION]
    assert said.messages == (
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "ab"},
    )


@pytest.mark.parametrize(
    ("answer", "ids"),
    [("a", [1, 2]), ("ab", [1, 8, 2])],
    ids=["cut by a stop text", "with a special token inside"],
)
def test_an_answer_that_is_not_its_ids_text_is_spelled_anew(tokenizer, answer, ids):
    said = talk(tokenizer)
    first = said.ask("b")
    said.answered(answer, ids)
    assert spelled(tokenizer, said.ask("b")) == [*QUESTION, answer, "</s>", *QUESTION]
    assert said.ask("b")[: len(first)] == first


def test_a_template_that_shows_old_answers_otherwise_decides(tokenizer):
    said = talk(tokenizer, TEMPLATE.replace("m.content", "m.content | trim"))
    said.ask("b")
    said.answered(" ab", [7, 1, 2])
    assert spelled(tokenizer, said.ask("b")) == [*QUESTION, "ab", "</s>", *QUESTION]


def test_a_question_without_an_answer_is_no_part_of_what_follows(tokenizer):
    said = talk(tokenizer)
    said.ask("a")
    assert spelled(tokenizer, said.ask("b")) == QUESTION


def test_a_new_conversation_has_the_same_system_text(tokenizer):
    said = talk(tokenizer, TEMPLATE.replace("m.role[0]", "m.role[-1]"), system="a")
    begun = said.ask("b")
    said.answered("ab", [3, 0])
    said.clear()
    assert said.ask("b") == begun
    assert said.messages == ({"role": "system", "content": "a"},)


def test_a_prompt_without_tokens_is_refused(tokenizer):
    with pytest.raises(UsageError, match="empty prompt"):
        talk(tokenizer, "{{ '' }}").ask("b")
