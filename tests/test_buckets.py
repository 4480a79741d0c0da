"""Every step that can be planned has a bucket, the bucket has a graph, and its layout fits the slab."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbatch.buffers import eager_bucket, round_up
from cbatch.graphs import Buckets
from cbatch.scheduler.plan import Bucket, HostBatch, StepShape, layout


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(max_num_tokens, max_num_seqs, num_tokens, num_rows) as the scheduler may ask for."""
    max_num_seqs = draw(st.integers(1, 600))
    max_num_tokens = draw(st.integers(max_num_seqs, 10_000))
    num_rows = draw(st.integers(1, max_num_seqs))
    num_tokens = draw(st.one_of(st.just(num_rows), st.integers(num_rows, max_num_tokens)))
    return max_num_tokens, max_num_seqs, num_tokens, num_rows


@given(steps())
def test_every_step_has_a_captured_bucket_that_holds_it(step: tuple[int, int, int, int]) -> None:
    max_num_tokens, max_num_seqs, num_tokens, num_rows = step
    buckets = Buckets(max_num_tokens, max_num_seqs)
    bucket = buckets.choose(num_tokens, num_rows)
    assert bucket in buckets.all()
    assert bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows
    # A decode graph gives each row one token; a mixed step in it would be attended as decodes.
    assert (bucket.num_tokens == bucket.num_rows) == (num_tokens == num_rows)


@given(steps(), st.integers(1, 4), st.sampled_from([1, 16, 64]))
def test_no_bucket_outgrows_the_slab(step: tuple[int, int, int, int], num_groups: int, block_size: int) -> None:
    max_num_tokens, max_num_seqs, num_tokens, num_rows = step
    limit, shape = Bucket(max_num_tokens, max_num_seqs), StepShape(num_groups, block_size, 5)
    words = layout(shape, limit)[1]
    for bucket in (
        Buckets(max_num_tokens, max_num_seqs).choose(num_tokens, num_rows),
        eager_bucket(limit)(num_tokens, num_rows),
    ):
        assert layout(shape, bucket)[1] <= words


@given(st.integers(1, 20_000))
def test_buckets_waste_little(count: int) -> None:
    """Never to the next power of two: at most 7 rows up to 32, 15 up to 256, an eighth beyond."""
    padded = round_up(count)
    assert count <= padded
    assert padded - count < (8 if count <= 32 else 16) if count <= 256 else padded <= count * 1.125 + 1


@given(st.integers(257, 30_000))
def test_mixed_steps_compute_few_tokens_that_nobody_asked_for(num_tokens: int) -> None:
    """Powers of two and their halves computed 11.5% too many in a mixed traffic, and 1,025 tokens as 1,536."""
    padded = Buckets(32_768, 256).choose(num_tokens, 1).num_tokens
    assert padded % 128 == 0
    assert padded - num_tokens < 128 if num_tokens <= 2048 else padded < num_tokens * 1.25


def test_views_of_a_layout_do_not_overlap() -> None:
    import numpy as np

    shape, bucket = StepShape(3, 16, 5), Bucket(40, 7)
    slab = np.zeros(layout(shape, bucket)[1], np.int32)
    host = HostBatch(slab, shape, bucket)
    names = list(layout(shape, bucket)[0])
    for number, name in enumerate(names, 1):
        view = getattr(host, name)
        assert not view.any(), f"{name} lies over another array"
        view[...] = number
    assert host.num_words == slab.size
