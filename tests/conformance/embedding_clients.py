"""langchain-openai and llama-index, in an environment without Kvasir: vectors of texts as JSON.

Arguments: the server's URL of OpenAI's API, a model, a key, and the texts.
"""

from __future__ import annotations

import json
import sys

from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding


def main(url: str, model: str, key: str, *texts: str) -> None:
    # By default it sends ids of OpenAI's tokenizers.
    langchain = OpenAIEmbeddings(
        model=model, base_url=url, api_key=key, check_embedding_ctx_length=False
    )
    llama_index = OpenAIEmbedding(model_name=model, api_base=url, api_key=key)
    vectors = {
        "langchain-openai": langchain.embed_documents(list(texts)),
        "llama-index-embeddings-openai": llama_index.get_text_embedding_batch(list(texts)),
    }
    assert langchain.embed_query(texts[0]) == vectors["langchain-openai"][0]
    assert llama_index.get_query_embedding(texts[0]) == vectors["llama-index-embeddings-openai"][0]
    sys.stdout.write(json.dumps(vectors))


if __name__ == "__main__":
    main(*sys.argv[1:])
