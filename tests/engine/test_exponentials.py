"""The sampler's powers and logarithms: near the real ones, and the same bits on every CPU."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.server.engine.sampling.beams import BeamSearch
from kvasir.server.engine.sampling.exponentials import exp2, log
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams, token_logprobs
from kvasir.server.engine.sampling.sampler import sample
from tests.kit.engine_driver import sampled_sequence

HASH = "e07d8be468ec265a"  # of `sampled`, on every CPU
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 300},
    {"min_p": 0.001, "temperature": 1.3},
    {"typical_p": 0.8},
    {"top_p": 0.99, "top_k": 2000, "logit_bias": {5: -200.0}, "frequency_penalty": 0.3},
)


def test_powers_of_two() -> None:
    generator = np.random.default_rng(1)
    x = np.concatenate([-generator.random(2**17) * scale for scale in (125, 1, 1e-6)])
    ends = [-0.5, -0.5 - 2**-24, -124.5, -125.0, 0.0]
    x = np.concatenate([x, ends]).astype(np.float32)
    expected = np.exp2(x.astype(np.longdouble))
    exp2(x)
    assert np.abs(x / expected - 1).max() < 7e-7
    assert x[-1] == 1.0


def test_powers_below_all_others_are_zero_and_change_none() -> None:
    x = (-np.arange(400) / 4).astype(np.float32)
    lightest = np.array([-125.5, -1e9, -np.inf], dtype=np.float32)
    powers, with_zeros = x.copy(), np.concatenate([x, lightest], dtype=np.float32)
    exp2(powers)
    exp2(with_zeros)
    assert (with_zeros[:-3] == powers).all()
    assert (with_zeros[-3:] == 0).all()


def test_logarithms() -> None:
    generator = np.random.default_rng(2)
    exponents = generator.uniform(-300, 300, 5000)
    for x in map(float, (*10**exponents, *(1 + exponents / 3e6), 1.0, 2.0, 0.5, 49152.0)):
        expected = np.log(np.longdouble(x))
        assert abs(log(x) - expected) <= np.spacing(abs(float(expected)))


def sampled() -> str:
    """Hash tokens, log-probabilities and a beam search for random logits; they hold no exp."""
    generator, found = np.random.default_rng(3), hashlib.sha256()
    for vocab in (300, 5000, 49152):
        rows = (generator.random((6, vocab)) ** 2 * 25).astype(np.float32)
        for filters in FILTERS:
            params = SamplingParams(max_tokens=9, seed=vocab, **filters)
            sequence = sampled_sequence(params)
            for row in rows:
                token = sample(row, sequence)
                assert token is not None
                sequence.output_ids.append(token)
                logprobs = token_logprobs(row, token, 3)
                found.update(f"{token} {logprobs.logprob.hex()} {logprobs.top}".encode())
        beams = BeamSearch(BeamParams(3, length_penalty=0.7), {0, 7}, 1, 6)
        for row in rows:
            beams.advance(np.tile(row, (len(beams.running), 1)))
        found.update(repr([(text.score.hex(), text.token_ids) for text in beams.finished]).encode())
    return found.hexdigest()[:16]


def test_the_same_bits_on_every_cpu() -> None:
    """As this one, with the instructions that NumPy chooses, and with the least that it needs."""
    assert sampled() == HASH
    numpy_core: Any = importlib.import_module("numpy._core._multiarray_umath")
    chosen = [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__[name]]
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(chosen)}
    code = f"from {__name__} import sampled; print(sampled())"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    result = subprocess.run(
        command, env=environment, cwd=root, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == HASH, chosen
