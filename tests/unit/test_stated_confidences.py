"""How sure a draft says it is of each id: the softmax of its scores, written down again here."""

import numpy as np
import pytest
import torch
from support.draft_bench import Bench
from support.drive import unpack
from support.local_pair import LocalPair
from support.tiny_draft import (
    SPECULATORS,
    Z_LAB,
    embedding,
    head,
    merged,
    uniform,
    write_draft,
)
from support.tiny_pair import VOCAB as PAIR_VOCAB
from support.tiny_pair import write_pair

from draft_daemon.checkpoint import LoadedDraft, OwnHead, load_draft
from draft_daemon.chosen import Chosen, shares, stated
from draft_daemon.head import Borrowed
from draft_daemon.lexicon import Asked
from protocol.codec import decode, encode
from protocol.kernels.linear import pack
from protocol.messages import OpenItem, Proposed, ProposeItem, Sampling
from protocol.transports.local import TRANSPORT as LOCAL
from protocol.transports.tcp import TRANSPORT as TCP

VOCAB, SLOTS = 96, 5
WARM = Sampling(temperature=2.0, seed=21)
HEATS = (0.0, 2.0, 1.0, 1e-7, 0.5)  # what is colder than COLDEST is the best id as well
PROMPT = [(7 * i) % (PAIR_VOCAB - 4) + 4 for i in range(30)]


def softmax(rows, columns, heats=()):
    """Of each row, what its column has of the softmax at its temperature; in float64."""
    rows = np.asarray(rows, dtype=np.float64)
    heats = np.array([heat if heat > 1e-5 else 1.0 for heat in heats or (1.0,) * len(rows)])
    weights = np.exp((rows - rows.max(-1, keepdims=True)) / heats[:, None])
    return (weights / weights.sum(-1, keepdims=True))[range(len(rows)), list(columns)]


def about(values):
    return pytest.approx(list(values), rel=1e-4, abs=1e-7)


# --- the share of one column ----------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 1000])
@pytest.mark.parametrize("heats", [(), (0.0, 0.7, 1.3, 1e-9)])
def test_a_share_is_the_softmaxs(vocab, heats):
    scores = 20 * uniform((4, vocab), vocab)
    columns = torch.tensor([0, vocab // 2, vocab - 1, int(scores[3].argmax())])
    kept = scores.clone()
    found = shares(scores, columns, heats)
    assert found.tolist() == about(softmax(scores, columns.tolist(), heats))
    assert torch.equal(scores, kept)


def test_a_share_is_never_outside_0_to_1_nor_no_number():
    infinity, nothing = float("inf"), float("nan")
    rows = [
        [0.0, 1e30, 0.0],  # the sum overflows
        [0.0, -infinity, -infinity],
        [5.0, 5.0, 5.0],
        [nothing, 1.0, 0.0],
        [infinity, 1.0, infinity],
        [-infinity, -infinity, -infinity],
        [1.0, nothing, 0.0],
    ]
    found = shares(torch.tensor(rows), torch.zeros(7, dtype=torch.int64), (0.5,) * 7).tolist()
    assert found == [0.0, 1.0, pytest.approx(1 / 3), 0.0, 0.0, 0.0, 0.0]
    logs = torch.tensor([1e-6, 0.0, -infinity, nothing, np.log(0.25)])
    assert stated(logs) == (1.0, 1.0, 0.0, 0.0, pytest.approx(0.25))


def test_ids_and_shares_survive_the_way_to_numbers():
    ids = torch.tensor([0, 2**31 - 1, 16_777_217])
    found = Chosen.of(ids, torch.tensor([0.0, 1.0, 0.1]))
    assert found == Chosen((0, 2**31 - 1, 16_777_217), (0.0, 1.0, float(np.float32(0.1))))
    assert {type(one) for one in found.ids} == {int}


# --- a chain, and alternatives --------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path):
    with Bench(tmp_path) as made:
        yield made


def travelled(answer):
    whole = Proposed(target_life=1, draft_life=2, results=(answer,))
    return decode(encode(whole), (Proposed,)).results[0]


def check(answer, scores, heats=()):
    """`answer` states of its ids what `scores` say, and travels."""
    ids = unpack(answer.tokens)
    assert answer.confidences == about(softmax(scores, ids, heats))
    assert travelled(answer) == answer


@pytest.mark.parametrize("width", [2, 4, 6])
def test_every_proposed_id_comes_with_its_share_of_the_softmax(bench, width):
    features = bench.sequence()
    features.write(0, 20)
    answer = bench.propose(20, width=width)
    check(answer, bench.scores(features, 20, width=width))
    assert len(set(answer.confidences)) == width - 1


def test_a_drawn_id_comes_with_its_share_at_its_temperature(bench):
    features = bench.sequence(sampling=WARM)
    features.write(0, 8)
    scores = bench.scores(features, 8)
    answer = bench.propose(8, temperatures=HEATS)
    assert unpack(answer.tokens) != scores.argmax(-1).tolist()
    check(answer, scores, HEATS)


@pytest.mark.parametrize("heats", [(), HEATS])
def test_the_targets_scale_and_cap_count(bench, heats):
    features = bench.sequence(sampling=WARM)
    features.write(0, 8)
    bench.engine._lexicon = Borrowed(bench.draft, bench.guest.weights(), VOCAB, 3.0, 4.0)
    scores = 4 * torch.tanh(bench.scores(features, 8) * 3 / 4)
    check(bench.propose(8, temperatures=heats), scores, heats)
    bench.engine._lexicon = Borrowed(bench.draft, bench.guest.weights(), VOCAB, 0.5)
    check(bench.propose(8, temperatures=heats), bench.scores(features, 8) * 0.5, heats)


def test_a_draft_with_factors_of_its_own_goes_by_these(tmp_path):
    own = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    with Bench(tmp_path, merged(Z_LAB, dflash_config=own)) as bench:
        features = bench.sequence()
        features.write(0, 8)
        bench.engine._lexicon = Borrowed(bench.draft, bench.guest.weights(), VOCAB, 3.0, 4.0)
        scores = 2 * torch.tanh(bench.scores(features, 8) * 0.5 / 2)
        check(bench.propose(8), scores)


def test_a_cap_that_makes_scores_equal_does_not_change_which_is_best(tmp_path):
    draft = load_draft(write_draft(tmp_path / "draft"), torch.float32)
    table = torch.zeros(VOCAB, 32)
    table[:, 0] = torch.linspace(500.0, 501.0, VOCAB)
    found = Borrowed(draft, {"embed": table}, VOCAB, 1.0, 1.0).best(torch.eye(1, 32))
    assert found == Chosen((VOCAB - 1,), (pytest.approx(1 / VOCAB),))


@pytest.mark.parametrize("heats", [(), HEATS])
def test_a_head_of_the_drafts_own_shares_among_its_own_ids(tmp_path, heats):
    ids = torch.tensor([64, 30, 31, 2, 95])  # in no order
    own = uniform((5, 32), 77)
    extra = {"lm_head.weight": own, "d2t": ids - torch.arange(5)}
    with Bench(tmp_path, merged(SPECULATORS, draft_vocab_size=5), extra=extra) as bench:
        features = bench.sequence(sampling=WARM)
        features.write(0, 8)
        scores = torch.full((5, VOCAB), -torch.inf)
        scores[:, ids] = bench.scores(features, 8, scores=own)
        check(bench.propose(8, temperatures=heats), scores, heats)


@pytest.mark.parametrize("heats", [(), HEATS])
@pytest.mark.parametrize("known", [VOCAB, 70])
def test_a_reduced_vocabulary_shares_among_what_is_scored(tmp_path, heats, known):
    path = tmp_path / "ids.json"
    path.write_text(str(list(range(1, VOCAB, 3))))
    draft = load_draft(write_draft(tmp_path / "draft"), torch.float32, vocab=str(path))
    table, hidden = head(draft.config), uniform((SLOTS, 32), 400)
    lexicon = Borrowed(draft, {"embed": embedding(draft.config), "head": table}, known)
    scores = torch.full((SLOTS, VOCAB), -torch.inf)
    scores[:, 1:known:3] = hidden @ table[1:known:3].T
    drawn = lexicon.drawn(hidden, 9, WARM, heats) if heats else lexicon.best(hidden)
    assert drawn.confidences == about(softmax(scores, drawn.ids, heats))


def test_alternatives_state_the_first_ones_probability(bench):
    features = bench.sequence(sampling=WARM)
    features.write(0, 9)
    scores = bench.scores(features, 9)
    for few in (1, 4):
        answer = bench.propose(9, top_k=few)
        check(answer, scores)
        assert np.log(answer.confidences) == about(answer.top_logprobs[::few])
    hot = bench.propose(9, top_k=4, temperatures=HEATS)
    first = np.exp(hot.top_logprobs[::4])
    assert hot.confidences == about(first)  # of the race: how clearly it leads
    assert hot.confidences[0] == pytest.approx(softmax(scores, unpack(hot.tokens))[0], rel=1e-4)
    assert len(set(hot.confidences)) == SLOTS


def test_scores_that_are_no_numbers_are_answered_with_no_confidence(bench):
    bench.sequence().write(0, 9)
    broken = torch.full((VOCAB, 32), torch.nan)
    weights = {"embed": embedding(bench.draft.config), "head": broken}
    bench.engine._lexicon = Borrowed(bench.draft, weights, VOCAB)
    answer = bench.propose(9)
    assert answer.confidences == (0.0,) * 5
    assert travelled(answer) == answer


# --- where the target is asked for ids ------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(runtime_dir, checkpoints):
    with LocalPair(runtime_dir, *checkpoints) as pair:
        yield pair


def test_a_draft_that_is_given_ids_alone_states_no_confidences(pair):
    _, sure = pair.generate(pair.draft(LOCAL), PROMPT, 2)
    asked = pair.draft(TCP, draft_head="target")
    _, unsure = pair.generate(asked, PROMPT, 2, sequence=2)
    assert [item.tokens for item in unsure] == [item.tokens for item in sure]
    assert [len(item.confidences) for item in sure] == [SLOTS] * 2
    assert [item.confidences for item in unsure] == [()] * 2
    chosen = {"hidden": torch.ones(3, 32), "position": 5, "sampling": WARM}
    lexicon = pair.lexicon(pair.guest(), draft_head="target")
    assert lexicon.drawn(**chosen, temperatures=(1.0,) * 3).confidences == ()
    assert not lexicon.scored
    logs = lexicon.likeliest(**chosen, count=4, temperatures=())[1]
    assert logs.tolist() == [[0.0]] * 3


def test_alternatives_of_ids_alone_state_no_confidences(pair):
    asked, slot = pair.draft(TCP, draft_head="target"), 0
    pair.engine.open(OpenItem(sequence=1))
    asked.open(OpenItem(sequence=1, slot=slot))
    answer = asked.propose(ProposeItem(sequence=1, base_pos=0, pending=5, width=4, top_k=3))
    assert unpack(answer.tokens) == unpack(answer.top_ids)
    assert (answer.confidences, answer.top_logprobs) == ((), (0.0,) * 3)


def test_a_head_of_the_drafts_own_is_sure_also_where_the_target_is_asked(pair):
    plain, table = pair.loaded, pair.target.weights.embed
    ids = torch.arange(0, PAIR_VOCAB, 2)
    own = OwnHead(pack(table[ids], torch.float32), ids)
    asked = Asked(LoadedDraft(plain.config, plain.network, own, (), 0), pair.guest(), 3.0, 4.0)
    hidden = uniform((3, table.shape[1]), 8)
    scores = torch.full((3, PAIR_VOCAB), -torch.inf)
    scores[:, ids] = 4 * torch.tanh(hidden @ table[ids].T * 3 / 4)
    best = asked.best(hidden)
    assert best.confidences == about(softmax(scores, best.ids))
    assert asked.scored
    named, logs = asked.likeliest(hidden, 2, 5, WARM, ())
    assert named.tolist() == [[one] for one in best.ids]
    assert logs.exp().flatten().tolist() == about(best.confidences)
