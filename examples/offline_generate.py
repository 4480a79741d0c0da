"""Many prompts at hand, all answers in order: python examples/offline_generate.py [MODEL]"""

import sys

from cbatch import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    with LLM(model) as llm:
        prompts = ["Hello", "The capital of France is", [1, 2, 3]]  # text or token ids
        for out in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32)):
            answer = out.outputs[0]
            print(out.request_id, repr(answer.text), answer.token_ids, answer.finish_reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
