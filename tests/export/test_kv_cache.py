"""int8 keys and values for running sequences: their scales, and a graph with both kinds of rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.export.rounding.kv_cache import scale_kv_channels
from kvasir.export.rounding.weights import Weights
from kvasir.model.network.attention import split_heads
from kvasir.model.network.positions import rotary_table, rotate
from kvasir.model.network.transformer import Transformer
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import SequenceStatus
from tests.kit.engine_driver import make_sequence
from tests.kit.random_models import (
    RandomModel,
    export_decoder,
    make_config,
    make_decoder,
    measure_scales,
)


def keys_and_values(decoder: Transformer, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return each layer's keys and values [rows, n_kv_head, tokens, head_dim], rotated here."""
    heard: list[torch.Tensor] = []
    attentions = [
        decoder.get_submodule(f"blocks.{i}.attention") for i in range(decoder.config.n_layer)
    ]
    hooks = [
        attention.register_forward_pre_hook(
            lambda module, inputs: heard.append(module.project(*inputs))
        )
        for attention in attentions
    ]
    with torch.inference_mode():
        decoder(ids)
    for hook in hooks:
        hook.remove()
    result = []
    for qkv in heard:
        _, key, value = split_heads(qkv, decoder.config)
        if decoder.config.position == "rotary":
            key = rotate(key, rotary_table(decoder.config), torch.arange(ids.shape[1])[None])
        result += [key, value]
    return result


@pytest.mark.parametrize("changes", [{}, {"position": "learned", "n_kv_head": 4}])
def test_a_scale_reaches_as_far_as_the_sample(changes: dict[str, object]) -> None:
    """No key or value of the sample is clipped, and no channel's scale is larger than it needs."""
    config = make_config(**changes, max_model_len=32)
    decoder = make_decoder(config)
    ids = np.random.default_rng(3).integers(config.vocab_size, size=(8, 32))
    scales = measure_scales(decoder, ids)
    assert scales.shape == (2 * config.n_layer, config.n_kv_head, config.head_dim)
    seen = keys_and_values(decoder, torch.from_numpy(ids))
    for block, tensor in enumerate(seen):
        reach = tensor.abs().amax(dim=(0, 2)).numpy()
        assert (scales[block] * 127 >= reach * 0.9999).all()
        if block % 2 or config.position != "rotary":
            assert np.allclose(scales[block] * 127, reach, rtol=1e-4)
        else:  # a rotary pair turns: neither channel ever exceeds the pair's length
            left, right = np.split(scales[block], 2, axis=1)
            assert (left == right).all()
            assert (left * 127 <= 1.001 * np.hypot(*np.split(reach, 2, axis=1))).all()


@pytest.mark.parametrize("changes", [
    {"rotary_dim": 8},
    {"layers_without_rotary": (1,)},
    {"qk_norm": True, "qk_norm_after_rotary": True},
])  # fmt: skip
def test_a_channel_of_keys_that_turns_no_more_has_a_scale_of_its_own(
    changes: dict[str, Any],
) -> None:
    """However large it is, no other channel loses."""
    decoder, channel = make_decoder(make_config(**changes)), 5
    before, attention = measure_scales(decoder), decoder.get_submodule("blocks.1.attention")
    first = decoder.config.n_head * decoder.config.head_dim
    with torch.no_grad():
        if decoder.config.qk_norm:
            attention.get_parameter("key_norm.weight")[0, channel] *= 64.0
        else:
            attention.get_parameter("qkv.weight")[first + channel] *= 64.0
    expected = before.copy()
    expected[2, 0, channel] *= 64.0
    np.testing.assert_allclose(measure_scales(decoder), expected, rtol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_scaled_channels_leave_logits_as_they_were_and_fit_int8(qk_norm: bool) -> None:
    """In PyTorch, with grouped heads and biases: divided keys meet multiplied weights."""
    config = make_config(qkv_bias=True, qk_norm=qk_norm, max_model_len=32)
    decoder = make_decoder(config)
    ids = torch.from_numpy(np.random.default_rng(3).integers(config.vocab_size, size=(8, 32)))
    with torch.inference_mode():
        before = decoder(ids)
        scales = measure_scales(decoder, ids.numpy())
        scaled = Weights(copy.deepcopy(decoder.state_dict()))
        scale_kv_channels(scaled, config, scales)
        decoder.load_state_dict({name: scaled.read(name) for name in decoder.state_dict()})
        assert torch.allclose(decoder(ids), before, rtol=1e-3, atol=1e-3 * before.std().item())
    reach = torch.stack([tensor.abs().amax() for tensor in keys_and_values(decoder, ids)])
    assert (reach <= 127.01).all()
    assert (reach > 60).all()


def test_decoding_writes_and_reads_rows_of_int8(random_int8_model: RandomModel) -> None:
    """In place, in its own row, and nowhere else; and what it reads there matters."""
    runner = random_int8_model.runner(max_num_seqs=3)
    sequence = make_sequence(0, [5, 6, 7, 8], SamplingParams(max_tokens=4))
    assert runner.kv.admit(8, 0, []) == (0, 0)
    sequence.rows = [0]
    runner.run(StepBatch(prefills=[Chunk(sequence, 0, 4, 1)]))
    runner.kv.record_prefill(0, 0, 4, [])
    rows = runner.kv.running.array
    assert rows.dtype == np.int8
    before = rows.copy()
    assert rows[:, 0, :, :4].any(axis=(1, 2, 3)).all()  # every layer's keys and values
    assert not rows[:, 0, :, 4:].any()
    sequence.status, sequence.n_computed = SequenceStatus.RUNNING, 4
    sequence.output_ids.append(9)
    decode = StepBatch([Chunk(sequence, 4, 1, 1)], [sequence])
    logits = runner.run(decode)[:].copy()
    assert rows[:, 0, :, 4].any(axis=(1, 2)).all()
    rows[:, 0, :, 4] = 0
    assert (rows == before).all()
    rows[0, 0, :, 1] = -rows[0, 0, :, 1]  # a key of the first layer
    assert (runner.run(decode)[:] != logits).any()


def test_layers_with_equal_attention_have_scales_of_their_own(tmp_path: Path) -> None:
    """The exporter keeps one copy of equal weights, which must not be scaled twice."""
    decoder = make_decoder(make_config())
    first, second = (decoder.get_submodule(f"blocks.{i}.attention") for i in range(2))
    second.load_state_dict(first.state_dict())
    figures = export_decoder(decoder, tmp_path, "int8").verify()
    assert figures.max_logit_error < 0.5
    assert figures.greedy_agreement > 0.9
