"""A stock model of transformers, one batch at a time, its host work hidden behind the GPU: see ``generator``."""

from cbatch.interleave.generator import InterleavedGenerator

__all__ = ["InterleavedGenerator"]
