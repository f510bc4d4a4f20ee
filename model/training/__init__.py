"""The training of a decoder on text or chats, or of an encoder on text or pairs, by processes.

It may import all of `model` but downloads and published models.
"""
