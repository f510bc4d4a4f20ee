"""What knows nothing of models: files, processes, signals, machine, progress, words to people.

Imports nothing else of the project; free of PyTorch.
"""
