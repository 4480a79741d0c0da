"""Two conversations, answered side by side: python examples/chat.py [MODEL]"""

import sys

from cbatch import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    conversations = [
        [{"role": "user", "content": "Hi! What is a prime number?"}],
        [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Why is the sea salty?"},
        ],
    ]
    with LLM(model) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=48))
        for conversation, out in zip(conversations, outputs, strict=True):
            print(conversation[-1]["content"], "->", out.outputs[0].text.strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
