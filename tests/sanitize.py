"""A small asynchronous run on the GPU, launched kernel by kernel, for tools that watch memory and streams.

TORCH_CUDA_SANITIZER=1 python -m tests.sanitize                       # races between streams
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.sanitize     # accesses out of bounds
"""

from __future__ import annotations

import torch

from cbatch.engine import Engine
from cbatch.interleave import InterleavedGenerator
from cbatch.sampling_params import SamplingParams
from tests.models.families import make_tiny


def main() -> None:
    with Engine.from_model(
        make_tiny("llama", device="cuda"), enforce_eager=True, max_num_seqs=4, block_size=16, num_blocks=20
    ) as engine:
        asked = [SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(seed=1, top_p=0.9, max_tokens=8)]
        handles = [engine.submit([5, 6, 7] * (1 + 3 * i), asked[i % 2]) for i in range(6)]
        print([handle.result(240).outputs[0].token_ids for handle in handles])
    engine.scheduler.check()
    ids, mask = torch.tensor([[5, 6, 7], [0, 8, 9]], device="cuda"), torch.tensor([[1, 1, 1], [0, 1, 1]], device="cuda")
    for cache in ("static", "dynamic"):
        generator = InterleavedGenerator(make_tiny("llama", device="cuda"), cache=cache)
        for options in ({}, {"top_p": 0.9}, {"num_beams": 2}):
            print(generator.generate(ids, mask, 8, **options).tolist())


if __name__ == "__main__":
    main()
