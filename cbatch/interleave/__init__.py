"""Runs a stock transformers model one batch at a time, with host work hidden behind the GPU: see ``generator``."""

from cbatch.interleave.generator import InterleavedGenerator

__all__ = ["InterleavedGenerator"]
