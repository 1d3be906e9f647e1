"""The memory plan counts in full, reads every limit, and refuses with the arithmetic."""

import pytest

from protocol.checkpoints.target_config import parse_model_config
from protocol.config import TargetConfig
from protocol.errors import InsufficientMemory
from protocol.memory import Available, available
from target_daemon.memory_plan import plan

RAW = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def plan_of(dtype="float32", raw=None, **settings):
    model = parse_model_config({**RAW, **(raw or {})}, {}, where="config.json")
    settings = {"slots": 2, "taps": (0, 1), "block_size": 4, "prefill_chunk": 16, **settings}
    config = TargetConfig(model="m", run_dir="r", life=1, ring_window=32, **settings)
    return plan(model, config, dtype)


def sizes(result):
    return {line.name: line.size for line in result.lines}


def test_each_part_is_counted_in_full():
    found = sizes(plan_of())
    layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 96 + 2 * 64
    assert found["layers"] == 3 * layer * 4
    assert found["embedding"] == 500 * 64 * 2
    assert found["head"] == 500 * 64 * 4
    assert found["keys and values"] == 2 * 1000 * 3 * 2 * (2 * 16) * 4
    assert found["feature ring"] == 2 * (32 + 16) * (2 * 64) * 4
    assert plan_of().needed == sum(found.values())


def test_kept_prefixes_are_counted_as_they_are_allowed():
    found = sizes(plan_of(prefix_bytes=12345, prefix_folder="/store"))
    assert found["kept prefixes"] == 12345
    assert found["one prefix on its way from disk"] * 2 == found["keys and values"]


def test_a_tied_bf16_head_is_the_embedding_itself():
    assert "head" not in sizes(plan_of("bfloat16"))
    untied = sizes(plan_of("bfloat16", {"tie_word_embeddings": False}))
    assert untied["head"] == 500 * 64 * 2


def test_a_shorter_context_is_counted_as_it_is_and_a_longer_one_as_the_model_takes():
    assert sizes(plan_of(max_positions=10))["keys and values"] == 2 * 10 * 3 * 2 * 32 * 4
    assert sizes(plan_of(max_positions=10**6)) == sizes(plan_of())


def test_the_cost_of_a_position_explains_every_context():
    whole = plan_of()
    for positions in (1, 10, 999):
        small = plan_of(max_positions=positions)
        assert small.needed == whole.fixed + positions * whole.per_position


def test_what_fits_is_not_refused():
    result = plan_of()
    result.check(Available(result.needed, "test"))


def test_a_refusal_shows_the_arithmetic_and_a_context_that_fits():
    result = plan_of()
    room = Available(result.fixed + 123 * result.per_position + 1, "limit of cgroup /x")
    with pytest.raises(InsufficientMemory) as caught:
        result.check(room)
    text = str(caught.value)
    for line in result.lines:
        assert line.name in text
        assert line.arithmetic in text
    assert "limit of cgroup /x" in text
    assert "A context of at most 123 tokens fits (now 1,000, in 2 slots)" in text
    plan_of(max_positions=123).check(room)
    with pytest.raises(InsufficientMemory):
        plan_of(max_positions=124).check(room)


def test_the_remedy_names_the_option_of_the_largest_part():
    with pytest.raises(InsufficientMemory, match="a smaller --prefix-memory needs less") as caught:
        plan_of(prefix_bytes=1 << 50).check(Available(1 << 30, "MemAvailable"))
    assert "(MemAvailable):\n" in str(caught.value)
    assert ";\n  kept prefixes " in str(caught.value)


def test_a_model_that_cannot_fit_says_so():
    with pytest.raises(InsufficientMemory, match="Even without any context"):
        plan_of().check(Available(1000, "MemAvailable"))


# --- what there is -------------------------------------------------------------------------------


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n"}


def test_without_a_cgroup_the_kernel_is_asked(tmp_path):
    assert available(tree(tmp_path, MEMINFO)) == Available(5000 * 1024, "MemAvailable")


def test_the_tightest_enclosing_cgroup_counts_less_the_pages_it_can_drop(tmp_path):
    root = "sys/fs/cgroup"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{root}/outer/inner/memory.max": "max\n",
        f"{root}/outer/inner/memory.current": "100\n",
        f"{root}/outer/memory.max": "900000\n",
        f"{root}/outer/memory.current": "700000\n",
        f"{root}/outer/memory.stat": "anon 5\ninactive_file 300000\n",
    }
    found = available(tree(tmp_path, files))
    assert found == Available(900000 - 400000, "limit of cgroup outer")


def test_a_limit_of_the_first_cgroup_version_is_read(tmp_path):
    root = "sys/fs/cgroup/memory"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:cpu,memory:/gone\n3:cpuset:/\n",
        f"{root}/memory.limit_in_bytes": "1000000\n",
        f"{root}/memory.usage_in_bytes": "400000\n",
    }
    assert available(tree(tmp_path, files)) == Available(600000, "limit of cgroup .")


def test_an_unlimited_cgroup_is_no_limit(tmp_path):
    root = "sys/fs/cgroup/memory"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:memory:/\n",
        f"{root}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{root}/memory.usage_in_bytes": "400000\n",
    }
    assert available(tree(tmp_path, files)).source == "MemAvailable"


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "4000\n",
        "sys/fs/cgroup/memory.stat": "anon 5\n",
    }
    assert available(tree(tmp_path, files)).size == 0


def test_a_system_that_tells_nothing_limits_nothing(tmp_path):
    assert available(tmp_path).source == "no limit is known"


def test_this_machine_has_memory():
    assert available().size > 0
