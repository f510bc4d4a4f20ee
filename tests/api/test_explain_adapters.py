"""Explanations of a model with an adapter: those of PyTorch's model that peft has merged."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvasir.model.directory import load_model_dir
from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Head, Questions
from tests.api.test_explain import switched_off
from tests.engine.test_adapters import Served, few_pairs
from tests.kernels.graphs import needs_library

__all__ = ["few_pairs"]
pytestmark = needs_library

OFF = (Head(0, 1), Head(1, 0))
SOURCE = [5, 9, 40, 41, 7, 300, 2]
IDS = [3, 17, 40, 9, 17, 40, 250, 33, 8, 9, 17, 41]
ALL = range(2)
# Decoders, of which one has permuted rows and biases, what reads a source, and encoders: by ONNX
# Runtime's operators and by our own. `tests/engine/test_adapters.py` has every kind of layer.
KINDS = ["llama fp32 stock", "smollm3 int4 stock", "gpt_neox int4 own"]
KINDS += ["bart fp32 stock", "bart int8 own", "bert fp32 stock", "modernbert int8 own"]
_PROJECTION = re.compile(
    r"(self_attn\.o_proj|attention(\.output)?\.dense|attn\.Wo"
    r"|decoder\.layers\.\d+\.self_attn\.out_proj)$"
)
# Of an answer's distance from the merged model's, without the adapter to with it, at least.
CLOSER = {"fp32": 500.0, "int8": 3.0, "int4": 3.0}


class Adapted:
    """A model with an adapter, explained here and by PyTorch."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, precision, operators = name.split()
        self.served = Served(kind, precision, operators, folder)
        self.served.export()
        self.merged: Any = self.served.adapt("adapter1", 1).merge_and_unload()
        self.is_encoder = self.served.kind in ("bert", "modernbert")
        self.source = SOURCE if self.served.has_sources else []
        self.directory = load_model_dir(folder / "base")
        runner = self.served.encoder() if self.is_encoder else self.served.runner()
        self.adapter = self.served.load(runner, 1)  # as it is served
        self.explainer = Explainer(self.directory, 1, runner.adapters)

    def found(self, adapter: Adapter | None, off: tuple[Head, ...] = ()) -> dict[str, Any]:
        """Return attention by layer, to a source too, and the probabilities of next tokens."""
        n_tokens = 0 if self.is_encoder else self.directory.config.vocab_size
        asked = Questions(top_k=n_tokens or 10, without=off)
        answer = self.explainer.explain_tokens(IDS, [*ALL], self.source, asked, adapter)
        shares = np.zeros(n_tokens)
        for one in answer.next_tokens:
            shares[one.token_id] = one.probability
        weights = {f"attention {i}": answer.weights[i] for i in ALL}
        weights |= {f"source {i}": of for i, of in answer.source_weights.items() if i in ALL}
        return weights | ({} if self.is_encoder else {"next": shares})

    def expected(self, off: tuple[Head, ...] = ()) -> dict[str, NDArray[Any]]:
        """Return the same of PyTorch."""
        ids, more = torch.tensor([IDS]), {"output_attentions": True}
        with torch.no_grad(), self.without(off):
            if self.source:
                out = self.merged(torch.tensor([self.source]), decoder_input_ids=ids, **more)
                own, others = out.decoder_attentions, out.cross_attentions
            else:
                out = self.merged(ids, **more)
                own, others = out.attentions, ()
        weights = {f"attention {i}": own[i][0].numpy() for i in ALL}
        weights |= {f"source {i}": others[i][0].numpy() for i in ALL if others}
        if self.is_encoder:
            return weights
        return weights | {"next": out.logits[0, -1].double().softmax(-1).numpy()}

    def without(self, off: tuple[Head, ...]) -> AbstractContextManager[None]:
        modules = self.merged.named_modules()
        found = [module for name, module in modules if _PROJECTION.search(name)]
        return switched_off(found, self.directory.config.n_head, off)


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp("explained"))


def test_attention_and_next_tokens_are_the_merged_models(adapted: Adapted) -> None:
    """With heads switched off, too. Without the adapter they are far from them."""
    for off in ((), OFF):
        expected = adapted.expected(off)
        own, base = adapted.found(adapted.adapter, off), adapted.found(None, off)
        assert own.keys() == base.keys() == expected.keys()
        for name, right in expected.items():
            error, without = (np.abs(one[name] - right).mean() for one in (own, base))
            assert CLOSER[adapted.served.precision] * error < without, name
            if adapted.served.precision == "fp32":
                np.testing.assert_allclose(own[name], right, atol=1e-5)
