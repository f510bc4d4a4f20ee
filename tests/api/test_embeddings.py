"""The routes of encoders: their texts and answers, case by case; refusals; disconnects."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from kvasir.model.config import Pooling
from kvasir.model.directory import ModelDirectory
from kvasir.server.api.embeddings.requests import PromptFields
from kvasir.server.api.routes import ROUTES
from kvasir.server.engine.encoder.sequence import Encoding
from tests.faults.bodies import VALID, random_body, wrong_types
from tests.kit.dialects import assert_close
from tests.kit.fake_encoder import (
    D_MODEL,
    FakeTextRunner,
    encoder_app,
    encoder_model_dir,
    output_of,
    pair_tokenizer,
)
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import VOCAB_SIZE, RawRequest, running, serving

LIMIT = 64
MODEL = "fake-encoder"
LABELS = ("calm", "glad", "sad")


class Client(NamedTuple):
    app: FastAPI
    runner: FakeTextRunner
    http: httpx.AsyncClient
    post: Callable[..., Awaitable[httpx.Response]]


@asynccontextmanager
async def encoding(model_dir: ModelDirectory, **settings: Any) -> AsyncIterator[Client]:
    app, runner = encoder_app(model_dir, **settings)
    async with running(app) as client:
        yield Client(app, runner, client, client.post)


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector]


def cosine(one: list[float], other: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(unit(one), unit(other), strict=True))


def sigmoids(scores: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-x)) for x in scores]


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(x) for x in scores]
    return [x / math.fsum(powers) for x in powers]


def ids_of(text: Any, longest: int | None = None, side: str = "right") -> Encoding:
    """Return the tokens of a text, of two, or of token ids, as the engine should get them."""
    if isinstance(text, list):
        return Encoding(text)
    tokenizer = Tokenizer.from_str(pair_tokenizer().to_str())
    if longest is not None:
        tokenizer.enable_truncation(longest, direction=side)
    tokens = tokenizer.encode(*([text] if isinstance(text, str) else text))
    return Encoding(tokens.ids, None if isinstance(text, str) else tokens.type_ids)


def data(**columns: Any) -> Any:
    rows = zip(*columns.values(), strict=True)
    return [{"index": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(rows)]


def ranked(scores: list[list[float]], name: str, more: dict[str, list[Any]]) -> Any:
    """Return the places of scores, the best first, with what else is shown of each."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i][0])
    return [
        {"index": i, name: scores[i][0]} | {key: values[i] for key, values in more.items()}
        for i in order
    ]


def predicted(scores: list[float]) -> Any:
    pairs = sorted(zip(scores, LABELS, strict=True), reverse=True)
    return [{"score": score, "label": label} for score, label in pairs]


def classified(scores: list[list[float]]) -> Any:
    likeliest = [LABELS[one.index(max(one))] for one in scores]
    return data(label=likeliest, probs=scores, num_classes=[3] * len(scores))


def bits(vector: list[float], offset: int = 0) -> list[int]:
    signs = "".join("01"[x >= 0] for x in vector)
    return [int(signs[i : i + 8].ljust(8, "0"), 2) - offset for i in range(0, len(signs), 8)]


EMBEDDER = encoder_model_dir()
UNIT = encoder_model_dir(normalize=True)
RERANKER = encoder_model_dir(("relevant",), label_activation="sigmoid")
CLASSIFIER = encoder_model_dir(LABELS, label_activation="softmax")
TAGGER = encoder_model_dir(LABELS, label_activation="sigmoid")
EMBEDDING = ["/v1/embeddings", "/v2/embed", "/embed", "/embed_all", "/similarity"]
EMBEDDING += ["/score", "/v1/score", "/pooling", "/v1/embed", "/api/embed", "/api/embeddings"]
RANKING = ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"]
LABELLING = ["/predict", "/v1/classify", "/classify", "/pooling"]

A, B, C, LONG = "def", "read_json(path)", "x ☃", "json.load(path)\n" * 30
TEXTS, FOUND = [A, B, C], [(A, text) for text in (B, C, A)]
SOURCE = {"source_sentence": A, "sentences": [B, C]}
COHERE = {"texts": [A, B], "truncate": "END", "input_type": "clustering"}
FIRST = {"texts": [A, B]}  # of Cohere's first version
QUERY, DOCUMENTS = {"query": A, "texts": [B, C, A]}, {"query": A, "documents": [B, C, A]}
NAMED = [{"text": text} for text in DOCUMENTS["documents"]]
Case = tuple[str, dict[str, Any], list[Any], Callable[[list[Any]], Any]]
# A body, the texts that the engine gets, and what is shown of its vectors or scores.
VECTORS: list[Case] = [
    ("/v1/embeddings", {"input": A}, [A], lambda o: data(object=["embedding"], embedding=o)),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64"}, [[5, 6], [7]],
     lambda o: data(object=["embedding"] * 2, embedding=o)),
    ("/v1/embeddings", {"input": [5, 6], "dimensions": 5}, [[5, 6]],
     lambda o: data(object=["embedding"], embedding=[unit(o[0][:5])])),
    ("/embed", {"inputs": TEXTS, "prompt_name": "query"}, [f"find: {text}" for text in TEXTS],
     lambda o: [*map(unit, o)]),
    ("/embed", {"inputs": A, "normalize": False, "dimensions": 5}, [A], lambda o: [o[0][:5]]),
    ("/embed", {"inputs": A, "dimensions": 5}, [A], lambda o: [unit(o[0][:5])]),
    ("/embed", {"inputs": LONG, "truncate": True}, [ids_of(LONG, LIMIT)], lambda o: [unit(o[0])]),
    ("/embed", {"inputs": LONG, "truncate_prompt_tokens": 7, "truncation_direction": "Left"},
     [ids_of(LONG, 7, "left")], lambda o: [unit(o[0])]),
    ("/embed", {"inputs": LONG, "truncate_prompt_tokens": -1, "truncation_side": "left"},
     [ids_of(LONG, LIMIT, "left")], lambda o: [unit(o[0])]),
    ("/embed_all", {"inputs": [*range(9)], "truncate_prompt_tokens": 4}, [[0, 1, 2, 3]], list),
    ("/embed_all", {"inputs": TEXTS}, TEXTS, list),
    ("/similarity", {"inputs": SOURCE}, TEXTS, lambda o: [cosine(o[0], one) for one in o[1:]]),
    ("/similarity", {"inputs": SOURCE, "parameters": {"prompt_name": "query"}},
     [f"find: {text}" for text in TEXTS], lambda o: [cosine(o[0], one) for one in o[1:]]),
    ("/score", {"text_1": A, "text_2": [B, C]}, TEXTS,
     lambda o: data(object=["score"] * 2, score=[cosine(o[0], one) for one in o[1:]])),
    ("/v1/score", {"queries": [A, B], "items": [C, A]}, [A, B, C, A],
     lambda o: data(object=["score"] * 2, score=[*map(cosine, o[:2], o[2:])])),
    ("/pooling", {"input": [A, B]}, [A, B], lambda o: data(object=["pooling"] * 2, data=o)),
    ("/pooling", {"input": A, "task": "token_embed"}, [A],
     lambda o: data(object=["pooling"], data=o)),
    ("/v2/embed", COHERE, [A, B], lambda o: {"float": o}),
    ("/v2/embed", COHERE | {"input_type": "search_query", "embedding_types": ["binary", "ubinary"]},
     [f"find: {A}", f"find: {B}"],
     lambda o: {"ubinary": [*map(bits, o)], "binary": [bits(one, 128) for one in o]}),
    ("/v2/embed", COHERE | {"texts": [LONG], "truncate": "START", "output_dimension": 12,
     "embedding_types": ["base64", "ubinary"]}, [ids_of(LONG, LIMIT, "left")],
     lambda o: {"base64": [unit(o[0][:12])], "ubinary": [bits(o[0][:12])]}),
    ("/v2/embed", COHERE | {"texts": [LONG], "max_tokens": 7}, [ids_of(LONG, 7)],
     lambda o: {"float": o}),
    ("/v1/embed", FIRST, [A, B], list),
    ("/v1/embed", FIRST | {"input_type": "search_query", "embedding_types": ["float", "binary"]},
     [f"find: {A}", f"find: {B}"],
     lambda o: {"float": o, "binary": [bits(one, 128) for one in o]}),
    ("/api/embed", {"input": [LONG, A], "dimensions": 5, "keep_alive": "5m"},
     [ids_of(LONG, LIMIT), A], lambda o: [unit(one[:5]) for one in o]),
    ("/api/embed", {"input": A}, [A], lambda o: [unit(o[0])]),
    ("/api/embeddings", {"prompt": A, "options": {"num_ctx": 9}}, [A], lambda o: o[0]),
    ("/rerank", {"query": A, "texts": [B, C]}, TEXTS,
     lambda o: ranked([[cosine(o[0], one)] for one in o[1:]], "score", {})),
    ("/v1/rerank", {"query": A, "documents": [B, C], "return_documents": False}, TEXTS,
     lambda o: ranked([[cosine(o[0], one)] for one in o[1:]], "relevance_score", {})),
]  # fmt: skip
RANKS: list[Case] = [
    ("/rerank", QUERY, FOUND, lambda o: ranked([*map(sigmoids, o)], "score", {})),
    ("/rerank", QUERY | {"raw_scores": True, "return_text": True}, FOUND,
     lambda o: ranked(o, "score", {"text": [B, C, A]})),
    ("/v1/rerank", DOCUMENTS | {"documents": NAMED, "top_n": 2}, FOUND,
     lambda o: ranked([*map(sigmoids, o)], "relevance_score", {"document": NAMED})[:2]),
    ("/v1/rerank", DOCUMENTS | {"return_documents": False}, FOUND,
     lambda o: ranked([*map(sigmoids, o)], "relevance_score", {})),
    ("/v2/rerank", DOCUMENTS, FOUND, lambda o: ranked([*map(sigmoids, o)], "relevance_score", {})),
    ("/v2/rerank", DOCUMENTS | {"return_documents": True}, FOUND,
     lambda o: ranked([*map(sigmoids, o)], "relevance_score", {"document": NAMED})),
    ("/score", {"text_1": A, "text_2": [B, C, A]}, FOUND,
     lambda o: data(object=["score"] * 3, score=[sigmoids(one)[0] for one in o])),
    ("/v1/score", {"data_1": [A, B], "documents": [B, C]}, [(A, B), (B, C)],
     lambda o: data(object=["score"] * 2, score=[sigmoids(one)[0] for one in o])),
    ("/predict", {"inputs": A}, [A], lambda o: [{"score": sigmoids(o[0])[0], "label": "relevant"}]),
]  # fmt: skip


def labelling(shares: Callable[[list[float]], list[float]]) -> list[Case]:
    return [
        ("/predict", {"inputs": A}, [A], lambda o: predicted(shares(o[0]))),
        ("/predict", {"inputs": [A, B], "raw_scores": True}, [(A, B)], lambda o: predicted(o[0])),
        ("/predict", {"inputs": [[A], [A, LONG]], "truncate": True}, [A, ids_of((A, LONG), LIMIT)],
         lambda o: [predicted(shares(one)) for one in o]),
        ("/v1/classify", {"input": A}, [A], lambda o: classified([*map(shares, o)])),
        ("/classify", {"input": [[5, 6], [7]]}, [[5, 6], [7]],
         lambda o: classified([*map(shares, o)])),
        ("/pooling", {"input": [A, B], "encoding_format": "base64"}, [A, B],
         lambda o: data(object=["pooling"] * 2, data=[*map(shares, o)])),
    ]  # fmt: skip


CASES: list[tuple[ModelDirectory, list[Case]]] = [
    (EMBEDDER, VECTORS),
    (RERANKER, RANKS),
    (CLASSIFIER, labelling(softmax)),
    (TAGGER, labelling(sigmoids)),
]


@pytest.mark.parametrize(("model_dir", "cases"), CASES, ids=["vectors", "ranks", "one", "several"])
async def test_a_route_shows_what_the_engine_makes_of_the_texts(
    model_dir: ModelDirectory, cases: list[Case]
) -> None:
    pooling = model_dir.config.pooling
    assert pooling is not None
    async with encoding(model_dir) as client:
        for path, body, texts, show in cases:
            client.runner.batches.clear()
            response = await client.post(path, json=body | {"user": "me"})
            assert response.status_code == 200, response.text
            by_cosine = model_dir is EMBEDDER and path in RANKING
            assert response.headers.get("x-kvasir-scores") == ("cosine" if by_cosine else None)
            (route,) = (one for one in ROUTES if one.path == path)
            TypeAdapter(route.response_model).validate_json(response.content)
            given = [text if isinstance(text, Encoding) else ids_of(text) for text in texts]
            got = sorted(client.runner.texts, key=lambda text: text.id)
            assert [(one.prompt_ids, one.type_ids) for one in got] == [
                (one.ids, one.type_ids) for one in given
            ]
            of_tokens = got[0].wants_tokens
            outputs = [output_of(one, pooling, tokens=of_tokens).tolist() for one in given]
            shown = answer_of(path, body, response.json(), sum(len(one.ids) for one in given))
            assert_close(shown, show(outputs))


def answer_of(path: str, body: dict[str, Any], answer: Any, n_tokens: int) -> Any:
    """Return the vectors or scores of an answer; check what is beside them."""
    if not isinstance(answer, dict):
        return answer
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    meta = {"api_version": {"version": path[2]}, "tokens": {"input_tokens": n_tokens}}
    assert answer.get("usage", usage) == usage
    assert answer.get("meta", meta) == meta
    assert answer.get("model", MODEL) == MODEL
    assert answer.get("texts") == body.get("texts")
    (shown,) = (
        answer[name] for name in ("data", "results", "embeddings", "embedding") if name in answer
    )
    return shown


async def test_a_models_unit_vectors_stay_as_they_are() -> None:
    async with encoding(UNIT) as client:
        openai = await client.post("/v1/embeddings", json={"input": "def"})
        tei = await client.post("/embed", json={"inputs": "def"})
        raw = await client.post("/embed", json={"inputs": "def", "normalize": False})
    assert tei.json() == [openai.json()["data"][0]["embedding"]]
    assert (raw.status_code, raw.json()["error_type"]) == (400, "validation")


@pytest.mark.parametrize(
    ("model_dir", "kind", "fields"),
    [
        (EMBEDDER, "embedding", {"pooling": "mean"}),
        (RERANKER, "reranker", {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}),
    ],
)
async def test_info_has_teis_fields_and_limits(
    model_dir: ModelDirectory, kind: str, fields: dict[str, Any]
) -> None:
    async with encoding(model_dir) as client:
        info = (await client.http.get("/info")).json()
    assert info["model_type"] == {kind: fields}
    assert (info["max_input_length"], info["model_id"]) == (LIMIT, MODEL)
    assert info["max_concurrent_requests"] > info["max_client_batch_size"] == 2048


async def test_the_openai_client_reads_its_usual_encoding() -> None:
    async with encoding(EMBEDDER) as served:
        http: Any = served.http
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http)
        answer = await client.embeddings.create(model=MODEL, input=[A, B])
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="another", input=[A, B])
    for one, text in zip(answer.data, (A, B), strict=True):
        assert one.embedding == output_of(ids_of(text), Pooling(kind="mean")).tolist()


BAD_INPUTS: list[Any] = [None, [], [[]], ["a", 1], [VOCAB_SIZE], [[1], [-1]], ["a"] * 2049]
BAD_INPUTS += [["a", "a" * 200], [5] * (LIMIT + 1)]
TO_SCORE = {"text_1": "a", "text_2": ["b"]}
TO_RANK = {"query": "a", "documents": ["b"]}
Refused = tuple[ModelDirectory, str, dict[str, Any], str]  # what should be named comes last
REFUSED: list[Refused] = [
    *[
        (model_dir, path, {"input": inputs}, "input")
        for model_dir, path in ((EMBEDDER, "/v1/embeddings"), (CLASSIFIER, "/pooling"))
        for inputs in BAD_INPUTS
    ],
    (EMBEDDER, "/v1/embeddings", {"input": "a", "dimensions": D_MODEL + 1}, "dimensions"),
    (EMBEDDER, "/v1/embeddings", {"input": "a", "prompt_name": "question"}, "prompt_name"),
    (EMBEDDER, "/v1/embeddings", {"input": [1], "prompt_name": "query"}, "prompt_name"),
    (CLASSIFIER, "/v1/classify", {"input": "a", "prompt_name": "query"}, "prompt_name"),
    (CLASSIFIER, "/v1/classify", {"input": "a", "nothing": 1}, "nothing"),
    (EMBEDDER, "/v2/embed", COHERE | {"texts": []}, "texts"),
    (EMBEDDER, "/v2/embed", COHERE | {"texts": ["a" * 200], "truncate": "NONE"}, "texts"),
    (EMBEDDER, "/v2/embed", COHERE | {"input_type": None}, "input_type"),
    (EMBEDDER, "/v2/embed", COHERE | {"embedding_types": ["int8"]}, "embedding_types.0"),
    (EMBEDDER, "/v2/embed", COHERE | {"output_dimension": D_MODEL + 1}, "output_dimension"),
    (EMBEDDER, "/v2/embed", COHERE | {"truncate": "NONE", "max_tokens": 5}, "max_tokens"),
    (EMBEDDER, "/v2/embed", COHERE | {"images": ["x"]}, "images"),
    (EMBEDDER, "/score", TO_SCORE | {"text_1": []}, "text_1"),
    (EMBEDDER, "/score", TO_SCORE | {"text_2": []}, "text_1"),
    (EMBEDDER, "/score", TO_SCORE | {"text_1": ["a", "b"]}, "text_1"),
    (EMBEDDER, "/score", TO_SCORE | {"text_2": ["b"] * 2049}, "text_2"),
    (EMBEDDER, "/score", TO_SCORE | {"text_2": ["b" * 200]}, "text_2"),
    (EMBEDDER, "/score", TO_SCORE | {"use_activation": False}, "use_activation"),
    (CLASSIFIER, "/pooling", {"input": "a", "task": "embed"}, "task"),
    (CLASSIFIER, "/pooling", {"input": "a", "task": "pool"}, "task"),
    (RERANKER, "/v2/rerank", TO_RANK | {"documents": []}, "documents"),
    (RERANKER, "/v2/rerank", TO_RANK | {"documents": [{"text": 1}]}, "documents.0"),
    (RERANKER, "/v2/rerank", TO_RANK | {"documents": ["b"] * 2049}, "documents"),
    (RERANKER, "/v2/rerank", TO_RANK | {"query": "a" * 200}, "documents"),
]


async def test_what_texts_are_compared_with_is_beside_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model of vectors, too, which reads each text by itself."""
    monkeypatch.setattr("kvasir.server.api.embeddings.requests.MAX_INPUTS", 9)
    most = ["b"] * 9
    async with encoding(EMBEDDER) as client:
        for path, body in (
            ("/rerank", {"query": "a", "texts": most}),
            ("/v2/rerank", {"query": "a", "documents": most}),
            ("/score", {"text_1": most, "text_2": most}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": most}}),
        ):
            assert (await client.post(path, json=body)).status_code == 200, path


async def refusals(cases: list[Refused]) -> AsyncIterator[tuple[httpx.Response, str]]:
    """Yield each answer, which is a 400 that no model was asked for, and what it should name."""
    for model_dir in (EMBEDDER, RERANKER, CLASSIFIER):
        async with encoding(model_dir) as client:
            for _, path, body, named in (one for one in cases if one[0] is model_dir):
                response = await client.post(path, json=body)
                assert response.status_code == 400, (path, body, response.text)
                assert not client.runner.texts
                yield response, named


async def test_a_bad_field_is_named() -> None:
    async for response, param in refusals(REFUSED):
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error


TEI_REFUSED: list[Refused] = [
    (EMBEDDER, "/embed", {"inputs": "a" * 200}, f"at most {LIMIT}"),
    (EMBEDDER, "/embed", {"inputs": "a", "prompt_name": "x"}, "'query', 'passage'"),
    (EMBEDDER, "/embed_all", {"inputs": [1, 2, 3] * 7}, "8064 bytes, more than 7200"),
    (EMBEDDER, "/similarity", {"inputs": SOURCE | {"sentences": []}}, "sentences"),
    (RERANKER, "/rerank", {"query": "a", "texts": []}, "texts"),
    (RERANKER, "/rerank", {"query": "a" * 30, "texts": ["b"] * 9}, "more than 200 tokens"),
    (CLASSIFIER, "/predict", {"inputs": []}, "inputs"),
    (CLASSIFIER, "/predict", {"inputs": ["a", "b", "c"]}, "inputs"),
    (CLASSIFIER, "/predict", {"inputs": [["a", "b", "c"]]}, "inputs"),
]


async def test_a_bad_field_is_named_in_teis_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.server.requests.encoding.MAX_TOKENS", 200)
    monkeypatch.setattr("kvasir.server.requests.admission.answers.MAX_BYTES", 300 * 24)
    async for response, cause in refusals(TEI_REFUSED):
        assert response.json().keys() == {"error", "error_type"}
        assert cause in response.json()["error"], response.text


OTHER_TASKS: list[Refused] = [
    (EMBEDDER, "/v1/completions", {"prompt": "a"}, "/v1/embeddings"),
    (EMBEDDER, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "embed"),
    (EMBEDDER, "/v1/classify", {"input": "a"}, "/v1/embeddings"),
    (CLASSIFIER, "/v1/embeddings", {"input": "a"}, "/v1/classify"),
    (CLASSIFIER, "/score", {"text_1": "a", "text_2": "b"}, "/predict and /v1/classify"),
    (CLASSIFIER, "/v1/rerank", {"query": "a", "documents": ["b"]}, ", ".join(LABELS)),
    (CLASSIFIER, "/rerank", {"query": "a", "texts": ["b"]}, "/predict and /v1/classify"),
]


async def test_a_model_for_another_task_names_its_own() -> None:
    async for response, cause in refusals(OTHER_TASKS):
        assert cause in response.text
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
    for model_dir, paths in ((EMBEDDER, EMBEDDING), (RERANKER, RANKING + LABELLING)):
        async with encoding(model_dir) as client:
            for path in paths:
                valid = VALID[path] | {"model": MODEL}
                bodies = chance.sample([*wrong_types(valid, fields)], 20)
                bodies += [random_body(chance, valid) for _ in range(5)]
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
    async with encoding(EMBEDDER) as client:
        client.runner.gate.clear()
        asked = RawRequest(client.app, "/v1/embeddings", {"input": ["a"] * 9})
        await asyncio.to_thread(client.runner.begun.wait, TIMEOUT)
        asked.leaves.set()
        await asked.task
        assert asked.sent == []
        client.runner.gate.set()
        await client.post("/embed", json={"inputs": "b"})
    assert len(client.runner.texts) == 5, "the first step, of four texts, and the last request"
