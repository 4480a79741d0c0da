"""Random requests of every kind on engines of random shape, for as long as wanted:

    python -m tests.engine.soak --worlds 1000 [--seed 1] [--device cuda]

Each request must get what it gets alone, whatever runs beside it, and nothing of any may be left at the end. Prints the
seed of a world that fails; that alone: --worlds 1 --seed SEED. When who is aborted or preempted depends on the clock.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cbatch.engine import Engine
from cbatch.errors import CBatchError, EngineDeadError
from cbatch.outputs import RequestOutput
from cbatch.request import RequestHandle
from cbatch.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.api.tiny import byte_level
from tests.waiting import settle

VOCAB_SIZE, EOS, MAX_LEN = 357, 1, 72
TOKENIZER = byte_level()
GROUPS = {"full": 1, "window": 1, "hybrid": 3}  # of layers, by kind of model
STEM = random.Random(2).choices(range(2, VOCAB_SIZE), k=40)  # what prompts begin with, so that many share a prefix
DIGITS = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
STRUCTURES = {"regex": "[a-f]+[0-9]?", "json": DIGITS, "choice": ["red", "green"]}

Params = SamplingParams | BeamSearchParams
Job = tuple[list[int], Params]


@cache
def model(kind: str, device: str) -> nn.Module:
    """Tiny, and of windows of 8 positions in all layers, in some or in none."""
    base: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        made: Any
        if kind == "full":
            made = LlamaForCausalLM(LlamaConfig(**base))
        elif kind == "window":
            made = MistralForCausalLM(MistralConfig(**base, sliding_window=8))
        else:
            made = Qwen2ForCausalLM(Qwen2Config(**base, use_sliding_window=True, sliding_window=8, layer_types=layers))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)  # so that the best token is the best by far more than rounding
    return made.eval().to(device)


# ---- requests


def push(token_ids: list[int], logits: Tensor) -> Tensor:
    logits[(7 * sum(token_ids) + 11) % VOCAB_SIZE] += 5.0
    return logits


def fail_at_the_third(token_ids: list[int], logits: Tensor) -> Tensor:
    if len(token_ids) == 2:
        raise ValueError("there is no third token")
    return logits


def job(rng: random.Random) -> Job:
    prompt = STEM[: rng.choice((0, 3, 8, 17, 40))] + rng.choices(range(2, VOCAB_SIZE), k=rng.randint(1, 6))
    if rng.random() < 0.1:
        return prompt, BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.choice((1, 3, 8)))
    max_tokens = rng.choice((1, 1, 2, 5, 12, 24))
    some: list[tuple[float, dict[str, Any]]] = [
        (0.3, {"logprobs": rng.choice((0, 3, 20))}),
        (0.25, {"prompt_logprobs": rng.choice((0, 2))}),
        (0.2, {"repetition_penalty": 1.3}),
        (0.2, {"presence_penalty": 0.7, "frequency_penalty": 0.4}),
        (0.2, {"min_tokens": rng.randint(0, max_tokens)}),
        (0.2, {"ignore_eos": True}),
        (0.3, {"stop_token_ids": rng.sample(range(2, VOCAB_SIZE), rng.choice((1, 30)))}),
        (0.25, {"stop": rng.choice((["e"], ["th", "o"], [" a", "1", "x"])), "include_stop_str_in_output": True}),
        (0.1, {"logit_bias": {EOS: 3.0, 40: 5.0}}),
        (0.1, {"bad_words": ["hello", "e"]}),
        (0.1, {"allowed_token_ids": [EOS, *range(60, 120)]}),
        (0.15, {"logits_processors": [rng.choice((push, push, fail_at_the_third))]}),
    ]
    if find_spec("llguidance"):
        name = rng.choice(list(STRUCTURES))
        some.append((0.25, {"structured_outputs": StructuredOutputsParams(**{name: STRUCTURES[name]})}))  # type: ignore[arg-type]
    fields: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.5:
        fields = {"temperature": rng.choice((0.7, 1.0, 2.0)), "seed": rng.randint(0, 99)}
        some += [(0.3, {"n": rng.randint(2, 3)}), (0.3, {"top_p": 0.8}), (0.2, {"top_k": 20})]
    for probability, more in some:
        if rng.random() < probability:
            fields |= more
    return prompt, SamplingParams(max_tokens=max_tokens, **fields)


def submit(engine: Engine, prompt: list[int], params: Params, **options: Any) -> RequestHandle:
    if isinstance(params, BeamSearchParams):
        return engine.submit_beam_search(prompt, params, **options)
    return engine.submit(prompt, params, **options)


def outcome(handle: RequestHandle) -> tuple[Any, list[float]]:
    """What came out, exactly; and log-probabilities, which are right up to rounding."""
    try:
        output = handle.result(120)
    except EngineDeadError:
        raise
    except CBatchError as error:
        return str(error).partition(": ")[2], []
    exact = [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
    return exact, logprobs(output)


def logprobs(output: RequestOutput) -> list[float]:
    found = [entry for one in output.outputs for entry in one.logprobs or ()]
    found += [entry for entry in output.prompt_logprobs or () if entry is not None]
    return [next(iter(entry.values())).logprob for entry in found]


# ---- worlds


def quiet(kind: str, device: str) -> Engine:
    """Where a request is alone: nothing is cached, preempted or in flight beside it."""
    options = {"schedule": "sync", "enable_prefix_caching": False, "max_num_seqs": 8, "block_size": 16}
    return Engine.from_model(model(kind, device), TOKENIZER, num_blocks=100, max_num_batched_tokens=64, **options)


def engine_of(rng: random.Random, kind: str, device: str) -> Engine:
    policy, slots, size = rng.choice(("fcfs", "priority", "longest_prefix")), rng.choice((1, 3, 6)), rng.choice((4, 8))
    depth = rng.choice((1, 2, 2, 3, 4))
    engine = Engine.from_model(
        model(kind, device),
        TOKENIZER,
        schedule="async" if depth > 1 else "sync",
        depth=depth if depth > 1 else None,
        scheduling_policy=policy,
        enable_prefix_caching=policy == "longest_prefix" or rng.random() < 0.7,
        max_model_len=MAX_LEN,
        max_num_seqs=slots,
        max_num_batched_tokens=slots + rng.choice((0, 5, 20)),
        block_size=size,
        num_blocks=1 + GROUPS[kind] * -(-MAX_LEN // size) + rng.choice((0, 4, 30)),
        swap_space=rng.choice((0, 0, 0.0001, 0.001)),
        itl_target_ms=rng.choice((None, None, None, 5.0)),
    )
    if (swap := engine.scheduler.swap) is not None:
        swap.ms_per_block, swap.ms_per_token = rng.choice((0.0, 0.0, 1e-3)), 1.0
    preempt(engine, rng.choice((0.0, 0.1, 0.3)), random.Random(rng.random()))
    return engine


def preempt(engine: Engine, probability: float, rng: random.Random) -> None:
    """Send who runs back to the queue before a step, at random, but nobody for ever."""
    scheduler, plan, times = engine.scheduler, engine.scheduler.plan, Counter[Any]()

    def preempting(host_batch: Any) -> Any:
        for sequence in scheduler.slot_tables.sequences.tolist():
            if sequence is not None and rng.random() < probability and times[sequence] < 6:
                times[sequence] += 1
                scheduler._preempt(sequence)
        return plan(host_batch)

    scheduler.plan = preempting  # type: ignore[method-assign]


def live(seed: int, device: str, alone: Callable[[str], Engine]) -> Counter[str]:
    """One world from its start to its end; what happened in it. ``alone`` has a quiet engine for each kind of model."""
    rng = random.Random(seed)
    kind = rng.choice(list(GROUPS))
    jobs = [job(rng) for _ in range(rng.choice((6, 14)))]
    wanted = [outcome(submit(alone(kind), *each)) for each in jobs]
    with engine_of(rng, kind, device) as engine:
        handles = []
        for prompt, params in jobs:
            options = {"cache_salt": rng.choice((None, None, "x")), "timeout_s": rng.choice((None, 600.0))}
            priority = rng.randint(-1, 1) if engine.scheduler.policy == "priority" else 0
            handles.append(submit(engine, prompt, params, priority=priority, **options))
            time.sleep(rng.choice((0.0, 0.0, 0.02 * rng.random())))
        aborted = {index for index in range(len(jobs)) if rng.random() < 0.15}
        for index in sorted(aborted):
            time.sleep(0.02 * rng.random())
            handles[index].abort()
            if rng.random() < 0.3:
                engine.reset_prefix_cache()
        for index, (handle, (exact, values)) in enumerate(zip(handles, wanted, strict=True)):
            got, got_values = outcome(handle)
            if index not in aborted:
                assert got == exact, (jobs[index], got, exact)
                assert len(got_values) == len(values), (jobs[index], got_values, values)
                assert all(map(lambda a, b: math.isclose(a, b, abs_tol=0.02), got_values, values)), jobs[index]
            elif isinstance(got, list) and isinstance(exact, list) and isinstance(jobs[index][1], SamplingParams):
                assert all(one[0] == whole[0][: len(one[0])] for one, whole in zip(got, exact, strict=True))
        settle(engine)
        assert engine.is_healthy
        stats = engine.stats()
    engine.scheduler.check()
    return Counter(requests=len(jobs), preemptions=stats["num_preemptions"], blocks_in=stats["num_blocks_in"])


def soak(num_worlds: int, seed: int, device: str = "cpu") -> Counter[str]:
    totals: Counter[str] = Counter()
    with ExitStack() as stack:
        alone = cache(lambda kind: stack.enter_context(quiet(kind, device)))
        for number in range(seed, seed + num_worlds):
            try:
                totals += live(number, device, alone)
            except BaseException:
                print(
                    f"world {number} failed: python -m tests.engine.soak --worlds 1 --seed {number} --device {device}"
                )
                raise
    return totals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    os.environ["CBATCH_DEBUG"] = "1"
    print(dict(soak(arguments.worlds, arguments.seed, arguments.device)))
