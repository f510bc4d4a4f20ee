"""The factors that the export folds into weights, for adapters that are added to their products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.weights import Weights
from kvasir.model.adapters.layout import Layer, Layout


def with_factors(layout: Layout, weights: Weights, activations: Activations | None) -> Layout:
    """Return a layout with the factors of weights, and with those that smooth activations."""
    smoothing = {} if activations is None else activations.multipliers

    def scaled(name: str, layer: Layer) -> Layer:
        outputs, inputs = layer.outputs, layer.inputs
        for factor in [*smoothing.get(name, ()), *weights.factors(name)]:
            if factor.shape[-1] > 1:  # [1, n_in]
                inputs = inputs * factor.ravel()
            else:  # [n_out, 1], or one number
                outputs = outputs * factor.ravel()
        as_float32 = (values.astype(np.float32) for values in (outputs, inputs))
        return Layer(layer.parts, *as_float32)

    layers = {name: scaled(name, layer) for name, layer in layout.layers.items()}
    return replace(layout, layers=layers)
