"""Every message of the links, in the order of one request's life.

Direction is the first word of each docstring. Compute messages carry a *list* of sequences, and
their replies one result or one `ItemFailed` per sequence, so that one bad sequence fails alone.
Every number and length from a peer is bounded here and nowhere else. A field of bytes holds token
ids, but for one that is named `raw`.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

WIRE_VERSION: Final = 4

MAX_SEQUENCES: Final = 64
MAX_TOKEN_BYTES: Final = 4 << 20  # one million int32 ids
MAX_TOKENS_A_ROUND: Final = 1024
MAX_HINTS: Final = 1 << 17

Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Position = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Earlier = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]  # an ended sequence; -1: none
Slot = Annotated[int, Meta(ge=-1, le=4095)]
Token = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # NaN is within no bounds
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=16384)]
MAX_RAW_BYTES: Final = (512 << 10) - 256  # with the rest of its message at most 512 KiB

TokenBytes = Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]  # int32, little-endian
RawBytes = Annotated[bytes, Meta(max_length=MAX_RAW_BYTES)]  # rows of a tensor, little-endian
Ids = Annotated[tuple[Count, ...], Meta(max_length=4096)]
Hints = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_HINTS)]
Finish = Literal["", "stop", "length"]

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_REPORTED: Final = 256  # requests that one report lists
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
DaemonRole = Literal["target", "draft"]
Mode = Literal["speculative", "autoregressive"]
Stage = Literal["absent", "loading", "greeting", "pairing", "ready", "failed", "parked"]

MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_TOP_K: Final = 16
DEFAULT_TREE_BUDGET: Final = 15
MAX_ALTERNATIVES: Final = 4096  # slots of a block times ids of each
LEAST_LOGPROB: Final = -1e9  # stands for minus infinity

# The ranges of sampling; the command's options read them from here.
Temperature = Annotated[float, Meta(ge=0.0, le=10.0)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.1, le=10.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
# Rows of a verify that the draft fills, the pending token included: 0: what pays, 1: no draft.
BlockWidth = Annotated[int, Meta(ge=0, le=MAX_TOKENS_A_ROUND)]
TreeVerify = Literal["chain", "tree", "auto"]  # auto: a tree where that emits more tokens a second
Ngram = Literal["auto", "always", "never"]  # auto: where that emits more tokens a second
TreeBudget = Annotated[int, Meta(ge=1, le=MAX_TOKENS_A_ROUND - 1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0.0)]
Logprobs = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the field ``type`` on the wire is the class's name."""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """One sequence's part of a message; ``(target_life, draft_life, sequence, round)`` names it."""

    sequence: Id
    round: Id = 0


class LinkMessage(Message, frozen=True, kw_only=True):
    """Base of supervisor <-> daemon messages; a reply repeats the lives that were asked for."""

    target_life: Id
    draft_life: Id = 0


class ItemFailed(Item, frozen=True, kw_only=True):
    """daemon -> supervisor: this sequence's part failed; the others' parts did not."""

    code: Name
    detail: Text


class Failed(LinkMessage, frozen=True, kw_only=True):
    """daemon -> supervisor: the whole message was refused; nothing was changed."""

    code: Name
    detail: Text


# --- meeting ---------------------------------------------------------------------------------


class Hello(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> daemon: the first message of a life; answered with TargetHello/DraftHello.

    To a daemon that runs as a service it gives a new life, if this supervisor may drive it; all
    that an earlier one had open is closed then. `owner` is this supervisor's own random number.
    """

    wire_version: Count
    nonce: Id
    owner: Id = 0


class Leave(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> daemon: end with exit code 75; it is sick, and will be started again.

    Needs no Hello before it, and is answered only with a refusal, if it is for another life.
    """

    reason: Text


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU that a daemon computes on; `obstacle` says why its memory cannot be shared."""

    uuid: Name  # "GPU-..." or "MIG-...", the same in every process
    name: Name
    driver: Name  # the CUDA version that the driver speaks
    mig: bool  # an instance of a GPU, which shares memory with no other instance
    mps: bool  # several processes compute on it at once, and can take each other down
    obstacle: Text = ""  # empty: none


class HostFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a daemon runs; `protocol.placement` chooses the transport from two of these."""

    pid: Count
    boot_id: Name
    pid_namespace: Name
    ipc_namespace: Name
    device: Name  # "cpu", or "cuda:GPU-<uuid>"
    threads: Count
    listens: Name = ""  # a tcp:// address; empty: a socket file
    versions: Annotated[dict[Name, Name], Meta(max_length=128)]
    gpu: GpuFacts | None = None


class TargetHello(LinkMessage, frozen=True, kw_only=True):
    """target -> supervisor: the target's facts; sent once its first forward has run."""

    wire_version: Count
    nonce: Id
    host: HostFacts
    model_type: Name
    dtype: Name  # "float32" | "bfloat16" | "float16"
    weights: Name = "dtype"  # of its layers: as its rows are | "int8" | "int4"
    hidden_size: Count
    num_layers: Count
    vocab_size: Count  # ids the tokenizer can produce
    padded_vocab_size: Count  # rows of the embedding table
    max_positions: Count
    taps: Ids  # captured layer outputs, in the order of their columns in a feature row
    mask_token_id: Token
    eos_token_ids: Ids
    embedding_scale: Finite
    logit_scale: Finite
    logit_softcap: Finite  # 0: none
    tied_embeddings: bool
    rope_theta: Finite
    slots: Count
    ring_capacity: Count
    ring_window: Count
    prefill_chunk: Count
    max_width: Count  # widest block a Verify may carry
    exact: Literal["native", "padded", "no"]
    exact_detail: Text
    rollback: Literal["fast", "replay"]
    rollback_detail: Text = ""  # why that one
    tree_verify: bool = False  # whether a Verify may carry a tree
    tree_detail: Text = ""  # how exact that is, or why not
    load_seconds: Seconds
    weight_bytes: Id
    split: Text = ""  # which layers are on which device; empty: all on one


class DraftHello(LinkMessage, frozen=True, kw_only=True):
    """draft -> supervisor: the draft's facts; sent once its weights are loaded."""

    wire_version: Count
    nonce: Id
    host: HostFacts
    network: Name
    dtype: Name
    hidden_size: Count
    vocab_size: Count
    target_layer_ids: Ids
    mask_token_id: Token
    block_size: Count
    sample_from_anchor: bool
    context_window: Count
    top_k: Count = 0  # most ids per slot that a Propose may ask for; 0: the best ones alone
    max_positions: Count = 0  # that its rotations reach; 0: as many as the target's
    slots: Count
    load_seconds: Seconds
    weight_bytes: Id
    ignored: Annotated[
        tuple[Name, ...], Meta(max_length=4096)
    ] = ()  # checkpoint tensors and keys that were listed and left out


class Pair(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> draft: attach to the target's ring and to its embedding and head."""

    transport: Name
    address: Name  # path of the target's ring socket
    ring_nonce: Id  # the target's nonce from TargetHello
    slots: Count
    ring_capacity: Count
    dtype: Name
    hidden_size: Count
    padded_vocab_size: Count
    vocab_size: Count
    embedding_scale: Finite
    logit_scale: Finite
    logit_softcap: Finite


class Paired(LinkMessage, frozen=True, kw_only=True):
    """draft -> supervisor: the ring is mapped and a first block has run."""

    transport: Name
    mapped_bytes: Id
    seconds: Seconds  # of attaching and the first block
    agreed: Count = 0  # first tokens on a fixed prompt that are the target's own choices
    compared: Count = 0  # of so many; 0: the target shares no such prompt


# --- another host ----------------------------------------------------------------------------


class Attach(LinkMessage, frozen=True, kw_only=True):
    """draft -> target: the first message of a draft that pulls what it needs over a network."""

    wire_version: Count
    nonce: Id  # the target's, as the supervisor told it
    slots: Count
    ring_capacity: Count
    row_width: Count
    dtype: Name


class Attached(LinkMessage, frozen=True, kw_only=True):
    """target -> draft: what a copy of the target's checkpoint must agree with; hex digests."""

    config_hash: Name
    tokenizer_hash: Name  # empty: the target's checkpoint has none
    weights_hash: Name  # of embedding and head; empty: they cannot be had
    embedding_scale: float


class Pull(LinkMessage, frozen=True, kw_only=True):
    """Base of what a draft asks a target for; the answer repeats `pull`."""

    pull: Id


class Rows(Pull, frozen=True, kw_only=True):
    """draft -> target: feature rows of positions ``start .. start + count - 1``."""

    slot: Slot
    sequence: Id
    start: Position
    count: Count


class RowsSent(Pull, frozen=True, kw_only=True):
    """target -> draft: the rows from `start` on; those before it are overwritten, and lost."""

    start: Position
    raw: RawBytes


class Embed(Pull, frozen=True, kw_only=True):
    """draft -> target: the embeddings of these ids (``--draft-head target``)."""

    tokens: TokenBytes


class Embedded(Pull, frozen=True, kw_only=True):
    """target -> draft: one row for each id, float32."""

    raw: RawBytes


class Project(Pull, frozen=True, kw_only=True):
    """draft -> target: the best id of each of these hidden rows, float32."""

    raw: RawBytes


class Projected(Pull, frozen=True, kw_only=True):
    """target -> draft: one id for each hidden row."""

    tokens: TokenBytes


# --- one request -----------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens of one request are chosen; the one argument of `protocol.choice` that varies.

    In the order of application; `docs/sampling.md` defines each. `eos_token_ids` are ended by, or
    with `ignore_eos` banned, as the target's own are, which it adds. `prompt_tokens` is where the
    output begins in the history; the target fills it in at the end of the prompt.
    """

    logit_bias: Annotated[tuple[tuple[Count, Bias], ...], Meta(max_length=MAX_BIASES)] = ()
    eos_token_ids: Ids = ()
    stop_token_ids: Ids = ()
    ignore_eos: bool = False
    min_tokens: Count = 0
    prompt_tokens: Count = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    temperature: Temperature = 0.0  # 0: the largest logit
    top_k: TopK = 0  # 0: all
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Id = 0
    logprobs: Logprobs = -1  # so many alternatives with each token; -1: no log-probabilities


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-probabilities at one chosen token, of the raw logits: before any step of sampling.

    `ids` are the likeliest tokens, likeliest first, and `logprobs` theirs.
    """

    logprob: Logprob  # of the chosen token
    ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()


AllLogprobs = Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_TOKENS_A_ROUND)]


class OpenItem(Item, frozen=True, kw_only=True):
    """A new sequence. `slot` is -1 to the target, which assigns one; the draft is told which.

    It may go on where a sequence that was closed with `retain` has state: `prefix` (target only)
    holds the tokens that may be found there. The draft is told what the target answered.
    """

    slot: Slot = -1
    sampling: Sampling = Sampling()
    draft_context: Count = 0  # rows of context that a draft attends to; 0: all that it can
    prefix: TokenBytes = b""
    retain: bool = False  # target only: it will be closed with `retain`
    continues: Earlier = -1
    committed: Position = 0
    oldest: Position = 0


class Open(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> either daemon: reserve a slot for each sequence."""

    items: Annotated[tuple[OpenItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class OpenedItem(Item, frozen=True, kw_only=True):
    """The slot of a sequence: its index in the feature ring, and the state that it begins with.

    `committed` positions have state, which sequence `continues` left. The ring holds their feature
    rows from position `oldest` on. A draft answers how many positions it needs no rows of any more.
    """

    slot: Slot
    continues: Earlier = -1
    committed: Position = 0
    oldest: Position = 0


class Opened(LinkMessage, frozen=True, kw_only=True):
    """daemon -> supervisor: answer to Open."""

    results: Annotated[tuple[OpenedItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class PrefillItem(Item, frozen=True, kw_only=True):
    """Prompt tokens for positions ``start ..``; `last` asks for the first emitted token."""

    start: Position
    tokens: TokenBytes
    last: bool


class Prefill(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> target: one chunk of the prompt per sequence."""

    items: Annotated[tuple[PrefillItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class PrefilledItem(Item, frozen=True, kw_only=True):
    """`committed` positions have state; `token` is the first emitted one, or -1 before the end.

    `logprobs` has the first token's, where the request asked for them.
    """

    committed: Position
    token: Token
    finish: Finish
    seconds: Seconds
    logprobs: AllLogprobs = ()


class Prefilled(LinkMessage, frozen=True, kw_only=True):
    """target -> supervisor: answer to Prefill; the progress mark of a long prompt."""

    results: Annotated[tuple[PrefilledItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class ReplayItem(Item, frozen=True, kw_only=True):
    """Tokens emitted in an earlier life, from `base_pos`; all but the last are run, by decode."""

    base_pos: Position
    tokens: TokenBytes


class Replay(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> target: take back what a client has; emits nothing."""

    items: Annotated[tuple[ReplayItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class ReplayedItem(Item, frozen=True, kw_only=True):
    """The last token is pending again. `mismatches` would be chosen otherwise now; exact: 0."""

    committed: Position
    mismatches: Count
    seconds: Seconds


class Replayed(LinkMessage, frozen=True, kw_only=True):
    """target -> supervisor: answer to Replay."""

    results: Annotated[tuple[ReplayedItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class IngestItem(Item, frozen=True, kw_only=True):
    """Turn the ring's feature rows up to `stop` into context K/V of the draft."""

    stop: Position


class Ingest(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> draft: take in new feature rows before they are overwritten."""

    items: Annotated[tuple[IngestItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class IngestedItem(Item, frozen=True, kw_only=True):
    """Rows ``start .. stop-1`` are context now; a gap before `start` is legal and masked."""

    start: Position
    stop: Position
    seconds: Seconds
    moved_bytes: Id = 0  # over a network


class Ingested(LinkMessage, frozen=True, kw_only=True):
    """draft -> supervisor: answer to Ingest."""

    results: Annotated[tuple[IngestedItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class ProposeItem(Item, frozen=True, kw_only=True):
    """One block: `pending` sits at `base_pos`; `width` counts it and the tokens wanted.

    `temperatures` has one for each token wanted, at which it is chosen with the noise of the
    request's seed and its position; 0, and where there are none, stands for the best id. `top_k`
    asks for so many ids at each slot, and for their log-probabilities.
    """

    base_pos: Position
    pending: Token
    width: Annotated[int, Meta(ge=2, le=MAX_TOKENS_A_ROUND)]
    temperatures: Annotated[tuple[Temperature, ...], Meta(max_length=MAX_TOKENS_A_ROUND)] = ()
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0


class Propose(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> draft: propose the tokens that follow `pending`; ingests new rows first."""

    items: Annotated[tuple[ProposeItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class ProposedItem(Item, frozen=True, kw_only=True):
    """``width - 1`` proposed ids for positions ``base_pos + 1 ..``; times of the draft's engine.

    Where they were asked for: `top_ids` of each slot, the first being the proposed one, and
    `top_logprobs`, slot by slot, likeliest first. `confidences` say of each slot how likely its id
    is the target's, all before it being so: by the network's own word where it has one, else the
    id's share of the softmax of the draft's scores, at the slot's temperature or, with
    alternatives, of those that race. None where the draft sees no scores.
    """

    tokens: TokenBytes
    top_ids: TokenBytes = b""
    top_logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_ALTERNATIVES)] = ()
    confidences: Annotated[tuple[Share, ...], Meta(max_length=MAX_TOKENS_A_ROUND)] = ()
    context_rows: Count
    draft_seconds: Seconds
    ingest_seconds: Seconds
    moved_bytes: Id = 0  # over a network


class Proposed(LinkMessage, frozen=True, kw_only=True):
    """draft -> supervisor: answer to Propose."""

    results: Annotated[tuple[ProposedItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class VerifyItem(Item, frozen=True, kw_only=True):
    """A block ``[pending, d1 .. dk]`` at `base_pos`, which must be the target's `committed`.

    With `parents` it is a token tree: the row that each row but the first follows, as int32. A
    parent stands before its children, and siblings differ. Without, a row follows the one before.
    """

    base_pos: Position
    tokens: TokenBytes
    parents: TokenBytes = b""
    budget: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]  # tokens this request may still emit


class Verify(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> target: one forward over each block; an autoregressive step is width 1."""

    items: Annotated[tuple[VerifyItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class Verdict(Item, frozen=True, kw_only=True):
    """What one round keeps: `tokens` are the accepted drafts, then the new pending token.

    ``committed`` is the base of the next round. `chosen` holds the target's own choice at every
    row of the block, for the trace; of a tree, at the rows of `path`, which are the kept ones as
    int32, from row 0 down. `finish` says why the request ends here, or is empty. `logprobs` has one
    entry per token, where the request asked for them. `rollback` is how rejected rows were undone,
    where there were any, and `replayed` how many of the kept ones were run again for that.
    """

    accepted: Count
    tokens: TokenBytes
    chosen: TokenBytes
    committed: Position
    finish: Finish
    seconds: Seconds
    logprobs: AllLogprobs = ()
    path: TokenBytes = b""
    rollback: Literal["none", "fast", "replay"] = "none"
    replayed: Count = 0


class Verified(LinkMessage, frozen=True, kw_only=True):
    """target -> supervisor: answer to Verify."""

    results: Annotated[tuple[Verdict | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


class CloseItem(Item, frozen=True, kw_only=True):
    """End of a sequence; rows from position `keep` on are dropped before the slot is freed.

    With `retain` the others stay until another sequence takes the slot, or continues them.
    """

    keep: Position = 0
    retain: bool = False


class Close(LinkMessage, frozen=True, kw_only=True):
    """supervisor -> either daemon: free the slots; a closed sequence never computes again."""

    items: Annotated[tuple[CloseItem, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class ClosedItem(Item, frozen=True, kw_only=True):
    """The slot is free; `committed` positions were held."""

    committed: Position


class Closed(LinkMessage, frozen=True, kw_only=True):
    """daemon -> supervisor: answer to Close."""

    results: Annotated[tuple[ClosedItem | ItemFailed, ...], Meta(max_length=MAX_SEQUENCES)]


# --- clients ---------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """supervisor -> client: the first message of a connection; what serves at this socket."""

    wire_version: Count
    pid: Count
    model: Text  # the target's folder, which has the tokenizer and the chat template
    draft: Text  # the draft's folder; empty: none
    max_positions: Count  # what prompt and text may have together
    vocab_size: Count


class Submit(Message, frozen=True, kw_only=True):
    """client -> supervisor: a request; answered by Accepted, Pieces, then Finished or Refused."""

    request: Id
    prompt: TokenBytes
    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    sampling: Sampling = Sampling()
    draft_context: Count = 0
    hints: Hints = ()  # (generated position, id): guesses that override the draft's
    ngram: Ngram = "auto"  # propose what followed the last tokens before; auto: where it pays
    stops: Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()  # texts that end it
    base_pos: Position = 0  # positions of the prompt that may have state already
    retain: bool = False  # leave the state for a request that begins with the same tokens
    block_width: BlockWidth = 0
    verify: TreeVerify = "chain"
    tree_budget: TreeBudget = DEFAULT_TREE_BUDGET  # proposals of a tree, its chain among them


class Accepted(Message, frozen=True, kw_only=True):
    """supervisor -> client: a Submit has its number here, which every later message states."""

    asked: Id  # the number in Submit, the client's own
    request: Id
    waits: Text = ""  # why nobody serves it now, where somebody must act first


class Cancel(Message, frozen=True, kw_only=True):
    """client -> supervisor: end a request, anybody's, within one round or prefill chunk."""

    request: Id
    operation: Id = 0  # repeated in the answer, Done or Denied


class Progress(Message, frozen=True, kw_only=True):
    """supervisor -> client: prompt positions prefilled so far."""

    request: Id
    done: Count
    total: Count


class Piece(Message, frozen=True, kw_only=True):
    """supervisor -> client: tokens that one commit emitted, and that round's trace."""

    request: Id
    position: Position  # of the first token
    tokens: TokenBytes
    width: Count  # rows of the verify forward; 0 for the token that prefill chose
    proposed: TokenBytes
    parents: TokenBytes = b""  # of a tree, as in VerifyItem
    path: TokenBytes = b""  # the rows of it that were kept, as in Verdict
    chosen: TokenBytes
    draft_seconds: Seconds
    ingest_seconds: Seconds
    verify_seconds: Seconds
    moved_bytes: Id = 0  # by the draft, over a network
    logprobs: AllLogprobs = ()  # one per token, where the request asked for them


class Finished(Message, frozen=True, kw_only=True):
    """supervisor -> client: the request's end, and its statistics."""

    request: Id
    finish_reason: Literal["stop", "length", "cancelled"]
    statistics: "Statistics"


class Refused(Message, frozen=True, kw_only=True):
    """supervisor -> client: the request failed; every request gets this or Finished, once."""

    request: Id
    code: Name
    detail: Text


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's figures, under the field's names; times are seconds of wall clock."""

    prompt_tokens: Count
    completion_tokens: Count
    mode: Literal["speculative", "autoregressive"]
    mode_reason: Text
    verify: Literal["chain", "tree"] = "chain"
    verify_reason: Text = ""  # why chains, where trees were wanted
    transport: Name
    exact: Literal["native", "padded", "no"]
    rollback: Literal["", "fast", "replay"] = ""  # of the target; empty: it was never met
    time_to_first_token_seconds: Seconds
    prefill_seconds: Seconds
    decode_seconds: Seconds
    draft_seconds: Seconds
    ingest_seconds: Seconds
    verify_seconds: Seconds
    overhead_seconds: Seconds
    num_rounds: Count  # verify forwards, with and without drafts
    num_drafts: Count  # rounds that verified at least one proposal, whoever made it
    num_draft_tokens: Count
    num_accepted_tokens: Count
    num_hint_tokens: Count = 0
    num_accepted_hint_tokens: Count = 0
    num_ngram_tokens: Count = 0
    num_accepted_ngram_tokens: Count = 0
    num_trees: Count = 0  # rounds that verified more than a chain
    num_tree_nodes: Count = 0  # proposals in them
    num_fast_rollbacks: Count = 0  # rounds whose rejected rows were dropped as they stood
    num_replays: Count = 0  # rounds that were undone as a whole, and whose kept rows ran again
    num_replayed_tokens: Count = 0  # those rows
    acceptance_histogram: Ids  # [a]: rounds with a draft that accepted a tokens
    num_accepted_tokens_per_pos: Ids  # [i]: times draft token i was accepted
    num_proposed_tokens_per_pos: Ids
    width_histogram: Ids = ()  # [w]: rounds that verified w rows
    num_stale_replies: Count
    num_draft_restarts: Count = 0  # lives that the draft lost
    num_target_restarts: Count = 0  # lives that the target lost
    num_replay_mismatches: Count = 0  # emitted tokens that a new life would have chosen otherwise
    num_late_proposals: Count = 0  # that came when the round had gone on without them
    moved_bytes: Id = 0  # in rounds, by the draft, over a network
    prompt_moved_bytes: Id = 0  # the same before the first of them
    num_kept_tokens: Count = 0  # of the prompt, whose state an earlier request had left


# --- operations --------------------------------------------------------------------------------


class Status(Message, frozen=True, kw_only=True):
    """client -> supervisor: what runs, how, and why; answered with StatusReport."""


class Watch(Message, frozen=True, kw_only=True):
    """client -> supervisor: a StatusReport now, and one after each `seconds` from then on."""

    seconds: Annotated[float, Meta(ge=0.1, le=3600.0)]


class Park(Message, frozen=True, kw_only=True):
    """client -> supervisor: end a daemon and free its memory; Done when its process has ended.

    Requests that run finish first. With `now` they are paused, those of a parked target until it
    is unparked; paused and new ones are refused after `within` seconds of being parked.
    """

    role: DaemonRole
    now: bool = False
    within: Annotated[float, Meta(gt=0.0, le=86400.0)] = 300.0
    operation: Id = 0


class Unpark(Message, frozen=True, kw_only=True):
    """client -> supervisor: start a parked daemon again; Done when it serves."""

    role: DaemonRole
    operation: Id = 0


class Swap(Message, frozen=True, kw_only=True):
    """client -> supervisor: put another draft in the place of the present one, or deny it.

    It is loaded beside the present one, which serves meanwhile. Done when it serves.
    """

    draft: Text  # its folder
    operation: Id = 0


class Done(Message, frozen=True, kw_only=True):
    """supervisor -> client: an operation has been carried out; `detail` is one sentence."""

    operation: Id
    detail: Text


class Denied(Message, frozen=True, kw_only=True):
    """supervisor -> client: an operation was refused, or failed; what ran before runs on."""

    operation: Id
    code: Name
    detail: Text


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One daemon as the supervisor sees it; `reason` says why it is not ready."""

    stage: Stage
    reason: Text
    life: Id
    pid: Count | None


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request that has no answer yet; counts are those of its Statistics so far."""

    request: Id
    phase: Name  # "waiting" for a slot, "paused" until a target serves, or what it is at
    prompt_tokens: Count
    prefilled_tokens: Count
    completion_tokens: Count
    max_tokens: Count
    mode: Mode
    mode_reason: Text
    num_rounds: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    seconds: Seconds  # since it was submitted


class StatusReport(Message, frozen=True, kw_only=True):
    """supervisor -> client: answer to Status; counts are of all requests since the start."""

    pid: Count
    seconds: Seconds  # since the start
    mode: Mode
    mode_reason: Text
    transport: Name
    transport_reason: Text
    target: DaemonStatus
    draft: DaemonStatus
    target_facts: TargetHello | None
    draft_facts: DraftHello | None
    running: Count
    waiting: Count
    finished: Count
    refused: Count
    num_stale_replies: Id
    num_draft_restarts: Count
    num_target_restarts: Count
    load_seconds: Seconds  # from the start to the first moment a request could run
    completion_tokens: Id
    num_rounds: Id
    num_drafts: Id
    num_draft_tokens: Id
    num_accepted_tokens: Id
    moved_bytes: Id = 0  # in rounds, by the draft, over a network
    requests: Annotated[tuple[RequestStatus, ...], Meta(max_length=MAX_REPORTED)] = ()
