"""Verification of the CUDA graph over blocks, run by numpy; and export without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.export.directory import export_checkpoint
from kvasir.export.verification import paged_session
from kvasir.export.verification.paged_session import Floats, PagedSession
from kvasir.export.verification.verify import VerificationError
from kvasir.server.engine.gpu.cuda_runtime import NoDeviceError
from kvasir.server.engine.gpu.graphs import Inputs
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.sampling.logits import Candidates, Logits
from tests.engine.test_session import NO_GPU
from tests.export.runs import save_run
from tests.kit.numpy_session import BLOCK, NumpyModel, export_paged, numpy_backend
from tests.kit.random_models import RandomModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return export_paged(tmp_path_factory.mktemp("model"), n_layer=1, max_model_len=48)


class WrongTail(NumpyModel):
    """A graph with one number of its candidates wrong."""

    field = ""

    def run(self, inputs: Inputs, first_row: int = 0) -> Logits:
        logits = super().run(inputs, first_row)
        if self.field:
            assert logits.candidates is not None
            getattr(logits.candidates, self.field)[-1:] += 1
        return logits


def test_the_candidates_are_verified(model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as the GPU's own session returns them, here of numpy."""
    decoder, path = model.decoder, model.graph
    tokens, lengths = np.arange(6).reshape(2, 3), [3, 2]
    wrong = WrongTail(path, 4)
    session = PagedSession(decoder.config, lambda _: wrong, block_size=BLOCK)

    def run() -> Floats:
        session.clear(2, 4)
        return session.run(tokens, lengths)

    expected = run()
    for wrong.field in Candidates._fields:
        with pytest.raises(VerificationError, match="candidates that the graph chooses are not"):
            run()
    backend = numpy_backend(2**20)
    on_device = DeviceModel(backend.open_session(path), 4, backend.bind_blocks)
    session = PagedSession(decoder.config, lambda _: on_device, block_size=BLOCK)
    assert run() == pytest.approx(expected, abs=1e-5)
    checked = list[Any]()
    monkeypatch.setattr(paged_session, "_check", lambda *given: checked.append(given))
    run()
    assert len(checked) == 1


@NO_GPU
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "install the extra cuda"),
        (
            {},
            {"precision": "fp32"},
            "no precision 'fp32' for cuda; there are bf16, fp16, int8, int4",
        ),
        ({}, {"kv_cache": "int4"}, "no kv cache 'int4' on cuda; on cuda there are int8, fp8"),
        ({"position": "alibi"}, {}, "alibi positions bias scores"),
    ],
)
def test_what_cannot_be_exported_for_cuda_leaves_nothing(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_run(tmp_path / "run", **changes)
    with pytest.raises((NoDeviceError, ValueError), match=message):
        export_checkpoint(tmp_path / "run", tmp_path / "out", device="cuda", **options)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.part*"))
