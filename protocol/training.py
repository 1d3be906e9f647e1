"""What the processes of `dflashd train` tell each other, and the names of the files between them.

`launch` composes prompts, in text. ``python -m target_daemon.collecting CONFIG.json`` answers them
in batches, one JSON line a message: `Ask` on its standard input, `Answered` on its standard output;
what is kept goes into shards. ``python -m draft_daemon.training CONFIG.json`` reads the shards and
writes the draft. Both report as `Report` lines. No torch here.

A shard ``shard-NNNNN.safetensors`` holds whole sequences behind each other:

=============== ================= ================================================================
tensor          shape, dtype      meaning
=============== ================= ================================================================
tokens          [n] int32         prompt and answer of every sequence, with what ended it
starts          [s + 1] int64     where each sequence begins; the last is n
prompts         [s] int32         tokens of each prompt
ids             [s] int64         `Ask.id`
tasks           [s] int32         index into the metadata's ``tasks``, a JSON list of names
held_out        [s] uint8         1: never trained on
temperatures    [s] float32       of the answer
top_ids         [n, k] int32      likeliest next tokens after each position, likeliest first
top_logprobs    [n, k] float16    theirs, of the raw distribution; rows before the last of a prompt
                                  and behind the last of an answer are zero
=============== ================= ================================================================

``features-NNNNN.safetensors`` beside it holds ``features`` [n, taps * hidden] bfloat16; it is
missing where the byte budget was spent. The last row of a sequence was never computed: zero; its
metadata has ``taps``, a JSON list. `protocol.checkpoints.shards` reads and writes both.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from protocol.config import DType, FrozenConfig, Positive, Timeout
from protocol.messages import Sampling

SHARD: Final = "shard-{:05d}.safetensors"
FEATURES: Final = "features-{:05d}.safetensors"
DATA_FOLDER: Final = "work/data"  # in the folder that is being made
STEPS_FILE: Final = "train.jsonl"
CURVE_FILE: Final = "curve.png"
ANSWER: Final = "answer"  # the `Report.stage` of a collecting process that is loaded
SHARD_TOKENS: Final = 1 << 15  # of a whole one
CACHED_SHARDS: Final = 12  # whose features a rank holds: more than are shuffled together
LEAST_ANSWER: Final = 2  # tokens: a block's first row and one that it predicts
SEQUENCES: Final = 8  # of a step, which ranks divide among them
MAX_LINE: Final = 16 << 20  # bytes of one message
# The file at which the ranks that `launch` starts find each other; without it, as torchrun says.
MEETING_VARIABLE: Final = "DFLASHD_MEETING"

Ids = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=1 << 20)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class CollectConfig(FrozenConfig, frozen=True, kw_only=True):
    """What the collecting process is told at its start."""

    model: str  # folder, or GGUF file
    folder: str  # where shards go; those that lie there stay
    taps: tuple[int, ...]
    dtype: DType = "auto"
    device: str = "cpu"
    threads: int = 0
    slots: Count = 0  # sequences that are answered at once; 0: as many as pay and fit
    max_positions: Positive = 1024  # of a prompt with its answer
    likeliest: Positive = 16  # k of the shards
    shard_tokens: Positive = SHARD_TOKENS
    feature_bytes: Count = 0  # of all feature files together; later shards have none


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written about an answer that goes into a shard."""

    task: str
    held_out: bool = False


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """launch -> collecting: continue `tokens`; without `kept` the answer is only told."""

    id: Count
    tokens: Ids
    max_tokens: Positive
    sampling: Sampling = Sampling()  # its `stop_token_ids` and `eos_token_ids` end it
    kept: Kept | None = None


class Answered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """collecting -> launch: what followed, without what ended it.

    A refused one was never begun, or no token followed: `detail` says why, and nothing is kept.
    """

    id: Count
    tokens: Ids
    finish_reason: Literal["stop", "length", "refused"]
    detail: str = ""


class Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """collecting -> launch: a shard is on disk, so that its sequences survive everything."""

    shard: Count
    ids: Annotated[tuple[Count, ...], Meta(max_length=1 << 20)]
    tokens: Count  # of all shards that lie there
    features: bool


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Either process -> launch: `done` of `total` of what `stage` counts; total 0: unknown."""

    stage: str  # "load", `ANSWER`, "features", "train", "validate"
    done: Count
    total: Count = 0
    unit: str = ""  # what is counted, as a word for a person
    detail: str = ""


class Validated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """training -> launch: an exact greedy walk over the held-out answers.

    Acceptance lengths count the bonus token: tokens emitted per round.
    """

    step: Count
    mean_acceptance_length: float
    by_task: dict[str, float]
    accepted_per_slot: tuple[float, ...]  # of the rounds, the part that accepted each slot
    best: bool  # of all so far; its weights are what the folder holds now


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Either process -> launch: why it ends; one sentence."""

    code: str
    detail: str


class Trained(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """training -> launch: the last line."""

    steps: Count
    seconds: float
    tokens: Count  # of data, without what was held out
    passes: float  # over the data


CollectLine = Answered | Written | Report | Problem
TrainLine = Report | Validated | Trained | Problem


class TrainConfig(FrozenConfig, frozen=True, kw_only=True):
    """What the training process is told at its start; also what `--resume` must find unchanged."""

    model: str  # the target: embedding, head, and the layers that the draft starts from
    folder: str  # what is being made: checkpoint, steps, curve; its data lie in `DATA_FOLDER`
    taps: tuple[int, ...]
    mask_token_id: int
    start: str = ""  # a draft of the same shape to begin with; empty: the target's own layers
    layers: Positive = 3
    block_size: Positive = 8
    steps: Count = 0  # 0: until `hours` have been used
    hours: float = 0.0
    sequences: Positive = SEQUENCES  # a step
    anchors: Positive = 32  # a sequence
    gamma: Annotated[float, Meta(gt=0)] = 4.0  # slots are weighted exp(-(k - 1) / gamma)
    rate: float = 1e-3  # AdamW's, with a warm-up and a cosine to a tenth
    soft: Fraction = 0.5  # of the loss: against the target's distribution instead of the token
    frequent_rows: Count = 6144  # of the head; 0: all
    random_rows: Count = 1024  # of the others, drawn anew at each step
    whole: Fraction = 0.15  # of the steps, the last ones: on all rows of head and blocks
    average: Fraction = 0.998  # decay of the moving average that is validated and kept; 0: none
    weight_decay: float = 0.01
    clip: float = 1.0  # longest gradient
    validate_every: Positive = 500
    validate_sequences: Count = 64  # of those held out; 0: all
    validate_tokens: Positive = 128  # of each answer, as if no more had been asked for
    save_seconds: Timeout = 120.0  # between two states to resume from
    collect: str = ""  # the `CollectConfig` by which missing features are made; empty: none are
    seed: Count = 0
    dtype: DType = "float32"
    device: str = "cpu"
    threads: int = 0
