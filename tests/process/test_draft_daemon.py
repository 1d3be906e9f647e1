"""The draft daemon as a real process, over a ring in shared memory that the test hosts."""

import tempfile

import pytest
from support.draft_process import (
    DRAFT_LIFE,
    NONCE,
    TARGET_LIFE,
    DraftProcess,
    RingHost,
    lives,
    pair_message,
)
from support.drive import unpack
from support.tiny_draft import write_draft

from protocol.checkpoints.draft_config import read_draft_config
from protocol.cpu import resolve_dtype
from protocol.errors import from_wire
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Closed,
    CloseItem,
    DraftHello,
    Failed,
    Hello,
    Ingest,
    IngestItem,
    ItemFailed,
    Open,
    OpenItem,
    Paired,
    Propose,
    ProposeItem,
)
from protocol.status import LoadFailed, Loading, Ready

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def daemon(folder):
    """One process for most tests; each pairs it anew, which forgets what was before."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="dft-", dir="/tmp") as place,
    ):
        patch.setenv("DFLASH_RUNTIME", place)
        with DraftProcess(folder, context_window=32, max_ingest=8) as process:
            process.status = process.started()
            process.hello()
            yield process


@pytest.fixture
def fresh(folder):
    with DraftProcess(folder) as process:
        assert process.started()[-1] == Ready(), process.log()
        yield process


@pytest.fixture
def target(daemon, folder):
    with RingHost(daemon.run_dir, read_draft_config(folder)) as host:
        yield host


def pair(daemon, target, folder, **changes):
    message = pair_message(daemon.run_dir, target.shape, read_draft_config(folder), **changes)
    return daemon.ask(message, serve=target.host)


def proposed(daemon, sequence, base, *, pending=7, width=6):
    item = ProposeItem(sequence=sequence, round=1, base_pos=base, pending=pending, width=width)
    (result,) = daemon.items(Propose, item).results
    return result


def test_it_says_what_it_loaded(daemon, folder):
    first, told, *others = daemon.status
    assert told.detail.startswith("memory: ")
    assert [first, *others] == [Loading(done=0, total=1), Loading(done=1, total=1), Ready()]
    hello = daemon.hello()
    assert isinstance(hello, DraftHello)
    assert (hello.wire_version, hello.nonce, hello.draft_life) == (WIRE_VERSION, NONCE, DRAFT_LIFE)
    assert (hello.network, hello.dtype, hello.hidden_size) == ("dflash", resolve_dtype("auto"), 32)
    assert (hello.block_size, hello.mask_token_id, hello.target_layer_ids) == (6, 3, (0, 2, 5))
    assert (hello.slots, hello.context_window, hello.sample_from_anchor) == (2, 32, False)
    assert hello.host.pid == daemon.process.pid
    assert hello.weight_bytes == (folder / "model.safetensors").stat().st_size - _header(folder)
    assert "auto_map" in hello.ignored


def _header(folder):
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_it_proposes_over_the_mapped_ring_through_rounds(daemon, target, folder):
    paired = pair(daemon, target, folder)
    assert isinstance(paired, Paired)
    assert paired.mapped_bytes > target.ring.rows.nbytes
    features = target.features()
    daemon.items(Open, OpenItem(sequence=1, slot=0))
    features.write(0, 20)
    (ingested,) = daemon.items(Ingest, IngestItem(sequence=1, stop=20)).results
    assert (ingested.start, ingested.stop) == (0, 20)
    texts = []
    for base in range(20, 90, 7):
        features.write(base, base + 7)
        first, again = proposed(daemon, 1, base), proposed(daemon, 1, base)
        assert first.tokens == again.tokens
        assert first.context_rows == min(base, 32)
        assert first.draft_seconds > 0
        texts.append(tuple(unpack(first.tokens)))
    assert all(len(text) == 5 and set(text) <= set(range(96)) for text in texts)
    assert len(set(texts)) > 1  # the proposals follow the features
    closed = daemon.items(Close, CloseItem(sequence=1, keep=10))
    assert isinstance(closed, Closed)
    assert closed.results[0].committed == 10


def test_one_sequence_that_fails_does_not_fail_the_other(daemon, target, folder):
    pair(daemon, target, folder)
    features = target.features(sequence=1)
    opened = daemon.items(Open, OpenItem(sequence=1, slot=0), OpenItem(sequence=2, slot=7))
    assert isinstance(opened.results[1], ItemFailed)
    features.write(0, 10)
    good = ProposeItem(sequence=1, base_pos=10, pending=5, width=3)
    foreign = ProposeItem(sequence=2, base_pos=10, pending=5, width=3)
    unwritten = ProposeItem(sequence=1, base_pos=11, pending=5, width=3)
    results = daemon.items(Propose, foreign, good, unwritten).results
    assert [result.code for result in results if isinstance(result, ItemFailed)] == [
        "unknown_sequence",
        "protocol",
    ]
    assert len(unpack(results[1].tokens)) == 2
    assert len(unpack(proposed(daemon, 1, 10).tokens)) == 5


def test_another_life_of_the_target_is_refused(daemon, target, folder):
    pair(daemon, target, folder)
    stale = daemon.items(Open, OpenItem(sequence=1, slot=0), target_life=TARGET_LIFE + 1)
    assert (stale.code, stale.target_life) == ("stale", TARGET_LIFE + 1)
    assert not isinstance(daemon.items(Open, OpenItem(sequence=1, slot=0)), Failed)


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"hidden_size": 64}, "draft_mismatch", "hidden size 32, the target's is 64"),
        ({"padded_vocab_size": 128}, "draft_mismatch", "vocabulary 96, the target's is 128"),
        ({"transport": "pigeon"}, "transport_refused", "transport pigeon: unknown"),
        ({"ring_nonce": 1}, "stale", "nonce"),
        ({"ring_capacity": 49}, "transport_refused", ""),
        ({"address": "/nonexistent/ring.sock"}, "transport_refused", ""),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_and_a_right_one_still_works(
    daemon, target, folder, changes, code, sentence
):
    refused = pair(daemon, target, folder, **changes)
    assert isinstance(refused, Failed), refused
    assert refused.code == code, refused
    assert sentence in str(from_wire(refused.code, refused.detail))
    assert isinstance(pair(daemon, target, folder), Paired)


def test_pairing_again_forgets_the_old_target(daemon, target, folder):
    pair(daemon, target, folder)
    daemon.items(Open, OpenItem(sequence=1, slot=0))
    pair(daemon, target, folder)
    assert proposed(daemon, 1, 0).code == "unknown_sequence"
    daemon.items(Open, OpenItem(sequence=2, slot=0))
    target.features(sequence=2).write(0, 5)
    assert len(unpack(proposed(daemon, 2, 5).tokens)) == 5


def test_before_pairing_it_refuses_and_a_signal_ends_it_cleanly(fresh):
    other = fresh.ask(Hello(**lives(), wire_version=WIRE_VERSION + 1, nonce=NONCE))
    assert other.code == "wire_mismatch"
    fresh.hello()
    for kind, item in (
        (Open, OpenItem(sequence=1, slot=0)),
        (Ingest, IngestItem(sequence=1, stop=1)),
        (Propose, ProposeItem(sequence=1, base_pos=1, pending=1, width=2)),
        (Close, CloseItem(sequence=1)),
    ):
        refused = fresh.items(kind, item)
        assert (type(refused), refused.code) == (Failed, "protocol")
        assert "before Pair" in refused.detail
    fresh.process.terminate()
    assert fresh.process.wait(60) == 0
    assert not (fresh.run_dir / "draft.sock").exists()


def test_a_draft_that_cannot_load_says_why(tmp_path):
    with DraftProcess(write_draft(tmp_path, without=("fc.weight",))) as daemon:
        failed = daemon.started()[-1]
        assert isinstance(failed, LoadFailed)
        assert failed.code == "checkpoint"
        assert "fc.weight" in failed.detail
        assert daemon.process.wait(60) == 78
