"""What a run learns from: texts, chats, pairs and translations, as tokens on disk and batches.

It may import the files of `model`.
"""
