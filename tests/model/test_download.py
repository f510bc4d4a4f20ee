"""Models from stores: what is brought, what a broken connection leaves, and wrong copies."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from types import MappingProxyType, SimpleNamespace
from typing import Any

import botocore.session
import huggingface_hub
import pytest
import requests
from huggingface_hub import constants
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from kvasir.model.download import choice, hub, s3, transfer
from kvasir.model.download.choice import choose_files
from kvasir.model.download.oci import guard
from kvasir.model.download.pull import find
from kvasir.model.download.reference import DownloadError, Reference
from tests.kit import fake_stores
from tests.kit.fake_stores import CREDENTIALS, Store, running

WEIGHTS = random.Random(0).randbytes(100_000)
CHECKPOINT = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
}
OTHERS = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"x" * 2000,
    "onnx/model.onnx": b"y" * 2000,
    "tf_model.h5": b"z",
    "original/consolidated.safetensors": b"v",
}
SCHEMES = ("hf", "oci", "s3")


@pytest.fixture(autouse=True, scope="module")
def loader_of_botocore() -> Iterator[None]:
    """Let all sessions read the descriptions of S3 once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield


@contextmanager
def store_of(scheme: str, files: dict[str, bytes], monkeypatch: Any, folder: Path) -> Iterator[Any]:
    """Run a store; yield it and the reference of its model."""
    prefix = "some/name/" if scheme == "s3" else ""
    store = Store({prefix + name: content for name, content in files.items()})
    with running(store, getattr(fake_stores, {"hf": "hub"}.get(scheme, scheme))) as store:
        monkeypatch.setattr(constants, "ENDPOINT", store.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
        template = store.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "nowhere")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        host = store.url.removeprefix("http://")
        references = {"hf": "hf://org/name", "oci": f"oci://{host}/org/name:v1"}
        yield store, references.get(scheme, "s3://models/some/name")


def answering(
    part: str,
    body: Callable[[], Iterable[bytes]],
    status: int = 200,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[BaseHTTPRequestHandler], bool]:
    """Return what answers a GET of a path with this part in place of a store."""

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        if handler.command != "GET" or part not in handler.path:
            return False
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        with suppress(OSError):
            for chunk in body():
                handler.wfile.write(chunk)
        return True

    return answer


def pull(reference: str, folder: Path) -> Path:
    parsed = Reference.parse(reference)
    assert parsed is not None
    return find(parsed, folder / "cache").pull(lambda *_: None)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_import_needs_is_brought_once(scheme: str, monkeypatch: Any, tmp_path: Path) -> None:
    with store_of(scheme, CHECKPOINT | OTHERS, monkeypatch, tmp_path) as (store, reference):
        folder = pull(reference, tmp_path)
        assert contents(folder) == CHECKPOINT
        n_asked = len(store.asked)
        assert pull(reference, tmp_path) == folder
        assert len(store.asked) == n_asked


@pytest.mark.parametrize(
    ("scheme", "knows_ranges"),
    [*((scheme, True) for scheme in SCHEMES), ("oci", False), ("s3", False)],
)
def test_a_cut_connection_is_resumed(
    scheme: str, knows_ranges: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    with store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        name = next(name for name in store.files if name.endswith("model.safetensors"))
        store.cut[name], store.knows_ranges = 70_001, knows_ranges
        assert contents(pull(reference, tmp_path)) == CHECKPOINT
        if knows_ranges:
            ranges = [wanted for asked, wanted in store.asked if asked == name]
            assert len(ranges) == 2
            assert ranges[1] in ("bytes=65536-", "bytes=70001-")


@pytest.mark.parametrize("scheme", ["oci", "s3"])
def test_an_interrupted_pull_is_no_model_and_goes_on(
    scheme: str, monkeypatch: Any, tmp_path: Path
) -> None:
    with store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        seen = []

        def interrupt(what: str, *_: int) -> None:
            seen.append(what)
            if len(seen) == 3:
                raise KeyboardInterrupt

        parsed = Reference.parse(reference)
        assert parsed is not None
        with pytest.raises(KeyboardInterrupt):
            find(parsed, tmp_path / "cache").pull(interrupt)
        assert not [
            path for path in (tmp_path / "cache").rglob("config.json") if "part" not in str(path)
        ]
        before = len(store.asked)
        assert contents(pull(reference, tmp_path)) == CHECKPOINT
        assert len(store.asked) - before < len(CHECKPOINT)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("hf", "model.safetensors"),  # of LFS
        ("hf", "config.json"),  # of git
        ("oci", "config.json"),
        ("s3", "model.safetensors"),  # in parts
        ("s3", "config.json"),
        ("s3", "chat_template.jinja"),  # with a SHA-256
    ],
)
def test_a_wrong_copy_is_refused_and_not_kept(
    scheme: str, name: str, monkeypatch: Any, tmp_path: Path
) -> None:
    with store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        store.corrupt = {file for file in store.files if file in (name, f"some/name/{name}")}
        with pytest.raises(DownloadError, match=f"{name} does not match"):
            pull(reference, tmp_path)
        store.corrupt = set()
        assert contents(pull(reference, tmp_path)) == CHECKPOINT


ENDLESS = 2**27  # bytes; far more than the store announced
LISTINGS = {"hf": "/api/models", "oci": "/manifests/", "s3": "list-type"}
FILES = {"hf": "/model.safetensors", "oci": "/blobs/", "s3": "/model.safetensors"}
TO_TOKEN = (401, {"WWW-Authenticate": 'Bearer realm="{url}/token",service="here"'})
TO_ITSELF = (307, {"Location": "{url}/v2/"})


@pytest.mark.parametrize(
    ("scheme", "part", "status", "headers"),
    [
        *((scheme, FILES[scheme], 200, {}) for scheme in SCHEMES),
        *((scheme, LISTINGS[scheme], 200, {}) for scheme in SCHEMES),
        *((scheme, LISTINGS[scheme], 404, {}) for scheme in SCHEMES),
        *((scheme, "safetensors.index", 200, {}) for scheme in ("hf", "s3")),
        ("oci", "/v2/", 200, {}),
        ("oci", "/manifests/", *TO_TOKEN),
        ("oci", "/token", 200, {}),
        ("oci", "/blobs/", *TO_ITSELF),
    ],
)
def test_a_store_that_sends_more_than_it_announced_is_cut_off(
    scheme: str,
    part: str,
    status: int,
    headers: dict[str, str],
    monkeypatch: Any,
    tmp_path: Path,
) -> None:
    n_sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal n_sent
        while n_sent < ENDLESS:
            n_sent += 2**16  # first: who asks for no more than this piece never comes back
            yield bytes(2**16)

    files = CHECKPOINT
    if part == "safetensors.index":
        files = SHARDS | PLAIN | {"model.safetensors.index.json": INDEX}
    with store_of(scheme, files, monkeypatch, tmp_path) as (store, reference):
        headers = {name: value.format(url=store.url) for name, value in headers.items()}
        store.instead = answering(part, endless, status, headers)
        if part == "/token":
            store.challenge = TO_TOKEN[1]["WWW-Authenticate"]
        with pytest.raises(DownloadError):
            pull(reference, tmp_path)
    assert 0 < n_sent < ENDLESS
    assert not [path for path in tmp_path.rglob("*.incomplete") if path.stat().st_size]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_that_sends_hardly_anything_is_left(
    scheme: str, monkeypatch: Any, tmp_path: Path
) -> None:
    is_over = Event()

    def a_byte() -> Iterator[bytes]:
        yield b"x"
        is_over.wait()
        yield WEIGHTS[1:]  # else the hub's library asks five times again, a second apart

    monkeypatch.setattr(transfer, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(hub, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(hub, "_LEAST_SPEED", len(WEIGHTS) * 100)
    with store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        whole = {"Content-Length": str(len(WEIGHTS))}
        store.instead = answering(FILES[scheme], a_byte, headers=whole)
        try:
            with pytest.raises(DownloadError, match=r"longer than 0\.1"):
                pull(reference, tmp_path)
        finally:
            is_over.set()
            for thread in threading.enumerate():
                if thread.name == "work":
                    thread.join()


def test_a_file_in_chunks_of_the_hub_is_counted_as_it_is_written(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """The library reports the bytes of the network and of the file, which may be fewer, apart."""
    fetch: Any = huggingface_hub.hf_hub_download
    n_more = 0

    def fetch_in_chunks(repo: str, name: str, *, tqdm_class: Any, **options: Any) -> Any:
        bar = XetDownloadProgressReporter(
            reconstruction_desc="", log_level=0, tqdm_class=tqdm_class
        )
        sizes = ("total_bytes_completed", "total_bytes")
        written = dict.fromkeys(sizes, len(CHECKPOINT[name]) + n_more)
        brought = {"total_transfer_bytes_completed": 2 * len(WEIGHTS)}
        rates = ("total_bytes_completion_rate", "total_transfer_bytes_completion_rate")
        bar.update_progress(SimpleNamespace(**written, **brought, **dict.fromkeys(rates, 1.0)))
        return fetch(repo, name, **options)

    with store_of("hf", CHECKPOINT, monkeypatch, tmp_path) as (_, reference):
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch_in_chunks)
        assert contents(pull(reference, tmp_path)) == CHECKPOINT
        n_more = 1
        with pytest.raises(DownloadError, match="more than its"):
            pull(reference, tmp_path)


def test_a_compressed_answer_of_a_registry_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    body = gzip.compress(bytes(ENDLESS))
    with store_of("oci", CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        for part in ("/manifests/", "/blobs/"):
            store.instead = answering(part, lambda: [body], headers={"Content-Encoding": "gzip"})
            with pytest.raises(DownloadError, match="compressed"):
                pull(reference, tmp_path)


DIGEST, TITLE = f"sha256:{'0' * 64}", "org.opencontainers.image.title"
LAYER: dict[str, Any] = {"size": 1, "digest": DIGEST, "annotations": {TITLE: "config.json"}}
WRONG: tuple[dict[str, Any], ...] = (
    *({"size": size} for size in (None, "1", -1, 1e300)),
    *({"digest": digest} for digest in (1, "sha256:../..")),
    *({"annotations": notes} for notes in (1, {TITLE: 1})),
)


MANIFESTS = [
    *("[]", "[" * 100_000, '{"layers": 1}', '{"layers": [1]}'),
    *(json.dumps({"layers": [LAYER | wrong]}) for wrong in WRONG),
]


def test_a_malformed_manifest_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    with store_of("oci", CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        for manifest in map(str.encode, MANIFESTS):
            store.instead = answering("/manifests/", partial(iter, [manifest]))
            with pytest.raises(DownloadError, match="manifest is malformed"):
                pull(reference, tmp_path)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "file:///etc/passwd"])
def test_a_registry_with_tls_leads_nowhere_else(url: str) -> None:
    session = requests.Session()
    guard(session, is_local=False)
    with pytest.raises(requests.exceptions.InvalidSchema):
        session.get(url)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_of_too_many_files_is_refused(
    scheme: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(choice, "MAX_FILES", 3)
    monkeypatch.setattr(s3, "MAX_FILES", 3)
    with (
        store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (_, reference),
        pytest.raises(DownloadError, match="more than 3 files"),
    ):
        pull(reference, tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_directory_is_brought_whole(scheme: str, monkeypatch: Any, tmp_path: Path) -> None:
    directory = {"model.onnx": b"graph", "model.onnx.data": WEIGHTS, "config.json": b"{}"}
    manifest = json.dumps({"files": dict.fromkeys(directory, "a hash")}).encode()
    directory["manifest.json"] = manifest
    with store_of(scheme, directory | OTHERS, monkeypatch, tmp_path) as (_, reference):
        assert contents(pull(reference, tmp_path)) == directory


def test_offline_the_hubs_cache_is_used_and_what_it_lacks_is_named(
    monkeypatch: Any, tmp_path: Path
) -> None:
    with store_of("hf", CHECKPOINT, monkeypatch, tmp_path) as (_, reference):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(DownloadError, match=r"is not in .*HF_HUB_OFFLINE"):
            pull(reference, tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        folder = pull(reference, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(reference, tmp_path) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DownloadError, match=r"has no tokenizer\.json"):
        pull(reference, tmp_path)


def test_offline_a_gguf_file_needs_no_other_beside_it(monkeypatch: Any, tmp_path: Path) -> None:
    with store_of("hf", {"a.Q4.gguf": b"GGUF"}, monkeypatch, tmp_path) as (_, reference):
        file = pull(reference, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(reference, tmp_path) == file
    assert pull(f"{reference}/a.Q4.gguf", tmp_path) == file
    with pytest.raises(DownloadError, match=r"b\.gguf is not in .*HF_HUB_OFFLINE"):
        pull(f"{reference}/b.gguf", tmp_path)


@pytest.mark.parametrize(
    "challenge", ['Basic realm="here"', 'Bearer realm="{url}/token",service="here"']
)
def test_a_registry_gets_the_credentials_of_docker(
    challenge: str, monkeypatch: Any, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / ".docker").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    with store_of("oci", CHECKPOINT, monkeypatch, tmp_path) as (store, reference):
        store.challenge = challenge
        with pytest.raises(DownloadError, match="docker login"):
            pull(reference, tmp_path)
        auths = {store.url.removeprefix("http://"): {"auth": CREDENTIALS}}
        (home / ".docker/config.json").write_text(json.dumps({"auths": auths}), encoding="utf-8")
        assert contents(pull(reference, tmp_path)) == CHECKPOINT


@pytest.mark.parametrize(
    ("scheme", "reference", "complaint"),
    [
        ("hf", "hf://org/other", "not on the hub"),
        ("hf", "hf://org/name@v9", "no revision 'v9'"),
        ("oci", "oci://{host}/org/name:v9", "answers 404"),
        ("oci", "oci://127.0.0.1:9/org/name:v1", "cannot be reached"),
        ("s3", "s3://models/other", "holds nothing"),
        ("s3", "s3://elsewhere/name", "cannot be listed"),
    ],
)
def test_a_model_that_is_not_there(
    scheme: str, reference: str, complaint: str, monkeypatch: Any, tmp_path: Path
) -> None:
    with (
        store_of(scheme, CHECKPOINT, monkeypatch, tmp_path) as (store, _),
        pytest.raises(DownloadError, match=complaint),
    ):
        pull(reference.format(host=store.url.removeprefix("http://")), tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/folder", None),
        ("C:/folder", None),
        ("hf:/org/name", ("hf://org/name", "org/name", None, None)),
        ("hf://org/name@refs/pr/1/", ("hf://org/name@refs/pr/1", "org/name", "refs/pr/1", None)),
        ("hf://o/n@v1/q4/a.gguf", ("hf://o/n@v1/q4/a.gguf", "o/n", "v1", "q4/a.gguf")),
        ("oci://host:5000/a/b/c:v1", ("oci://host:5000/a/b/c:v1", "c", None, None)),
        ("s3://bucket/a/b", ("s3://bucket/a/b", "b", None, None)),
    ],
)
def test_references(text: str, expected: Any) -> None:
    found = Reference.parse(Path(text))
    assert (found and (str(found), found.name, found.revision, found.file)) == expected


@pytest.mark.parametrize("text", ["hf://name", "hf://org/name/file.bin", "oci://host", "s3://b"])
def test_a_wrong_reference_is_refused(text: str) -> None:
    with pytest.raises(DownloadError, match="not of the form"):
        Reference.parse(text)


SHARDS = {f"model-0000{i}-of-00002.safetensors": b"w" for i in (1, 2)}
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
PLAIN = {"config.json": b"{}", "tokenizer.json": b"{}"}
MARIAN = dict.fromkeys(("config.json", "model.safetensors", "source.spm", "vocab.json"), b"{}")


@pytest.mark.parametrize(
    ("files", "reference", "expected"),
    [
        (PLAIN | SHARDS | {"model.safetensors.index.json": INDEX, "consolidated.safetensors": b""},
         "hf://o/n", {*PLAIN, *SHARDS, "model.safetensors.index.json"}),
        ({"a.Q4.gguf": b"", "README.md": b""}, "hf://o/n", {"a.Q4.gguf"}),
        ({"config.json": b"", "a.gguf": b"", "b.gguf": b""}, "hf://o/n/b.gguf", {"b.gguf"}),
        ({f"a-0000{i}-of-00002.gguf": b"" for i in (1, 2)}, "hf://o/n",
         {f"a-0000{i}-of-00002.gguf" for i in (1, 2)}),
        ({"a.gguf": b"", "b.gguf": b""}, "hf://o/n", "several GGUF files: .*o/n/a.gguf"),
        ({"a.gguf": b""}, "hf://o/n/b.gguf", "does not exist; the GGUF files there are a.gguf"),
        ({"adapter_config.json": b'{"base_model_name_or_path": "o/base"}',
          "adapter_model.safetensors": b""}, "hf://o/n", "LoRA adapter of o/base"),
        (PLAIN | {"pytorch_model.bin": b""}, "hf://o/n", r"weights are in pytorch_model\.bin"),
        ({"config.json": b"", "model.safetensors": b""}, "hf://o/n", r"has no tokenizer\.json"),
        (MARIAN | {"target.spm": b"", "README.md": b""}, "hf://o/n", {*MARIAN}),
        (PLAIN | {"model.safetensors.index.json": INDEX}, "hf://o/n", "lacks model-00001"),
        *(
            ({"manifest.json": json.dumps({"files": {name: ""}}).encode(), "model.onnx": b"",
              name: b""}, "hf://o/n", "outside the model's folder")
            for name in ("../x", "a/../../x", "/etc/x", "..")
        ),
        ({"manifest.json": b"[]", "model.onnx": b""}, "hf://o/n", "must hold a JSON object"),
    ],
)  # fmt: skip
def test_the_files_of_a_model(files: dict[str, bytes], reference: str, expected: Any) -> None:
    parsed = Reference.parse(reference)
    assert parsed is not None
    if isinstance(expected, set):
        assert set(choose_files(parsed, files, files.__getitem__)) == expected
    else:
        with pytest.raises(DownloadError, match=expected):
            choose_files(parsed, files, files.__getitem__)
