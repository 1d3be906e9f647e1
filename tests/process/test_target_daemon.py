"""The target daemon as a real process over real sockets, with a tiny checkpoint."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
import torch
from support.drive import generate, pack, prefill, unpack
from support.plain_host import PlainHost
from support.reference_loop import acceptances, greedy
from support.target_process import (
    DRAFT_LIFE,
    LIFE,
    NONCE,
    PATIENCE,
    Link,
    Refused,
    TargetProcess,
    numbers,
)
from support.tiny_target import write_tiny_target

from protocol import errors
from protocol.config import RING_SOCKET, TARGET_SOCKET, TargetConfig
from protocol.feature_ring import RingShape
from protocol.messages import (
    WIRE_VERSION,
    Close,
    CloseItem,
    Hello,
    ItemFailed,
    Open,
    OpenItem,
    PrefillItem,
    Sampling,
    Verify,
    VerifyItem,
)
from protocol.status import LoadFailed, Loading, Ready
from protocol.transports.shared_memory import TRANSPORT
from target_daemon.families.base import load_target

pytestmark = pytest.mark.process

PROMPT = [5, 17, 80, 33, 2, 9, 41, 64, 12, 12, 7]
END = len(PROMPT)
CHUNK, WIDTH, TAPS = 4, 6, (0, 2)
SETTINGS = {
    "prefill_chunk": CHUNK,
    "block_size": WIDTH,
    "taps": TAPS,
    "ring_window": 64,
    "max_positions": 128,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_target(tmp_path_factory.mktemp("model"), "qwen3", eos_token_id=96)


@pytest.fixture(scope="module")
def reference(model):
    """The same checkpoint in this process, for the slow loop."""
    config = TargetConfig(model=str(model), run_dir="", life=0, **SETTINGS)
    return load_target(config, PlainHost())


@pytest.fixture(scope="module")
def daemon(model, tmp_path_factory):
    """One daemon for all tests that leave it running."""
    with TargetProcess(model, place=tmp_path_factory.mktemp("run"), **SETTINGS) as process:
        assert process.wait_until_started() == Ready(), process.log()
        yield process


@pytest.fixture(scope="module")
def faulty(model, tmp_path_factory):
    """A daemon with the faults of `support.problem_target`."""
    place = tmp_path_factory.mktemp("faulty")
    with TargetProcess(model, place=place, problem=True, **SETTINGS) as process:
        assert process.wait_until_started() == Ready(), process.log()
        yield process


@pytest.fixture
def link(daemon):
    with Link(daemon) as engine:
        yield engine


def block(sequence, ids, *, base=END, number=1, budget=50):
    return VerifyItem(
        sequence=sequence, round=number, base_pos=base, tokens=pack(ids), budget=budget
    )


def drafter_for(text, *, right):
    """Proposes `right` true tokens, then wrong ones; None: all true."""

    def draft(so_far, wanted):
        done = len(so_far) - END
        tokens = (text[done : done + wanted] + [0] * wanted)[:wanted]
        return [t if right is None or i < right else (t + 1) % 90 for i, t in enumerate(tokens)]

    return draft


def test_the_hello_states_the_facts_and_the_load_reports_its_progress(daemon, link, reference):
    hello = link.hello
    assert (hello.nonce, hello.wire_version) == (NONCE, WIRE_VERSION)
    assert (hello.model_type, hello.dtype, hello.taps) == ("qwen3", "float32", TAPS)
    assert (hello.hidden_size, hello.num_layers) == (32, 4)
    assert (hello.vocab_size, hello.max_positions) == (97, 128)
    assert (hello.prefill_chunk, hello.max_width) == (CHUNK, WIDTH)
    assert hello.ring_window == 64
    assert hello.ring_capacity >= 64 + WIDTH
    assert hello.host.pid == daemon.process.pid
    assert hello.host.threads == 1
    assert hello.eos_token_ids == (96,)
    assert hello.weight_bytes == reference.weight_bytes
    *loading, ready = daemon.status
    assert ready == Ready()
    assert all(isinstance(line, Loading) for line in loading)
    counted = [line for line in loading if line.total]
    done = [line.done for line in counted]
    assert done == sorted(done)
    assert done[-1] == counted[-1].total
    memory, way = (line.detail for line in loading if not line.total)
    assert memory.startswith("memory: ")
    assert way == f"rejected rows are undone by {hello.rollback}: {hello.rollback_detail}"
    assert hello.rollback == "fast"


def test_a_supervisor_of_another_life_or_wire_version_is_refused(daemon):
    with Link(daemon, greet=False) as link:
        hello = Hello(
            target_life=LIFE, draft_life=DRAFT_LIFE, wire_version=WIRE_VERSION + 1, nonce=1
        )
        with pytest.raises(Refused, match="wire_mismatch"):
            link.ask(hello)
        link.life = LIFE + 1
        with pytest.raises(Refused, match="stale"):
            link.ask_all(Open, OpenItem(sequence=1))
        link.life = LIFE
        with pytest.raises(Refused, match="before Hello"):
            link.ask_all(Open, OpenItem(sequence=1))


def test_garbage_is_refused_and_the_daemon_serves_on(daemon, link, reference):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(str(daemon.run_dir / TARGET_SOCKET))
        for data in (b"", b"\xc1garbage", b"\x81", os.urandom(300)):
            stranger.sendall(struct.pack("<I", len(data)) + data)
            assert b"protocol" in stranger.recv(1 << 16)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1 << 16) == b""
    text, *_ = generate(link, PROMPT, 5, chunk=CHUNK, sequence=next(numbers))
    assert text == greedy(reference, PROMPT, 5)


def test_the_text_equals_the_reference_loop_whatever_is_drafted(link, reference):
    text = greedy(reference, PROMPT, 24)
    plain = generate(link, PROMPT, 24, chunk=CHUNK, sequence=next(numbers))
    assert plain == (text, [1] * 23, "length")
    for right in (0, 2, None):
        drafter = drafter_for(text, right=right)
        options = {"chunk": CHUNK, "width": WIDTH, "drafter": drafter}
        got, rounds, _ = generate(link, PROMPT, 24, sequence=next(numbers), **options)
        assert got == text
        assert rounds == acceptances(text, PROMPT, WIDTH, drafter, 24)


def test_replay_gives_the_same_text_as_fast_rollback(model, reference):
    text = greedy(reference, PROMPT, 24)
    with TargetProcess(model, rollback="replay", **SETTINGS) as process:
        process.wait_until_started()
        with Link(process) as link:
            assert link.hello.rollback == "replay"
            for right in (0, 1, 3):
                drafter = drafter_for(text, right=right)
                options = {"chunk": CHUNK, "width": WIDTH, "drafter": drafter}
                got, rounds, _ = generate(link, PROMPT, 24, sequence=next(numbers), **options)
                assert got == text
                assert rounds == acceptances(text, PROMPT, WIDTH, drafter, 24)


def test_a_stop_token_inside_an_accepted_block_ends_the_text(link, reference):
    whole = greedy(reference, PROMPT, 24)
    stop = whole[8]
    text = whole[: whole.index(stop) + 1]
    got, _, finish = generate(
        link,
        PROMPT,
        24,
        chunk=CHUNK,
        sequence=next(numbers),
        width=WIDTH,
        drafter=drafter_for(whole, right=None),
        sampling=Sampling(stop_token_ids=(stop,)),
    )
    assert (got, finish) == (text, "stop")


def test_two_sequences_in_one_message_and_a_bad_third_that_fails_alone(link, reference):
    other = [30, 3, 77, 17, 6]
    prompts = {next(numbers): PROMPT, next(numbers): other}
    one, two = prompts
    opened = link.ask_all(Open, *(OpenItem(sequence=n) for n in (one, two, two + 1000)))
    assert sorted(result.slot for result in opened[:2]) == [0, 1]
    assert isinstance(opened[2], ItemFailed)
    assert opened[2].code == "overloaded"
    got = {n: [prefill(link, n, prompt, CHUNK).token] for n, prompt in prompts.items()}
    for number in range(1, 6):
        items = [
            block(n, got[n][-1:], base=len(prompts[n]) + len(got[n]) - 1, number=number)
            for n in prompts
        ]
        *verdicts, failed = link.ask_all(Verify, *items, block(two + 1000, [1]))
        for verdict in verdicts:
            got[verdict.sequence] += unpack(verdict.tokens)
        assert failed.code == "unknown_sequence"
    assert got == {n: greedy(reference, prompt, 6) for n, prompt in prompts.items()}
    link.ask_all(Close, CloseItem(sequence=one), CloseItem(sequence=two))


def test_a_request_that_is_closed_in_its_prefill_never_computes_again(link, reference):
    gone, other = next(numbers), next(numbers)
    for sequence in (gone, other):
        link.open(OpenItem(sequence=sequence))
    link.prefill(PrefillItem(sequence=gone, start=0, tokens=pack(PROMPT[:4]), last=False))
    assert link.close(CloseItem(sequence=gone)).committed == 4
    late = PrefillItem(sequence=gone, start=4, tokens=pack(PROMPT[4:8]), last=False)
    with pytest.raises(errors.UnknownSequence):
        link.prefill(late)
    with pytest.raises(errors.StaleMessage):
        link.open(OpenItem(sequence=gone))
    assert [prefill(link, other, PROMPT, CHUNK).token] == greedy(reference, PROMPT, 1)
    link.close(CloseItem(sequence=other))


def test_a_repeated_verify_gets_the_same_verdict(link):
    sequence = next(numbers)
    link.open(OpenItem(sequence=sequence))
    first = prefill(link, sequence, PROMPT, CHUNK).token
    item = block(sequence, [first, 1, 2])
    verdict = link.verify(item)
    assert link.verify(item) == verdict
    with pytest.raises(errors.PositionMismatch):
        link.verify(block(sequence, [first, 1, 2], number=2))
    link.close(CloseItem(sequence=sequence))


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(link):
    sequence = next(numbers)
    link.open(OpenItem(sequence=sequence))
    prompt = [1 + i % 80 for i in range(129)]
    with pytest.raises(errors.PromptTooLong, match="129 tokens; this target takes 128"):
        prefill(link, sequence, prompt, CHUNK)
    assert link.close(CloseItem(sequence=sequence)).committed == 128


def test_the_feature_rows_of_a_sequence_can_be_read_through_the_ring(daemon, link, reference):
    sequence = next(numbers)
    slot = link.open(OpenItem(sequence=sequence)).slot
    prefill(link, sequence, PROMPT, CHUNK)
    hello = link.hello
    shape = RingShape(
        slots=hello.slots,
        window=hello.ring_window,
        guard=hello.ring_capacity - hello.ring_window,
        row_width=len(hello.taps) * hello.hidden_size,
        dtype=hello.dtype,
    )
    guest = TRANSPORT.attach(
        str(daemon.run_dir / RING_SOCKET), nonce=NONCE, life=LIFE, shape=shape, timeout=PATIENCE
    )
    try:
        rows = guest.read_rows(slot, sequence, 0, END)
        assert rows.start == 0
        reference.reset(0)
        reference.verify_batch(0, torch.tensor(PROMPT), 0, "none")
        torch.testing.assert_close(rows.rows, reference.ring.rows[0, :END], rtol=0, atol=1e-4)
        assert guest.weights()["embed"].shape == (97, 32)
        link.close(CloseItem(sequence=sequence))
        with pytest.raises(errors.FeatureExpired):
            guest.read_rows(slot, sequence, 0, END)
    finally:
        guest.close()


def test_a_verify_without_memory_is_tried_at_width_1_and_the_text_stays(faulty, reference):
    text = greedy(reference, PROMPT, 12)
    drafter = drafter_for(text, right=None)
    with Link(faulty) as link:
        sequence = next(numbers)
        got, rounds, _ = generate(
            link, PROMPT, 12, chunk=CHUNK, sequence=sequence, width=WIDTH, drafter=drafter
        )
    assert got == text
    assert rounds == [1] * 11


def test_a_request_without_memory_fails_alone_and_the_daemon_serves_on(faulty, reference):
    doomed = [90, *PROMPT]
    text = greedy(reference, doomed, 4)
    with Link(faulty) as link:
        sequence = next(numbers)
        link.open(OpenItem(sequence=sequence))
        assert prefill(link, sequence, doomed, CHUNK).token == text[0]
        with pytest.raises(errors.OutOfMemory, match="no memory for a forward of 1 row"):
            link.verify(block(sequence, text, base=END + 1))
        got, *_ = generate(link, PROMPT, 6, chunk=CHUNK, sequence=next(numbers))
        assert got == greedy(reference, PROMPT, 6)
        assert link.close(CloseItem(sequence=sequence)).committed == END + 1


def test_a_defect_fails_one_request_without_showing_its_words(faulty):
    with Link(faulty) as link:
        sequence = next(numbers)
        link.open(OpenItem(sequence=sequence))
        with pytest.raises(errors.InternalError) as caught:
            prefill(link, sequence, [*PROMPT, 91], CHUNK)
        assert "a defect" not in str(caught.value)
        assert link.close(CloseItem(sequence=sequence)).committed == 8
    assert "KeyError" in faulty.log()


def test_a_signal_ends_the_daemon_cleanly_with_a_request_open(model):
    with TargetProcess(model, **SETTINGS) as process:
        process.wait_until_started()
        with Link(process) as link:
            link.open(OpenItem(sequence=1))
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(PATIENCE) == 0
        left = {path.name for path in process.run_dir.iterdir()}
        assert not left & {TARGET_SOCKET, RING_SOCKET}


def test_a_daemon_that_still_loads_ends_with_its_parents_pipe(model):
    with TargetProcess(model, **SETTINGS) as process:
        process.wait_until_loading()
        process.process.stdin.close()
        assert process.process.wait(PATIENCE) == 0


def test_what_does_not_fit_into_memory_is_refused_before_loading(model):
    with TargetProcess(model, **{**SETTINGS, "ring_window": 1 << 30}) as process:
        failed = process.wait_until_started()
        assert isinstance(failed, LoadFailed)
        assert failed.code == "insufficient_memory"
        assert "keys and values" in failed.detail
        assert "2 slots x 1,073,741,830 rows x 64 wide x 4 bytes" in failed.detail
        assert process.process.wait(PATIENCE) == errors.InsufficientMemory.exit_code
        assert not any(isinstance(line, Loading) for line in process.status)


def test_a_broken_checkpoint_is_one_sentence_and_an_exit_code(model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with TargetProcess(tmp_path, **SETTINGS) as process:
        failed = process.wait_until_started()
        assert failed.code == "checkpoint"
        assert process.process.wait(PATIENCE) == errors.CheckpointError.exit_code


def test_a_setting_that_no_message_can_carry_is_refused_by_name(model):
    with TargetProcess(model, **{**SETTINGS, "slots": 4097}) as process:
        failed = process.wait_until_started()
        assert (failed.code, failed.detail) == ("config", "`slots` is 4097; 1 to 4096 are possible")


def test_facts_are_one_json_object():
    command = [sys.executable, "-I", "-m", "target_daemon", "--facts"]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert facts["torch"] == torch.__version__
    assert facts["gpus"]
    assert facts["auto_dtype"] in ("float32", "bfloat16")
    assert facts["weights"] == ["dtype", "int8", "int4"]
    assert facts["usable_cores"] == len(os.sched_getaffinity(0))
    assert facts.keys() >= {"python", "cpu_capability", "amx", "fast_bf16", "usable_cores"}


def test_a_client_that_vanishes_in_mid_request_does_not_stop_the_next_one(daemon, reference):
    with Link(daemon) as gone:
        sequence = next(numbers)
        gone.open(OpenItem(sequence=sequence))
        prefill(gone, sequence, PROMPT, CHUNK)
        gone.send(Verify(**gone.lives(), items=(block(sequence, [1]),)))
    with Link(daemon) as link:
        got, *_ = generate(link, PROMPT, 4, chunk=CHUNK, sequence=next(numbers))
        assert got == greedy(reference, PROMPT, 4)
        link.close(CloseItem(sequence=sequence))
