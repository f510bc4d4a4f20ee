"""The folder of prompt blocks: which files a model's engine may restore.

Their fingerprint differs wherever a block's bytes might.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from kvasir.kernels.library import Library
from kvasir.model.directory import ModelDirectory
from kvasir.model.platform.files import in_words
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.digest import RULES
from kvasir.server.engine.kv.files import PrefixFiles
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.model_runner import Runner
from kvasir.server.engine.packed import MemoryBlocks
from kvasir.server.requests.served_model import onnxruntime_version
from kvasir.server.settings import Settings


def keep_prefixes(
    settings: Settings, model_dir: ModelDirectory, runner: Runner, library: Library | None
) -> None:
    """Let a runner write blocks to `prefix_dir` and restore them.

    Raises ValueError for a runner that keeps none, and for a folder that cannot be written.
    """
    folder, kv = settings.prefix_dir, runner.kv
    if folder is None:
        return
    if not isinstance(kv, KVRows | MemoryBlocks) or not kv.cache.capacity or kv.state_bytes:
        raise ValueError(
            "prefix_dir is for decoders without recurrent layers, on the CPU with a prefix cache; "
            "leave it out"
        )
    facts = [type(kv).__name__, kv.cache.block_size, model_dir.manifest.files, RULES]
    facts += [version("kvasir-lm"), onnxruntime_version(), library and library.version]
    # Else operators of our own compute all of it, the same bits on any CPU and number of threads.
    if isinstance(kv, KVRows) or model_dir.manifest.digest is None:
        described = Path("/proc/cpuinfo")  # on Linux
        text = described.read_text(encoding="utf-8") if described.is_file() else ""
        facts += [library and library.path, settings.threads or usable_cpus()]
        names = r"^(?:flags|Features|model name)\s*: (.*)$"
        facts += sorted(set(re.findall(names, text, re.MULTILINE)))
    fingerprint = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()
    try:
        kv.files = PrefixFiles(folder, fingerprint, settings.prefix_dir_bytes)
    except OSError as error:
        raise ValueError(f"prefix_dir: {in_words(error)}") from None
