"""Answers in batches are the engine's own, and what is kept of them is what a prefill gives."""

import msgspec
import pytest
import torch
from support.collecting import answer_all, ask, decoder, loaded
from support.targets import features, load, prompt
from support.tiny_target import write_tiny_target

from protocol.choice import choose
from protocol.errors import ConfigError, InsufficientMemory, UsageError
from target_daemon.collecting import decoder as decoding
from target_daemon.collecting import loading
from target_daemon.collecting.choosing import Chooser
from target_daemon.collecting.forwards import OneByOne, Together
from target_daemon.collecting.likeliest import likeliest
from target_daemon.collecting.records import Records
from target_daemon.dense.abreast import GROUP
from target_daemon.sequences import resolved

SAMPLED = {"temperature": 1.0}
PROMPTS = [prompt(count, seed=count).tolist() for count in (5, 1, 17, 9, 30, 2, 12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("model"))


def _alone(folder, asked, most=96):
    """The answer of one sequence in a target of its own, with its logits and features."""
    target = load(folder, max_positions=most, ring_window=128, prefill_chunk=128)
    sampling = resolved(asked.sampling, target.eos_token_ids, target.vocab_size)
    sampling = msgspec.structs.replace(sampling, prompt_tokens=len(asked.tokens))
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    tokens, rows = torch.tensor(asked.tokens), []
    with torch.inference_mode():
        logits = target.verify_batch(0, tokens, 0, "last")
        while True:
            rows.append(logits[0])
            chosen = choose(logits, len(tokens), sampling, tokens)
            tokens = torch.cat((tokens, chosen))
            is_end = int(chosen) in (*ends, *sampling.stop_token_ids)
            if is_end or len(tokens) == min(most, len(asked.tokens) + asked.max_tokens):
                break
            logits = target.verify_batch(0, chosen, len(tokens) - 1, "last")
    return tokens, torch.stack(rows), features(target, 0, 0, len(tokens) - 1)


def _same_as_alone(folder, asks, found, k=5):
    answers = {one.answer.id: one for one in found}
    assert sorted(answers) == [one.id for one in asks]
    for asked in asks:
        got = answers[asked.id]
        tokens, logits, rows = _alone(folder, asked)
        example = got.example
        assert example.tokens.tolist() == tokens.tolist(), asked
        stopped = got.answer.finish_reason == "stop"
        assert list(got.answer.tokens) == tokens[example.prompt : len(tokens) - stopped].tolist()
        answered = slice(example.prompt - 1, len(tokens) - 1)
        every = logits.log_softmax(-1)
        told = torch.from_numpy(example.top_logprobs[answered]).float()
        torch.testing.assert_close(told, every.topk(k).values, atol=2e-2, rtol=0)
        ids = torch.from_numpy(example.top_ids[answered]).long()
        torch.testing.assert_close(told, every.gather(1, ids), atol=2e-2, rtol=0)
        assert not example.top_ids[: answered.start].any()
        assert not example.top_ids[answered.stop :].any()
        made = torch.from_numpy(got.features).view(torch.bfloat16).float()
        torch.testing.assert_close(made[:-1], rows, atol=1e-2, rtol=1e-2)
        assert not made[-1].any()


@pytest.mark.parametrize("family", ["smollm2", "llama3", "mistral-window", "qwen2-window", "qwen3"])
def test_answers_together_are_those_of_each_alone(tmp_path, family):
    folder = write_tiny_target(tmp_path, family)
    ready, config = loaded(folder)
    assert isinstance(ready.forwards, Together)
    asks = [
        ask(number, tokens, most=12 + number, seed=number, **(SAMPLED if number % 2 else {}))
        for number, tokens in enumerate(PROMPTS)
    ]
    _same_as_alone(folder, asks, answer_all(decoder(ready, config), asks))


def test_texts_of_many_lengths_move_between_groups_and_stay_themselves(model):
    ready, config = loaded(model, slots=GROUP + 3)
    asks = [
        ask(n, prompt(1 + n * 7 % 40, seed=n), most=3 + n * 5 % 17, ignore_eos=True)
        for n in range(2 * GROUP)
    ]
    _same_as_alone(model, asks, answer_all(decoder(ready, config), asks))


def test_one_by_one_gives_the_same(model):
    _, config = loaded(model, slots=3)
    asks = [ask(number, tokens, seed=number) for number, tokens in enumerate(PROMPTS)]
    target = load(model, slots=3, max_positions=96, ring_window=64, prefill_chunk=8)
    alone = loading.Loaded(target, OneByOne(target), 3, torch.device("cpu"))
    _same_as_alone(model, asks, answer_all(decoder(alone, config), asks))


def test_threads_that_choose_change_nothing(model):
    asks = [ask(number, PROMPTS[number], seed=number, **SAMPLED) for number in range(6)]
    ready, config = loaded(model, slots=6)
    with Chooser(3) as chooser:
        found = answer_all(decoder(ready, config, chooser=chooser), asks)
    _same_as_alone(model, asks, found)


def test_a_prompt_that_one_forward_has_no_room_for_takes_several(model, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK_ROWS", 7)
    ready, config = loaded(model)
    asks = [ask(number, tokens) for number, tokens in enumerate(PROMPTS)]
    _same_as_alone(model, asks, answer_all(decoder(ready, config), asks))


def test_a_slot_refills_as_soon_as_its_text_ends(model):
    ready, config = loaded(model, slots=2)
    batch = decoder(ready, config)
    batch.begin(ask(0, PROMPTS[0], most=3, ignore_eos=True))
    batch.begin(ask(1, PROMPTS[1], most=9, ignore_eos=True))
    assert batch.free == 0
    ended = [one.answer.id for _ in range(3) for one in batch.step()]
    assert (ended, batch.free) == ([0], 1)
    batch.begin(ask(2, PROMPTS[2], most=2, ignore_eos=True))
    ended += [one.answer.id for _ in range(6) for one in batch.step()]
    assert (ended, batch.open) == ([0, 2, 1], 0)


def test_penalties_and_filters_see_the_history_of_their_own_text(model):
    ready, config = loaded(model)
    settings = [
        {"repetition_penalty": 1.8},
        {"temperature": 1.0, "top_k": 4, "presence_penalty": 1.5},
        {"logit_bias": ((7, 5.0),), "min_tokens": 4, "eos_token_ids": (7,)},
    ]
    asks = [ask(n, PROMPTS[n], seed=n, **one) for n, one in enumerate(settings)]
    _same_as_alone(model, asks, answer_all(decoder(ready, config), asks))


def test_a_text_ends_at_its_stop_token_at_its_limit_or_where_positions_do(model):
    ready, config = loaded(model, max_positions=20)
    free = ask(0, PROMPTS[0], ignore_eos=True, most=90)
    (whole,) = answer_all(decoder(ready, config), [free])
    assert (whole.answer.finish_reason, len(whole.answer.tokens)) == ("length", 15)
    end = whole.answer.tokens[3]
    first = whole.answer.tokens.index(end)
    stopped = ask(0, PROMPTS[0], ignore_eos=True, most=90, stop_token_ids=(end,))
    (one,) = answer_all(decoder(ready, config), [stopped])
    assert one.answer.finish_reason == "stop"
    assert one.answer.tokens == whole.answer.tokens[:first]
    assert one.example.tokens[-1] == end
    limited = ask(0, PROMPTS[0], ignore_eos=True, most=1)
    (one,) = answer_all(decoder(ready, config), [limited])
    assert (one.answer.finish_reason, one.answer.tokens) == ("length", whole.answer.tokens[:1])


def test_what_is_not_kept_leaves_nothing(model):
    ready, config = loaded(model)
    (one,) = answer_all(decoder(ready, config), [ask(4, PROMPTS[0], keep=False)])
    assert (one.answer.id, one.example, one.features) == (4, None, None)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (ask(0, []), "prompt of 0 tokens; 1 to 95 are taken"),
        (ask(0, range(3, 99)), "prompt of 96 tokens"),
        (ask(0, [97]), "token id 97; this target's are 0 to 96"),
        (ask(0, [5], stop_token_ids=(99,)), "token id 99"),
    ],
)
def test_an_ask_that_cannot_be_answered_is_refused_and_takes_no_slot(model, asked, told):
    ready, config = loaded(model)
    batch = decoder(ready, config)
    with pytest.raises(UsageError, match=told):
        batch.begin(asked)
    assert batch.free == 3


@pytest.mark.parametrize("way", [Together, OneByOne])
def test_a_text_whose_numbers_are_not_finite_ends_alone_and_leaves_nothing(model, monkeypatch, way):
    target = load(model, slots=3, max_positions=96, ring_window=64)
    _, config = loaded(model)
    forwards = way(target)
    ready = loading.Loaded(target, forwards, 3, torch.device("cpu"))
    asks = [ask(n, PROMPTS[n], ignore_eos=True) for n in (4, 1, 0, 3)]
    score = forwards.score

    def broken(rows):
        logits = score(rows).clone()
        if len(rows) == 3 and not broken.done:  # while three texts are open, the first time
            broken.done = True
            target.key_values.view(0, 0, 30).fill_(torch.nan)
            logits[0] = torch.nan
        return logits

    broken.done = False
    monkeypatch.setattr(forwards, "score", broken)
    found = {one.answer.id: one for one in answer_all(decoder(ready, config), asks)}
    assert found[4].answer.finish_reason == "refused"
    assert "nan" in found[4].answer.detail
    assert found.pop(4).example is None
    _same_as_alone(model, sorted(asks[1:], key=lambda one: one.id), list(found.values()))


@pytest.mark.parametrize("vocab", [40, 97, 640, 1000])
def test_the_likeliest_tokens_are_those_of_a_whole_sort(vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    ids, logprobs = likeliest(logits, 5)
    best = logits.log_softmax(-1).topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logprobs, best.values)


def test_what_is_impossible_or_rounded_above_certain_is_noted_as_a_finite_number():
    records = Records(
        slots=1, positions=4, likeliest=3, taps=(), hidden_size=1, device=torch.device("cpu")
    )
    noted = torch.tensor([[3e-7, -90_000.0, -torch.inf]])
    zero = torch.tensor([0])
    records.note(zero, zero, torch.tensor([[5, 6, 7]]), noted)
    ids, logprobs = records.top(0, 1, 2)
    assert ids[0].tolist() == [5, 6, 7]
    assert logprobs[0].tolist() == [0.0, -65504.0, -65504.0]


def test_slots_are_as_many_as_fit_unless_a_number_is_asked_for(model, monkeypatch):
    ready, _ = loaded(model, slots=0)
    assert ready.slots == loading.SLOTS
    config = loaded(model, slots=0, max_positions=512)[1]
    facts = loading.read_model_config(model)
    settings = loading._settings(config, loading.open_device("cpu"), together=True)
    need = {
        slots: loading.memory(
            config, loading.msgspec.structs.replace(settings, slots=slots), facts
        ).needed
        for slots in (1, 8, 16)
    }
    monkeypatch.setattr("protocol.transports.devices.available", lambda: _left(need[8]))
    assert loaded(model, slots=0, max_positions=512)[0].slots == 8
    with pytest.raises(InsufficientMemory, match="the collecting target needs"):
        loaded(model, slots=16, max_positions=512)
    monkeypatch.setattr("protocol.transports.devices.available", lambda: _left(need[1] - 1))
    with pytest.raises(InsufficientMemory, match="notes"):
        loaded(model, slots=0, max_positions=512)


def _left(size):
    from protocol.memory import Available

    return Available(size, "as this test says")


def test_taps_that_are_no_layers_and_too_many_slots_are_refused(model):
    with pytest.raises(ConfigError, match=r"distinct layers in 0\.\.3"):
        loaded(model, taps=(0, 4))
    with pytest.raises(ConfigError, match="`slots` is 5000"):
        loaded(model, slots=5000)
