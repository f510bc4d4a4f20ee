"""Whole models on an emulated ARM CPU answer with this machine's bits: `make arm-check`."""
