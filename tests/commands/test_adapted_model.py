"""An adapter from its training to the tokens that a server answers with."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.export.directory import export_checkpoint
from kvasir.model.directory import load_model_dir, newest_checkpoint
from kvasir.server.process.app import create_app
from kvasir.server.settings import load_settings
from tests.kernels.graphs import needs_library
from tests.kit.huggingface_checkpoints import TEXT, make_model, make_tokenizer, save_checkpoint
from tests.kit.serving import running
from tests.kit.training_runs import trained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from peft import PeftModel

PROMPT, N_TOKENS = "the 7th line of", 10  # as TEXT goes on: learned by heart, so ties are rare


async def answer(model_dir: Path, name: str, **settings: Any) -> str:
    """Serve a model directory, and return its greedy answer under a model's name."""
    known = load_settings(model=model_dir, threads=1, kv_cache_memory=2**26, **settings)
    served = create_app(known, load_model_dir(model_dir))
    async with running(served) as client:
        while (await client.get("/health/ready")).status_code != 200:
            assert not served.state.models.failures
            await asyncio.sleep(0.01)
        body = {"model": name, "prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0.0}
        text: str = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        return text


@torch.no_grad()
def answer_of_peft(base: Path, adapter: Path) -> str:
    make: Any = transformers.AutoModelForCausalLM
    plain = make.from_pretrained(base, dtype=torch.float32)
    model, tokenizer = PeftModel.from_pretrained(plain, adapter).eval(), make_tokenizer()
    ids = tokenizer.encode(PROMPT).ids
    for _ in range(N_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids).removeprefix(PROMPT)


@needs_library
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
async def test_a_trained_adapter_answers_beside_its_model_as_merged_and_as_in_peft(
    tmp_path: Path,
) -> None:
    """Of a model with latents, which tests/engine/test_adapters.py has not."""
    base, run, text = tmp_path / "base", tmp_path / "run", tmp_path / "text.txt"
    save_checkpoint(base, make_model("minicpm3"))
    text.write_text(TEXT)
    options = ["--lora=r=8", "--context=32", "--batch-size=4", "--steps=60", "--warmup=5"]
    options += ["--learning-rate=0.02", "--no-mixed-precision"]
    trained(str(text), "--init", str(base), "--out", str(run), *options)
    adapter = newest_checkpoint(run)
    assert adapter is not None
    arguments = ["merge", str(base), str(run), "--out", str(tmp_path / "merged")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    for name, precision in (("base", "int8"), ("merged", "fp32")):
        export_checkpoint(tmp_path / name, tmp_path / f"{name}.onnx", precision=precision)
    expected = answer_of_peft(base, adapter)
    assert expected.startswith(" a text that nobody needs to read")
    assert await answer(tmp_path / "merged.onnx", "merged.onnx") == expected
    beside = {"adapter": f"mine={adapter}"}
    assert await answer(tmp_path / "base.onnx", "mine", **beside) == expected
    assert await answer(tmp_path / "base.onnx", "base.onnx", **beside) != expected
