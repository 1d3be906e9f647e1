"""What a target will need, computed from its config before anything is loaded.

Pages are touched lazily, so a load that fits today may die in the middle of a long prompt
tomorrow: everything is counted in full, and what does not fit is refused with the arithmetic.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from protocol.checkpoints.target_config import ModelConfig
from protocol.checkpoints.tensors import open_tensors
from protocol.config import TargetConfig
from protocol.errors import InsufficientMemory
from protocol.gpu import is_gpu

SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
ID_BYTES: Final = 8
UNLIMITED: Final = 1 << 62  # cgroup v1 states "no limit" as a huge number
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the plan: ``factors`` multiply to `size` bytes."""

    name: str
    size: int
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that this process may still take, and what says so."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The lines of one target, and the context and slots that they are for."""

    lines: tuple[Line, ...]
    positions: int
    slots: int
    fixed: int  # bytes without any context
    per_position: int  # bytes that each position of context costs, in all slots

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return sum(line.size for line in self.lines)

    def check(self, available: Available) -> None:
        """Raise InsufficientMemory, with every line and a remedy, where `available` is less."""
        if self.needed <= available.size:
            return
        width = max(len(line.name) for line in self.lines)
        rows = [
            f"  {line.name:<{width}}  {_megabytes(line.size):>12}  = {line.arithmetic}"
            for line in self.lines
        ]
        raise InsufficientMemory(
            f"the target needs {_megabytes(self.needed)}, and {_megabytes(available.size)} are "
            f"available ({available.source})\n" + "\n".join(rows) + "\n" + self._remedy(available)
        )

    def _remedy(self, available: Available) -> str:
        fits = max(0, available.size - self.fixed) // self.per_position
        if fits:
            return (
                f"A context of at most {fits:,} tokens fits (now {self.positions:,}, in "
                f"{self.slots} slots); fewer slots or --dtype bfloat16 need less, too."
            )
        return (
            f"Even without any context {_megabytes(self.fixed)} are needed: free memory, use fewer "
            f"slots (now {self.slots}), --dtype bfloat16, or a smaller model."
        )


def plan(
    model: ModelConfig, config: TargetConfig, dtype: Literal["float32", "bfloat16"]
) -> MemoryPlan:
    """Count a target of `model` that computes in `dtype`: a dense one by its config.

    Of any other the weights are counted as they lie in ``config.model``, and its state as if
    every layer had full attention; CheckpointError where the files cannot be read.
    """
    positions = min(config.max_positions or model.max_positions, model.max_positions)
    fixed, first = (sum(line.size for line in _lines(model, config, dtype, n)) for n in (0, 1))
    return MemoryPlan(
        _lines(model, config, dtype, positions), positions, config.slots, fixed, first - fixed
    )


def _lines(
    model: ModelConfig, config: TargetConfig, dtype: str, positions: int
) -> tuple[Line, ...]:
    size = SIZES[dtype]
    if not model.dense:
        return _general_lines(model, config, positions, size)
    return (
        *_weights(model, dtype),
        _key_values(model, config.slots, positions, size),
        _ring(model, config, size),
        *_exported(model, config, size),
        *_prefixes(config),
        _context(model, config.slots, positions, size),
        _working(model, config, positions, size),
    )


def _general_lines(
    model: ModelConfig, config: TargetConfig, positions: int, size: int
) -> tuple[Line, ...]:
    """Upper bounds for an architecture that only its library knows."""
    with open_tensors(Path(config.model)) as tensors:
        weights = sum(math.prod(tensors.shape(name)) for name in tensors.names())
    wide, rows = max(model.intermediate_size, 4 * model.hidden_size), _widest(config)
    table = ((model.vocab_size, "ids"), (model.hidden_size, "wide"), (size, "bytes"))
    scores = 2 * model.num_heads * rows * positions * SIZES["float32"]
    logits = 2 * rows * model.vocab_size * SIZES["float32"]
    return (
        _line("weights", (weights, "weights"), (size, "bytes")),
        _line("embedding and head, moved", (2, "tables"), *table),
        # They grow by concatenation: the old rows live until the new ones are written.
        _line(
            "keys and values",
            (config.slots, "slots"),
            (positions, "positions"),
            (2 * model.num_layers + 2, "tensors"),
            (model.num_kv_heads * model.head_dim, "wide"),
            (size, "bytes"),
        ),
        _ring(model, config, size),
        *_prefixes(config),
        _line("token ids", (config.slots, "slots"), (positions, "positions"), (ID_BYTES, "bytes")),
        Line(
            "working memory",
            logits + scores + 16 * rows * wide * size,
            f"2 x {rows} rows of logits + 2 x {model.num_heads * rows:,} rows of scores + 16 x "
            f"{rows} rows of one layer",
        ),
    )


def _weights(model: ModelConfig, dtype: str) -> Iterator[Line]:
    hidden, size = model.hidden_size, SIZES[dtype]
    stored = model.dtype if model.dtype in SIZES else "bfloat16"
    attention = 2 * hidden * model.head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    yield _line("layers", (model.num_layers, "layers"), (layer, "weights"), (size, "bytes"))
    table = ((model.vocab_size, "ids"), (hidden, "wide"))
    yield _line("embedding", *table, (SIZES[str(stored)], f"bytes ({stored})"))
    # A tied head that can be the embedding itself costs nothing; else it is laid out once more.
    if not model.tied or stored != dtype or dtype == "float32":
        yield _line("head", *table, (size, f"bytes ({dtype})"))


def _key_values(model: ModelConfig, slots: int, positions: int, size: int) -> Line:
    return _line(
        "keys and values",
        (slots, "slots"),
        (positions, "positions"),
        (2 * model.num_layers, "tensors"),
        (model.num_kv_heads * model.head_dim, "wide"),
        (size, "bytes"),
    )


def _ring(model: ModelConfig, config: TargetConfig, size: int) -> Line:
    return _line(
        "feature ring",
        (config.slots, "slots"),
        (config.ring_window + _widest(config), "rows"),
        (len(config.taps) * model.hidden_size, "wide"),
        (size, "bytes"),
    )


def _exported(model: ModelConfig, config: TargetConfig, size: int) -> Iterator[Line]:
    """On a GPU a draft may write what it maps, so that it gets copies of embedding and head."""
    if is_gpu(config.device) and config.taps:
        table = ((model.vocab_size, "ids"), (model.hidden_size, "wide"), (size, "bytes"))
        yield _line("embedding and head, exported", (2, "tables"), *table)


def _prefixes(config: TargetConfig) -> Iterator[Line]:
    if config.prefix_bytes:
        yield Line("kept prefixes", config.prefix_bytes, "what --prefix-memory allows")


def _context(model: ModelConfig, slots: int, positions: int, size: int) -> Line:
    return Line(
        "context tables",
        positions * (2 * model.head_dim * size + slots * ID_BYTES),
        f"{positions:,} positions x (2 x {model.head_dim} x {size} bytes of angles "
        f"+ {slots} x {ID_BYTES} bytes of ids)",
    )


def _working(model: ModelConfig, config: TargetConfig, positions: int, size: int) -> Line:
    """The widest forward: logits, the rows of one layer, and the attention mask."""
    rows, group = _widest(config), model.num_heads // model.num_kv_heads
    logits = 2 * config.block_size * model.vocab_size * SIZES["float32"]
    layer = 8 * rows * (model.hidden_size + model.intermediate_size) * size
    mask = group * rows * positions * size
    return Line(
        "working memory",
        logits + layer + mask,
        f"2 x {config.block_size} rows of logits + 8 x {rows} rows of one layer + the mask of "
        f"{group * rows:,} rows",
    )


def _widest(config: TargetConfig) -> int:
    return max(config.prefill_chunk, config.block_size)


def _line(name: str, *factors: tuple[int, str]) -> Line:
    size = 1
    for factor, _ in factors:
        size *= factor
    return Line(name, size, " x ".join(f"{factor:,} {unit}" for factor, unit in factors))


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.1f} MB"


def available(root: Path = Path("/")) -> Available:
    """The least of what the kernel has available and what every enclosing cgroup leaves.

    `root` stands for the file system's root, for tests. File pages that the kernel can drop at
    any time do not count as used.
    """
    found = [*_kernel(root), *_cgroups(root)]
    return min(found, key=lambda one: one.size, default=Available(UNLIMITED, "no limit is known"))


def _kernel(root: Path) -> Iterator[Available]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "MemAvailable")


def _cgroups(root: Path) -> Iterator[Available]:
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(base, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(base / "memory", path, names)


def _walk(base: Path, path: str, names: tuple[str, str, str]) -> Iterator[Available]:
    """The limits from the group at `path` up to `base`; the path may be another namespace's."""
    folder = base / path.strip("/")
    for group in (folder, *folder.parents):
        limit, used = (_text(group / name).strip() for name in names[:2])
        if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
            cached = _statistic(group / "memory.stat", names[2])
            left = int(limit) - max(0, int(used) - cached)
            yield Available(max(0, left), f"limit of cgroup {group.relative_to(base)}")
        if group == base:
            return


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
