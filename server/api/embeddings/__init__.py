"""The routes of encoders: embeddings, similarity, ranks and labels of texts, in others' forms."""
