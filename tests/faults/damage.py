"""Damaged model directories: one line on standard error, exit code 1, nothing is served.

So there is no stream to time; the memory of a hostile one is limited.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from kvasir.model.directory import MANIFEST_FILE, hash_files
from kvasir.server.process.local_server import serve_command
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE
from tests.kit.fake_runner import TIMEOUT

Damage = Callable[[random.Random, Path], str]  # of a file; says what was done


def refused_models(n: int, seed: int = 0) -> Report:
    """Serve n model directories that are an attack though their hashes are right, or damaged.

    Damage is a flipped bit of a file, a missing end, or a missing file.
    """
    report, chance = Report("damaged and hostile model files"), random.Random(seed)
    names = sorted(path.name for path in EXAMPLE.iterdir())
    cases: list[tuple[str, bytes | Damage]] = [
        *((name, content) for name, contents in sorted(_ATTACKS.items()) for content in contents),
        *product(names, (_flip, _truncate, _remove)),
    ]
    for name, attack in chance.sample(cases, min(n, len(cases))):
        report.tried += 1
        with TemporaryDirectory() as folder:
            directory = Path(folder) / "model"
            if isinstance(attack, bytes):
                what = repr(attack[:60])
                with_file(directory, name, attack)
            else:
                what = attack(chance, shutil.copytree(EXAMPLE, directory) / name)
            wrong = _refusal(directory)
        report.check(wrong == "", f"{name}: {what}: {wrong}")
    report.note = f"{_MOST_MEMORY // 1024} MiB of memory were enough"
    return report


def with_file(directory: Path, name: str, content: bytes) -> Path:
    """Copy the example to a directory with another file of this name, whose hash is right."""
    shutil.copytree(EXAMPLE, directory)
    (directory / name).write_bytes(content)
    if name != MANIFEST_FILE:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
        manifest["files"] = hash_files(directory)
        (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
    return directory


def _graph(location: str) -> bytes:
    """Return a graph whose weights are elsewhere: Model.graph.initializer.external_data."""
    message = b"\x0a\x08location\x12" + bytes([len(location)]) + location.encode()
    for tag in (b"\x6a", b"\x2a", b"\x3a"):
        message = tag + bytes([len(message)]) + message
    return message


_DEEP = b"[" * 100_000
_LISTS = "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}"
_TEMPLATES = (
    "{{ (messages[0].content * 900000) | wordwrap(1) }}",
    "{{x}}" * 50_000,
    "{% for i in range(10 ** 12) %}{% endfor %}{{ raise_exception('x') }}{{ messages",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 'x' | center(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    _LISTS + "{% endfor %}{{ n.x }}",
    _LISTS + "{% endfor %}{{ {n.x: 1} | length }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "x" * 300_000,
)
_SAFE = json.loads((EXAMPLE / "tokenizer.json").read_bytes())
_SIX = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 36}
_SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
_UNKNOWN = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}]
_TOKENIZERS = [
    json.dumps({**_SAFE, **change}).encode()
    for change in (
        {"normalizer": {"type": "Sequence", "normalizers": [_SIX] * 6}},
        {"pre_tokenizer": _SLOW},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": _UNKNOWN,
                "pair": _UNKNOWN,
                "special_tokens": {},
            }
        },
        {"model": {**_SAFE["model"], "vocab": _SAFE["model"]["vocab"] | {"a" * 10**6: 0}}},
    )
]
_ATTACKS: dict[str, list[bytes]] = {
    "manifest.json": [_DEEP, b"[]", b'{"format_version": NaN}', b'{"files": ' + b"9" * 5000 + b"}"],
    "config.json": [
        b'{"eos_token_ids": [' + b"0," * 10**6 + b"0]}",
        _DEEP,
        b'{"vocab_size": NaN}',
        b'{"vocab_size": "' + b"x" * 100_000 + b'"}',
    ],
    "tokenizer.json": [_DEEP, b"{}", b"\xff" * 100, *_TOKENIZERS],
    "special_tokens_map.json": [_DEEP, b"[]", b'{"bos_token": "\\ud800"}'],
    "examples.json": [_DEEP, b"[1]", b'["' + b"x" * 2**23 + b'"]'],
    "generation_config.json": [_DEEP, b'{"temperature": NaN}', b'{"top_k": 1e400}'],
    "chat_template.jinja": [source.encode() for source in _TEMPLATES],
    "model.onnx": [_graph("/etc/passwd"), _graph("../x"), _graph("*/_ORT_MEM_ADDR_/*"), b"\xff"],
}
_MOST_MEMORY = 600 * 1024  # KiB that a server may write to while it refuses its model


def _refusal(directory: Path) -> str:
    """Return what is wrong with the server's refusal of the directory."""
    limited = ["sh", "-c", f'ulimit -d {_MOST_MEMORY}; OPENBLAS_NUM_THREADS=1 exec "$@"', "sh"]
    command = [*limited, *serve_command(directory)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "it is served"
    lines = run.stderr.splitlines()
    if run.returncode == 1 and len(lines) == 1 and lines[0].startswith("kvasir: "):
        return ""
    return f"exit code {run.returncode}, {run.stderr[-300:]!r}"


def _flip(chance: random.Random, path: Path) -> str:
    """Flip a bit; in the manifest only among names and hashes, because the rest is not checked."""
    content = bytearray(path.read_bytes())
    first, last = 0, len(content)
    if path.name == MANIFEST_FILE:
        first = content.index(b'"files"')
        last = content.index(b"}", first)
    at = chance.randrange(first, last)
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"bit flipped in byte {at}"


def _truncate(chance: random.Random, path: Path) -> str:
    content = path.read_bytes()
    n_left = chance.randrange(len(content))
    path.write_bytes(content[:n_left])
    return f"cut after {n_left} bytes"


def _remove(_chance: random.Random, path: Path) -> str:
    path.unlink()
    return "missing"
