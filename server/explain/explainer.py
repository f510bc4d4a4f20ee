"""The session of attention.onnx, another graph over the weights file of the served model.

The encoder of an encoder-decoder runs first, in a session of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders

from kvasir.model.directory import (
    ATTENTION_GRAPH_FILE,
    ENCODER_GRAPH_FILE,
    HEAD_MASK_INPUT,
    LENS_OUTPUT,
    NEW_TOKENS_INPUT,
    ROWS_OUTPUT,
    STATE_OUTPUTS,
    ModelDirectory,
    cache_names,
    state_names,
)
from kvasir.model.packing import SOURCE_OUTPUT, encode_sources, pack
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters
from kvasir.server.errors import InvalidRequestError, NotFoundError
from kvasir.server.explain.explanation import (
    Explanation,
    Head,
    HeadValues,
    Questions,
    check_index,
    check_length,
    entropies_of,
)
from kvasir.server.explain.memory import Memory, measure_memory
from kvasir.server.explain.next_tokens import likeliest, measure_effect
from kvasir.server.text.detokenizer import token_name

# Outputs of each layer, which may lack the last two.
_PARTS = ("queries", "keys", "values", "bias", "sinks")
_OF_MEMORY = ("queries", "keys", "decays", "rates")  # of a recurrent layer, which may lack rates


def graph_path(model_dir: ModelDirectory) -> Path:
    """Return the path of attention.onnx. Raises NotFoundError if a model directory has none."""
    path = model_dir.path / ATTENTION_GRAPH_FILE
    if not path.is_file():
        how = "again" if model_dir.manifest.device == "cpu" else "for the CPU"
        cause = f"{model_dir.path.name} has no {ATTENTION_GRAPH_FILE}"
        raise NotFoundError(f"{cause}; export the model {how}")
    return path


class Explainer:
    """A session that returns attention weights. It holds the model's weights a second time.

    adapters: as the served graph reads them. Raises NotFoundError if the model directory has no
    attention.onnx.
    """

    def __init__(
        self,
        model_dir: ModelDirectory,
        threads: int | None = None,
        adapters: GraphAdapters | None = None,
    ) -> None:
        path = graph_path(model_dir)
        from kvasir.model.onnx.runtime import onnxruntime  # noqa: PLC0415  slow to import
        from kvasir.server.engine.session import open_session  # noqa: PLC0415  imports ONNX Runtime

        self._model_dir = model_dir
        threads = threads or usable_cpus()
        self.adapters, options = None, dict[str, Any]()
        if adapters is not None:
            self.adapters = adapters.of_another_graph()
            options = {"library": adapters.library, "adapters": self.adapters}
        self._session = open_session(path, threads, 0, **options)
        self._outputs = {value.name for value in self._session.get_outputs()}
        self._has_mask = any(value.name == HEAD_MASK_INPUT for value in self._session.get_inputs())
        self._only_asked = onnxruntime.RunOptions()
        self._only_asked.only_execute_path_to_fetches = True
        self._encoder = None
        if model_dir.config.encoder is not None:
            encoder = model_dir.path / ENCODER_GRAPH_FILE
            options |= {"of_sources": True, "fits_16_bits": model_dir.manifest.fits_16_bits}
            self._encoder = open_session(encoder, threads, 0, **options)

    def explain(
        self,
        text: str,
        layers: list[int],
        questions: Questions | None = None,
        *,
        target: str | None = None,
        adapter: Adapter | None = None,
    ) -> Explanation:
        """Explain a text, or a source and its target; see `explain_tokens`.

        Raises InvalidRequestError for a target that is missing, or too much, as well.
        """
        encode, config = self._model_dir.tokenizer.encode, self._model_dir.config
        token_ids = encode(text).ids
        if (target is None) is not (config.encoder is None):
            raise InvalidRequestError("an encoder-decoder needs a target, and no other model does")
        if target is None:
            return self.explain_tokens(token_ids, layers, questions=questions, adapter=adapter)
        target_ids = [*config.target_prefix, *encode(target, add_special_tokens=False).ids]
        return self.explain_tokens(target_ids, layers, token_ids, questions, adapter)

    def explain_tokens(
        self,
        token_ids: list[int],
        layers: list[int],
        source_ids: list[int] | None = None,
        questions: Questions | None = None,
        adapter: Adapter | None = None,
    ) -> Explanation:
        """Return the weights of some layers, and the answers to questions.

        Of an encoder-decoder the tokens are a target's, with those that begin it. adapter: as the
        engine or `adapters` has loaded it. Raises InvalidRequestError for no tokens, for a layer,
        head or position that does not exist, and for what only a newer attention.onnx answers;
        ContextLengthError for too many tokens.
        """
        config, tokenizer, n = self._model_dir.config, self._model_dir.tokenizer, len(token_ids)
        source_ids, asked = source_ids or [], questions or Questions()
        for layer in layers:
            check_index("layer", layer, config.n_layer)
        check_length(n, config, "text" if config.encoder is None else "target")
        asked.check(n, config)
        is_new = asked.without or asked.lens or asked.entropies or asked.values_of
        if is_new and not self._has_mask:
            raise InvalidRequestError(
                f"the model's {ATTENTION_GRAPH_FILE} is of an older Kvasir, which shows attention "
                "and next tokens only; export the model again"
            )
        if config.encoder is not None:
            check_length(len(source_ids), config.encoder)
        position = n - 1 if asked.position is None else asked.position
        if adapter is not None and self.adapters is not None:
            adapter = self.adapters.fitted(adapter)  # lives until the runs end
        inputs = self._inputs(token_ids, source_ids, position, adapter)
        outputs = self._run(self._names(layers, asked), inputs, asked.without)
        answers: dict[str, Any] = {}
        if "logits" in outputs:
            logits = outputs["logits"][0]
            answers["next_tokens"] = likeliest(tokenizer, logits, asked.top_k)
            if asked.without:
                (whole,) = self._run(["logits"], inputs, ())["logits"]
                answers["effect"] = measure_effect(tokenizer, logits, whole, asked.top_k)
        if asked.lens:
            of_layers = outputs[LENS_OUTPUT]
            answers["lens"] = [likeliest(tokenizer, logits, asked.lens) for logits in of_layers]
        if asked.entropies:
            answers["entropies"] = entropies_of(outputs.get(ROWS_OUTPUT), config)
        if asked.values_of is not None:
            answers["head_values"] = self._head_values(outputs, asked.values_of, n)
        return Explanation(
            token_ids,
            [_name(tokenizer, token_id) for token_id in token_ids],
            {i: outputs[of][0, :, :n, :n] for i in layers if (of := f"attention.{i}") in outputs},
            answers.pop("next_tokens", []),
            source_ids,
            [_name(tokenizer, token_id) for token_id in source_ids],
            {i: outputs[name][0] for i in layers if (name := f"source_attention.{i}") in outputs},
            memories={i: self._memory(outputs, i) for i in layers if f"decays.{i}" in outputs},
            **answers,
        )

    def _names(self, layers: list[int], asked: Questions) -> list[str]:
        """Return the outputs that answer questions."""
        config = self._model_dir.config
        of_layers = (f"{part}.{i}" for i in layers for part in self._shown(i))
        names = [name for name in of_layers if name in self._outputs]
        of_sources = (f"source_attention.{layer}" for layer in layers)
        names += [name for name in of_sources if name in self._outputs]
        if config.pooling is None and asked.top_k:
            names.append("logits")
        if asked.lens:
            names.append(LENS_OUTPUT)
        if asked.entropies and config.n_attention_layer:
            names.append(ROWS_OUTPUT)
        if asked.values_of is not None:
            of_layer = (f"{part}.{asked.values_of.layer}" for part in _PARTS)
            names += [name for name in of_layer if name in self._outputs]
        return names

    def _shown(self, layer: int) -> tuple[str, ...]:
        return ("attention",) if self._model_dir.config.attends(layer) else _OF_MEMORY

    def _memory(self, outputs: dict[str, NDArray[Any]], layer: int) -> Memory:
        parts = (outputs.get(f"{part}.{layer}") for part in _OF_MEMORY)
        n_head = self._model_dir.config.heads_of(layer)
        return measure_memory(n_head, *(part[0] for part in parts if part is not None))

    def _inputs(
        self,
        token_ids: list[int],
        source_ids: list[int],
        position: int,
        adapter: Adapter | None,
    ) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs but for the mask."""
        config, n = self._model_dir.config, len(token_ids)
        if config.pooling is not None:  # one token has another beside it
            packed = pack([token_ids], None if config.n_token_types is None else [None])[0]
            return packed | self._of_adapter(adapter, np.array([n]))
        return {
            "input_ids": np.array([token_ids], dtype=np.int64),
            "position_ids": np.arange(n)[None],
            "seqlens_k": np.array([n - 1], dtype=np.int32),
            "total_sequence_length": np.array(n, dtype=np.int32),
            "logits_indices": np.array([position]),
            **self._states(n),
            **self._of_adapter(adapter),
            **self._read(source_ids, adapter),
        }

    def _of_adapter(
        self, adapter: Adapter | None, counts: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return an adapter's inputs. counts: of packed tokens."""
        return {} if self.adapters is None else self.adapters.inputs([adapter], counts)

    def _run(
        self, names: list[str], inputs: dict[str, NDArray[Any]], without: Iterable[Head]
    ) -> dict[str, NDArray[Any]]:
        """Return outputs by name, of a model without some heads."""
        if not names:  # ONNX Runtime would return all outputs
            return {}
        config = self._model_dir.config
        if self._has_mask:
            n_head = max(config.heads_of(layer) for layer in range(config.n_layer))
            mask = np.ones((config.n_layer, n_head, 1), dtype=np.float32)
            for layer, head in without:
                mask[layer, head] = 0.0
            inputs = inputs | {HEAD_MASK_INPUT: mask}
        return dict(zip(names, self._session.run(names, inputs, self._only_asked), strict=True))

    def _head_values(self, outputs: dict[str, NDArray[Any]], place: Head, n: int) -> HeadValues:
        """Return what one head computes, from a layer's outputs."""
        config, (layer, head) = self._model_dir.config, place
        queries, keys, values = (outputs[f"{part}.{layer}"] for part in _PARTS[:3])
        shared = head // config.n_groups
        # queries: [1, n, (n_head + 2 n_kv_head) · head_dim]; keys, values: [1, n_kv_head, n, …]
        query = queries[0, :n].reshape(n, -1, config.head_dim)[:, head]
        if config.pooling is None:  # the weights that make queries hold attention's scale
            query = query / np.float32(config.query_scale)
        key, value = keys[0, shared, :n], values[0, shared, :n]
        sinks, scores = outputs.get(f"sinks.{layer}"), query @ key.T
        sink, own = None if sinks is None else float(sinks[head]), None
        if config.position == "alibi" or config.has_relative_bias:  # else it is an encoder's window
            bias = outputs[f"bias.{layer}"][0, head, :n, :n]
            own = np.where(np.isfinite(bias), bias, np.float32(0))
        return HeadValues(
            layer, head, config.query_scale, query, key, value, scores, bias=own, sink=sink
        )

    def _states(self, n: int) -> dict[str, NDArray[Any]]:
        """Return the states before a text of n tokens, and its length, if the graph has states."""
        config, (past,) = self._model_dir.config, STATE_OUTPUTS
        if config.recurrence is None:
            return {}
        states: dict[str, NDArray[Any]] = {
            f"{past}.{layer}.{part}": np.zeros((1, *shape), dtype=np.float32)
            for layer in config.recurrent_layers
            for part, shape in config.states.items()
        }
        return states | {NEW_TOKENS_INPUT: np.array([n])}

    def _read(self, source_ids: list[int], adapter: Adapter | None) -> dict[str, NDArray[Any]]:
        """Return the decoder's inputs for a source; none without an encoder."""
        if self._encoder is None:
            return {}
        of_adapter = self._of_adapter(adapter, np.array([len(source_ids)]))
        ((keys_values, states),) = encode_sources(self._encoder, [source_ids], of_adapter)
        blocks, begin = keys_values[:, None], state_names(self._model_dir.config)
        names = cache_names(SOURCE_OUTPUT, len(blocks) // 2)
        made = dict(zip(names, map(np.ascontiguousarray, blocks), strict=True))
        if begin:  # parts that are alike
            made |= zip(begin, np.split(states[None], len(begin), axis=1), strict=True)
            n = len(source_ids)
            lengths = np.array([n - 1], dtype=np.int32), np.array(n, dtype=np.int32)
            given = zip(("source_seqlens_k", "source_total_length"), lengths, strict=True)
            wanted = {value.name for value in self._session.get_inputs()}
            made |= {name: value for name, value in given if name in wanted}
        return made


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Name a token. WordPiece's own names tell which continue a word: those after ##."""
    if isinstance(tokenizer.decoder, decoders.WordPiece):
        return str(tokenizer.id_to_token(token_id))
    return token_name(tokenizer, token_id)
