"""The operators of the domain `kvasir` in NumPy: slow, obvious, and without their order of sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kvasir.export.rewrite import MICROSOFT
from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import DOMAIN, parts
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session

Floats = NDArray[np.float32]
# Operators that ONNX Runtime computes, by domain; ONNX's GatherElements stops at 64 elements.
_STOCK = {"GatherElements": ""}
_STOCK |= dict.fromkeys(("GroupQueryAttention", "MatMulIntegerToFloat"), MICROSOFT)
_STOCK |= dict.fromkeys(("MatMulNBits", "QMoE"), MICROSOFT)
# The first input that is a weight, of operators that round activations, or add exactly, only
# beside constants.
_WEIGHTS = {"MatMulIntegerToFloat": 1, "MatMulNBits": 1, "QMoE": 2}


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float32)


def _gelu(x: Floats) -> Floats:
    halves = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))
    return np.asarray(x * (0.5 + 0.5 * halves), dtype=np.float32)


def _gelu_tanh(x: Floats) -> Floats:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
    return np.asarray(x * (0.5 + 0.5 * np.tanh(inner)), dtype=np.float32)


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "": lambda x: x,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "exp": np.exp,
    "softplus": lambda x: np.logaddexp(np.float32(0), x),
}


def prepare(
    x: Floats,
    weight: Floats | None,
    bias: Floats | None,
    *,
    activation: str,
    gated: int,
    norm: str,
    epsilon: float,
) -> Floats:
    """Return what is rounded: x [..., n_in], or [..., 2 n_in], after activation, gate and norm."""
    gate, *up = np.split(x, 2, axis=-1) if gated else [x]
    y = ACTIVATIONS[activation](gate)
    for half in up:
        y = y * half
    if norm:
        centred = y.astype(np.float64)
        if norm == "layer":
            centred -= centred.mean(axis=-1, keepdims=True)
        mean_square = (centred**2).mean(axis=-1, keepdims=True)
        y = (centred / np.sqrt(mean_square + epsilon)).astype(np.float32)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return y


def round_rows(y: Floats, block: int) -> tuple[NDArray[np.int64], Floats]:
    """Return integers [..., blocks, block] and scales [..., blocks]; zeros have no scale."""
    width = block or y.shape[-1]
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // width, width)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scales > 0, np.rint(blocks * (1 / scales)), 0)
    return np.clip(steps, -127, 127).astype(np.int64), scales[..., 0]


def mix(y: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of the eight parts of each row, of which signs are those of bits."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)]
    parts = y.reshape(*y.shape[:-1], 8, -1)
    mixed: NDArray[Any] = np.einsum("ij,...jk->...ik", np.array(signs, dtype=y.dtype), parts)
    return mixed.reshape(y.shape)


class Linear(OpRun):
    """int8 weights [n_in, n_out], or [n_out, n_in] if transposed."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Floats,
        weight: NDArray[np.int8],
        scales: Floats,
        bias: Floats | None = None,
        norm_weight: Floats | None = None,
        norm_bias: Floats | None = None,
        residual: Floats | None = None,
        *,
        transposed: int,
        block: int,
        mixed: int,
        **attributes: Any,
    ) -> tuple[Floats]:
        y = prepare(x, norm_weight, norm_bias, **attributes)
        y = mix(y) if mixed else y
        matrix = (weight.T if transposed else weight).astype(np.int64)
        steps, of_rows = round_rows(y, block)
        blocks = matrix.reshape(*steps.shape[-2:], -1)  # [blocks, block, n_out]
        sums = np.einsum("...bi,bio->...bo", steps, blocks)
        out = (sums * of_rows[..., None]).sum(axis=-2) * scales
        return (_finish(out, bias, residual),)


class Linear4(OpRun):
    """Weights of 4 bits in blocks of 32: [n_out, blocks, 16], the low half of a byte first."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Floats,
        weight: NDArray[np.uint8],
        scales: Floats,
        bias: Floats | None = None,
        norm_weight: Floats | None = None,
        norm_bias: Floats | None = None,
        residual: Floats | None = None,
        **attributes: Any,
    ) -> tuple[Floats]:
        y = prepare(x, norm_weight, norm_bias, **attributes)
        n_out, n_blocks, n_bytes = weight.shape
        halves = np.stack((weight & 15, weight >> 4), axis=-1).astype(np.int64) - 8
        steps, of_rows = round_rows(y, 2 * n_bytes)
        sums = np.einsum("...bi,obi->...bo", steps, halves.reshape(n_out, n_blocks, -1))
        of_columns = scales.reshape(n_out, n_blocks).T  # [blocks, n_out]
        return (_finish((sums * of_rows[..., None] * of_columns).sum(axis=-2), bias, residual),)


class Linear32(OpRun):
    """Weights of floats [n_in, n_out], or [n_out, n_in] if transposed; nothing is rounded."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Floats,
        weight: Floats,
        scales: None = None,
        bias: Floats | None = None,
        norm_weight: Floats | None = None,
        norm_bias: Floats | None = None,
        residual: Floats | None = None,
        *,
        transposed: int,
        mixed: int,
        **attributes: Any,
    ) -> tuple[Floats]:
        assert (scales, mixed) == (None, 0)
        y = prepare(x, norm_weight, norm_bias, **attributes)
        return (_finish(y @ (weight.T if transposed else weight), bias, residual),)


class Norm(OpRun):
    """A norm over the last axis."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Floats,
        weight: Floats | None = None,
        bias: Floats | None = None,
        *,
        norm: str,
        epsilon: float = 0.0,
    ) -> tuple[Floats]:
        if norm == "softmax":
            shares = np.exp(x - x.max(axis=-1, keepdims=True))
            return (shares / shares.sum(axis=-1, keepdims=True),)
        if norm == "l2":
            return (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), epsilon),)
        options: dict[str, Any] = {"activation": "", "gated": 0, "norm": norm, "epsilon": epsilon}
        return (prepare(x, weight, bias, **options),)


class Activation(OpRun):
    """A function of each number."""

    op_domain = DOMAIN

    def _run(self, x: Floats, *, activation: str) -> tuple[Floats]:
        return (ACTIVATIONS[activation](x),)


class TextAttention(OpRun):
    """Texts one behind the other, each of which attends to itself; nothing is rounded."""

    op_domain = DOMAIN

    def _run(
        self,
        qkv: Floats,
        starts: NDArray[np.int32],
        cos: Floats | None = None,
        sin: Floats | None = None,
        biases: Floats | None = None,
        sinks: Floats | None = None,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        softcap: float,
        window: int,
        looks_ahead: int,
        interleaved: int,
    ) -> tuple[Floats]:
        assert (softcap, interleaved, sinks) == (0.0, 0, None)
        texts = []
        for start, end in itertools.pairwise(starts):
            if (length := end - start) == 0:
                continue
            x = qkv[start:end].astype(np.float64).reshape(length, heads + 2 * kv_heads, -1)
            x = x.swapaxes(0, 1)  # [heads, length, head_dim]
            if cos is not None and sin is not None:
                left, right = np.split(x[: heads + kv_heads], 2, axis=-1)
                c, s = cos[:length], sin[:length]
                turned = np.concatenate((left * c - right * s, right * c + left * s), axis=-1)
                x = np.concatenate((turned, x[heads + kv_heads :]))
            q, k, v = np.split(x, [heads, heads + kv_heads])
            k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, v))
            scores = q @ k.swapaxes(1, 2) * (scale or x.shape[-1] ** -0.5)
            if biases is not None:
                scores = scores + biases[0, :, :length, :length]
            ahead = np.arange(length) - np.arange(length)[:, None]
            hidden = (ahead > 0) & (not looks_ahead)
            if window > 0:
                hidden = hidden | (np.abs(ahead) >= window)
            e = np.exp(np.where(hidden, -np.inf, scores))
            attended = (e / e.sum(axis=-1, keepdims=True)) @ v
            texts.append(attended.swapaxes(0, 1).reshape(length, -1))
        return (np.concatenate(texts).astype(np.float32),)


class TextAttention32(TextAttention):
    """The same, of which the operator rounds nothing either."""


class Experts(OpRun):
    """Rows that go to one expert each, of matrices [experts, n_out, n_in] in blocks of 32."""

    op_domain = DOMAIN

    def _run(
        self,
        x: Floats,
        routes: Floats,
        up: NDArray[Any],
        up_scales: NDArray[Any] | None,
        up_bias: Floats | None,
        down: NDArray[Any],
        down_scales: NDArray[Any] | None = None,
        down_bias: Floats | None = None,
        *,
        limit: float,
    ) -> tuple[Floats]:
        rows = []
        for row, expert in zip(x, routes.argmax(axis=1), strict=True):
            bias = None if up_bias is None else up_bias[expert]
            of = up[expert], None if up_scales is None else up_scales[expert]
            hidden = self.product(row, *of, bias)
            gate, gated = hidden[::2], hidden[1::2]
            if limit:
                gate = np.minimum(gate, np.float32(limit))
                gated = np.clip(gated, -limit, limit) + 1
                y = gate * _sigmoid(np.float32(1.702) * gate) * gated
            else:
                y = gate * _sigmoid(gate) * gated
            bias = None if down_bias is None else down_bias[expert]
            of = down[expert], None if down_scales is None else down_scales[expert]
            rows.append(self.product(y, *of, bias))
        return (np.stack(rows) if rows else np.zeros((0, down.shape[1]), dtype=np.float32),)

    def product(
        self, row: Floats, matrix: NDArray[Any], scales: NDArray[Any] | None, bias: Any
    ) -> Floats:
        """Return a row's product with a matrix [n_out, n_in], whose scales are [n_out, blocks]."""
        assert scales is not None
        integers = self.integers(matrix).reshape(len(matrix), -1, 32)
        steps, of_row = round_rows(row, 32)
        sums = np.einsum("bi,obi->ob", steps, integers)
        of_blocks = scales.astype(np.float32).reshape(len(matrix), -1)
        return _finish((sums * of_row * of_blocks).sum(axis=-1), bias, None)

    def integers(self, matrix: NDArray[np.uint8]) -> NDArray[np.int64]:
        return matrix.astype(np.int64) - 128


class Experts4(Experts):
    """Of 4 bits, the low half of a byte first."""

    def integers(self, matrix: NDArray[np.uint8]) -> NDArray[np.int64]:
        return np.stack((matrix & 15, matrix >> 4), axis=-1).astype(np.int64) - 8


class Experts32(Experts):
    """Of floats, without scales."""

    def product(self, row: Floats, matrix: Floats, scales: Any, bias: Any) -> Floats:
        assert scales is None
        return _finish(matrix @ row, bias, None)


def _finish(out: NDArray[Any], bias: Floats | None, residual: Floats | None) -> Floats:
    out = out.astype(np.float32)
    out = out if bias is None else out + bias
    if residual is None:
        return out
    assert residual.shape == out.shape, "the operator does not repeat a residual"
    return out + residual


class _Stock(OpRun):
    """A node in a session of ONNX Runtime of its own."""

    _session: onnxruntime.InferenceSession | None = None

    def _run(self, *inputs: NDArray[Any] | None, **_: Any) -> tuple[NDArray[Any], ...]:
        node = self.onnx_node
        feeds = {n: x for n, x in zip(node.input, inputs, strict=True) if x is not None}
        first_weight = _WEIGHTS.get(node.op_type, len(inputs))
        weights = {n: feeds.pop(n) for n in node.input[first_weight:] if n}
        if self._session is None:
            kinds = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
            given = [
                helper.make_tensor_value_info(n, kinds[n], [None] * x.ndim)
                for n, x in feeds.items()
            ]
            made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
            constants = [numpy_helper.from_array(x, n) for n, x in weights.items()]
            graph = helper.make_graph([node], "node", given, made, constants)
            opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
            self._session = open_cpu_session(model.SerializeToString(), threads=1)
        return tuple(self._session.run(None, feeds))


class HeadLinear(OpRun):
    """A matrix of floats for each head: [heads, n_in, n_out]."""

    op_domain = DOMAIN

    def _run(self, x: Floats, weight: Floats) -> tuple[Floats]:
        return (np.einsum("...hi,hio->...ho", x, weight),)


def _restore(node: NodeProto) -> None:
    """Make attention over rows ONNX Runtime's again, in a graph of a decoder."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    qkv, *rows_and_ends, cos, sin, biases, sinks = [*node.input, *[""] * 8][:8]
    positions, options = "position_ids" if cos else "", dict[str, Any]()
    inputs = [qkv, "", "", *rows_and_ends, "total_sequence_length", cos, sin, positions]
    inputs += [biases, sinks]
    if node.op_type == "RowAttention8":
        inputs += ["step", "step"]
        options |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        options |= {"kv_cache_bit_width": 8}
    restored = helper.make_node(
        "GroupQueryAttention",
        inputs,
        list(node.output),
        domain=MICROSOFT,
        num_heads=given["heads"],
        kv_num_heads=given["kv_heads"],
        do_rotary=int(bool(cos)),
        rotary_interleaved=given["interleaved"],
        local_window_size=given["window"],
        scale=given["scale"],
        softcap=given["softcap"],
        **options,
    )
    node.CopyFrom(restored)


class FusedSession:
    """A rewritten graph, with what tests use of ONNX Runtime's sessions.

    Attention over rows is ONNX Runtime's: `tests.kernels.test_row_attention` has that of ours.
    """

    def __init__(self, path: Path) -> None:
        model, self.report = fuse(onnx.load(path, load_external_data=False))
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        onnx.load_external_data_for_model(model, str(path.parent))
        model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "step"))
        for node in (node for part in parts(model.graph) for node in part.node):
            if node.op_type.startswith("RowAttention"):
                _restore(node)
        stock = [type(name, (_Stock,), {"op_domain": domain}) for name, domain in _STOCK.items()]
        own: list[type[OpRun]] = [Linear, Linear4, Linear32, Norm, Activation, HeadLinear]
        own += [TextAttention, TextAttention32, Experts, Experts4, Experts32]
        self._evaluator = ReferenceEvaluator(model, new_ops=[*own, *stock])

    def get_inputs(self) -> list[onnx.ValueInfoProto]:
        return list(self.model.graph.input)

    def run(self, names: Sequence[str], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        made = self._evaluator.run(list(names), feeds)
        assert isinstance(made, list)
        return made
