"""The parts of a configuration: how its classes check their fields, recurrences, and its rules.

Imports `model.platform`.
"""
