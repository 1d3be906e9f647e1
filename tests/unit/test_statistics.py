"""The closing figures of a request."""

from launch.statistics import Clock, Tally, TreeRound, statistics


def figures(tally, clock):
    return statistics(
        tally,
        clock,
        tokens=(10, 4),
        mode=("speculative", ""),
        transport="shm",
        target=("no", "fast"),
        stale=2,
    )


def test_overhead_is_decoding_time_that_no_engine_accounts_for():
    tally = Tally(prefill_seconds=7.0, prompt_ingest_seconds=5.0)
    tally.add_seconds(0.5, 0.25, 1.0)
    clock = Clock(100.0)
    for now in (112.5, 113.0, 114.75):
        clock.mark(now)
    found = figures(tally, clock)
    assert found.time_to_first_token_seconds == 12.5
    assert found.decode_seconds == 2.25
    assert found.overhead_seconds == 0.5
    assert found.ingest_seconds == 5.25
    assert found.num_stale_replies == 2


def test_a_request_without_a_token_has_no_times():
    found = figures(Tally(), Clock(100.0))
    assert (found.time_to_first_token_seconds, found.decode_seconds) == (0.0, 0.0)


def test_rounds_are_counted_by_how_many_drafts_they_accepted():
    tally = Tally()
    for proposed, accepted in ((3, 0), (3, 3), (1, 1), (0, 0)):
        tally.add_round(proposed, accepted, frozenset())
    found = figures(tally, Clock(0.0))
    assert (found.num_rounds, found.num_drafts) == (4, 3)
    assert found.acceptance_histogram == (1, 1, 0, 1)
    assert found.num_proposed_tokens_per_pos == (3, 2, 2)
    assert found.num_accepted_tokens_per_pos == (2, 1, 1)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (7, 4)


def test_hints_are_no_drafts():
    tally = Tally()
    tally.add_round(4, 2, frozenset({1, 3}))
    assert (tally.num_draft_tokens, tally.num_accepted_tokens) == (2, 1)
    assert (tally.num_hint_tokens, tally.num_accepted_hint_tokens) == (2, 1)


def test_a_trees_proposals_are_counted_by_depth_and_guesses_by_the_chain():
    tally = Tally()
    tally.add_round(9, 3, frozenset({0, 2}), frozenset({3}), TreeRound(depth=4, on_chain=1))
    assert (tally.num_trees, tally.num_tree_nodes, tally.num_drafts) == (1, 9, 1)
    assert (tally.num_hint_tokens, tally.num_accepted_hint_tokens) == (2, 1)
    assert (tally.num_ngram_tokens, tally.num_accepted_ngram_tokens) == (1, 0)
    assert (tally.num_draft_tokens, tally.num_accepted_tokens) == (6, 2)
    assert tally.proposed_per_pos == [1, 1, 1, 1]
    assert tally.accepted_per_pos == [1, 1, 1, 0]
    assert tally.histogram == [0, 0, 0, 1, 0]
    assert tally.widths[10] == 1
    tally.add_round(2, 2)
    assert (tally.num_trees, tally.histogram) == (1, [0, 0, 1, 1, 0])
