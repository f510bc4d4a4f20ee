"""Compare whole models' answers on an emulated ARM CPU with this machine's, on every path of both.

python -m tests.arm FOLDER: as userland.sh made it. Exit code 1 if answers of a model differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer import echo

from kvasir.kernels.library import FILE
from kvasir.model.directory import CONFIG_FILE
from tests.kernels.graphs import usable_paths
from tests.kit.encoder_decoders import export_both
from tests.kit.encoders import BERT, LAST_TOKEN, MODERN, MPNET, export_encoder
from tests.kit.fake_seq2seq import small_config, small_model
from tests.kit.random_models import export_random
from tests.model.variants import VARIANTS

ROOT = Path(__file__).parents[2]
EXAMPLES = {"decoder int8 stdlib": "stdlib", "encoder-decoder int8 numbers": "numbers"}
DECODERS = (
    *("fp32 llama", "fp32 deepseek", "int4 qwen", "int4 phi"),
    *("int8 gpt2", "int8 qwen3", "int8 persimmon"),
)
ENCODERS = {"fp32 bert": BERT, "fp32 mpnet": MPNET, "int8 modernbert": MODERN}
ENCODERS |= {"int4 qwen3": LAST_TOKEN}
ENCODER_DECODERS = ("fp32 relative", "int8 relative", "int4 sinusoidal")
# What every precision rounds, and operators of ours take.
SHAPE: dict[str, Any] = {"d_model": 64, "d_ff": 128, "head_dim": 16, "max_model_len": 96}


def export_models(folder: Path) -> None:
    """Export random models to folders of their names, and link the examples beside them."""
    for name in DECODERS:
        precision, variant = name.split()
        out = folder / f"decoder {name}"
        model = export_random(out, precision, **SHAPE | VARIANTS[variant])
        model.config.save(out / CONFIG_FILE)
    for name, changes in ENCODERS.items():
        out = folder / f"encoder {name}"
        model = export_encoder(out, name.split()[0], **SHAPE | changes)
        model.config.save(out / CONFIG_FILE)
    for name in ENCODER_DECODERS:
        precision, position = name.split()
        out, config = folder / f"encoder-decoder {name}", small_config(vocab_size=300)
        shape = SHAPE | {"position": position}
        assert config.encoder is not None
        config = replace(config, encoder=replace(config.encoder, **shape), **shape)
        export_both(config, small_model(config).state_dict(), out, precision)
        config.save(out / CONFIG_FILE)
    for name, example in EXAMPLES.items():
        (folder / name).symlink_to(ROOT / "examples" / example)


def main(folder: Path) -> None:
    root, library, usable = folder / "root", folder / "libkvasir.so", ",".join(usable_paths())
    emulated = ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3")]
    runs = ([sys.executable], FILE, usable), (emulated, library, "neon,scalar")
    answers: list[dict[str, dict[str, str]]] = []  # here and on ARM: digests by path and model
    with TemporaryDirectory() as models:
        export_models(Path(models))
        for python, file, names in runs:
            command = [*python, "-m", "tests.arm.answers", str(file), names, models]
            packages = [str(folder / "packages")] if python is emulated else []
            search = {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages])}
            environment = os.environ | search | {"PYTHONDONTWRITEBYTECODE": "1"}
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            answers.append(json.loads(run.stdout))
    are_equal = []
    for model in next(iter(answers[0].values())):
        here, there = (dict.fromkeys(of[model] for of in paths.values()) for paths in answers)
        are_equal.append(len(here | there) == 1)
        said = "equal" if are_equal[-1] else "DIFFERENT"
        echo(f"{model:32} here {' '.join(here)}, ARM {' '.join(there)}: {said}")
    echo(f"paths: {', '.join(answers[0])} here; {', '.join(answers[1])} on ARM")
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
