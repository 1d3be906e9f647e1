"""Tiny GGUF files, written with the format's own library."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from launch.gguf_tokenizer import byte_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "i n", "Ġ Ġ", "ĠĠ ĠĠ", "Ã ©")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = 2


def byte_level_vocabulary():
    """Special tokens, the 256 bytes, and one token per merge."""
    tokens = list(SPECIAL) + list(byte_alphabet().values())
    tokens += [merge.replace(" ", "") for merge in MERGES]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    return tokens, kinds


def sentencepiece_vocabulary():
    """Three control tokens, the bytes, and pieces with scores from which merges follow."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "el", "lo", "▁hel", "▁hello", "▁w"]
    pieces += ["or", "▁wor", "ld", "▁world", "1", "2", "3", "ol", "he", "ll"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(index // 2) for index in range(len(pieces))]
    return tokens, kinds, scores


@dataclass
class TinyGGUF:
    """What to write; `extra` are raw metadata of the architecture, `tensors` replace or add."""

    arch: str = "llama"
    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = True
    biases: tuple[str, ...] = ()
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0
    pre: str = "smollm"
    tokenizer: str = "gpt2"
    add_bos: bool | None = False
    template: str | None = TEMPLATE
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.arch)
        tokens = self._tokens(writer)
        self._metadata(writer)
        for name, values in (self._weights(len(tokens)) | self.tensors).items():
            if values is None:
                continue
            if values.ndim == 1:
                writer.add_tensor(name, values)
            else:
                packed = quantize(values, self.kind)
                writer.add_tensor(name, packed, raw_dtype=self.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tokens(self, writer):
        if self.tokenizer == "llama":
            tokens, kinds, scores = sentencepiece_vocabulary()
            writer.add_token_scores(scores)
        else:
            tokens, kinds = byte_level_vocabulary()
            writer.add_token_merges(list(MERGES))
            writer.add_tokenizer_pre(self.pre)
        writer.add_tokenizer_model(self.tokenizer)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(EOS)
        writer.add_unk_token_id(0)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)
        return tokens

    def _metadata(self, writer):
        writer.add_block_count(self.layers)
        writer.add_context_length(128)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        if self.arch == "llama":
            writer.add_rope_dimension_count(self.head_dim)
        else:
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        for key, value in {f"{self.arch}.{k}": v for k, v in self.extra.items()}.items():
            self._add(writer, key, value)
        for key, value in self.raw.items():
            self._add(writer, key, value)

    @staticmethod
    def _add(writer, key, value):
        adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        adder = adders.get(type(value), writer.add_array)
        writer.kv_data[0].pop(key, None)
        adder(key, value)

    def _weights(self, vocab):
        rng = np.random.default_rng(self.seed)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"token_embd.weight": (vocab, self.hidden), "output_norm.weight": (self.hidden,)}
        if not self.tied:
            shapes["output.weight"] = (vocab, self.hidden)
        for index in range(self.layers):
            block = {
                "attn_norm.weight": (self.hidden,),
                "attn_q.weight": (queries, self.hidden),
                "attn_k.weight": (keys, self.hidden),
                "attn_v.weight": (keys, self.hidden),
                "attn_output.weight": (self.hidden, queries),
                "ffn_norm.weight": (self.hidden,),
                "ffn_gate.weight": (self.inner, self.hidden),
                "ffn_up.weight": (self.inner, self.hidden),
                "ffn_down.weight": (self.hidden, self.inner),
            }
            sizes = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": self.hidden}
            block |= {f"{name}.bias": (sizes[name],) for name in self.biases}
            if self.arch == "qwen3":
                block |= {f"attn_{x}_norm.weight": (self.head_dim,) for x in "qk"}
            shapes |= {f"blk.{index}.{name}": shape for name, shape in block.items()}
        return {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
