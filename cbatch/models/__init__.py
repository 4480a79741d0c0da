"""Models: what the engine asks of one, and how those of transformers are made to answer."""
