"""The routes of encoders: random bodies against slow, obvious answers; refusals; disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.types import Message
from tokenizers import Tokenizer

from kvasir.model.bundle import ModelBundle
from kvasir.model.config import Pooling
from kvasir.server.api.embeddings.requests import PromptFields
from kvasir.server.api.routes import ROUTES
from kvasir.server.engine.encoder.sequence import Encoding
from tests.fake_encoder import (
    D_MODEL,
    PROMPTS,
    FakeTextRunner,
    encoder_app,
    encoder_bundle,
    output_of,
    pair_tokenizer,
)
from tests.fake_runner import TIMEOUT
from tests.faults.bodies import VALID, random_body, wrong_types
from tests.serving import VOCAB_SIZE, serving

LIMIT = 64
MODEL = "fake-encoder"
LABELS = ("calm", "glad", "sad")


class Client(NamedTuple):
    app: FastAPI
    runner: FakeTextRunner
    http: httpx.AsyncClient
    post: Callable[..., Awaitable[httpx.Response]]


@asynccontextmanager
async def encoding(bundle: ModelBundle, **settings: Any) -> AsyncIterator[Client]:
    app, runner = encoder_app(bundle, **settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield Client(app, runner, client, client.post)


class Oracle:
    """Answers to bodies, one number at a time."""

    def __init__(self, bundle: ModelBundle) -> None:
        assert bundle.config.pooling is not None
        self.pooling: Pooling = bundle.config.pooling
        self.n_tokens = 0

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return what a route answers, without ids and times; None for a refusal of length."""
        self.n_tokens = 0
        try:
            return getattr(self, path.replace("/", "_"))(body)
        except OverflowError:
            return None

    def outputs(self, body: dict[str, Any], inputs: list[Any], output: str) -> list[Any]:
        encoded = [self.encoding(body, one, output) for one in inputs]
        self.n_tokens = sum(len(one.ids) for one in encoded)
        return [output_of(one, self.pooling, tokens=output == "tokens").tolist() for one in encoded]

    def encoding(self, body: dict[str, Any], one: Any, output: str) -> Encoding:
        longest = body.get("truncate_prompt_tokens")
        if longest in (None, -1):
            longest = LIMIT if body.get("truncate") or longest == -1 else None
        longest = longest and min(longest, LIMIT)
        side = body.get("truncation_direction", "right").lower()
        if isinstance(one, list):
            ids = one
            if longest is not None:
                ids = one[-longest:] if side == "left" else one[:longest]
            return Encoding(self.fitting(ids), None)
        tokenizer = Tokenizer.from_str(pair_tokenizer().to_str())
        if longest is not None:
            tokenizer.enable_truncation(longest, direction=side)
        parts = (one,) if isinstance(one, str) else one
        if output != "scores":
            parts = (PROMPTS[body.get("prompt_name") or "passage"] + parts[0],)
        tokens = tokenizer.encode(*parts)
        return Encoding(self.fitting(tokens.ids), tokens.type_ids if len(parts) == 2 else None)

    def fitting(self, ids: list[int]) -> list[int]:
        if len(ids) > LIMIT:
            raise OverflowError
        return ids

    def unit(self, vector: list[float]) -> list[float]:
        length = math.sqrt(math.fsum(x * x for x in vector))
        return [x / length for x in vector]

    def shares(self, scores: list[float]) -> list[float]:
        if len(scores) == 1 or self.pooling.label_activation == "sigmoid":
            return [1 / (1 + math.exp(-x)) for x in scores]
        powers = [math.exp(x) for x in scores]
        return [x / math.fsum(powers) for x in powers]

    def _v1_embeddings(self, body: dict[str, Any]) -> Any:
        given = body["input"]
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        data = []
        for index, vector in enumerate(self.outputs(body, inputs, "pooled")):
            n = body.get("dimensions")
            shown = vector if n is None else self.unit(vector[:n])
            data.append({"object": "embedding", "index": index, "embedding": shown})
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "data": data, "model": MODEL, "usage": usage}

    def _embed(self, body: dict[str, Any]) -> Any:
        given = body["inputs"]
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        vectors = self.outputs(body, inputs, "pooled")
        kept = [one[: body.get("dimensions")] for one in vectors]
        return [self.unit(one) if body.get("normalize", True) else one for one in kept]

    def _embed_all(self, body: dict[str, Any]) -> Any:
        given = body["inputs"]
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return self.outputs(body, inputs, "tokens")

    def _similarity(self, body: dict[str, Any]) -> Any:
        inputs = [body["inputs"]["source_sentence"], *body["inputs"]["sentences"]]
        vectors = self.outputs(body.get("parameters", {}), inputs, "pooled")
        source, *others = map(self.unit, vectors)
        return [math.fsum(x * y for x, y in zip(source, one, strict=True)) for one in others]

    def ranks(self, body: dict[str, Any], texts: list[str]) -> Iterator[tuple[int, float, float]]:
        scores = self.outputs(body, [(body["query"], text) for text in texts], "scores")
        for score, index in sorted((-one[0], index) for index, one in enumerate(scores)):
            yield index, -score, self.shares([-score])[0]

    def _rerank(self, body: dict[str, Any]) -> Any:
        texts = body["texts"]
        return [
            {"index": index, "score": raw if body.get("raw_scores") else share}
            | ({"text": texts[index]} if body.get("return_text") else {})
            for index, raw, share in self.ranks(body, texts)
        ]

    def _v1_rerank(self, body: dict[str, Any], version: str = "1") -> Any:
        texts = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        results: list[Any] = []
        for index, _, share in self.ranks(body, texts):
            results.append({"index": index, "relevance_score": share})
            if body.get("return_documents", version == "1"):
                results[-1]["document"] = {"text": texts[index]}
        n = self.n_tokens
        return {
            "model": MODEL,
            "results": results[: body.get("top_n")],
            "usage": {"prompt_tokens": n, "total_tokens": n},
            "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": n}},
        }

    def _v2_rerank(self, body: dict[str, Any]) -> Any:
        return self._v1_rerank(body, "2")

    def _predict(self, body: dict[str, Any]) -> Any:
        given = body["inputs"]
        is_batch = isinstance(given, list) and isinstance(given[0], list)
        batch = given if is_batch else [given]
        inputs = [one if isinstance(one, str) else tuple(one) for one in batch]
        inputs = [one[0] if len(one) == 1 and isinstance(one, tuple) else one for one in inputs]
        answers = []
        for scores in self.outputs(body, inputs, "scores"):
            shown = scores if body.get("raw_scores") else self.shares(scores)
            pairs = sorted(zip(shown, self.pooling.labels, strict=True), reverse=True)
            answers.append([{"score": score, "label": label} for score, label in pairs])
        return answers if is_batch else answers[0]

    def _v1_classify(self, body: dict[str, Any]) -> Any:
        given = body["input"]
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        data = []
        for index, scores in enumerate(self.outputs(body, inputs, "scores")):
            label = self.pooling.labels[scores.index(max(scores))]
            probs = self.shares(scores)
            data.append(
                {"index": index, "label": label, "probs": probs, "num_classes": len(scores)}
            )
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "model": MODEL, "data": data, "usage": usage}

    def _classify(self, body: dict[str, Any]) -> Any:
        return self._v1_classify(body)

    def _v1_score(self, body: dict[str, Any]) -> Any:
        seconds = body["items"] if "items" in body else body["text_2"]
        firsts, seconds = (
            [one] if isinstance(one, str) else one for one in (body["text_1"], seconds)
        )
        firsts = firsts * (len(seconds) if len(firsts) == 1 else 1)
        if self.pooling.labels:
            pairs = self.outputs(body, [*zip(firsts, seconds, strict=True)], "scores")
            scores = [self.shares(one)[0] for one in pairs]
        else:
            given = [body["text_1"]] if isinstance(body["text_1"], str) else body["text_1"]
            vectors = self.outputs(body, [*given, *seconds], "pooled")
            units = [*map(self.unit, vectors)]
            of_firsts, of_seconds = units[: len(given)], units[len(given) :]
            of_firsts = of_firsts * (len(of_seconds) // len(of_firsts))
            both = zip(of_firsts, of_seconds, strict=True)
            scores = [math.fsum(x * y for x, y in zip(*pair, strict=True)) for pair in both]
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "model": MODEL, "data": data, "usage": usage}

    def _score(self, body: dict[str, Any]) -> Any:
        return self._v1_score(body)

    def _pooling(self, body: dict[str, Any]) -> Any:
        given = body["input"]
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        output = "scores" if self.pooling.labels else "pooled"
        if body.get("task") == "token_embed":
            output = "tokens"
        found = self.outputs(body, inputs, output)
        if output == "scores":
            found = [*map(self.shares, found)]
        if output == "tokens" and body.get("encoding_format") == "base64":
            found = [[x for token in one for x in token] for one in found]
        data = [{"index": i, "object": "pooling", "data": one} for i, one in enumerate(found)]
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "model": MODEL, "data": data, "usage": usage}

    def _v2_embed(self, body: dict[str, Any]) -> Any:
        options: dict[str, Any] = {
            "truncate": body.get("truncate", "NONE") != "NONE",
            "truncation_direction": "left" if body.get("truncate") == "START" else "right",
            "truncate_prompt_tokens": body.get("max_tokens"),
            "prompt_name": {"search_query": "query"}.get(body["input_type"]),
        }
        n = body.get("output_dimension")
        vectors = [
            vector if n is None else self.unit(vector[:n])
            for vector in self.outputs(options, body["texts"], "pooled")
        ]
        signs = ["".join("01"[x >= 0] for x in vector) for vector in vectors]
        bits = [
            [int(one[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(one), 8)] for one in signs
        ]
        forms = {
            "float": vectors,
            "base64": vectors,
            "ubinary": bits,
            "binary": [[byte - 128 for byte in one] for one in bits],
        }
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": self.n_tokens}}
        return {
            "embeddings": {form: forms[form] for form in body.get("embedding_types", ["float"])},
            "texts": body["texts"],
            "meta": meta,
            "response_type": "embeddings_by_type",
        }


class Bodies:
    """Random bodies of each route."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def some(self, **fields: Any) -> dict[str, Any]:
        """Return some of the fields, each with one of its values."""
        return {k: self.chance.choice(v) for k, v in fields.items() if self.chance.random() < 0.4}

    def text(self) -> str:
        n = self.chance.choice((0, 3, 9, 30, 90))
        return "".join(self.chance.choices("def read_json(path):☃\n", k=n))

    def texts(self) -> list[str]:
        return [self.text() for _ in range(self.chance.randint(1, 4))]

    def ids(self) -> list[int]:
        n = self.chance.choice((1, 5, LIMIT, LIMIT + 3))
        return [self.chance.randrange(VOCAB_SIZE) for _ in range(n)]

    def inputs(self) -> Any:
        return self.chance.choice((self.text, self.texts, self.ids, lambda: [self.ids()] * 2))()

    def options(self, inputs: Any = "") -> dict[str, Any]:
        is_text = isinstance(inputs, str) or isinstance(inputs[0], str)
        names = {"prompt_name": list(PROMPTS)} if is_text and inputs != "" else {}
        return self.some(
            truncate=[True, False],
            truncate_prompt_tokens=[-1, 7, 20, 1000],
            truncation_direction=["left", "right", "Left", "Right"],
            timeout_ms=[60_000],
            priority=[1],
            user=["me"],
            **names,
        )

    def of(self, path: str) -> dict[str, Any]:
        inputs = self.inputs()
        lists = [[self.text()], [self.text(), self.text()]]
        source = {"source_sentence": self.text(), "sentences": self.texts()}
        ranked = {"query": self.text(), "documents": [{"text": x, "id": 1} for x in self.texts()]}
        if self.chance.random() < 0.5:
            ranked["documents"] = self.texts()
        flags = [True, False]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/embeddings": {"input": inputs, **self.options(inputs)}
            | self.some(encoding_format=["float", "base64"], dimensions=[1, 5, D_MODEL]),
            "/embed": {"inputs": inputs, **self.options(inputs)}
            | self.some(normalize=flags, dimensions=[1, 5, D_MODEL]),
            "/embed_all": {"inputs": inputs, **self.options(inputs)},
            "/similarity": {"inputs": source} | self.some(parameters=[self.options("text")]),
            "/rerank": {"query": self.text(), "texts": self.texts(), **self.options()}
            | self.some(raw_scores=flags, return_text=flags),
            "/predict": {"inputs": self.chance.choice((self.text(), *lists, lists))}
            | self.options()
            | self.some(raw_scores=flags),
            "/v1/classify": {"input": inputs, **self.options()},
            "/classify": {"input": inputs, **self.options()},
            "/pooling": {"input": inputs, **self.options()}
            | self.some(encoding_format=["float", "base64"]),
        }
        pairs = [self.text(), self.texts()], [[self.text()], self.text()], [self.texts()] * 2
        first, second = self.chance.choice(pairs)
        bodies["/score"] = bodies["/v1/score"] = {
            "text_1": first,
            self.chance.choice(("text_2", "items")): second,
            **self.options(),
        }
        bodies["/v2/embed"] = {
            "texts": self.texts(),
            "input_type": self.chance.choice(("search_query", "search_document", "clustering")),
            "truncate": self.chance.choice(("START", "END")),
        } | self.some(
            embedding_types=[["base64"], ["ubinary", "float"], ["binary"]],
            output_dimension=[1, 8, 12, D_MODEL],
            max_tokens=[7, 20, 1000],
        )
        ranked |= self.options() | self.some(top_n=[1, 2, 9], return_documents=flags)
        return bodies.get(path, ranked)


def shown(answer: Any, body: dict[str, Any]) -> Any:
    """Return a comparable answer: no ids and times, base64 as the numbers that it holds."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in ("id", "created")}
    for one in kept.get("data", ()):
        if body.get("encoding_format") == "base64":
            name = "embedding" if "embedding" in one else "data"
            one[name] = numbers(one[name])
    if "base64" in (forms := kept.get("embeddings", {})):
        forms["base64"] = [*map(numbers, forms["base64"])]
    return kept


def numbers(text: str) -> list[float]:
    raw = base64.b64decode(text)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def assert_close(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(actual[name], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    else:
        assert actual == (
            pytest.approx(expected, abs=1e-6) if isinstance(expected, float) else expected
        )


EMBEDDER = encoder_bundle()
UNIT = encoder_bundle(normalize=True)
RERANKER = encoder_bundle(("relevant",), label_activation="sigmoid")
CLASSIFIER = encoder_bundle(LABELS, label_activation="softmax")
TAGGER = encoder_bundle(LABELS, label_activation="sigmoid")
EMBEDDING = ["/v1/embeddings", "/v2/embed", "/embed", "/embed_all", "/similarity"]
EMBEDDING += ["/score", "/v1/score", "/pooling"]
RANKING = ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"]
LABELLING = ["/predict", "/v1/classify", "/classify", "/pooling"]


@pytest.mark.parametrize(
    ("bundle", "paths"),
    [
        (EMBEDDER, EMBEDDING),
        (RERANKER, RANKING + LABELLING),
        (CLASSIFIER, LABELLING),
        (TAGGER, LABELLING),
    ],
    ids=["embedder", "reranker", "classifier", "tagger"],
)
async def test_random_bodies_get_the_oracles_answers(bundle: ModelBundle, paths: list[str]) -> None:
    bodies, oracle, n_refused = Bodies(seed=0), Oracle(bundle), 0
    async with encoding(bundle) as client:
        for _ in range(25):
            for path in paths:
                body = bodies.of(path)
                response = await client.post(path, json=body)
                expected = oracle.answer(path, body)
                if expected is None:
                    n_refused += 1
                    assert response.status_code == 400, (path, body)
                    assert f"at most {LIMIT}" in response.text
                    continue
                assert response.status_code == 200, (path, body, response.text)
                route = next(one for one in ROUTES if one.path == path)
                TypeAdapter(route.response_model).validate_json(response.content)
                assert_close(shown(response.json(), body), expected)
    assert n_refused > 3


async def test_a_models_unit_vectors_stay_as_they_are() -> None:
    async with encoding(UNIT) as client:
        openai = await client.post("/v1/embeddings", json={"input": "def"})
        tei = await client.post("/embed", json={"inputs": "def"})
        raw = await client.post("/embed", json={"inputs": "def", "normalize": False})
    assert tei.json() == [openai.json()["data"][0]["embedding"]]
    assert (raw.status_code, raw.json()["error_type"]) == (400, "validation")


@pytest.mark.parametrize(
    ("bundle", "kind", "fields"),
    [
        (EMBEDDER, "embedding", {"pooling": "mean"}),
        (RERANKER, "reranker", {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}),
    ],
)
async def test_info_has_teis_fields_and_limits(
    bundle: ModelBundle, kind: str, fields: dict[str, Any]
) -> None:
    async with encoding(bundle) as client:
        info = (await client.http.get("/info")).json()
    assert info["model_type"] == {kind: fields}
    assert (info["max_input_length"], info["model_id"]) == (LIMIT, MODEL)


async def test_the_openai_client_reads_both_encodings() -> None:
    texts = ["def", "read"]
    expected = [
        output_of(Encoding(pair_tokenizer().encode(text).ids), Pooling(kind="mean"))
        for text in texts
    ]
    async with encoding(EMBEDDER) as served:
        http: Any = served.http
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0
        )
        usual = await client.embeddings.create(model=MODEL, input=texts)
        floats = await client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="'query', 'passage'"):
            await client.embeddings.create(
                model=MODEL, input=texts, extra_body={"prompt_name": "question"}
            )
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="another", input=texts)
    for answer in (usual, floats):
        assert [one.embedding for one in answer.data] == [one.tolist() for one in expected]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0


INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [VOCAB_SIZE]}, "input"),
    ({"input": [[1], [-1]]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ["a", "a" * 200]}, "input"),
    ({"input": [5] * (LIMIT + 1)}, "input"),
    ({"truncate": 1}, "truncate"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_direction": "up"}, "truncation_direction"),
    ({"timeout_ms": 0}, "timeout_ms"),
    ({"priority": 101}, "priority"),
    ({"nothing": 1}, "nothing"),
]
REFUSED: dict[str, tuple[ModelBundle, dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "/v1/embeddings": (
        EMBEDDER,
        {"input": "a"},
        [
            *INPUTS,
            ({"encoding_format": "int8"}, "encoding_format"),
            ({"dimensions": 0}, "dimensions"),
            ({"dimensions": D_MODEL + 1}, "dimensions"),
            ({"prompt_name": "question"}, "prompt_name"),
            ({"prompt_name": "query", "input": [1]}, "prompt_name"),
        ],
    ),
    "/v1/classify": (
        CLASSIFIER,
        {"input": "a"},
        [*INPUTS, ({"prompt_name": "query"}, "prompt_name")],
    ),
    "/v2/embed": (
        EMBEDDER,
        {"texts": ["a"], "input_type": "search_query"},
        [
            ({"texts": []}, "texts"),
            ({"texts": "a"}, "texts"),
            ({"texts": ["a" * 200]}, "texts"),
            ({"input_type": "image"}, "input_type"),
            ({"input_type": None}, "input_type"),
            ({"embedding_types": ["int8"]}, "embedding_types.0"),
            ({"output_dimension": D_MODEL + 1}, "output_dimension"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"images": ["x"]}, "images"),
        ],
    ),
    "/score": (
        EMBEDDER,
        {"text_1": "a", "text_2": ["b"]},
        [
            ({"text_1": []}, "text_1"),
            ({"text_2": []}, "text_1"),
            ({"text_1": ["a", "b"]}, "text_1"),
            ({"text_2": ["b"] * 2048}, "text_2"),
            ({"text_2": ["b" * 200]}, "text_2"),
            ({"use_activation": False}, "use_activation"),
        ],
    ),
    "/pooling": (
        CLASSIFIER,
        {"input": "a"},
        [*INPUTS, ({"task": "embed"}, "task"), ({"task": "pool"}, "task")],
    ),
    "/v2/rerank": (
        RERANKER,
        {"query": "a", "documents": ["b"]},
        [
            ({"query": None}, "query"),
            ({"documents": []}, "documents"),
            ({"documents": [1]}, "documents.0"),
            ({"documents": [{"text": 1}]}, "documents.0"),
            ({"documents": ["b"] * 2049}, "documents"),
            ({"query": "a" * 200}, "documents"),
            ({"top_n": 0}, "top_n"),
        ],
    ),
}


@pytest.mark.parametrize("path", REFUSED)
async def test_a_bad_field_is_named(path: str) -> None:
    bundle, base, refused = REFUSED[path]
    async with encoding(bundle) as client:
        for change, param in refused:
            response = await client.post(path, json=base | change)
            assert response.status_code == 400, (change, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), change
        assert not client.runner.texts


TEI_REFUSED: list[tuple[str, ModelBundle, dict[str, Any], str]] = [
    ("/embed", EMBEDDER, {"inputs": "a" * 200}, f"at most {LIMIT}"),
    ("/embed", EMBEDDER, {"inputs": "a", "prompt_name": "x"}, "'query', 'passage'"),
    ("/embed_all", EMBEDDER, {"inputs": [1, 2, 3] * 7}, "8064 bytes, more than 7200"),
    ("/similarity", EMBEDDER, {"inputs": {"source_sentence": "a", "sentences": []}}, "sentences"),
    ("/rerank", RERANKER, {"query": "a", "texts": []}, "texts"),
    ("/rerank", RERANKER, {"query": "a" * 30, "texts": ["b"] * 9}, "more than 200 tokens"),
    ("/predict", CLASSIFIER, {"inputs": []}, "inputs"),
    ("/predict", CLASSIFIER, {"inputs": ["a", "b", "c"]}, "inputs"),
    ("/predict", CLASSIFIER, {"inputs": [["a", "b", "c"]]}, "inputs"),
]


async def test_a_bad_field_is_named_in_teis_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.server.requests.encoding.MAX_TOKENS", 200)
    monkeypatch.setattr("kvasir.server.requests.admission.answers.MAX_BYTES", 300 * 24)
    for path, bundle, body, cause in TEI_REFUSED:
        async with encoding(bundle) as client:
            response = await client.post(path, json=body)
        assert response.status_code == 400, (path, body)
        assert response.json().keys() == {"error", "error_type"}
        assert cause in response.json()["error"], (path, body)
        assert not client.runner.texts


OTHER_TASKS: list[tuple[ModelBundle, str, dict[str, Any], str]] = [
    (EMBEDDER, "/v1/completions", {"prompt": "a"}, "/v1/embeddings"),
    (EMBEDDER, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "embed"),
    (EMBEDDER, "/rerank", {"query": "a", "texts": ["b"]}, "/similarity"),
    (EMBEDDER, "/v1/classify", {"input": "a"}, "/v1/embeddings"),
    (CLASSIFIER, "/v1/embeddings", {"input": "a"}, "/v1/classify"),
    (CLASSIFIER, "/score", {"text_1": "a", "text_2": "b"}, "/predict and /v1/classify"),
    (CLASSIFIER, "/v1/rerank", {"query": "a", "documents": ["b"]}, ", ".join(LABELS)),
    (CLASSIFIER, "/rerank", {"query": "a", "texts": ["b"]}, "/predict and /v1/classify"),
]


async def test_a_model_for_another_task_names_its_own() -> None:
    for bundle, path, body, cause in OTHER_TASKS:
        async with encoding(bundle) as client:
            response = await client.post(path, json=body)
        assert response.status_code == 400, (path, body)
        assert cause in response.text, (path, body)
    async with serving() as served:
        answers = [
            await served.client.post("/v1/embeddings", json={"input": "a"}),
            await served.client.post("/score", json={"text_1": "a", "text_2": "b"}),
        ]
    for response in answers:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "/v1/completions" in response.text


async def test_hostile_bodies_are_answers_or_refusals() -> None:
    chance, fields = random.Random(0), set(PromptFields.model_fields)
    for bundle, paths in ((EMBEDDER, EMBEDDING), (RERANKER, RANKING + LABELLING)):
        async with encoding(bundle) as client:
            for path in paths:
                valid = VALID[path] | {"model": MODEL}
                bodies = chance.sample([*wrong_types(valid, fields)], 40)
                bodies += [random_body(chance, valid) for _ in range(10)]
                for body in bodies:
                    status = (await client.post(path, content=body)).status_code
                    assert status in (200, 400, 404, 504), (path, body)
                assert (await client.post(path, json=valid)).status_code == 200, path


async def test_the_engine_gets_deadline_and_priority() -> None:
    body = {"input": ["a", "b"], "timeout_ms": 60_000, "priority": -3}
    async with encoding(EMBEDDER) as client:
        before = perf_counter()
        await client.post("/v1/embeddings", json=body, headers={"x-request-id": "one"})
    for text in client.runner.texts:
        assert before + 60 <= text.deadline <= perf_counter() + 60
        assert (text.priority, text.request_id) == (-3, "one")


async def test_tokens_count_for_the_key(tmp_path: Path) -> None:
    body = {"inputs": ["a", "b"]}
    headers, keys = {"authorization": "Bearer mine"}, tmp_path / "keys"
    keys.write_text("tokens_per_minute=5 mine")
    async with encoding(EMBEDDER, api_key_file=keys) as client:
        answers = [await client.post("/embed", json=body, headers=headers) for _ in range(2)]
        answers.append(await client.post("/embed", json=body))
    assert [answer.status_code for answer in answers] == [200, 429, 401]
    assert len(client.runner.texts) == 2


async def test_a_client_that_disconnects_cancels_its_request() -> None:
    gone = asyncio.Event()
    body = json.dumps({"input": ["a"] * 9}).encode()
    received: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/embeddings"}
    scope |= {"headers": [], "query_string": b"", "root_path": "", "http_version": "1.1"}
    async with encoding(EMBEDDER) as client:
        client.runner.gate.clear()
        asked = asyncio.create_task(client.app(scope, receive, send))
        await asyncio.to_thread(client.runner.begun.wait, TIMEOUT)
        gone.set()
        await asked
        client.runner.gate.set()
        await client.post("/embed", json={"inputs": "b"})
    assert len(client.runner.texts) == 5, "the first step, of four texts, and the last request"
