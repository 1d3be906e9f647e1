"""The temperature of a slot: the whole one at first, another part where that is accepted more."""

import random

import pytest

from launch.coupling import FIRST, PARTS, PROBE, Coupling, Couplings, temperatures


def play(coupling, rates, rounds, seed=0):
    """Rounds of one slot at which part `p` is right with probability ``rates[p]``; the parts."""
    chance, used = random.Random(seed), []
    for _ in range(rounds):
        (part,) = coupling.parts(1)
        assert coupling.parts(1) == (part,)  # asking changes nothing
        used.append(part)
        coupling.note((part,), (1,), (1 if chance.random() < rates[part] else 2,))
    return used


def test_at_temperature_0_there_is_nothing_to_choose():
    assert Couplings().at(0.0) is None


def test_near_temperatures_share_what_is_known():
    couplings = Couplings()
    assert couplings.at(0.7) is couplings.at(0.72)
    assert couplings.at(0.7) is not couplings.at(1.0)


@pytest.mark.parametrize("best", range(len(PARTS)))
def test_the_best_part_is_used_and_the_others_are_probed(best):
    rates = [0.3] * len(PARTS)
    rates[best] = 0.7
    used = play(Coupling(), rates, 900)
    assert set(used[: PROBE - 1]) == {FIRST}
    later = used[300:]
    assert later.count(best) > 0.85 * len(later)
    assert all(later.count(part) >= len(later) // PROBE // 4 for part in range(len(PARTS)))


def test_a_change_is_followed():
    coupling = Coupling()
    play(coupling, [0.1, 0.4, 0.8], 500)
    used = play(coupling, [0.8, 0.4, 0.1], 1500, seed=1)
    assert used[-300:].count(0) > 240


def test_slots_learn_apart_and_only_those_that_were_reached():
    coupling = Coupling()
    for _ in range(600):
        parts = coupling.parts(3)
        # The first is right with the whole temperature, the second with none of it.
        coupling.note(parts, (1, 1, 1), (int(parts[0] == FIRST), int(parts[1] == 0)))
    assert [slot.used for slot in coupling._slots] == [FIRST, 0, FIRST]
    assert [slot.reached for slot in coupling._slots] == [600, 600, 0]


def test_the_draft_is_told_temperatures_unless_all_are_0():
    assert temperatures((0, 1, 2), 0.8) == (0.0, 0.4, 0.8)
    assert temperatures((0, 0), 0.8) == ()
    assert temperatures((), 0.0) == ()
