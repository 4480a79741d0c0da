"""What requests ask to be done to their logits, against transformers' own processors; kernels against their twins."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import generation as hf

from cbatch.kernels import reference
from cbatch.kernels import slot_layout as layout
from cbatch.sampler import PROCESSED, Encoded, encode
from cbatch.sampling_params import SamplingParams
from cbatch.slot_state import Admission, SlotState, slot_state_bytes
from tests.kernels.targets import INTERPRETED, random, run_under_the_interpreter, targets

# The interpreter computes with numpy, which warns of what is meant here: -inf, times 0 too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 4321  # two chunks, the second of them short
STOPS = (5, 4300)
BAD_WORDS = ((17,), (1, 2, 3), (2, 4), tuple(range(100, 100 + layout.MAX_BAD_WORD_LEN)), (3, 2, 3), (4320,))
BIASES = {3: 2.5, 4: -1.5, 1000: -100.0, 4320: 100.0, 5: 50.0}
ALLOWED = (*range(0, VOCAB, 3), 4, 5, 4319)


@dataclass
class Row:
    """A sequence in the middle of its life."""

    params: SamplingParams
    prompt: Sequence[int] = (1, 2, 3, 2, 900)
    outputs: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    stops: Sequence[int] = STOPS
    seed: int = 5

    @property
    def history(self) -> np.ndarray:
        return np.array([*self.prompt, *self.outputs], np.int32)

    @property
    def encoded(self) -> Encoded:
        return encode(
            self.params, self.seed, prompt_len=len(self.prompt), stop_ids=self.stops, bad_word_ids=self.bad_words
        )


@dataclass
class Batch:
    """Rows in slots of their own, in falling order, with the tensors that the operations read."""

    rows: list[Row]
    device: str = "cpu"
    vocab: int = VOCAB
    state: SlotState = field(init=False)

    def __post_init__(self) -> None:
        count, device = len(self.rows), torch.device(self.device)
        slots = list(reversed(range(count)))
        self.state = SlotState(count, self.vocab, device)
        words = np.zeros((count + 1, layout.NUM_WORDS), np.int32)
        admissions = []
        for slot, row in zip(slots, self.rows, strict=True):
            asked = row.encoded
            words[slot] = asked.param_values
            assert (asked.upload is not None) == bool(asked.flags & PROCESSED)
            if asked.upload is not None:
                admissions.append(Admission(slot, asked.upload, row.history, len(row.prompt)))
        if admissions:
            self.state.apply(admissions)
        self.params = torch.from_numpy(words).to(device)
        # The token that a row draws behind stands at twice its row; those between are others'.
        positions = np.full(2 * count, 77, np.int32)
        positions[::2] = [row.history.size - 1 for row in self.rows]
        self.positions = torch.from_numpy(positions).to(device)
        self.sample_rows = torch.arange(0, 2 * count, 2, dtype=torch.int32, device=device)
        self.out_slots = torch.tensor(slots, dtype=torch.int32, device=device)

    def process(self, ops: ModuleType, logits: Tensor) -> Tensor:
        where = self.positions, self.sample_rows, self.out_slots
        return ops.process_logits(logits, self.params, self.state.counts, self.state.lists, *where)

    def draw(self, ops: ModuleType, logits: Tensor) -> list[int]:
        """A token for each row, by which the slots' state changes and the positions grow."""
        last_tokens = torch.zeros(len(self.rows) + 1, dtype=torch.int32, device=logits.device)
        sampled = torch.zeros(len(self.rows), dtype=torch.int32, device=logits.device)
        where = self.positions, self.sample_rows, self.out_slots
        state = {"counts": self.state.counts, "lists": self.state.lists}
        ops.draw(logits, self.params, *where, last_tokens, sampled, filtered=True, **state)
        self.positions += 1
        return sampled.tolist()


class Triton:
    """The kernels' launchers in one place, as ``reference`` has the twins."""

    def __getattr__(self, name: str) -> object:
        from cbatch.kernels import logit_processing, logprobs, sampling

        home = {"process_logits": logit_processing, "logprobs": logprobs}.get(name, sampling)
        return getattr(home, name)


def chain(row: Row, logits: Tensor) -> Tensor:
    """``logits [vocab]`` through transformers' processors, in the order that is promised; two penalties by formula."""
    params, scores = row.params, logits[None].clone()
    ids, outputs = torch.from_numpy(row.history)[None].long(), torch.tensor([row.outputs], dtype=torch.long)
    if params.allowed_token_ids is not None:
        others = sorted(set(range(len(logits))) - set(params.allowed_token_ids))
        scores = hf.SuppressTokensLogitsProcessor(others)(ids, scores)
    if row.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(word) for word in row.bad_words])(outputs, scores)
    if params.min_tokens:
        processor = hf.MinNewTokensLengthLogitsProcessor(len(row.prompt), params.min_tokens, list(row.stops))
        scores = processor(ids, scores)
    if params.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in params.logit_bias})(ids, scores)
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    times = torch.bincount(outputs[0], minlength=len(logits))
    scores = scores - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    return scores[0]


LOOP = [7, 7, 7, 9, 1, 2, 3, 2] * 3  # ends in the beginnings of two bad words
LONG = [*range(50, 100), *range(100, 99 + layout.MAX_BAD_WORD_LEN)]  # all of the longest bad word but its last token
ONE_AT_A_TIME = {
    "allowed": Row(SamplingParams(allowed_token_ids=ALLOWED)),
    "bad words": Row(SamplingParams(), outputs=LOOP, bad_words=BAD_WORDS),
    "the longest bad word": Row(SamplingParams(), outputs=LONG, bad_words=BAD_WORDS),
    "one token too few": Row(SamplingParams(min_tokens=4), outputs=[8, 8, 8]),
    "enough tokens": Row(SamplingParams(min_tokens=3), outputs=[8, 8, 8]),
    "biases": Row(SamplingParams(logit_bias=BIASES)),
    "repetition": Row(SamplingParams(repetition_penalty=1.3), outputs=LOOP),
    "repetition wanted": Row(SamplingParams(repetition_penalty=0.7), outputs=[800]),
    "repetition of a prompt": Row(SamplingParams(repetition_penalty=1.3)),
    "presence": Row(SamplingParams(presence_penalty=1.5), outputs=LOOP),
    "frequency": Row(SamplingParams(frequency_penalty=-0.4), outputs=LOOP),
}
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, max_tokens=99, min_tokens=40, logit_bias=BIASES,
    repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, allowed_token_ids=ALLOWED,
)  # fmt: skip
MIXED = [
    Row(SamplingParams(temperature=0.0)),
    *ONE_AT_A_TIME.values(),
    Row(EVERYTHING, outputs=LOOP, bad_words=BAD_WORDS),
    Row(SamplingParams(temperature=1.3, top_p=0.8)),
    Row(SamplingParams(temperature=0.0, repetition_penalty=1.5), outputs=LOOP),
    Row(
        SamplingParams(logit_bias={4 * i: i / 100 - 5 for i in range(layout.MAX_BIASES)}),
        outputs=LOOP,
        bad_words=[(i, 2, 3 * i) for i in range(layout.MAX_BAD_WORDS)],
    ),
]


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_each_parameter_does_what_transformers_does(name: str) -> None:
    row, logits = ONE_AT_A_TIME[name], 3 * random(1, VOCAB, device="cpu", dtype=torch.float32)
    got = Batch([row]).process(reference, logits)[0]
    torch.testing.assert_close(got, chain(row, logits[0]), rtol=1e-6, atol=1e-6)
    assert torch.equal(got, logits[0]) is (name == "enough tokens")


def test_all_together_keep_their_order_and_rows_keep_to_themselves() -> None:
    logits = 3 * random(len(MIXED), VOCAB, device="cpu", dtype=torch.float32, seed=3)
    before = logits.clone()
    got = Batch(MIXED).process(reference, logits)
    for row, processed, plain in zip(MIXED, got, logits, strict=True):
        torch.testing.assert_close(processed, chain(row, plain), rtol=1e-6, atol=1e-6)
    assert torch.equal(got[0], logits[0]) and torch.equal(logits, before)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 9},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 60, "top_p": 0.9},
        {"top_k": 60, "min_p": 0.1},
        {"top_p": 0.95, "min_p": 0.02},
        {"top_k": 400, "top_p": 0.98, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_filters_keep_what_transformers_warpers_keep(filters: dict[str, float], temperature: float) -> None:
    logits = 2 * random(1, VOCAB, device="cpu", dtype=torch.float32, seed=8)
    params = SamplingParams(temperature=temperature, **filters)
    batch = Batch([Row(params)])
    kept = logits >= reference.thresholds(logits, batch.params, batch.out_slots)[:, None]
    scores = hf.TemperatureLogitsWarper(temperature)(None, logits)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(None, scores)
    assert torch.equal(kept, scores > -torch.inf) and 1 < kept.sum() < VOCAB


def test_bad_words_are_looked_for_in_the_outputs_alone() -> None:
    """As vLLM does: the prompt ends in 1, 2, and 3 may still come; behind outputs 1, 2 it may not."""
    batch = Batch(
        [Row(SamplingParams(), prompt=[1, 2], outputs=outputs, bad_words=[(1, 2, 3)]) for outputs in ([], [1, 2])]
    )
    processed = batch.process(reference, torch.zeros(2, VOCAB))
    assert (processed == -torch.inf).sum(-1).tolist() == [0, 1] and processed[1, 3] == -torch.inf


def rebuilt_equals_updated(ops: ModuleType, logits: Tensor) -> None:
    """The state that steps leave must be the one that a resume builds from the history: it decides the same tokens."""
    rows = [
        Row(SamplingParams(frequency_penalty=0.5), bad_words=BAD_WORDS),
        Row(EVERYTHING, outputs=LOOP, bad_words=BAD_WORDS),
        Row(SamplingParams(temperature=0.0), outputs=LOOP, bad_words=BAD_WORDS),
    ]
    batch = Batch(rows, str(logits.device), logits.shape[1])
    tokens = [batch.draw(ops, batch.process(ops, logits)) for _ in range(layout.MAX_BAD_WORD_LEN + 3)]
    for row, new in zip(rows, zip(*tokens, strict=True), strict=True):
        row.outputs = [*row.outputs, *new]
    again = Batch(rows, str(logits.device), logits.shape[1])
    assert torch.equal(batch.state.counts, again.state.counts)
    assert torch.equal(batch.state.lists, again.state.lists)
    assert torch.equal(batch.process(ops, logits), again.process(ops, logits))
    assert len({token for step in tokens for token in step}) > 10


def test_state_after_many_steps_is_what_a_resume_builds() -> None:
    rebuilt_equals_updated(reference, 2 * random(3, VOCAB, device="cpu", dtype=torch.float32))


def test_a_new_owner_finds_nothing_of_the_one_before() -> None:
    batch = Batch([Row(EVERYTHING, outputs=LOOP, bad_words=BAD_WORDS)])
    row = Row(SamplingParams(repetition_penalty=2.0), prompt=[8, 9], outputs=[9])
    upload = row.encoded.upload
    assert upload is not None
    batch.state.apply([Admission(0, upload, row.history, 2)])
    assert batch.state.counts[0].nonzero()[:, 0].tolist() == [8, 9]
    assert batch.state.counts[0, [8, 9]].tolist() == [layout.IN_PROMPT, layout.IN_PROMPT + layout.OUTPUT]
    fresh = Batch([row]).state
    assert torch.equal(batch.state.lists, fresh.lists) and torch.equal(batch.state.counts, fresh.counts)
    state = batch.state
    assert state.num_bytes == slot_state_bytes(1, VOCAB) == 4 * (state.counts.numel() + state.lists.numel())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_everything_is_forbidden_token_0_comes(temperature: float) -> None:
    """Only a stop token is allowed, and it is too early for it: some token must come, and never nan."""
    params = SamplingParams(temperature=temperature, allowed_token_ids=STOPS, min_tokens=9, top_p=0.9, min_p=0.1)
    batch = Batch([Row(params)])
    assert batch.draw(reference, batch.process(reference, torch.randn(1, VOCAB))) == [0]


def records_of(ops: ModuleType, logits: Tensor, sampled: list[int], k: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and log-probabilities ``[rows, 1 + k]``, and ranks; checks that no other row is written."""
    tokens = torch.tensor([*sampled, -1], dtype=torch.int32, device=logits.device)
    records = torch.full((len(sampled) + 1, layout.num_record_words(k)), -7, dtype=torch.int32, device=logits.device)
    ops.logprobs(logits, tokens, records)
    assert (records[-1] == -7).all()
    records = records[:-1]
    return records[:, : k + 1].cpu(), records[:, k + 2 : 2 * k + 3].view(torch.float32).cpu(), records[:, k + 1].cpu()


def hard_rows(vocab: int, device: str, dtype: torch.dtype) -> Tensor:
    logits = 4 * random(6, vocab, device=device, dtype=torch.float32, seed=2)
    logits[1] = logits[1].round()  # ties by the dozen, across the twentieth too
    logits[2, : vocab - 2] = -torch.inf
    logits[3] = 0
    logits[4] = torch.linspace(-9, 9, vocab)  # all the largest in one group
    logits[5, ::2] += 300
    return logits.to(dtype)


def test_logprobs_are_log_softmax_and_its_largest() -> None:
    logits = hard_rows(VOCAB, "cpu", torch.float32)
    sampled = [int(logits[0].argmax()), 40, VOCAB - 1, 4000, 0, 3]
    ids, values, ranks = records_of(reference, logits, sampled)
    expected = logits.log_softmax(-1)
    largest = expected.topk(20)
    assert ids[:, 0].tolist() == sampled
    torch.testing.assert_close(values[:, 1:], largest.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values, expected.gather(1, ids.long()), rtol=1e-6, atol=1e-6)
    assert torch.equal(ids[[0, 4, 5], 1:].long(), largest.indices[[0, 4, 5]])
    assert ids[3, 1:].tolist() == list(range(20)) and ranks[3] == 4001
    assert ids[2, 1:].tolist()[2:] == list(range(18)) and set(ids[2, 1:3].tolist()) == {VOCAB - 2, VOCAB - 1}
    for row in range(6):
        order = logits[row].sort(descending=True, stable=True).indices.tolist()
        assert ids[row, 1:].tolist() == order[:20] and ranks[row] == order.index(sampled[row]) + 1


def test_logprobs_of_a_vocabulary_under_twenty() -> None:
    ids, values, ranks = records_of(reference, torch.tensor([[1.0, 3.0, 2.0]]), [2])
    assert ids[0].tolist() == [2, 1, 2, 0] + [-1] * 17 and ranks.tolist() == [2]
    assert (values[0, 4:] == -torch.inf).all()
    torch.testing.assert_close(values[0, 1:4].exp().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_all_logits_nan_is_the_likeliest_for_logprobs_too(sign: float) -> None:
    """Greedy takes it; with the sign that x86 gives what it computes, its rank was the last."""
    logits = torch.tensor([[1.0, 3.0, torch.nan, 2.0]]).copysign(torch.tensor([1.0, 1.0, sign, 1.0]))
    ids, values, ranks = records_of(reference, logits, [2], k=3)
    assert ids.tolist() == [[2, 2, 1, 3]] and ranks.tolist() == [1]
    assert values.isnan().all()


# ---- the kernels

VOCABULARIES = [7, VOCAB] if INTERPRETED else [7, VOCAB, 50257, 128256, 151936, 262144]


@targets
@pytest.mark.parametrize("vocab", [VOCAB] if INTERPRETED else [VOCAB, 128256])
def test_processed_as_the_twin_does(device, dtype, vocab):
    logits = 3 * random(len(MIXED), vocab, device=device, dtype=dtype, seed=3)
    batch = Batch(MIXED, device, vocab)
    wide = torch.cat([logits, torch.full_like(logits, torch.nan)], 1)[:, :vocab]  # a padded vocabulary, cut off
    # Two roundings where the twin has three.
    torch.testing.assert_close(
        batch.process(Triton(), wide), batch.process(reference, logits), rtol=1e-6, atol=1e-6, equal_nan=True
    )


@targets
def test_kernels_state_after_many_steps_is_what_a_resume_builds(device, dtype):
    rebuilt_equals_updated(Triton(), 2 * random(3, VOCAB, device=device, dtype=dtype))


@targets
def test_kernels_draw_and_count_as_the_twins_do(device, dtype):
    logits = 2 * random(len(MIXED), VOCAB, device=device, dtype=dtype, seed=4)
    ours, twins = Batch(MIXED, device), Batch(MIXED, device)
    for _ in range(2 if INTERPRETED else 20):
        assert ours.draw(Triton(), ours.process(Triton(), logits)) == twins.draw(
            reference, twins.process(reference, logits)
        )
    assert torch.equal(ours.state.counts, twins.state.counts) and torch.equal(ours.state.lists, twins.state.lists)


@pytest.mark.gpu
def test_a_new_owner_is_waited_for_by_nobody() -> None:
    """One copy from pinned memory and launches behind it, for a fresh sequence and for a resumed one."""
    batch = Batch(MIXED, "cuda")
    uploads = [(slot, row, row.encoded.upload) for slot, row in enumerate(MIXED)]
    admissions = [Admission(slot, up, row.history, len(row.prompt)) for slot, row, up in uploads if up is not None]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        batch.state.apply(admissions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.out_slots = batch.out_slots.flip(0)
    batch.params[: len(MIXED)] = batch.params[: len(MIXED)].flip(0)
    logits = random(len(MIXED), VOCAB, device="cuda", dtype=torch.float32)
    for got, row, plain in zip(batch.process(Triton(), logits).cpu(), MIXED, logits.cpu(), strict=True):
        torch.testing.assert_close(got, chain(row, plain), rtol=1e-6, atol=1e-6)


@targets
def test_a_row_without_wishes_draws_the_same_beside_processed_ones(device, dtype):
    """Its step may run any graph: by the logits as they are, or by those that became float32 with its neighbours'."""
    from cbatch.kernels import sampling

    rows = [
        Row(params, seed=i)
        for i, params in enumerate(
            [
                SamplingParams(temperature=0.0),
                SamplingParams(),
                SamplingParams(top_k=30, top_p=0.8),
                SamplingParams(min_p=0.1),
            ]
        )
    ]
    logits = 2 * random(len(rows), VOCAB, device=device, dtype=dtype, seed=5)
    batch, alone = Batch(rows, device), Batch(rows, device)
    assert batch.draw(sampling, batch.process(Triton(), logits)) == alone.draw(sampling, logits)


@targets
def test_whatever_padding_finds_in_the_dummy_slot_does_no_harm(device, dtype):
    """The dummy's words are what an older step left in the slab, or poison; its lists are empty."""
    logits = random(3, VOCAB, device=device, dtype=dtype)
    batch = Batch([MIXED[1], MIXED[6]], device)
    expected = batch.process(Triton(), logits[:2])
    batch.out_slots = torch.cat([batch.out_slots, batch.out_slots.new_tensor([2])])
    batch.sample_rows = torch.cat([batch.sample_rows, batch.sample_rows.new_tensor([0])])
    batch.rows = [*batch.rows, batch.rows[0]]
    counts, lists = batch.state.counts[:2].clone(), batch.state.lists[:2].clone()
    for poison in (-7, 2**31 - 1):
        batch.params[2] = poison
        processed = batch.process(Triton(), logits)
        assert torch.equal(processed[:2], expected)
        batch.draw(Triton(), processed)
        batch.positions -= 1
        batch.state.counts[:2], batch.state.lists[:2] = counts, lists


@targets
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs_as_the_twin_has_them(device, dtype, vocab):
    logits = hard_rows(vocab, device, dtype)
    sampled = [vocab // 2, 0, vocab - 1, 5, vocab - 1, 1]
    wide = torch.cat([logits, torch.full_like(logits, torch.inf)], 1)[:, :vocab]
    ids, values, ranks = records_of(Triton(), wide, sampled)
    expected = records_of(reference, logits, sampled)
    assert torch.equal(ids, expected[0]) and torch.equal(ranks, expected[2])
    torch.testing.assert_close(values, expected[1], rtol=2e-6, atol=2e-6)


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
