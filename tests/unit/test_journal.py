"""What a replay needs."""

from launch.journal import Journal, Replay
from launch.token_ids import last_id, one_id, pack_ids, unpack_ids


def test_before_the_first_token_only_the_prompt_is_run_again():
    journal = Journal(pack_ids([4, 5, 6]))
    assert journal.replay() == Replay(pack_ids([4, 5, 6]), b"", None)
    assert (journal.end, journal.emitted) == (3, 0)


def test_the_last_emitted_token_is_pending_and_is_not_run_again():
    journal = Journal(pack_ids([4, 5, 6]))
    journal.emit(pack_ids([7]))
    journal.emit(pack_ids([8, 9]))
    assert journal.replay() == Replay(pack_ids([4, 5, 6]), pack_ids([7, 8]), 9)


def test_committed_is_prompt_plus_emitted_minus_one():
    journal = Journal(pack_ids([4, 5, 6]))
    journal.emit(pack_ids([7, 8]))
    assert (journal.committed, journal.end, journal.pending) == (4, 5, 8)
    assert unpack_ids(journal.tokens) == (7, 8)


def test_ids_travel_as_little_endian_int32():
    assert pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_ids(one_id(70000) + one_id(-1)) == (70000, -1)
    assert last_id(pack_ids([3, 70000])) == 70000
