"""kvasir doctor: the software and the machine, what to expect of them, and what is missing."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from typer import Argument, Exit, Option

from kvasir.commands.console.options import Json
from kvasir.commands.console.output import make_table, one_line_errors, show, size_in_words
from kvasir.model.platform.suggestions import install_command

if TYPE_CHECKING:
    from kvasir.model.directory import ModelDirectory

# The kernel's names of CPU features, and the usual ones.
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX int8",
    "asimddp": "DotProd",
    "i8mm": "I8MM",
    "bf16": "BF16",
}
# What a processor lacks on which our operators take these paths.
_FASTER = {
    "scalar": "AVX2 with FMA, or DotProd on Arm",
    "avx2": "AVX-512 with VNNI",
    "avx512": "AMX int8",
}
_SHOWN_VERSIONS = ("kvasir-lm", "onnxruntime", "onnxruntime-gpu", "tokenizers", "torch", "onnx")
_PURPOSES = {
    "cpu": "serve, generate, explain on the CPU",
    "cuda": "the same on an NVIDIA GPU, in place of cpu",
    "webgpu": "the same on any GPU that WebGPU reaches",
    "train": "train, export, merge, eval",
    "hub": "pull hf://…",
    "oci": "pull oci://…",
    "s3": "pull s3://…",
    "tensorboard": "train --tensorboard",
    "otel": "serve --otlp-endpoint",
    "redis": "serve --state-url",
    "kv-events": "serve --kv-events",
    "ray": "batch --ray, in an environment of its own",
    "loadtest": "make loadtest, in an environment of its own",
    "dev": "make test, make lint",
}
_OF_CONTRIBUTORS = ("dev", "loadtest")
_SECTIONS = ("missing", "precisions", "machine", "versions")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == [\"'](?P<extra>[\w-]+)")
_NVIDIA = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_NVIDIA_SECONDS = 20  # the driver may have to start


def doctor(
    model: Path | None = Argument(
        None, help="A model directory: what its rounding costs, and its answers."
    ),
    every: bool = Option(False, "--all", help="Name what contributors lack, too."),
    as_json: Json = False,
) -> None:
    """Show what is missing, what to expect of each precision, the machine, and versions.

    Exits with 1 if no ONNX Runtime is installed, without which nothing is served, and if a model
    answers otherwise than where it was exported.
    """
    facts, is_same = examine(), True
    if not every:
        idle = {*_OF_CONTRIBUTORS, *(["cuda"] if facts["machine"]["gpu"] == "none" else [])}
        facts["missing"] = {name: how for name, how in facts["missing"].items() if name not in idle}
    if model is not None:
        with one_line_errors():
            of_model, is_same = _describe(model)
            facts["notes"] = [*of_model, *facts["notes"]]
    shown = [title for title in _SECTIONS if facts[title]]
    tables = [make_table(title, ("", ""), facts[title].items()) for title in shown]
    for table in tables:
        table.columns[1].justify = "left"  # words
    notes = [f"note: {note}" for note in facts["notes"]]
    show(as_json, facts, *tables, *notes, then=("serve",))
    if not facts["can_serve"] or not is_same:
        raise Exit(1)


def _memory(loaded: ModelDirectory) -> list[str]:
    """Say what a token of context takes, of a model that continues texts on the CPU."""
    from kvasir.model.platform.machine import available_memory

    model, config, manifest = loaded.path, loaded.config, loaded.manifest
    if manifest.device != "cpu" or config.pooling is not None or config.encoder is not None:
        return []
    try:
        from kvasir.kernels.library import Library, load
        from kvasir.server.engine.packed import open_decoder
    except ModuleNotFoundError:  # _notes tells
        return []
    found = load("auto", None)
    library = found if isinstance(found, Library) else None
    kv = open_decoder(loaded.graph_path, config, library, max_num_seqs=1).kv
    computed = f"{model.name}: ONNX Runtime computes its attention and recurrences, over rows"
    if not config.attention_layers:
        size = f"{kv.state_bytes:,} bytes, whatever its length"
        return [f"{model.name}: the states of a sequence take {size}", computed]
    words = f"{model.name}: a token of context takes {kv.token_bytes:,} bytes"
    if kv.prompt_token_bytes:
        words += f", and {kv.prompt_token_bytes:,} more while its prompt is computed"
    if kv.state_bytes:
        words += f"; the states of recurrent layers take {kv.state_bytes:,} for each sequence"
    if (latents := config.latents) is not None:
        full = config.n_head * (latents.key_dim + (config.rotary_dim or 0) + latents.value_dim)
        words += f" ({full / config.head_dim:.1f} times that without latents)"
    n_tokens = available_memory() // 2 // kv.token_bytes
    notes = [f"{words}; the default of kv_cache_memory holds {n_tokens:,} tokens here"]
    return [*notes, computed] if kv.state_bytes else notes


def _adapters(loaded: ModelDirectory) -> list[str]:
    """Say how many adapters the default of adapter_memory holds, of a model that takes some."""
    from kvasir.model.adapters.layout import Layout
    from kvasir.model.directory import ADAPTERS_FILE
    from kvasir.server.settings import Settings

    if ADAPTERS_FILE not in loaded.manifest.files or loaded.config.n_experts:
        return []
    layers = Layout.load(loaded.path / ADAPTERS_FILE).layers.values()
    numbers = sum(len(one.parts) * len(one.inputs) + len(one.outputs) for one in layers)
    size = 16 * numbers * (4 if loaded.manifest.precision == "fp32" else 2)
    n = Settings.model_fields["adapter_memory"].default // size
    words = f"an adapter of rank 16 in all layers takes {size_in_words(size)}"
    return [f"{loaded.path.name}: {words}; the default of adapter_memory holds {n:,}"]


def _describe(model: Path) -> tuple[list[str], bool]:
    """Say what rounding cost a model, and if it answers as its manifest says; False if not."""
    from kvasir.model.directory import load_model_dir

    loaded = load_model_dir(model)
    manifest = loaded.manifest
    notes = [f"{model.name} in {manifest.precision}: {manifest.verification.verdict}"]
    notes += [*_memory(loaded), *_adapters(loaded)]
    if (expected := manifest.digest) is None:
        return notes, True
    try:
        from kvasir.server.engine.digest import find_digest

        found, reason = find_digest(model)
    except ModuleNotFoundError as error:
        found, reason = None, f"{error.name} is not installed"
    if found is None:
        notes.append(f"{model.name}: its answers cannot be compared with its digest: {reason}")
    elif found.partition("-")[0] != expected.partition("-")[0]:
        renew = "another Kvasir made its digest; renew it with: kvasir export"
        notes.append(f"{model.name}: {renew}")
    elif found == expected:
        notes.append(f"{model.name}: its answers are those of its digest, to the last bit")
    else:
        differ = f"its answers differ from its digest {expected}; here it is {found}"
        return [*notes, f"{model.name}: {differ}"], False
    return notes, True


def examine() -> dict[str, Any]:
    """Return what the command shows."""
    from kvasir.model.platform.machine import available_memory, processor_name, usable_cpus

    described = Path("/proc/cpuinfo")  # on Linux
    cpuinfo = described.read_text(encoding="utf-8") if described.is_file() else ""
    features, gpus = cpu_features(cpuinfo), _gpus()
    installed = {name: number for name in _SHOWN_VERSIONS if (number := _version(name))}
    runtimes = [name for name in installed if name.startswith("onnxruntime")]
    left, total = available_memory(), psutil.virtual_memory().total
    return {
        "versions": installed | {"python": platform.python_version()},
        "machine": {
            "system": platform.platform(),
            "processor": processor_name(),
            "features": ", ".join(features) or "unknown",
            "kernels": _kernels(),
            "cpus": f"{usable_cpus()} of {os.cpu_count()} usable",
            "memory": f"{size_in_words(left)} of {size_in_words(total)} free",
            "gpu": "; ".join(gpus) or "none",
        },
        "precisions": expectations(features, has_gpu=bool(gpus)),
        "missing": _missing(),
        "notes": _notes(features, runtimes, has_gpu=bool(gpus)),
        "can_serve": bool(runtimes),
    }


def _kernels() -> str:
    """Return the path of our own operators, or why stock ones are used, after a new trial."""
    try:
        from kvasir.kernels.library import load
    except ModuleNotFoundError:  # _notes tells
        return "no ONNX Runtime is installed"
    library = load("auto", None)
    if isinstance(library, str):
        return library
    if library.fault:
        return f"{library.path}, since {library.fault}"
    faster = _FASTER.get(library.path)
    return f"{library.path}; faster ones need {faster}" if faster else library.path


def cpu_features(cpuinfo: str) -> list[str]:
    """Return the names of what speeds up products, from the text of /proc/cpuinfo."""
    line = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    flags = line[1].split() if line else []
    return list(dict.fromkeys(name for flag, name in _FEATURES.items() if flag in flags))


def expectations(features: list[str], *, has_gpu: bool) -> dict[str, str]:
    """Return in words what each precision is good for on this machine."""
    exact = "integer products, the default: fast and close to fp32"
    if "AMX int8" in features:
        exact = "the default; on AMX 2.5 to 3 times as fast as fp32, for prompts too"
    elif "VNNI" not in features and "AVX2" in features:
        exact = "the default; without VNNI exact products cost prompts up to a sixth of their speed"
    words = {
        "int8": exact,
        "int4": "the fastest for one stream; perplexity may rise by up to 5 %",
        "fp32": "PyTorch's answers; the slowest, four times int8's memory",
    }
    if has_gpu:
        words["bf16"] = "the default on a GPU: kvasir export --device cuda"
    return words


def _notes(features: list[str], runtimes: list[str], *, has_gpu: bool) -> list[str]:
    notes = []
    if not runtimes:
        notes.append("no ONNX Runtime is installed, so nothing can be served; install cpu or cuda")
    if len(runtimes) > 1:
        both = " and ".join(runtimes)
        notes.append(f"{both} share a folder and break each other; pip uninstall both, install one")
    if has_gpu and runtimes == ["onnxruntime"] and not _version("onnxruntime-ep-webgpu"):
        notes.append("a GPU is here, but this ONNX Runtime is for the CPU; install cuda instead")
    if features and not {"AVX2", "DotProd"} & {*features}:
        notes.append("this processor has neither AVX2 nor dot products; everything will be slow")
    return notes


def _missing() -> dict[str, str]:
    """Return what each extra that lacks packages is for, and how to get it."""
    needed = defaultdict(list)
    for requirement in requires("kvasir-lm") or ():
        if match := _REQUIREMENT.match(requirement):
            needed[match["extra"]].append(match["name"])
    if any(map(_version, ("onnxruntime", "onnxruntime-gpu"))):
        needed["cpu"], needed["cuda"] = [], [] if _version("onnxruntime-gpu") else needed["cuda"]
    missing = {}
    for extra, names in needed.items():
        if absent := [name for name in names if not _version(name)]:
            purpose = _PURPOSES.get(extra, extra)
            missing[extra] = f"for {purpose}: {install_command(extra)} (brings {', '.join(absent)})"
    return missing


def _gpus() -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(  # noqa: S603
            _NVIDIA, capture_output=True, text=True, timeout=_NVIDIA_SECONDS, check=True
        )
        return ran.stdout.strip().splitlines()
    return []


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
