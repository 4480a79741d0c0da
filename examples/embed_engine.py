"""The engine on a model you already have, token ids in and out: python examples/embed_engine.py [FOLDER]"""

import sys

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cbatch import Engine, SamplingParams


def some_model(folder: str | None = None) -> PreTrainedModel:
    """Any causal LM of transformers; here a tiny one with random weights, unless you name a folder."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


def main(folder: str | None = None) -> None:
    model = some_model(folder)  # left as it is: use it, even train it, beside the engine
    with Engine.from_model(model, max_num_seqs=32) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8), request_id="a")
        other = engine.submit([4, 5], SamplingParams(temperature=0.8, seed=1, max_tokens=1000))  # same batch
        for token in handle:  # as they come
            print(token, end=" ", flush=True)
        print(handle.result().outputs[0].finish_reason)
        other.abort()  # from any thread, at any time
        print(other.result().outputs[0].finish_reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
