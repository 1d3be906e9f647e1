"""What training will need, computed from configs before anything is loaded."""

import math
from typing import Final

from draft_daemon.models.dflash import DFlash
from draft_daemon.training.loss import CHUNK_ELEMENTS
from draft_daemon.training.walk import GROUP
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.memory import Line, MemoryPlan, counted
from protocol.training import TrainConfig

FLOAT: Final = (4, "bytes")
COPIES: Final = 6  # weights, gradients, two moments, the average, and what is walked
MOST_POSITIONS: Final = 1024  # of a sequence, as `dflashd train` collects them
LAYERS_REMEDY: Final = "--layers"
ROWS_REMEDY: Final = "more --ranks, each with its share of a step, elsewhere"


def plan(config: TrainConfig, facts: DraftCheckpointConfig, ranks: int) -> MemoryPlan:
    """Count one rank, in float32, with sequences as long as they may be."""
    positions = min(MOST_POSITIONS, facts.max_positions)
    weights = sum(math.prod(shape) for shape in DFlash.shapes(facts).values())
    sequences = -(-config.sequences // ranks)
    rows = sequences * config.anchors * config.block_size
    queries, layers = facts.num_heads * facts.head_dim, len(facts.layers)
    # Of a row, what a layer keeps for the way back: norms and residuals, heads, the MLP, scores.
    kept = 12 * facts.hidden_size + 6 * queries + 5 * facts.intermediate_size
    kept += 2 * facts.num_heads * (positions + config.block_size)
    context = facts.feature_width + 4 * facts.hidden_size
    context += layers * 6 * facts.num_kv_heads * facts.head_dim
    held = config.validate_sequences * positions
    walked = min(GROUP, config.validate_sequences or GROUP) * positions
    width = 2 * facts.num_kv_heads * facts.head_dim
    lines = (
        _line("weights", LAYERS_REMEDY, (weights, "weights"), (COPIES, "copies")),
        _line("head", "", (facts.vocab_size, "ids"), (facts.hidden_size, "wide")),
        _line("logits", "", (2 * CHUNK_ELEMENTS, "of a chunk")),
        _line("block rows", ROWS_REMEDY, (rows, "rows"), (layers, "layers"), (kept, "kept")),
        _line("context", ROWS_REMEDY, (sequences * positions, "rows"), (context, "kept")),
        counted("held out", (held, "rows"), (facts.feature_width, "wide"), (2, "bytes")),
        _line("walked", "", (walked, "rows"), (layers, "layers"), (width, "wide"), (2, "copies")),
    )
    fixed = sum(line.size for line in lines)
    return MemoryPlan("training", lines, positions, 1, fixed, 0)


def _line(name: str, remedy: str, *factors: tuple[int, str]) -> Line:
    line = counted(name, *factors, FLOAT)
    return Line(line.name, line.size, line.arithmetic, remedy)
