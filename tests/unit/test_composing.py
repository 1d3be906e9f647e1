"""Prompts for training data: from a seed, varied, without repetition, and some held out."""

import random
from collections import Counter

import msgspec
import pytest
from support.tiny_text import write_speaking_pair

from launch.tokenizer import load_text_side
from launch.training.found import STEPS, Found, digest
from launch.training.harvest import (
    HELD_OUT_EVERY,
    MOST_CHARACTERS,
    MOST_HELD_OUT,
    MOST_IN_VAIN,
    SOURCE_TASK,
    SOURCE_TEMPERATURE,
    WRITTEN_TEMPERATURE,
    WRITTEN_TOP_P,
    Harvest,
)
from launch.training.moves import (
    Afresh,
    Answer,
    Say,
    Talk,
    Task,
    Write,
    is_monotonous,
    tidy,
    whole_sentences,
)
from launch.training.overlap import RUN, Overlap
from launch.training.prompt_files import Prompt, read_prompts
from launch.training.sources import PASSES, FileSource, OwnSource
from launch.training.speech import Speech
from launch.training.tasks import TASKS
from launch.training.words import WORDS
from protocol.errors import CheckpointError, ConfigError, ProtocolError, UsageError
from protocol.training import Answered

SAID = ("one", "two", "three", "river", "stone", "cloud", "seven", "bird", "glass", "winter")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    target, _ = write_speaking_pair(tmp_path_factory.mktemp("pair"))
    return Speech(*load_text_side(target))


@pytest.fixture
def bare(speech):
    """The same model without a chat template."""
    return Speech(speech._tokenizer, None)


def made_up(ask, words=12):
    chance = random.Random(ask.id)
    return " ".join(chance.choice(SAID) for _ in range(words))


def ids(text):
    return tuple(ord(character) - 31 for character in text)


def harvest(speech, source=None, *, seed=1, excluded=(), **others):
    source = OwnSource(TASKS, seed) if source is None else source
    overlap = Overlap(excluded, speech.words)
    return Harvest(source, speech, overlap, positions=2048, seed=seed, **others)


def run(collected, asks, *, room=24, reply=made_up):
    """Answer the first `asks` requests, the oldest first; returns all of them."""
    waiting, every = [], []
    while len(every) < asks and not collected.is_over:
        new = collected.asks(room - len(waiting))
        every += new
        waiting += new
        ask = waiting.pop(0)
        text = reply(ask)
        reason = "stop"
        collected.answered(Answered(id=ask.id, tokens=ids(text), finish_reason=reason))
    return every


def texts(speech, asks):
    return [speech._tokenizer.decode(ask.tokens) for ask in asks]


def test_the_same_seed_and_answers_give_the_same_requests_and_another_seed_others(bare):
    first, again = (run(harvest(bare), 400) for _ in range(2))
    assert first == again
    other = run(harvest(bare, seed=2), 400)
    prompts, others = ({ask.tokens for ask in asks if ask.kept} for asks in (first, other))
    assert len(prompts & others) < len(prompts) / 4


def test_a_talk_is_a_function_of_seed_and_number_alone():
    source = OwnSource(TASKS, 5)
    later = source.talk(77)
    for number in range(77):
        OwnSource(TASKS, 5).talk(number).next(None)
    alone = OwnSource(TASKS, 5).talk(77)
    assert (later.task, later.next(None)) == (alone.task, alone.next(None))


def test_each_cycle_has_every_task_by_its_weight():
    cycle = sum(task.weight for task in TASKS)
    source = OwnSource(TASKS, 3)
    counted = [
        Counter(source.talk(number).task for number in range(start, start + cycle))
        for start in (0, cycle)
    ]
    wanted = Counter()
    for task in TASKS:
        wanted[task.name] += task.weight
    assert counted == [wanted, wanted]


def test_every_task_of_the_table_can_be_played_to_its_end_with_all_its_sentences(speech):
    for task in TASKS:
        for number in range(40):
            talk = Talk(task.name, task.moves, random.Random(number))
            wanted, asked = talk.next(None), 0
            while wanted is not None:
                asked += 1
                shown = [*wanted.messages, {"content": wanted.opening or ""}]
                assert not any(gap in each["content"] for each in shown for gap in "{}")
                roles = [each["role"] for each in wanted.messages]
                assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
                assert len(roles) % 2 == wanted.is_kept
                wanted = talk.next("A text of at least eight words, and then some more. More?")
            assert not talk.spoilt
            assert 0 < asked <= STEPS


def test_the_tasks_differ_in_kind_and_some_start_from_long_contexts(bare):
    long_text = "Some words of a text, which goes on for a while. " * 4
    asks = run(harvest(bare), 900, reply=lambda ask: f"{ask.id} {long_text}{made_up(ask)}")
    kinds = {ask.kept.task for ask in asks if ask.kept}
    assert kinds == {task.name for task in TASKS} | {SOURCE_TASK}
    lengths = [len(ask.tokens) for ask in asks if ask.kept]
    assert sum(length > 300 for length in lengths) > len(lengths) / 20


def test_no_prompt_is_kept_twice(bare):
    asks = run(harvest(bare), 600, reply=lambda _: "What is the name of the longest river?")
    kept = [ask.tokens for ask in asks if ask.kept]
    assert len(kept) == len(set(kept))
    assert len({ask.id for ask in asks}) == len(asks)


def test_what_came_before_is_counted_as_a_duplicate(speech):
    source = FileSource([Prompt(turns=("Hello there",)), Prompt(turns=("Hello there",))], 1)
    collected = harvest(speech, source, found=_with_held_out("prompts"))
    assert len(collected.asks(2)) == 1 + 1  # and the first of the second time
    assert collected.dropped["duplicate"] == [1]


def test_most_talks_are_greedy_and_the_rest_at_temperature_1(bare):
    asks = [ask for ask in run(harvest(bare), 1500) if ask.kept]
    others = [ask for ask in asks if ask.kept.task != SOURCE_TASK]
    greedy = sum(ask.sampling.temperature == 0 for ask in others)
    assert 0.6 < greedy / len(others) < 0.8
    assert {ask.sampling.temperature for ask in others} == {0.0, 1.0}
    sources = {ask.sampling.temperature for ask in asks if ask.kept.task == SOURCE_TASK}
    assert sources == {SOURCE_TEMPERATURE}


def test_a_self_written_turn_is_sampled_behind_what_the_template_puts_before_it(speech):
    task = Task("t", 1, (Write(("Who ",), "?"), Answer(40)))
    collected = harvest(speech, OwnSource([task], 1))
    (ask,) = collected.asks(1)
    assert ask.kept is None
    assert texts(speech, [ask]) == ["[user]Who"]
    assert (ask.sampling.temperature, ask.sampling.top_p) == (WRITTEN_TEMPERATURE, WRITTEN_TOP_P)
    text = " wrote this? And who that?"
    collected.answered(Answered(id=ask.id, tokens=ids(text), finish_reason="stop"))
    (ask,) = collected.asks(1)
    assert ask.kept is not None
    assert ask.max_tokens == 40
    assert texts(speech, [ask]) == ["[user]Who wrote this?[answer]"]


def test_a_self_written_turn_ends_where_the_template_would_end_it(speech):
    # The template has nothing behind a user's text but what begins the answer.
    assert set(speech.answer_ends) < set(speech.turn_ends)
    assert ids("[")[0] in speech.turn_ends


def test_what_is_asked_counts_as_much_as_answers_had_so_far(speech):
    moves = (Say(("First",), as_is=True), Answer(40), Write(tokens=9), Answer(40))
    collected = harvest(speech, OwnSource([Task("t", 1, moves)], 1))
    assert collected.coming == 0
    (ask,) = collected.asks(1)
    prompt = len(ask.tokens)
    assert collected.coming == prompt + 40  # no answer is known: as long as one may be
    collected.answered(Answered(id=ask.id, tokens=ids("It is so."), finish_reason="stop"))
    assert collected.coming == 0  # the next turn waits, and is not asked
    assert collected.tokens == prompt + 9
    (ask,) = collected.asks(1)
    assert collected.coming == len(ask.tokens) + 9 + 9  # the turn, and then an answer as before


def test_a_later_turn_has_the_earlier_ones_before_it(speech):
    moves = (Say(("First",), as_is=True), Answer(), Write(), Answer())
    collected = harvest(speech, OwnSource([Task("t", 1, moves)], 1))
    for text in ("It is so.", "And then what?"):
        (ask,) = collected.asks(1)
        collected.answered(Answered(id=ask.id, tokens=ids(text), finish_reason="stop"))
    (ask,) = collected.asks(1)
    wanted = "[user]First[assistant]It is so.[user]And then what?[answer]"
    assert texts(speech, [ask]) == [wanted]


def test_a_model_without_a_template_is_given_plain_text(bare):
    task = Task("t", 1, (Write(("Who ",)), Answer(), Say(("Why?",)), Answer()))
    collected = harvest(bare, OwnSource([task], 1))
    seen = []
    for text in (" is it?", "Nobody."):
        (ask,) = collected.asks(1)
        seen.append(ask)
        collected.answered(Answered(id=ask.id, tokens=ids(text), finish_reason="stop"))
    (ask,) = collected.asks(1)
    shown = texts(bare, [*seen, ask])
    assert shown == ["Who ", "Who is it?", "Who is it?\n\nNobody.\n\nWhy?".replace("\n", "")]
    assert bare.turn_ends == bare.answer_ends
    assert bare.opened((), "") == bare.answer_ends[:1]  # something has to be there to go on from


def test_a_template_that_hides_the_user_cannot_be_used(speech):
    from launch.chat_template import ChatTemplate

    template = ChatTemplate("[answer]", {}, where="here")
    with pytest.raises(CheckpointError, match="does not show"):
        Speech(speech._tokenizer, template)


def test_a_talk_that_a_template_refuses_is_dropped(speech):
    from launch.chat_template import ChatTemplate

    once = "{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}."
    collected = harvest(
        Speech(speech._tokenizer, ChatTemplate(once, {}, where="here")),
        FileSource([Prompt(turns=("One", "Two"))], 1),
    )
    (ask, *_) = collected.asks(1)
    collected.answered(Answered(id=ask.id, tokens=ids("yes"), finish_reason="stop"))
    assert collected.dropped["unusable"] == [0]


def test_texts_that_others_are_asked_about_are_kept_under_a_task_of_their_own(speech):
    moves = (Say(("Tell me",)), Answer(free=True), Afresh(), Say(("Sum: {answer}",)), Answer())
    collected = harvest(speech, OwnSource([Task("sum", 1, moves)], 1), found=_with_held_out("sum"))
    (first,) = collected.asks(1)
    collected.answered(
        Answered(id=first.id, tokens=ids("Eight words " * 4 + "at last. Cut"), finish_reason="stop")
    )
    (second,) = collected.asks(1)
    assert (first.kept.task, first.sampling.temperature) == (SOURCE_TASK, SOURCE_TEMPERATURE)
    assert second.kept.task == "sum"
    assert texts(speech, [second]) == ["[user]Sum: " + "Eight words " * 4 + "at last.[answer]"]


def _with_held_out(task):
    found = Found()
    found.held_out[task] = 1
    found.tasks[task] = 1
    return found


def test_what_held_out_prompts_are_about_is_not_kept(speech):
    moves = (Say(("Tell me",)), Answer(free=True), Afresh(), Say(("Sum: {answer}",)), Answer())
    collected = harvest(speech, OwnSource([Task("sum", 1, moves)], 1))
    (first,) = collected.asks(1)
    assert first.kept is None
    assert first.sampling.temperature == SOURCE_TEMPERATURE
    collected.answered(
        Answered(id=first.id, tokens=ids("Eight words " * 4 + "at last."), finish_reason="stop")
    )
    assert collected.tokens == 0
    (second,) = collected.asks(1)
    assert second.kept.held_out
    assert second.sampling.temperature == 0.0


def test_one_of_fifty_is_held_out_greedily_and_all_tasks_are_covered(bare):
    asks = run(harvest(bare), 3000)
    kept = [ask for ask in asks if ask.kept]
    held = [ask for ask in kept if ask.kept.held_out]
    assert all(ask.sampling.temperature == 0 for ask in held)
    talks = {ask.id // STEPS for ask in held}
    assert abs(len(talks) - len(kept) / HELD_OUT_EVERY) < 3
    counts = Counter(ask.kept.task for ask in held)
    assert set(counts) == {task.name for task in TASKS}
    # No sequence of a talk is trained on where another one of it is held out.
    assert not {ask.id // STEPS for ask in kept if not ask.kept.held_out} & talks


def test_no_more_are_held_out_than_validation_needs(bare):
    found = Found()
    found.tasks["chat"] = 10_000
    found.held_out["chat"] = MOST_HELD_OUT
    asks = run(harvest(bare, found=found), 300)
    assert not any(ask.kept.held_out for ask in asks if ask.kept)


def test_a_held_out_talk_of_no_use_makes_room_for_the_next(speech):
    task = Task("t", 1, (Write(least=3), Answer()))
    collected = harvest(speech, OwnSource([task], 1))
    (first,) = collected.asks(1)
    collected.answered(Answered(id=first.id, tokens=ids("no"), finish_reason="stop"))
    (second,) = collected.asks(1)
    collected.answered(Answered(id=second.id, tokens=ids("yes it is"), finish_reason="stop"))
    (ask,) = collected.asks(1)
    assert ask.kept.held_out
    assert collected.dropped["unusable"] == [0]


def test_a_prompt_that_shares_a_run_of_tokens_with_an_excluded_one_is_dropped(speech):
    secret = "The secret question is not to be asked"
    prompts = [Prompt(turns=(text,)) for text in ("I say: THE  Secret question?", "Something else")]
    collected = harvest(speech, FileSource(prompts, 1), excluded=[secret])
    assert len(collected.asks(1)) == 1
    assert collected.dropped["excluded"] == [0]


def test_runs_shorter_than_the_bound_do_not_exclude_and_short_texts_do_as_wholes(speech):
    text = "abcdefghijklmnop"
    overlap = Overlap([text, "xyz"], speech.words)
    assert overlap.has(f"--{text[2 : 2 + RUN].upper()}--")
    assert not overlap.has(f"--{text[2 : 1 + RUN]}--")
    assert overlap.has("XYZ")
    assert not overlap.has("vwxyz")
    assert not overlap.has("")
    assert not Overlap([], speech.words).has(text)


def test_going_on_asks_nothing_that_is_there_or_was_dropped(bare):
    whole = run(harvest(bare), 300)
    there = {ask.id // STEPS for ask in whole if ask.kept}
    found = Found(talks=there, prompts={digest(ask.tokens, 0) for ask in whole if ask.kept})
    collected = harvest(bare, found=found, dropped={"unusable": [max(there) + 1]})
    begun = {ask.id // STEPS for ask in collected.asks(50)}
    assert not begun & (there | {max(there) + 1})


def test_prompts_from_files_are_answered_greedily_and_then_sampled(speech):
    prompts = [Prompt(turns=(f"Number {number}", "And {topic}?"), task="x") for number in range(3)]
    collected = harvest(speech, FileSource(prompts, 1))
    asks = run(collected, 1000)
    assert collected.is_over
    held = [ask for ask in asks if ask.kept.held_out]
    assert len(held) == 2  # both turns of the first talk, once
    assert len(asks) == PASSES * 4 + 2
    temperatures = Counter(ask.sampling.temperature for ask in asks)
    assert temperatures == {0.0: 6, 1.0: 4 * (PASSES - 1)}
    assert any("And {topic}?" in text for text in texts(speech, asks))


def test_a_system_message_stands_before_what_the_user_says(speech):
    source = FileSource([Prompt(turns=("One", "Two"), system="Be short")], 1)
    first = source.talk(0)
    said = [first.next(None), first.next("Yes")][-1].messages
    assert [one["role"] for one in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"] == "Be short"
    (ask,) = harvest(speech, source).asks(1)
    assert texts(speech, [ask]) == ["[system]Be short[user]One[answer]"]


def test_of_few_prompts_a_tenth_is_held_out_and_of_none_that_is_trained_on(speech):
    prompts = [Prompt(turns=(f"Number {number}",)) for number in range(64)]
    collected = harvest(speech, FileSource(prompts, 1))
    asks = run(collected, 1000)
    held = [ask for ask in asks if ask.kept.held_out]
    assert len(held) == 7
    assert {ask.id // STEPS < 64 for ask in held} == {True}
    others = {ask.tokens for ask in asks if not ask.kept.held_out}
    assert not others & {ask.tokens for ask in held}
    assert len(collected.dropped["held out"]) == 7 * (PASSES - 1)
    assert collected.dropped["duplicate"] == []


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped(speech):
    collected = harvest(speech, FileSource([Prompt(turns=("x" * 2000,))], 1))
    assert collected.is_over
    assert collected.dropped["too long"] == [0, 1, 2, 3]


def test_an_answer_to_nothing_is_a_protocol_error(speech):
    collected = harvest(speech)
    (ask, *_) = collected.asks(4)
    for number in (ask.id + 1, 10**6):
        with pytest.raises(ProtocolError, match="not asked"):
            collected.answered(Answered(id=number, tokens=(), finish_reason="stop"))


def test_a_target_that_writes_nothing_of_use_is_given_up(bare):
    collected = harvest(bare, OwnSource([Task("t", 1, (Write(least=3), Answer()))], 1))
    with pytest.raises(ConfigError, match="--prompts"):
        run(collected, MOST_IN_VAIN + 50, reply=lambda _: "")


def test_prompts_of_files_may_be_useless_one_after_the_other(speech):
    useless = [Prompt(turns=("again",))] * (MOST_IN_VAIN + 100)
    long = [Prompt(turns=("x" * (2048 * MOST_CHARACTERS + number),)) for number in range(3)]
    collected = harvest(speech, FileSource([*useless, *long, Prompt(turns=("last",))], 1))
    asked = texts(speech, run(collected, 9))
    assert sum("last" in text for text in asked) == 4
    assert collected.is_over
    assert len(collected.dropped["too long"]) == 4 * len(long)


def test_requests_that_are_refused_one_after_the_other_are_an_error_with_the_reason(bare):
    collected = harvest(bare)

    def refuse_all():
        for _ in range(MOST_IN_VAIN):
            (ask,) = collected.asks(1)
            told = {"finish_reason": "refused", "detail": "no room"}
            collected.answered(Answered(id=ask.id, tokens=(), **told))

    with pytest.raises(ConfigError, match="no room"):
        refuse_all()


def test_gaps_are_filled_once_for_a_talk_and_differently_for_others():
    moves = (
        Say(("{name} {name} {name#b} {n:3-40} {n:3-40}",)),
        Answer(),
        Say(("{name}",)),
        Answer(),
    )
    talk = Talk("t", moves, random.Random(1))
    one, same, other, number, again = talk.next(None).messages[0]["content"].split()
    assert one == same != other
    assert number == again
    assert 3 <= int(number) <= 40
    assert talk.next("yes").messages[-1]["content"] == one
    assert {one, other} <= set(WORDS["name"])


def test_gaps_hold_the_last_answer_the_one_before_and_all():
    moves = []
    for _ in range(3):
        moves += [Say(("Go",)), Answer(free=True), Afresh()]
    talk = Talk("t", (*moves, Say(("{answer}|{before}|{texts}",)), Answer()), random.Random(1))
    texts = [f"This is text number {number}, of eight words or more." for number in range(3)]
    talk.next(None)
    for text in texts:
        wanted = talk.next(text)
    joined = "\n\n".join(texts)
    assert wanted.messages[-1]["content"] == f"{texts[2]}|{texts[1]}|{joined}"


def test_a_text_that_repeats_itself_is_of_no_use():
    assert is_monotonous("and so on and so on " * 30)
    assert not is_monotonous("aaaaaaaaaa")  # too short to tell
    assert not is_monotonous(" ".join(WORDS["topic"]))


def test_texts_are_cut_where_they_end():
    assert tidy("Is it ", " so? Or so?", "?\n") == "Is it so?"
    assert tidy("Question:", "\n\nIs it so?\nYes", "?\n") == "Question:Is it so?"
    assert tidy("Why? ", "because", "?") == "Why? because"
    assert whole_sentences("One. Two. Thr") == "One. Two."
    assert (
        whole_sentences("A. Then a long rest without an end")
        == "A. Then a long rest without an end"
    )
    assert whole_sentences("no end") == "no end"


def test_prompt_files_hold_json_lines_or_plain_lines(tmp_path):
    file = tmp_path / "p"
    lines = [
        {"turns": ["a", "b"], "task": "t", "id": 4},
        {"prompt": "c"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]},
    ]
    file.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n\n")
    found = read_prompts(file).prompts
    assert [(one.turns, one.task) for one in found] == [
        (("a", "b"), "t"),
        (("c",), "prompts"),
        (("d",), "prompts"),
    ]
    assert [one.system for one in found] == ["", "", "s"]
    file.write_bytes("\ufeff".encode() + b'{"prompt": "e"}\r\n{"prompt": "f\xe2\x80\xa8\xc2\x85g"}')
    assert [one.turns for one in read_prompts(file).prompts] == [("e",), ("f\u2028\x85g",)]
    file.write_text("[1 What?\r\n[Why?] ")
    assert [one.turns for one in read_prompts(file).prompts] == [("[1 What?",), ("[Why?]",)]
    file.write_text("What?\n\n Why? \n")
    assert [one.turns for one in read_prompts(file).prompts] == [("What?",), ("Why?",)]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"prompt": 4}', "line 1: `turns`"),
        (b'{"prompt": "x"}\n{"turns": []}', "line 2: `turns`"),
        (b'{"prompt": "x"}\n[1]', "line 2: a JSON object"),
        (b'{"prompt": "x"}\n{', "line 2: no JSON"),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "line 1: `turns`"),
        (b'{"prompt": "x", "task": 3}', "line 1: `task`"),
        (b'{"prompt": "x"}\n{"prompt": "x", "task": "\\ud800"}', "line 2: `task`"),
        (b'{"prompt": "x", "task": "a\\nb"}', "line 1: `task`"),
        (b'{"prompt": "x\\udfff"}', "line 1: half of a surrogate pair"),
        (b'[\n{"prompt": "x"}\n]', "JSON arrays"),
        (b'["x"]\n["y"]', "JSON arrays"),
        (b"{}", "line 1: `turns`"),
        (b"\n\n", "holds no prompt"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_says_file_line_and_why(tmp_path, content, match):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=match) as error:
        read_prompts(file)
    assert "prompts.jsonl" in str(error.value)


def test_a_prompt_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*missing"):
        read_prompts(tmp_path / "missing")
