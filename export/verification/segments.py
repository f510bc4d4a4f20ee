"""The exported graph on the CPU, a layer at a time: ONNX Runtime holds the weights of one.

Its nodes are cut into segments of consecutive ones: the embedding, each layer, and the head. What
crosses a cut is an output of one session and an input of later ones. A segment runs all steps of
all cases before the next is loaded, since their tokens are given. An encoder beside it runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.helper import make_tensor_value_info, np_dtype_to_tensor_dtype

from kvasir.model.bundle import CACHE_OUTPUTS, DECODE_INPUT, ENCODER_GRAPH_FILE, cache_names
from kvasir.model.config import TransformerConfig
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.model.packing import SOURCE_OUTPUT, pack
from kvasir.model.progress import Progress, followed, unheard

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]  # by the graph's names

_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


class Step(NamedTuple):
    """A run that appends `sequence` tokens to each row of a case; row b then holds lengths[b].

    Rows shorter than `sequence` are padded on the right. wanted: indices into batch · sequence, of
    the tokens that want logits. decode: use the rows of running sequences, where prompts have rows
    of their own.
    """

    sequence: int
    lengths: Sequence[int]
    wanted: Sequence[int] = ()
    decode: bool = False

    @property
    def positions(self) -> Ids:
        """The positions of its tokens [batch, sequence]."""
        starts = np.maximum(np.array(self.lengths) - self.sequence, 0)
        positions: Ids = starts[:, None] + np.arange(self.sequence)
        return positions

    def inputs(self, rows: Ids) -> Arrays:
        """Return the graph's inputs, without keys and values; rows: of the step's case."""
        return {
            "input_ids": np.take_along_axis(rows, self.positions, axis=1),
            "seqlens_k": np.array(self.lengths, dtype=np.int32) - 1,
            "total_sequence_length": np.array(max(self.lengths), dtype=np.int32),
            "position_ids": self.positions,
            "logits_indices": np.array(self.wanted, dtype=np.int64),
            DECODE_INPUT: np.array(self.decode),
        }


class Case(NamedTuple):
    """Steps over rows of tokens [batch, n_positions], from empty keys and values.

    sources: the tokens of each row's, for a decoder with an encoder.
    """

    rows: Ids
    steps: Sequence[Step]
    sources: Sequence[Ids] = ()


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive nodes of the graph.

    takes: the inputs of the graph and the values of earlier segments that they read. makes: their
    values that later segments read. read_later: all that these read.
    """

    nodes: list[onnx.NodeProto]
    takes: list[str]
    makes: list[str]
    read_later: frozenset[str]


class SegmentedGraph:
    """A graph of `export.graph`, whose weights are read a segment at a time."""

    def __init__(self, path: Path, config: TransformerConfig) -> None:
        self._config, self._folder = config, path.parent
        self._encoder = path.with_name(ENCODER_GRAPH_FILE)
        self._model = onnx.load(path, load_external_data=False)
        self._segments = _cut(self._model.graph)

    def logits(self, cases: Sequence[Case], progress: Progress = unheard) -> Iterator[Floats]:
        """Run all cases, and then yield the logits [wanted, vocab] of each of their steps."""
        # What is still to be read in each step.
        given = self._encode(cases, progress)
        pending = [
            step.inputs(case.rows) | of_case
            for case, of_case in zip(cases, given, strict=True)
            for step in case.steps
        ]
        *layers, head = self._segments
        for segment in followed(layers, "computing in ONNX Runtime", progress):
            session, start = self._open(segment, pending), 0
            for case in cases:
                self._run(session, segment, case, pending[start : start + len(case.steps)])
                start += len(case.steps)
        session = self._open(head, pending)
        for arrays in pending:
            (logits,) = session.run(["logits"], {name: arrays[name] for name in head.takes})
            yield logits

    def _encode(self, cases: Sequence[Case], progress: Progress) -> list[Arrays]:
        """Return what the decoder reads of the sources of each case."""
        if not any(case.sources for case in cases):
            return [{} for _ in cases]
        session, found = open_cpu_session(self._encoder), list[Arrays]()
        names = cache_names(SOURCE_OUTPUT, self._config.n_layer)
        for case in followed(cases, "encoding in ONNX Runtime", progress):
            inputs, ends = pack([source.tolist() for source in case.sources])
            (made,) = session.run([SOURCE_OUTPUT], inputs)
            lengths = np.diff(ends, prepend=0).astype(np.int32)
            _, n_blocks, n_heads, head_dim = made.shape
            shape = (n_blocks, len(lengths), n_heads, lengths.max(), head_dim)
            rows = np.zeros(shape, dtype=np.float32)
            for i, of_source in enumerate(np.split(made, ends)[: len(lengths)]):
                rows[:, i, :, : lengths[i]] = of_source.transpose(1, 2, 0, 3)
            arrays: Arrays = dict(zip(names, rows, strict=True))
            arrays |= {"source_seqlens_k": lengths - 1}
            found.append(arrays | {"source_total_length": np.array(lengths.max())})
        return found

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        segment: _Segment,
        case: Case,
        pending: list[Arrays],
    ) -> None:
        """Run a case's steps; pending: what is to be read in each, which is brought up to date."""
        caches = _empty_caches(session, self._config, *case.rows.shape)
        for step, arrays in zip(case.steps, pending, strict=True):
            prompt = "prompt_key_values" in caches and not step.decode
            used = "prompt_key_values" if prompt else "past_key_values"
            past = {
                f"{kind}.{place}": array
                for kind, arrays_of_kind in caches.items()
                for place, array in arrays_of_kind.items()
            }
            feeds = arrays | past
            places = list(caches.get(used, {}))
            presents = [f"{CACHE_OUTPUTS[used]}.{place}" for place in places]
            names = [*segment.makes, *presents]
            values = session.run(names, {name: feeds[name] for name in segment.takes})
            arrays.update(zip(segment.makes, values, strict=False))
            for name in arrays.keys() - segment.read_later:
                del arrays[name]
            rows = dict(zip(places, values[len(segment.makes) :], strict=True))
            if rows:
                caches[used] = rows
            if prompt:
                with np.errstate(invalid="ignore"):  # a NaN shows in the logits
                    caches["past_key_values"] = {
                        place: np.clip(np.rint(array), -127, 127).astype(np.int8)
                        for place, array in rows.items()
                    }

    def _open(self, segment: _Segment, pending: Sequence[Arrays]) -> onnxruntime.InferenceSession:
        """Open a session of a segment; pending: arrays that show its inputs' types."""
        model, whole = onnx.ModelProto(), self._model
        model.ir_version = whole.ir_version
        model.opset_import.extend(whole.opset_import)
        model.functions.extend(whole.functions)
        graph, reads = model.graph, set[str]().union(*map(_reads, segment.nodes))
        graph.name = whole.graph.name
        graph.node.extend(segment.nodes)
        graph.initializer.extend(of for of in whole.graph.initializer if of.name in reads)
        inputs = {value.name: value for value in whole.graph.input}
        for name in segment.takes:
            graph.input.append(
                inputs.get(name) or _value_info(name, [arrays[name] for arrays in pending])
            )
        made = {name for node in segment.nodes for name in node.output}
        graph.output.extend(of for of in whole.graph.output if of.name in made)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in segment.makes)
        entries = {_FOLDER_OPTION: self._folder}
        return open_cpu_session(model.SerializeToString(), entries=entries)


def _cut(graph: onnx.GraphProto) -> list[_Segment]:
    """Cut the nodes before each attention and before the head, where the fewest values cross.

    A node that does not depend on tokens belongs to every segment that needs it.
    """
    nodes, reads = list(graph.node), [_reads(node) for node in graph.node]
    given = {value.name for value in graph.input}
    caches = {name for name in given if name.partition(".")[0] in CACHE_OUTPUTS}
    of_tokens, of_choice = {"input_ids"}, {"logits_indices"}
    makers: dict[str, int] = {}  # the nodes that do not depend on tokens, by their values
    order: list[int] = []  # the others
    starts: list[int] = []  # of attentions and of the head, in this order
    for i, node in enumerate(nodes):
        if reads[i] & of_tokens:
            if reads[i] & caches or (reads[i] & of_choice and not of_tokens & of_choice):
                starts.append(len(order))
            of_tokens.update(node.output)
            order.append(i)
        else:
            makers |= dict.fromkeys(node.output, i)
        if reads[i] & of_choice:
            of_choice.update(node.output)
    last_reader = {name: place for place, i in enumerate(order) for name in reads[i]}
    n_crossing = np.zeros(len(order) + 1, dtype=np.int64)  # by the place of the node after the cut
    for place, i in enumerate(order):
        for name in nodes[i].output:
            n_crossing[place + 1 : last_reader.get(name, place) + 1] += 1
    cuts = [0]
    for before, start in pairwise([0, *starts]):
        # The last of the best: between two layers and not between the halves of one.
        places = np.arange(start, before, -1)
        cuts.append(int(places[n_crossing[places].argmin()]))
    parts = [_with_makers(order[a:b], reads, makers) for a, b in pairwise([*cuts, len(order)])]
    segments: list[_Segment] = []
    read_later: set[str] = set()
    weights = {tensor.name for tensor in graph.initializer}
    for part in reversed(parts):
        made = [name for i in part for name in nodes[i].output]
        takes = set[str]().union(*(reads[i] for i in part)) - weights - set(made)
        makes = [name for name in made if name in read_later]
        content = [nodes[i] for i in part]
        segments.append(_Segment(content, sorted(takes), makes, frozenset(read_later)))
        read_later |= takes
    return segments[::-1]


def _with_makers(
    part: Sequence[int], reads: Sequence[set[str]], makers: Mapping[str, int]
) -> list[int]:
    """Return nodes and, transitively, the makers of what they read, in the graph's order."""
    found, missing = set(part), list(part)
    while missing:
        needed = {makers[name] for name in reads[missing.pop()] & makers.keys()} - found
        found |= needed
        missing += needed
    return sorted(found)


def _reads(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node reads, those of its branches included."""
    found = set(node.input) - {""}
    for attribute in node.attribute:
        if attribute.HasField("g"):
            branch = attribute.g
            inner = {name for one in branch.node for name in one.output}
            found |= set[str]().union(*map(_reads, branch.node)) - inner
    return found


def _value_info(name: str, arrays: Sequence[NDArray[Any]]) -> onnx.ValueInfoProto:
    """Return the type of a value of which there are examples, with the sizes that they share."""
    sizes = [set(of) for of in zip(*(array.shape for array in arrays), strict=True)]
    shape = [of.pop() if len(of) == 1 else f"{name}.{axis}" for axis, of in enumerate(sizes)]
    return make_tensor_value_info(name, np_dtype_to_tensor_dtype(arrays[0].dtype), shape)


def _empty_caches(
    session: onnxruntime.InferenceSession, config: TransformerConfig, batch: int, n_positions: int
) -> dict[str, Arrays]:
    """Return the session's rows of keys and values, by CACHE_OUTPUTS and what follows in a name."""
    shape, caches = (batch, config.n_kv_head, n_positions, config.head_dim), dict[str, Arrays]()
    for value in session.get_inputs():
        kind, _, place = value.name.partition(".")
        if kind in CACHE_OUTPUTS:
            dtype = np.int8 if value.type == "tensor(int8)" else np.float32
            caches.setdefault(kind, {})[place] = np.zeros(shape, dtype)
    return caches
