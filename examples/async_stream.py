"""Streams in an event loop, one of them left early: python examples/async_stream.py [MODEL]"""

import asyncio
import sys

from cbatch import AsyncLLM, RequestOutputKind, SamplingParams


async def tell(llm: AsyncLLM, prompt: str) -> str:
    """Prints each piece of the answer as it comes."""
    params = SamplingParams(temperature=0.0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for out in llm.generate(prompt, params):
        pieces.append(out.outputs[0].text)
        print(f"{prompt!r} +{pieces[-1]!r}")
    return prompt + "".join(pieces)


async def first_words(llm: AsyncLLM, prompt: str, num_tokens: int) -> str:
    """Leaves the loop early, which aborts the request: its place goes to others."""
    text = ""
    async for out in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=100)):
        text = out.outputs[0].text  # cumulative, as nothing else was asked for
        if len(out.outputs[0].token_ids) >= num_tokens:
            break
    return prompt + text


async def main(model: str = "smollm2-135m") -> None:
    async with AsyncLLM(model) as llm:
        texts = await asyncio.gather(
            tell(llm, "Once upon a time"), tell(llm, "The moon is"), first_words(llm, "One, two,", num_tokens=5)
        )
        print(*texts, sep="\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
