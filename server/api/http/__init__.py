"""What routes share: API keys, limits, metrics, answers, errors and streams."""
