"""Parts of TransformerConfig, how their fields are checked, and the rules between fields.

Imports `model.platform`.
"""
