"""The exported graph on the CPU, a layer at a time: ONNX Runtime holds the weights of one.

Its nodes are cut into segments of consecutive ones: the embedding, each layer, and the head. What
crosses a cut is an output of one session and an input of later ones. A segment runs all steps of
all cases before the next is loaded, since their tokens are given. An encoder beside it runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir
from numpy.typing import NDArray
from onnx_ir.analysis import analyze_implicit_usage

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import (
    CACHE_OUTPUTS,
    DECODE_INPUT,
    ENCODER_GRAPH_FILE,
    NEW_TOKENS_INPUT,
    STATE_OUTPUTS,
    cache_names,
    present_name,
    state_names,
)
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.model.packing import SOURCE_OUTPUT, encode_sources
from kvasir.model.platform.progress import Progress, no_progress, with_progress

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]  # by the graph's names

_GRAPH = onnx_ir.AttributeType.GRAPH
FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


class Step(NamedTuple):
    """A run that appends `sequence` tokens to each row of a case; row b then holds lengths[b].

    Rows shorter than `sequence` are padded on the right. wanted: indices into batch · sequence, of
    the tokens that want logits. decode: use the rows of running sequences, where prompts have rows
    of their own. rests: rows whose states stay as they are.
    """

    sequence: int
    lengths: Sequence[int]
    wanted: Sequence[int] = ()
    decode: bool = False
    rests: Sequence[int] = ()

    @property
    def positions(self) -> Ids:
        """The positions of its tokens [batch, sequence]."""
        starts = np.maximum(np.array(self.lengths) - self.sequence, 0)
        positions: Ids = starts[:, None] + np.arange(self.sequence)
        return positions

    def inputs(self, rows: Ids) -> Arrays:
        """Return the graph's inputs, without keys and values; rows: of the step's case."""
        n_new = np.minimum(np.array(self.lengths, dtype=np.int64), self.sequence)
        n_new[list(self.rests)] = 0
        return {
            "input_ids": np.take_along_axis(rows, self.positions, axis=1),
            "seqlens_k": np.array(self.lengths, dtype=np.int32) - 1,
            "total_sequence_length": np.array(max(self.lengths), dtype=np.int32),
            "position_ids": self.positions,
            "logits_indices": np.array(self.wanted, dtype=np.int64),
            NEW_TOKENS_INPUT: n_new,
            DECODE_INPUT: np.array(self.decode),
        }


class Case(NamedTuple):
    """Steps over rows of tokens [batch, n_positions], from empty keys and values.

    sources: the tokens of each row's, for a decoder with an encoder.
    """

    rows: Ids
    steps: Sequence[Step]
    sources: Sequence[Ids] = ()


class _Segment(NamedTuple):
    """Consecutive nodes of the graph, by the names of values.

    takes: of earlier segments, for itself or for later ones. hands_on: to later ones. results: the
    graph's outputs that it makes.
    """

    takes: list[str]
    hands_on: list[str]
    results: list[str]

    @property
    def makes(self) -> list[str]:
        """The values that it makes for later segments."""
        return [name for name in self.hands_on if name not in self.takes]


def open_stock(model: onnx.ModelProto, folder: Path) -> onnxruntime.InferenceSession:
    """Open a graph by ONNX Runtime's operators; folder: of its weights."""
    return open_cpu_session(model.SerializeToString(), entries={FOLDER_OPTION: folder})


class SegmentedGraph:
    """A graph of `export.graphs.decoder`, whose weights are read a segment at a time.

    opens: opens the segments, and an encoder.
    """

    def __init__(
        self,
        path: Path,
        config: TransformerConfig,
        opens: Callable[[onnx.ModelProto, Path], onnxruntime.InferenceSession] = open_stock,
    ) -> None:
        self._config, self._folder, self._opens = config, path.parent, opens
        self._encoder = path.with_name(ENCODER_GRAPH_FILE)
        self._model = onnx_ir.load(path)
        self._segments = _cut(self._model.graph)

    def logits(self, cases: Sequence[Case], progress: Progress = no_progress) -> Iterator[Floats]:
        """Run all cases, and then yield the logits [wanted, vocab] of each of their steps."""
        # What is still to be read in each step.
        given = self._encode(cases, progress)
        pending = [
            step.inputs(case.rows) | of_case
            for case, of_case in zip(cases, given, strict=True)
            for step in case.steps
        ]
        *layers, head = self._segments
        for segment in with_progress(layers, "computing in ONNX Runtime", progress):
            session, start = self._open(segment, pending), 0
            for case in cases:
                self._run(session, segment, case, pending[start : start + len(case.steps)])
                start += len(case.steps)
        session = self._open(head, pending)
        names = [value.name for value in session.get_inputs()]
        for arrays in pending:
            (logits,) = session.run(["logits"], {name: arrays[name] for name in names})
            yield logits

    def layers_alone(self, row: Ids, exact: Iterable[Floats]) -> Iterator[Floats]:
        """Yield what the embedding, and then each layer, makes of what PyTorch has made before it.

        exact: PyTorch's vectors [tokens, d_model] of the row after each. Layers decode. Raises
        ValueError where layers hand on other vectors too.
        """
        case = Case(row[None], [Step(len(row), [len(row)], decode=True)])
        (arrays,) = pending = [case.steps[0].inputs(case.rows)]
        for segment, vectors in zip(self._segments, exact, strict=False):
            self._run(self._open(segment, pending), segment, case, pending)
            made = [name for name in segment.hands_on if arrays[name].size == vectors.size]
            if len(made) != 1:
                raise ValueError("its layers hand on more than one vector a token: none is alone")
            yield arrays[made[0]].reshape(vectors.shape)
            arrays[made[0]] = vectors.reshape(arrays[made[0]].shape)

    def _encode(self, cases: Sequence[Case], progress: Progress) -> list[Arrays]:
        """Return what the decoder reads of the sources of each case."""
        if not any(case.sources for case in cases):
            return [{} for _ in cases]
        model = onnx.load(self._encoder, load_external_data=False)
        session, encoded = self._opens(model, self._folder), list[Arrays]()
        config = self._config
        names = cache_names(SOURCE_OUTPUT, config.n_source_layer)
        for case in with_progress(cases, "encoding in ONNX Runtime", progress):
            made = encode_sources(session, [source.tolist() for source in case.sources])
            lengths = np.array([len(source) for source in case.sources], dtype=np.int32)
            n_blocks, n_heads, _, head_dim = made[0][0].shape
            shape = (n_blocks, len(lengths), n_heads, lengths.max(), head_dim)
            rows = np.zeros(shape, dtype=np.float32)
            for i, (keys_values, _) in enumerate(made):
                rows[:, i, :, : lengths[i]] = keys_values
            arrays: Arrays = dict(zip(names, rows, strict=True))
            states = np.stack([of_source for _, of_source in made])
            if begin := state_names(config):  # parts that are alike
                arrays |= zip(begin, np.split(states, len(begin), axis=1), strict=True)
            arrays |= {"source_seqlens_k": lengths - 1}
            encoded.append(arrays | {"source_total_length": np.array(lengths.max())})
        return encoded

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        segment: _Segment,
        case: Case,
        pending: list[Arrays],
    ) -> None:
        """Run a case's steps; pending: what is to be read in each, which is brought up to date."""
        caches = _empty_caches(session, self._config, *case.rows.shape)
        if case.sources and (states := caches.get("past_states")):
            caches["past_states"] = {i: pending[0][f"past_states.{i}"] for i in states}
        inputs, makes = [value.name for value in session.get_inputs()], segment.makes
        for step, arrays in zip(case.steps, pending, strict=True):
            prompt = "prompt_key_values" in caches and not step.decode
            used = "prompt_key_values" if prompt else "past_key_values"
            feeds = arrays | {
                f"{kind}.{place}": array
                for kind, arrays_of_kind in caches.items()
                for place, array in arrays_of_kind.items()
            }
            kept = [
                (kind, place) for kind in (used, *STATE_OUTPUTS) for place in caches.get(kind, {})
            ]
            names = [*makes, *(present_name(f"{kind}.{place}") for kind, place in kept)]
            values = session.run(names, {name: feeds[name] for name in inputs})
            arrays.update(zip(makes, values, strict=False))
            for name in set(segment.takes) - set(segment.hands_on):
                del arrays[name]
            for (kind, place), value in zip(kept, values[len(makes) :], strict=True):
                caches[kind][place] = value
            if prompt:
                with np.errstate(invalid="ignore"):  # a NaN shows in the logits
                    caches["past_key_values"] = {
                        place: np.clip(np.rint(array), -127, 127).astype(np.int8)
                        for place, array in caches[used].items()
                    }

    def _open(self, segment: _Segment, pending: Sequence[Arrays]) -> onnxruntime.InferenceSession:
        """Open a session of a segment; pending: arrays that show its inputs' types."""
        graph = self._model.graph
        given: list[onnx_ir.Value | str] = [*graph.inputs, *segment.takes]
        part = onnx_ir.convenience.extract(graph, given, [*segment.makes, *segment.results])
        part.inputs[:] = [value for value in part.inputs if value.uses()]
        for value in part.inputs:
            if (name := str(value.name)) in segment.takes:
                _set_type(value, [arrays[name] for arrays in pending])
        model = onnx_ir.to_proto(onnx_ir.Model(part, ir_version=self._model.ir_version))
        return self._opens(model, self._folder)


def _cut(graph: onnx_ir.Graph) -> list[_Segment]:
    """Cut the nodes before each layer's keys or state and before the head, at the fewest values.

    A node that does not depend on tokens belongs to every segment that needs it.
    """
    captured = analyze_implicit_usage(graph)
    inputs = {str(value.name): value for value in graph.inputs}
    caches = {
        value: name.split(".")[1]
        for name, value in inputs.items()
        if name.partition(".")[0] in CACHE_OUTPUTS | STATE_OUTPUTS
    }
    begun = set[str]()  # layers
    of_tokens, of_choice = {inputs["input_ids"]}, {inputs["logits_indices"]}
    order: list[onnx_ir.Node] = []  # of the nodes that depend on tokens
    starts: list[int] = []  # of layers and of the head, in this order
    last_reader: dict[onnx_ir.Value, int] = {}
    for node in graph:
        parts = (part.as_graph() for part in node.attributes.values() if part.type == _GRAPH)
        reads = {value for value in node.inputs if value}.union(*(captured[part] for part in parts))
        if reads & of_tokens:
            begins = {caches[value] for value in reads & caches.keys()} - begun
            if begins or (reads & of_choice and not of_tokens & of_choice):
                starts.append(len(order))
                begun |= begins
            last_reader |= dict.fromkeys(reads, len(order))
            of_tokens.update(node.outputs)
            order.append(node)
        if reads & of_choice:
            of_choice.update(node.outputs)
    crossing, alive = list[list[str]](), list[onnx_ir.Value]()  # by the node after the cut
    for place, node in enumerate(order):
        crossing.append([str(value.name) for value in alive])
        alive = [
            value for value in (*alive, *node.outputs) if last_reader.get(value, place) > place
        ]
    # The last of the best: between two layers and not between the halves of one.
    cuts = [
        min(range(start, before, -1), key=lambda place: len(crossing[place]))
        for before, start in pairwise([0, *starts])
    ]
    results, segments = set(graph.outputs), list[_Segment]()
    for start, end in pairwise([0, *cuts, len(order)]):
        hands_on = crossing[end] if end < len(order) else []
        made = [value for node in order[start:end] for value in node.outputs]
        names = [str(value.name) for value in made if value in results]
        segments.append(_Segment(crossing[start], hands_on, names))
    return segments


def _set_type(value: onnx_ir.Value, arrays: Sequence[NDArray[Any]]) -> None:
    """Give a value the type of examples, with the sizes that they share."""
    axes = [set(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    shape = [
        sizes.pop() if len(sizes) == 1 else f"{value.name}.{axis}"
        for axis, sizes in enumerate(axes)
    ]
    value.dtype = onnx_ir.DataType.from_numpy(arrays[0].dtype)
    value.shape = onnx_ir.Shape(shape)


def _empty_caches(
    session: onnxruntime.InferenceSession, config: TransformerConfig, batch: int, n_positions: int
) -> dict[str, Arrays]:
    """Return the session's keys, values and states, by their kind and what follows in a name."""
    shape, caches = (batch, config.n_kv_head, n_positions, config.head_dim), dict[str, Arrays]()
    for value in session.get_inputs():
        kind, _, place = value.name.partition(".")
        if kind in CACHE_OUTPUTS:
            dtype = np.int8 if value.type == "tensor(int8)" else np.float32
            caches.setdefault(kind, {})[place] = np.zeros(shape, dtype)
        elif kind in STATE_OUTPUTS:
            of_state = np.zeros((batch, *value.shape[1:]), np.float32)
            caches.setdefault(kind, {})[place] = of_state
    return caches
