"""Clients of encoders, in an environment without Kvasir: what they get for texts, as JSON.

langchain-openai, llama-index, Ollama's package and Cohere's two clients make vectors; the last two
rank texts by the first of them.
Arguments: the URLs of a server of vectors and of a reranker, a model, a key, and the texts.
"""

from __future__ import annotations

import json
import sys

import cohere
import ollama
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding


def main(url: str, reranker: str, model: str, key: str, *texts: str) -> None:
    # By default it sends ids of OpenAI's tokenizers.
    langchain = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key=key, check_embedding_ctx_length=False
    )
    llama_index = OpenAIEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key)
    vectors = {
        "langchain-openai": langchain.embed_documents(list(texts)),
        "llama-index-embeddings-openai": llama_index.get_text_embedding_batch(list(texts)),
        "cohere": cohere.Client(api_key=key, base_url=url)
        .embed(model=model, texts=list(texts))
        .embeddings,
        "cohere v2": cohere.ClientV2(api_key=key, base_url=url)
        .embed(
            model=model,
            texts=list(texts),
            input_type="clustering",
            embedding_types=["float"],
        )
        .embeddings.float_,
    }
    local = ollama.Client(host=url, headers={"authorization": f"Bearer {key}"})
    vectors["ollama"] = [local.embeddings(model, text).embedding for text in texts]
    units = local.embed(model, list(texts)).embeddings
    assert all(abs(sum(x * x for x in unit) - 1) < 1e-5 for unit in units)
    assert langchain.embed_query(texts[0]) == vectors["langchain-openai"][0]
    assert llama_index.get_query_embedding(texts[0]) == vectors["llama-index-embeddings-openai"][0]
    ranks = {}
    for client in (cohere.Client, cohere.ClientV2):
        ranking = client(api_key=key, base_url=reranker).rerank(
            model=model, query=texts[0], documents=list(texts), top_n=2
        )
        ranks[client.__name__] = [[one.index, one.relevance_score] for one in ranking.results]
    sys.stdout.write(json.dumps({"vectors": vectors, "ranks": ranks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
