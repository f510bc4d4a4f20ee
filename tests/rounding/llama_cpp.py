"""llama.cpp's own formats: it rounds a run's model and computes its logits, through its C library.

The library is that of the package node-llama-cpp. Structs are only as much of llama.h as is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_byte, c_char_p, c_float, c_int8, c_int32, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from kvasir.export.verification.segments import Case, Floats, Ids
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.progress import Progress
from kvasir.model.presets import PRESETS
from tests.kit.gguf_files import write_gguf

FORMATS = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama_ftype
_LLAMA = PRESETS["tiny"]
_SIZES = (
    *("vocab_size", "max_model_len", "n_layer", "n_head", "n_kv_head", "head_dim", "d_model"),
    *("d_ff", "rope_theta", "norm_eps", "tied_embeddings", "bos_token_id", "eos_token_ids"),
)


class _Options(Structure):
    """Any struct of options, of which the first words are set; llama.cpp reads what it knows."""

    _fields_ = [("words", c_int32 * 12), ("rest", c_byte * 464)]


class _Batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


def write_model(network: Transformer, file: Path) -> None:
    """Write a decoder of Llama's layout as a GGUF file in float32. Raises ValueError for others."""
    config = network.config
    odd = [
        field
        for field, value in asdict(config).items()
        if field not in _SIZES and value != getattr(_LLAMA, field)
    ]
    if odd:
        raise ValueError(f"not of Llama's layout: {', '.join(odd)}")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    ours, values = network.state_dict(), config.n_kv_head * config.head_dim
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["embedding.weight" if config.tied_embeddings else "head.weight"],
    }
    for i in range(config.n_layer):
        block, layer = f"blocks.{i}", f"model.layers.{i}"
        query, key, value = ours[f"{block}.attention.qkv.weight"].split(
            [config.n_head * config.head_dim, values, values]
        )
        gate, up = ours[f"{block}.feed_forward.up.weight"].chunk(2)
        theirs |= {
            f"{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": ours[f"{block}.attention_norm.weight"],
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.o_proj": ours[f"{block}.attention.output.weight"],
                "post_attention_layernorm": ours[f"{block}.feed_forward_norm.weight"],
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": ours[f"{block}.feed_forward.down.weight"],
            }.items()
        }
    llama.load_state_dict(theirs)
    write_gguf(file, llama)


class LlamaCpp:
    """The library in a folder."""

    def __init__(self, folder: Path) -> None:
        (llama,), (ggml,) = folder.glob("libllama.v*.so"), folder.glob("libggml.v*.so")
        ctypes.CDLL(str(ggml)).ggml_backend_load_all_from_path(c_char_p(str(folder).encode()))
        self._library: Any = ctypes.CDLL(str(llama))
        self._quiet = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
        self._library.llama_log_set(self._quiet, None)
        self._library.llama_backend_init()
        for name in ("model_quantize", "model", "context"):
            self._function(f"{name}_default_params").restype = _Options
        for name, result, *arguments in (
            ("model_load_from_file", c_void_p, c_char_p, _Options),
            ("init_from_model", c_void_p, c_void_p, _Options),
            ("get_logits", POINTER(c_float), c_void_p),
            ("decode", c_int32, c_void_p, _Batch),
            ("batch_init", _Batch, c_int32, c_int32, c_int32),
            ("batch_free", None, _Batch),
            ("free", None, c_void_p),
            ("model_free", None, c_void_p),
        ):
            self._function(name).restype = result
            self._function(name).argtypes = arguments

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"llama_{name}")

    def quantize(self, file: Path, out: Path, kind: str) -> None:
        """Write a GGUF file in one of FORMATS, without an importance matrix."""
        options = self._function("model_quantize_default_params")()
        options.words[1] = FORMATS[kind]
        paths = (c_char_p(str(path).encode()) for path in (file, out))
        if self._function("model_quantize")(*paths, byref(options)):
            raise ValueError(f"llama.cpp cannot write {file} in {kind}")

    def logits(self, file: Path, rows: Sequence[Ids], vocab_size: int) -> list[Floats]:
        """Return logits [tokens, vocab] of each row, with its defaults: keys in float16."""
        model = self._function("model_load_from_file")(
            str(file).encode(), self._function("model_default_params")()
        )
        assert model, f"llama.cpp cannot load {file}"
        result = [self._of_row(model, row, vocab_size) for row in rows]
        self._function("model_free")(model)
        return result

    def _of_row(self, model: int, row: Ids, vocab_size: int) -> Floats:
        options, n = self._function("context_default_params")(), len(row)
        options.words[:3] = [n, n, n]  # n_ctx, n_batch, n_ubatch
        context = self._function("init_from_model")(model, options)
        batch = self._function("batch_init")(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(row.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        failed = self._function("decode")(context, batch)
        assert not failed, f"llama.cpp cannot compute {n} tokens"
        logits = self._function("get_logits")(context)
        copied: Floats = np.ctypeslib.as_array(logits, (n, vocab_size)).copy()
        self._function("batch_free")(batch)
        self._function("free")(context)
        return copied


class GgufRun:
    """A GGUF file for `Verifier.verify`: logits of the same steps."""

    def __init__(self, library: LlamaCpp, file: Path, vocab_size: int) -> None:
        self._library, self._file, self._vocab_size = library, file, vocab_size

    def logits(self, cases: Sequence[Case], progress: Progress) -> Iterator[Floats]:
        """Yield the logits [wanted, vocab] of each step of all cases."""
        for done, case in enumerate(cases, 1):
            ends = np.max([step.lengths for step in case.steps], axis=0)
            rows = [row[:end] for row, end in zip(case.rows, ends, strict=True)]
            of_rows = self._library.logits(self._file, rows, self._vocab_size)
            for step in case.steps:
                places = np.divmod(np.array(step.wanted, dtype=np.int64), step.sequence)
                wanted = [of_rows[i][step.positions[i, j]] for i, j in zip(*places, strict=True)]
                yield np.array(wanted, dtype=np.float32).reshape(-1, self._vocab_size)
            progress("computing in llama.cpp", done, len(cases))
