"""What knows nothing of models: files, processes, the machine, progress, words for a terminal.

Imports nothing else of the project; free of PyTorch.
"""
