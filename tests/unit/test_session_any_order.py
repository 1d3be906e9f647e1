"""The session under any order of events, against the model target's own text."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_pair import VOCAB
from support.session_world import Setting, World

from launch.events import Fail, Finish
from launch.policy import AUTO, FULL

ACTIONS = {
    "answer target": lambda world: world.answer("target"),
    "answer draft": lambda world: world.answer("draft"),
    "hold target": lambda world: world.hold("target"),
    "hold draft": lambda world: world.hold("draft"),
    "release": lambda world: world.release(),
    "lose target": lambda world: world.lose("target"),
    "lose draft": lambda world: world.lose("draft"),
    "repeat": lambda world: world.repeat(),
    "foreign": lambda world: world.foreign(),
    "nonsense": lambda world: world.nonsense(),
    "refuse target": lambda world: world.refuse("target"),
    "refuse draft": lambda world: world.refuse("draft"),
    "deadline target": lambda world: world.deadline("target"),
    "deadline draft": lambda world: world.deadline("draft"),
    "kill draft": lambda world: world.kill_draft(),
    "start draft": lambda world: world.start_draft(),
    "late draft": lambda world: world.late(),
    "withdraw draft": lambda world: world.withdraw(),
    "pair draft": lambda world: world.pair(),
    "kill target": lambda world: world.kill_target(),
    "start target": lambda world: world.start_target(),
    "fatal kill target": lambda world: world.kill_target(fatal=True),
    "cancel": lambda world: world.cancel(),
}
HARMFUL = {"cancel", "refuse target", "fatal kill target"}
HARMLESS = [name for name in ACTIONS if name not in HARMFUL]
ANSWERS = ["answer target", "answer draft"]

SETTINGS = st.builds(
    Setting,
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=90),
    max_tokens=st.integers(1, 40),
    block_size=st.integers(2, 9),
    draft=st.booleans(),
    chunk=st.sampled_from([4, 8, 16]),
    luck=st.integers(1, 6),
    max_positions=st.sampled_from([91, 100, 200]),
    block_width=st.sampled_from([AUTO, AUTO, 1, 3, FULL]),
    verify=st.sampled_from(["chain", "tree", "tree", "auto"]),
    trees=st.sampled_from([True, True, True, False]),
    top_k=st.sampled_from([0, 2, 8, 8]),
)


def scripts(names):
    """Mostly answers, so that requests get somewhere; anything in between."""
    return st.lists(st.sampled_from([*names, *ANSWERS * 8]), max_size=60)


def run(setting, script):
    world = World(setting).start()
    for name in script:
        ACTIONS[name](world)
    world.drain()
    return world


@settings(max_examples=150, deadline=None)
@given(SETTINGS, scripts(list(ACTIONS)))
def test_no_position_is_emitted_twice_none_is_lost_and_there_is_always_one_end(setting, script):
    world = run(setting, script)
    text, reason = setting.text
    assert world.tokens == text[: len(world.tokens)]
    assert len(world.ends) == 1
    match world.ends[0]:
        case Finish("cancelled"):
            assert "cancel" in script
        case Finish(ended):
            assert (world.tokens, ended) == (text, reason)
        case Fail():
            assert world.target_faults
    for action in ACTIONS.values():  # whatever comes after the end changes nothing
        action(world)
    assert len(world.ends) == 1


@settings(max_examples=150, deadline=None)
@given(SETTINGS, scripts(HARMLESS))
def test_whatever_dies_and_is_started_again_the_text_is_the_targets_own(setting, script):
    world = run(setting, script)
    text, reason = setting.text
    assert world.tokens == text
    assert world.ends == [Finish(reason)]
    assert world.session.tally.num_replay_mismatches == 0


@settings(max_examples=100, deadline=None)
@given(SETTINGS, scripts(["cancel", "nonsense", "refuse draft", "refuse target"]))
def test_a_sequence_is_closed_wherever_it_was_opened(setting, script):
    world = run(setting, script)
    assert world.target.tokens == {}
    assert world.draft.taken == {}
