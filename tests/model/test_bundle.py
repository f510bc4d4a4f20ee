"""A model directory is served only when it is whole; else one line says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from kvasir.model.directory import MANIFEST_FILE, ModelDirectoryError, hash_files, load_model_dir
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.random_models import make_config
from tests.kit.serving import fake_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Whole, as far as reading it can tell; its graph is not one."""
    directory = tmp_path / "model"
    directory.mkdir()
    make_config().save(directory / "config.json")
    train_tokenizer(["some text"], 300).save(str(directory / "tokenizer.json"))
    (directory / "model.onnx").write_bytes(onnx.ModelProto().SerializeToString())
    (directory / "model.onnx.data").write_bytes(b"weights")
    write_manifest(directory)
    return directory


def write_manifest(directory: Path) -> None:
    manifest = fake_manifest(96, architecture="kvasir-decoder", files=hash_files(directory))
    manifest.save(directory / "manifest.json")


def edit_manifest(directory: Path, **changes: object) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_whole_directory_loads(directory: Path) -> None:
    model_dir = load_model_dir(directory)
    assert model_dir.config == make_config()
    assert model_dir.manifest.precision == "fp32"
    assert model_dir.tokenizer.decode(model_dir.tokenizer.encode("text").ids) == "text"
    assert set(model_dir.manifest.files) == {
        "config.json",
        "tokenizer.json",
        "model.onnx",
        "model.onnx.data",
    }


def point_graph(directory: Path, location: str) -> None:
    """Let the graph read its weights from another place."""
    tensor = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor]))
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    write_manifest(directory)


def damage(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes() + b"x")


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (damage("model.onnx.data"), r"model\.onnx\.data does not match its hash .* copy it again"),
    (damage("tokenizer.json"), r"tokenizer\.json does not match its hash"),
    (remove("model.onnx"), r"model\.onnx is missing; copy it again"),
    (remove("manifest.json"), r"has no manifest\.json, so it is not a model directory"),
    (
        lambda d: (d / "manifest.json").write_text("{"),
        r"manifest\.json is damaged: .* export the model again",
    ),
    (lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe"), r"manifest\.json is damaged"),
    (
        lambda d: edit_manifest(d, format_version=99, kv_type="int8"),
        r"format version 99, newer than 1, .* upgrade it",
    ),
    (lambda d: (d / "manifest.json").write_text("[]"), r"manifest\.json is damaged: "),
    (lambda d: edit_manifest(d, format_version="x"), r"damaged: format_version"),
    (lambda d: edit_manifest(d, surprise=1), r"damaged: unknown field 'surprise'"),
    (lambda d: edit_manifest(d, precisions="int8"), r"did you mean 'precision'\?"),
    (lambda d: edit_manifest(d, rope_thet=1), r"^(?!.*did you mean).*'rope_thet'"),
    (lambda d: edit_manifest(d, device="tpu"), r"damaged: device must be"),
    (lambda d: edit_manifest(d, files={}), r"does not list config\.json"),
    (
        lambda d: (d / "manifest.json").write_text("[" * 100_000),
        r"manifest\.json is damaged: is nested too deeply",
    ),
    (lambda d: (d / "manifest.json").write_text('{"a": "\\ud800"}'), r"manifest\.json is damaged"),
    (
        lambda d: (d / "chat_template.jinja").write_text("x"),
        r"chat_template\.jinja is not in manifest\.json; remove it, or export the model again",
    ),
    (lambda d: (d / "attention.onnx").write_bytes(b""), r"attention\.onnx is not in manifest"),
    (lambda d: (d / "adapters.safetensors").touch(), r"adapters\.safetensors is not in manifest"),
    (
        lambda d: point_graph(d, "/etc/passwd"),
        r"model\.onnx reads '/etc/passwd', which is not in manifest\.json; export",
    ),
    (lambda d: point_graph(d, "../x"), r"model\.onnx reads '\.\./x', which is not in"),
    (lambda d: point_graph(d, "*/_ORT_MEM_ADDR_/*"), r"model\.onnx reads "),
    (
        lambda d: edit_manifest(d, files={**hash_files(d), "../secret": "0" * 64}),
        r"lists '\.\./secret', which is outside the directory",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), DAMAGES)
def test_a_damaged_directory_is_refused_in_one_line(
    directory: Path, break_it: Callable[[Path], object], message: str
) -> None:
    break_it(directory)
    with pytest.raises(ModelDirectoryError, match=message) as caught:
        load_model_dir(directory)
    assert "\n" not in str(caught.value)


def test_advice_on_sampling_travels_with_the_model(directory: Path) -> None:
    assert load_model_dir(directory).generation.given() == {}
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 40}')
    write_manifest(directory)
    assert load_model_dir(directory).generation.given() == {"temperature": 0.6, "top_k": 40}


def test_a_chat_template_and_the_tokens_it_names_travel_with_the_model(directory: Path) -> None:
    assert load_model_dir(directory).chat_template is None
    assert load_model_dir(directory).special_tokens == {}
    (directory / "chat_template.jinja").write_text("{{ bos_token }}é", encoding="utf-8")
    tokens = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "additional_special_tokens": ["x"],
    }
    (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
    write_manifest(directory)
    assert load_model_dir(directory).chat_template == "{{ bos_token }}é"
    assert load_model_dir(directory).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


NESTED = b"[" * 100_000
HASHED: list[tuple[str, bytes]] = [
    ("config.json", b'{"vocab_size": -3}'),
    ("chat_template.jinja", b"\xff"),
    ("examples.json", b"[1]"),
    *(("special_tokens_map.json", content) for content in (b"[", b"[]", b"\xff", NESTED)),
    *(("generation_config.json", content) for content in (b"{", NESTED, b'{"temperature": -1}')),
]


@pytest.mark.parametrize(("name", "content"), HASHED)
def test_a_file_that_hashes_well_but_is_wrong_is_refused(
    directory: Path, name: str, content: bytes
) -> None:
    (directory / name).write_bytes(content)
    write_manifest(directory)
    named = "" if name == "config.json" else f"{name}: .*"
    with pytest.raises(ModelDirectoryError, match=f"{named}; export the model again"):
        load_model_dir(directory)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(directory: Path) -> None:
    """Or a text prompt asks the graph for an embedding that is not there."""
    make_config(vocab_size=260).save(directory / "config.json")
    tokenizer = train_tokenizer(["some text, and some more text that has other words in it"], 300)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() > 260
    write_manifest(directory)
    with pytest.raises(
        ModelDirectoryError, match=r"token ids up to \d+, but the model only 260 tokens"
    ):
        load_model_dir(directory)


def test_a_file_that_cannot_be_read_is_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ModelDirectoryError, match=r"manifest\.json cannot be read: Permission denied"
    ):
        load_model_dir(directory)


def test_no_directory_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="does not exist; make one with: kvasir export"):
        load_model_dir(tmp_path / "absent")


def test_a_folder_of_model_directories(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST_FILE).touch()
    with pytest.raises(ModelDirectoryError, match=f"{tmp_path}/a, or .* --models-dir {tmp_path}$"):
        load_model_dir(tmp_path)
