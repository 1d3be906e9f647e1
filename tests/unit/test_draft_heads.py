"""Heads that correct scores, each against its formula written down again in NumPy."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_drafts import write_llama_cpp, write_lucebox
from support.tiny_draft import (
    DFLASH2,
    DOMINO,
    DSPARK,
    HEADS,
    SPECULATORS,
    embedding,
    head,
    merged,
    uniform,
    write_draft,
)

from draft_daemon.checkpoint import load_draft
from draft_daemon.head import Borrowed
from draft_daemon.lexicon import Asked
from draft_daemon.likeliest import RACING
from draft_daemon.models.base import DraftNetwork, Lent
from draft_daemon.models.dflash import DFlash
from draft_daemon.models.dflash2 import convolve
from draft_daemon.walker import Noise, Walker
from protocol import noise
from protocol.errors import CheckpointError, UnsupportedModel
from protocol.messages import Sampling

VOCAB, SLOTS, PENDING = 96, 5, 7
GREEDY = Noise(20, Sampling())


def louder(path):
    """Let what a random Domino head adds be heard."""
    tensors = load_file(path)
    if "embed_proj.2.weight" in tensors:
        tensors["embed_proj.2.weight"] *= 12
        save_file(tensors, path)


class Bench:
    """One head over a head and an embedding, and hidden rows for it."""

    def __init__(self, place, raw, *, vocab="all", extra=None):
        self.folder = write_draft(place / "draft", raw, extra=extra)
        louder(self.folder / "model.safetensors")
        self.draft = load_draft(self.folder, torch.float32, vocab=vocab)
        config = self.draft.config
        weights = {"embed": embedding(config), "head": head(config)}
        self.borrowed = Borrowed(self.draft, weights, VOCAB, 3.0, 5.0)
        self.walker = Walker(self.draft, self.borrowed, VOCAB)
        self.hidden = 0.3 * uniform((SLOTS, config.hidden_size), 400)  # what is added counts
        self.tensors = {
            name: value.numpy()
            for name, value in load_file(self.folder / "model.safetensors").items()
        }

    def base(self):
        """What the target's head makes of the rows, [slots, vocab], by the draft's own factors."""
        config = self.draft.config
        scores = self.hidden.numpy() @ head(config).numpy().T * config.logit_scale
        cap = config.logit_softcap
        return cap * np.tanh(scores / cap) if cap else scores

    def rows(self, tokens):
        """The formula's scores [slots, vocab], with `tokens` chosen before each slot."""
        return FORMULAS[self.draft.config.network](self, [PENDING, *tokens])


def dflash2(bench, before):
    base, options, given = bench.base(), bench.draft.config.options, bench.tensors
    prefix = "candidate_selector"
    found = np.full_like(base, -np.inf)
    for slot, row in enumerate(base):
        projected = given[f"{prefix}.hidden_projection.weight"] @ bench.hidden[slot].numpy()
        a = given[f"{prefix}.predecessor_codebook"][before[slot]]
        for c in np.argsort(-row, kind="stable")[: options["selector_top_k"]]:
            b = given[f"{prefix}.successor_codebook"][c]
            found[slot, c] = row[c] + np.dot(a * projected, b)
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dspark(bench, before):
    given, options = bench.tensors, bench.draft.config.options
    w1, w2 = (given[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    found, state = bench.base(), np.zeros(options["markov_rank"])
    bench.confidences = []
    for slot, h in enumerate(bench.hidden.numpy()):
        e = w1[before[slot]]
        x = e
        if options["markov_head_type"] == "gated":
            weight, bias = (given[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
            x = sigmoid(weight @ np.concatenate([h, e]) + bias) * e
        elif options["markov_head_type"] == "rnn":
            weight, bias = (given[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias"))
            g, c, out = np.split(weight @ np.concatenate([state, e, h]) + bias, 3)
            state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
            x = np.tanh(out)
        found[slot] += w2 @ x
        if options["enable_confidence_head"]:
            seen = np.concatenate([h, e]) if options["confidence_head_with_markov"] else h
            weight, bias = (given[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
            bench.confidences.append(float(sigmoid(weight @ seen + bias)[0]))
    return found


def domino(bench, before):
    given, options = bench.tensors, bench.draft.config.options
    w_ih, w_hh = given["prefix_gru.weight_ih_l0"], given["prefix_gru.weight_hh_l0"]
    table = embedding(bench.draft.config).numpy() * bench.draft.config.embedding_scale
    found, state = bench.base(), np.zeros(options["gru_hidden_dim"])
    for slot, h in enumerate(bench.hidden.numpy()):
        i_r, i_z, i_n = np.split(w_ih @ table[before[slot]], 3)
        h_r, h_z, h_n = np.split(w_hh @ state, 3)
        z = sigmoid(i_z + h_z)
        state = (1 - z) * np.tanh(i_n + sigmoid(i_r + h_r) * h_n) + z * state
        if slot >= options["pure_draft_prefix_len"]:
            inner = given["embed_proj.0.weight"] @ np.concatenate([h, state])
            found[slot] += given["embed_proj.2.weight"] @ (inner * sigmoid(inner))
    return found


FORMULAS = {"dflash2": dflash2, "domino": domino, "dspark": dspark}


@pytest.fixture(params=HEADS)
def bench(request, tmp_path):
    return Bench(tmp_path, HEADS[request.param])


def test_the_walk_is_the_formulas(bench):
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY)
    tokens = walked.ids[:, 0].tolist()
    assert tokens == bench.rows(tokens).argmax(-1).tolist()
    assert tokens != bench.base().argmax(-1).tolist()  # what the head adds matters
    other = bench.walker.walk(bench.hidden, 0, GREEDY).ids[:, 0].tolist()
    assert tokens != other  # and so does the token before


def test_alternatives_are_the_likeliest_under_the_corrected_scores(bench):
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY, 4)
    rows = torch.from_numpy(bench.rows(walked.ids[:, 0].tolist()))
    assert walked.ids.tolist() == rows.topk(4).indices.tolist()
    expected = rows.log_softmax(-1).gather(1, walked.ids)
    assert torch.allclose(walked.logprobs, expected, atol=1e-4)
    alone = bench.walker.walk(bench.hidden, PENDING, GREEDY, 1)
    assert alone.ids[:, 0].tolist() == walked.ids[:, 0].tolist()


@pytest.mark.parametrize("count", [1, 3])
def test_a_slot_is_drawn_with_the_noise_of_its_position(bench, count):
    sampling = Sampling(seed=5)
    asked = Noise(20, sampling, (0.7, 0.0, 1.3, 0.4, 1.0))
    tokens = bench.walker.walk(bench.hidden, PENDING, asked, count).ids[:, 0].tolist()
    rows = bench.rows(tokens)
    for slot, temperature in enumerate(asked.temperatures):
        sums = rows[slot].astype(np.float64)
        if temperature:
            ids = np.arange(VOCAB)
            drawn = noise.gumbel(noise.bits(noise.stream(5, 20 + slot), ids))
            sums = sums / temperature + drawn
        if count > 1:  # alternatives race among the likeliest alone
            sums[np.argsort(-rows[slot], kind="stable")[RACING:]] = -np.inf
        assert tokens[slot] == sums.argmax()
    assert tokens != bench.walker.walk(bench.hidden, PENDING, GREEDY).ids[:, 0].tolist()


def shares_of(bench, tokens, heats=(1.0,) * SLOTS, ids=None):
    """What `tokens` have of the softmax of the formula's scores; of `ids` alone."""
    scores = np.stack(bench.rows(tokens)).astype(np.float64) / np.array(heats)[:, None]
    if ids is not None:
        scores[:, np.setdiff1d(np.arange(VOCAB), ids)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found = (weights / weights.sum(-1, keepdims=True))[range(SLOTS), tokens]
    return pytest.approx(found.tolist(), rel=1e-3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("heats", [(), (0.7, 0.0, 1.3, 0.4, 1.0)])
def test_a_network_that_does_not_say_how_sure_it_is_goes_by_its_scores(
    tmp_path, bench, count, heats
):
    raw = HEADS[bench.draft.config.network]
    silent = Bench(tmp_path / "s", merged(raw, dflash_config={"enable_confidence_head": None}))
    asked = Noise(20, Sampling(seed=5), heats)
    walked = silent.walker.walk(silent.hidden, PENDING, asked, count)
    tokens = walked.ids[:, 0].tolist()
    first = walked.logprobs[:, 0].exp().tolist()
    assert walked.confidences == pytest.approx(first, rel=1e-4)
    if count == 1 or not heats:  # alternatives at a temperature race
        each = [heat or 1.0 for heat in heats] or (1.0,) * SLOTS
        assert walked.confidences == shares_of(silent, tokens, each)


def test_ids_that_are_not_scored_are_never_chosen(tmp_path, bench):
    path = tmp_path / "ids.json"
    ids = list(range(1, VOCAB, 4))
    path.write_text(str(ids))
    few = Bench(tmp_path / "few", HEADS[bench.draft.config.network], vocab=str(path))
    walked = few.walker.walk(few.hidden, PENDING, GREEDY, 2)
    tokens = walked.ids[:, 0].tolist()
    assert set(walked.ids.flatten().tolist()) <= set(ids)
    if few.draft.config.network != "dflash2":  # whose candidates are the best that are scored
        rows = bench.rows(tokens)
        assert tokens == [ids[one] for one in rows[:, ids].argmax(-1)]


@pytest.mark.parametrize("vocab", ["all", "some"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_large_vocabulary_is_corrected_where_the_targets_head_likes_it_best(
    tmp_path, bench, monkeypatch, vocab, temperature
):
    monkeypatch.setattr("draft_daemon.walker.POOL", 70)
    ids, network = list(range(VOCAB)), bench.draft.config.network
    if vocab == "some":
        ids = [one for one in ids if one % 9]
        (tmp_path / "ids.json").write_text(str(ids))
        vocab = str(tmp_path / "ids.json")
    some = Bench(tmp_path / "some", HEADS[network], vocab=vocab)
    asked = Noise(20, Sampling(seed=5), (temperature,) * SLOTS)
    walked = some.walker.walk(some.hidden, PENDING, asked)
    tokens = walked.ids[:, 0].tolist()
    rows = bench.rows(tokens).astype(np.float64)
    heats = (temperature or 1.0,) * SLOTS
    if network != "dflash2":
        best = sorted(ids, key=lambda one: -bench.base()[:, one].max())[:70]
        rows[:, np.setdiff1d(np.arange(VOCAB), best)] = -np.inf
        said = network == "dspark"  # by a head of its own
        assert said or walked.confidences == shares_of(bench, tokens, heats, best)
    elif vocab != "all":
        return  # its candidates are the best of those that are scored
    for slot, row in enumerate(rows):
        drawn = noise.gumbel(noise.bits(noise.stream(5, 20 + slot), np.arange(VOCAB)))
        assert tokens[slot] == (row / temperature + drawn if temperature else row).argmax()


def test_the_head_is_refused_where_the_target_is_asked_for_ids(bench):
    name = type(bench.draft.network).__name__
    with pytest.raises(UnsupportedModel, match=f"the head of {name} needs the target's logits"):
        Asked(bench.draft, None)


def test_a_network_without_a_head_of_its_own_has_none_to_give(tmp_path):
    network = object.__new__(DFlash)
    with pytest.raises(NotImplementedError, match="DFlash corrects no scores"):
        DraftNetwork.head(network, Lent(None, VOCAB, embedding))


def test_a_head_in_bf16_follows_the_one_in_fp32(bench):
    draft = load_draft(bench.folder, torch.bfloat16)
    weights = {"embed": embedding(draft.config).bfloat16(), "head": head(draft.config).bfloat16()}
    walker = Walker(draft, Borrowed(draft, weights, VOCAB), VOCAB)
    ours = walker.walk(bench.hidden.bfloat16(), PENDING, GREEDY).ids[:, 0].tolist()
    exact = bench.walker.walk(bench.hidden, PENDING, GREEDY).ids[:, 0].tolist()
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, exact, strict=True))
    assert len(list(same)) >= 1


# --- Domino alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 1, 3, 7])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_the_first_slots_are_the_heads_own_and_the_gru_has_read_all_before(tmp_path, prefix, scale):
    options = {"pure_draft_prefix_len": prefix, "input_embedding_scale": scale}
    bench = Bench(tmp_path, merged(DOMINO, dflash_config=options))
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY, VOCAB)
    rows = torch.from_numpy(bench.rows(walked.ids[:, 0].tolist()))
    expected, order = rows.log_softmax(-1).sort(descending=True, stable=True)
    assert torch.equal(walked.ids, order)
    assert torch.allclose(walked.logprobs, expected, atol=1e-4)
    alone = bench.base().argmax(-1)[:prefix].tolist()
    assert walked.ids[:prefix, 0].tolist() == alone
    gru = torch.nn.GRU(32, 16, bias=False, batch_first=True)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        getattr(gru, name).data = torch.from_numpy(bench.tensors[f"prefix_gru.{name}"])
    read = bench.borrowed.embed(torch.tensor([PENDING, *walked.ids[:-1, 0]]))
    state = torch.zeros(1, 16)
    for row, theirs in zip(read[:, None], gru(read[None])[0][0], strict=True):
        state = bench.draft.network._correction.next_state(row, state)
        assert torch.allclose(state[0], theirs, atol=1e-6)


@pytest.mark.parametrize(("shift", "first"), [(True, 0), (False, 1)])
def test_shifted_labels_propose_as_many_tokens_from_one_row_earlier(tmp_path, shift, first):
    config = Bench(tmp_path, merged(DOMINO, dflash_config={"shift_label": shift})).draft.config
    assert (config.first_slot, config.max_proposals, config.sample_from_anchor) == (first, 5, False)


def test_its_head_may_have_the_name_of_older_files(tmp_path):
    bench = Bench(tmp_path, DOMINO)
    path = bench.folder / "model.safetensors"
    tensors = {
        name.replace("embed_proj", "logit_head"): one for name, one in load_file(path).items()
    }
    save_file(tensors, path)
    assert load_draft(bench.folder, torch.float32).weight_bytes == bench.draft.weight_bytes


# --- DSpark alone ---------------------------------------------------------------------------------


def spark(place, **options):
    return Bench(place, merged(DSPARK, dflash_config=options))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_every_markov_head_and_its_confidence_are_the_formulas(tmp_path, kind, with_markov):
    bench = spark(tmp_path, markov_head_type=kind, confidence_head_with_markov=with_markov)
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY, VOCAB)
    rows = torch.from_numpy(bench.rows(walked.ids[:, 0].tolist()))
    expected, order = rows.log_softmax(-1).sort(descending=True, stable=True)
    assert torch.equal(walked.ids, order)
    assert torch.allclose(walked.logprobs, expected, atol=1e-4)
    assert walked.confidences == pytest.approx(bench.confidences, abs=1e-5)
    assert len(set(walked.confidences)) == SLOTS


def test_a_confidence_head_that_is_not_switched_on_is_left_out(tmp_path):
    extra = {"confidence_head.proj.weight": torch.ones(1, 40)}
    raw = merged(DSPARK, dflash_config={"enable_confidence_head": None})
    bench = Bench(tmp_path, raw, extra=extra)
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY)
    assert walked.confidences == shares_of(bench, walked.ids[:, 0].tolist())
    assert "confidence_head.proj.weight" in bench.draft.ignored


def test_a_draft_vocabulary_of_its_own_is_what_the_markov_head_scores(tmp_path):
    ids = torch.tensor([2, 30, 31, 64, 95])
    own = uniform((5, 32), 77)
    extra = {"lm_head.weight": own, "d2t": ids - torch.arange(5)}
    flat = {"markov_rank": 8, "enable_confidence_head": True, "architectures": ["DSparkSpeculator"]}
    raw = merged(SPECULATORS, draft_vocab_size=5, speculators_model_type="dspark", **flat)
    bench = Bench(tmp_path, raw, extra=extra)
    assert (bench.draft.config.network, bench.draft.config.max_proposals) == ("dspark", 6)
    walked = bench.walker.walk(bench.hidden, PENDING, GREEDY, 5)
    before, given = [PENDING, *walked.ids[:, 0].tolist()], bench.tensors
    base = bench.hidden.numpy() @ own.numpy().T
    for slot, row in enumerate(base):
        w1 = given["markov_head.markov_w1.weight"][before[slot]]
        order = np.argsort(-(row + given["markov_head.markov_w2.weight"] @ w1), kind="stable")
        assert walked.ids[slot].tolist() == ids[order].tolist()


@pytest.mark.parametrize("prefix", ["dspark_", "mtp.2."])
def test_its_tensors_may_have_the_names_that_some_files_give_them(tmp_path, prefix):
    bench = spark(tmp_path)
    path = bench.folder / "model.safetensors"
    heads = ("markov_head.", "confidence_head.")
    tensors = {
        f"{prefix}{name}" if name.startswith(heads) else name: value
        for name, value in load_file(path).items()
    }
    save_file(tensors, path)
    assert load_draft(bench.folder, torch.float32).weight_bytes == bench.draft.weight_bytes


def test_a_gguf_file_of_lucebox_is_the_same_head(tmp_path):
    bench = spark(tmp_path)
    draft = load_draft(write_lucebox(bench.folder, tmp_path / "d.gguf"), torch.float32)
    assert draft.config.options == bench.draft.config.options
    weights = {"embed": embedding(draft.config), "head": head(draft.config)}
    walker = Walker(draft, Borrowed(draft, weights, VOCAB), VOCAB)
    ours = walker.walk(bench.hidden, PENDING, GREEDY, 3)
    theirs = bench.walker.walk(bench.hidden, PENDING, GREEDY, 3)
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert ours.confidences == theirs.confidences


# --- DFlash2 alone --------------------------------------------------------------------------------


def test_codebooks_may_have_the_name_that_some_files_give_them(tmp_path):
    bench = Bench(tmp_path, DFLASH2)
    path = bench.folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("predecessor_codebook", "successor_codebook"):
        full = f"candidate_selector.{name}"
        tensors[f"{full}.weight"] = tensors.pop(full)
    save_file(tensors, path)
    again = load_draft(bench.folder, torch.float32)
    assert again.ignored == bench.draft.ignored
    tensors["candidate_selector.successor_codebook"] = torch.zeros(VOCAB, 8)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=r"successor_codebook\.weight is not part"):
        load_draft(bench.folder, torch.float32)


def test_groups_that_do_not_divide_the_rows_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="hidden size 32 is no multiple of conv_group_size 5"):
        Bench(tmp_path, merged(DFLASH2, dflash_config={"conv_group_size": 5}))


def test_a_block_of_fewer_rows_than_taps_is_possible(tmp_path):
    wide = Bench(tmp_path, merged(DFLASH2, dflash_config={"conv_kernel_size": 4}))
    rows, weights = uniform((2, 32), 1), uniform((2, 4, 8, 4), 2)
    expected = rows.view(2, 8, 4) * weights[:, 0]
    expected[1] += rows.view(2, 8, 4)[0] * weights[1, 1]
    assert torch.allclose(convolve(rows, weights), expected.view(2, 32))
    assert wide.draft.config.options["conv_kernel_size"] == 4


@pytest.mark.parametrize("name", [name for name in HEADS if name != "domino"])
def test_a_gguf_file_of_llama_cpp_is_the_same_head(tmp_path, name):
    bench = Bench(tmp_path, HEADS[name])
    draft = load_draft(write_llama_cpp(bench.folder, tmp_path / "d.gguf"), torch.float32)
    assert (draft.config.network, draft.config.options, draft.config.layers) == (
        bench.draft.config.network,
        bench.draft.config.options,
        bench.draft.config.layers,
    )
    weights = {"embed": embedding(draft.config), "head": head(draft.config)}
    walker = Walker(draft, Borrowed(draft, weights, VOCAB), VOCAB)
    ours = walker.walk(bench.hidden, PENDING, GREEDY, 3)
    theirs = bench.walker.walk(bench.hidden, PENDING, GREEDY, 3)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert torch.equal(ours.logprobs, theirs.logprobs)
