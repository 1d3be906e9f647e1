"""Any causal LM of `transformers` that no family of this folder loads.

The library is an optional extra, imported when such a model is chosen. It computes; this file
turns its forward into the contract of `target.py`. What varies by version or by model is found in
`target_daemon.adapter`: how caches are passed and cut, and, by a probe at load, what a model can
do. A cache that cannot be cut (recurrent layers) is saved before a speculative forward, restored
and replayed by the engine.
"""

import inspect
import logging
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from protocol.errors import CheckpointError, ConfigError, InsufficientMemory, UnsupportedModel
from protocol.memory import available
from protocol.transports.base import FeatureHost, WeightSpec
from target_daemon.adapter import library as foreign
from target_daemon.adapter import parts
from target_daemon.adapter.caches import SlotCaches, Snapshot
from target_daemon.adapter.copies import CopiedCaches
from target_daemon.adapter.measure import Watched, embedding_scale
from target_daemon.adapter.probe import SLOT, settle
from target_daemon.families.base import ANY, Family, LoadRequest, NativeTarget, open_ring
from target_daemon.target import Logits

ALL_LOGITS: Final = 0  # what `logits_to_keep` means by 0

log = logging.getLogger(__name__)


class TransformersTarget(CopiedCaches):
    """A model of `transformers` with one cache for each of ``config.slots`` sequences."""

    def __init__(self, request: LoadRequest) -> None:
        model, config = request.model, request.config
        if request.device.type != "cpu":
            raise UnsupportedModel(
                f"model_type {model.model_type!r} runs through transformers, which this program "
                "runs on the CPU alone; use --target-device cpu"
            )
        library = foreign.import_library(model.model_type)
        path = Path(config.model)
        self._model = foreign.load_model(library, path, model.model_type, request.dtype)
        self._embedding, self._head = parts.ends(self._model)
        self._take_facts(request)
        self._capture, self.ring = open_ring(request)
        self._layers = parts.layers(self._model, model.num_layers)
        for index in config.taps:
            self._layers[index].register_forward_hook(self._hook(index))
        self._share(request.host)
        parameters = {id(one): one for one in self._model.parameters()}.values()
        self.weight_bytes = sum(one.numel() * one.element_size() for one in parameters)
        self._forward_names = inspect.signature(self._model.forward).parameters
        self.caches = SlotCaches(library, self._model, config.slots)
        self.stepwise = False
        self._probe(config.exact)

    def _take_facts(self, request: LoadRequest) -> None:
        model, config = request.model, request.config
        rows, scored = self._embedding.weight.shape[0], self._head.weight.shape[0]
        if min(rows, scored) < model.vocab_size:
            raise CheckpointError(
                f"{config.model}: vocab_size is {model.vocab_size}; the embedding has {rows} rows, "
                f"the head {scored}"
            )
        if config.mask_token_id >= rows:
            raise ConfigError(
                f"mask token id {config.mask_token_id} is outside the vocabulary of {rows}"
            )
        self.model_type = model.model_type
        self.dtype = request.dtype
        self.hidden_size = model.hidden_size
        self.num_layers = model.num_layers
        self.vocab_size, self.padded_vocab_size = model.vocab_size, rows
        self.max_positions = request.max_positions
        self.slots = config.slots
        self.capture_layer_ids = config.taps
        self.mask_token_id = config.mask_token_id
        self.eos_token_ids = model.eos_token_ids
        self.tied = self._head.weight is self._embedding.weight
        self.rope_theta = model.rope_theta or 0.0
        self.max_width = max(config.block_size, 1)
        self.prefill_chunk = config.prefill_chunk
        self.embedding_scale = 1.0  # until it is measured
        text = self._model.config
        cap = getattr(text, "final_logit_softcapping", None)
        self.logit_softcap = float(cap or getattr(text, "logits_soft_cap", None) or 0.0)
        self.logit_scale = float(getattr(text, "logit_scale", None) or 1.0)
        self.logit_scale /= float(getattr(text, "logits_scaling", None) or 1.0)

    def _share(self, host: FeatureHost) -> None:
        """Move embedding and head into memory that the draft will map; the model runs on it."""
        embed, head = self._embedding.weight, self._head.weight
        dtype = str(self.dtype).removeprefix("torch.")
        specs = {"embed": WeightSpec(tuple(embed.shape), dtype)}
        if not self.tied:
            specs["head"] = WeightSpec(tuple(head.shape), dtype)
        shared = host.create_weights(specs)
        for name, module in (("embed", self._embedding), ("head", self._head)):
            if name in shared:
                shared[name].copy_(module.weight)
            memory = shared.get(name, shared["embed"])
            module.weight = nn.Parameter(memory, requires_grad=False)

    def _hook(self, index: int) -> Any:
        def take(_module: nn.Module, _inputs: object, output: Any) -> None:
            if index in self._capture.columns:
                self._capture.take(index, parts.first(output)[0])

        return take

    # --- state ---------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        self.caches.reset(slot)

    @torch.inference_mode()
    def snapshot_kv(self, slot: int, base_pos: int, rows: int) -> Snapshot:
        del base_pos, rows
        return self.caches.save(slot)

    @torch.inference_mode()
    def restore_kv(self, slot: int, snapshot: object) -> None:
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"not a snapshot of this target: {type(snapshot).__name__}")
        self.caches.restore(slot, snapshot)

    @property
    def supports_fast_rollback(self) -> bool:
        return self._fast

    @property
    def rollback_detail(self) -> str:
        return self._fast_detail

    def prepare_rollback(self, kind: Literal["fast", "replay"]) -> None:
        self.caches.record(self._fast and kind == "fast")

    @torch.inference_mode()
    def rollback_to(self, slot: int, base_pos: int, n: int) -> bool:
        if self.caches.lengths[slot] == base_pos + n:
            return True
        if not self.caches.recording:
            return False
        self.caches.cut(slot, base_pos + n)
        return True

    @torch.inference_mode()
    def cut(self, slot: int, length: int) -> None:
        self.caches.cut(slot, length)

    # --- forward -------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify_batch(
        self, slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        count = tokens.shape[0]
        # A model that forgets its state when given several rows is given one at a time.
        step = 1 if self.stepwise and base_pos else count
        rows = []
        for start in range(0, count, step):
            keep = ALL_LOGITS if logits == "all" else 1
            part = tokens[start : start + step]
            rows.append(self._forward(slot, part, base_pos + start, keep))
        if logits == "none":
            return None
        return torch.cat(rows) if logits == "all" else rows[-1][-1:]

    def _forward(self, slot: int, tokens: Tensor, base: int, keep: int) -> Tensor:
        cache = self.caches.at(slot, base)
        self._capture.begin(slot, base, tokens.shape[0])
        options: dict[str, Any] = {self.caches.keyword: cache, "use_cache": True}
        if "position_ids" in self._forward_names:  # some count from 0 whatever the cache holds
            options["position_ids"] = torch.arange(base, base + tokens.shape[0])[None]
        if "logits_to_keep" in self._forward_names:
            options["logits_to_keep"] = keep
        answer = self._model(input_ids=tokens[None], **options)
        self.caches.lengths[slot] = base + tokens.shape[0]
        logits: Tensor = answer.logits[0, :, : self.vocab_size].float()
        return logits

    # --- what this model can do ----------------------------------------------------------------

    @torch.inference_mode()
    def _probe(self, exact: bool) -> None:
        with self._capture.paused():
            found = settle(
                self,
                vocab=self.vocab_size,
                positions=self.max_positions,
                block=self.max_width,
                dtype=self.dtype,
                exact=exact,
            )
            self._fast, self.supports_cut, self.exactness = found.fast, found.cut, found.exactness
            self._fast_detail = found.detail
            self.embedding_scale = embedding_scale(
                Watched(
                    self._embedding,
                    self._head,
                    self._layers,
                    self.capture_layer_ids,
                    self.hidden_size,
                    self.dtype,
                    self.run_bare,
                    self._scores,
                )
            )
            self._check_state()
        log.info(
            "%s by transformers: rollback %s (%s), %s, exact %s (%s)",
            self.model_type,
            "fast" if found.fast else "by replay",
            found.detail,
            "one row at a time" if found.stepwise else "blocks",
            self.exactness.kind,
            self.exactness.detail,
        )

    def run(self, tokens: Tensor, base: int) -> Tensor:
        logits = self.verify_batch(SLOT, tokens, base, "all")
        assert logits is not None
        return logits

    def run_bare(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits
        return logits[0, :, : self.vocab_size].float()

    def _check_state(self) -> None:
        """No config states how large a recurrent state is: refuse here what will not fit."""
        tokens = torch.zeros(1, dtype=torch.int64)
        self.run(tokens, 0)
        size = self.caches.constant_bytes(SLOT)
        self.caches.reset(SLOT)
        left = available()
        if size * (self.slots + 1) > left.size:
            raise InsufficientMemory(
                f"recurrent state: {self.slots} slots and a copy take {size:,} bytes each; "
                f"{left.size:,} are left ({left.source})"
            )

    # --- embedding and head --------------------------------------------------------------------

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        rows = functional.embedding(tokens, self._embedding.weight)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def _scores(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self._head(hidden.to(self.dtype)).float() * self.logit_scale
        if self.logit_softcap:
            scores = self.logit_softcap * torch.tanh(scores / self.logit_softcap)
        return scores[:, : self.vocab_size]

    @torch.inference_mode()
    def project_hidden_to_tokens(self, hidden: Tensor) -> Tensor:
        return self._scores(hidden).argmax(dim=-1)

    @torch.inference_mode()
    def project_hidden_to_topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = self._scores(hidden)
        best, ids = scores.topk(k, dim=-1)
        return best - scores.logsumexp(dim=-1, keepdim=True), ids


class TransformersFamily(Family):
    """Whatever `transformers` can load from safetensors without foreign code."""

    model_types = (ANY,)

    def load(self, request: LoadRequest) -> NativeTarget:
        return TransformersTarget(request)


FAMILY: Final = TransformersFamily()
