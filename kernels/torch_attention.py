"""Paged attention out of torch's own operators: the way of the CPU, and a slow oracle on CUDA. Knows no Triton.

Decode on the CPU is bound by memory: at SmolLM2's shape (30 layers, 9 heads, 3 KV heads of 64, float32, 32 rows with
contexts of 50 to 400) a step reads 331 MB, and two Zen 4 cores need 11.3 ms merely to add it up. Ways tried, in ms for
all layers:

    scores   gather pages 6.5, then one bmm a KV head 5.8      one for all heads now, see below
             bmm on the pages where they lie 18                small GEMMs do not prefetch, memcpy does
             torch.sparse.sampled_addmm 17                     no gather
             embedding_bag's backward to its weights           no gather, a BLAS dot a token: a step takes twice as long
    values   embedding_bag 11                                  kept: gather and weighted sum in one
             gather pages 6.2, then bmm 7                      and stale NaN in a page's tail must be wiped first
    both     SDPA, a page a batch item 57; on gathered pages 12 + 39; on gathered rows of one length 12 + 17

With softmax, masks, the write of K and V and the plan a step takes 33 ms, measured beside other work on the two cores
(`python -m benchmarks.kernels --device cpu`); gathering all rows and attending under one mask takes more than 1,000.

Pages hold head behind head: what is gathered of a page and head is a matrix of one bmm over all of them, and a head's
values follow each other. That takes 0 to 16% off a step, for contexts of 45 to 1,000.

Few operators count as much as few bytes. The engine computes in a thread of its own, and where another thread of the
process has used OpenMP too, libgomp has more threads than there are cores and lets them sleep between operators: some
40 us until a parallel one has both (contexts of 45 to 85 on a quiet machine: 29 ms, 15 without the other thread).

Gathers and masks depend on the step alone, so `_DecodePlan` makes them once for all layers of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.kernels.attention import AttentionBatch

CHUNK = 64  # tokens of one GEMM: pages smaller than this are joined
BAND_COST = 256  # chunks, see ``_split_into_bands``
QUERY_BLOCK = 256  # queries whose scores are kept at once where SDPA cannot serve (softcap, sinks)


class TorchAttention:
    """AttentionBackend for any device and dtype. On CUDA `prepare` waits for the device to learn the lengths."""

    max_head_dim = 1 << 30
    capturable = False
    heads_first = True

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._context_lens: list[int] = batch.context_lens.tolist()  # waits for the device, if there is one
        self._starts: list[int] = batch.cu_seqlens_q.tolist()
        self._row_slots: list[int] = batch.row_slots.tolist()
        self._decode_plans: dict[tuple[int, int, int], _DecodePlan] = {}
        self._slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def slot_mapping(self, group: int) -> None:
        """None: a prompt attends over k and v as they come, which is faster than out of its pages."""

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, k_head_dim]
        k: Tensor | None,  # [num_tokens, num_kv_heads, k_head_dim]
        v: Tensor | None,  # [num_tokens, num_kv_heads, v_head_dim]
        k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
        v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
        group: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert k is not None and v is not None
        batch, block_size = self._batch, k_cache.shape[1]
        self._write_kv(k, v, k_cache, v_cache, group)
        out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])

        key = (group, window, block_size)
        plan = self._decode_plans.get(key)
        if plan is None:
            lens = self._context_lens[: batch.num_decodes]
            plan = self._decode_plans[key] = _DecodePlan(lens, batch, group, window, block_size)
        if plan.num_chunks:
            decode = self._decode_in_place if _has_table(k_cache, v_cache) else _decode_gathered
            decode(out, q, k_cache, v_cache, plan, scale, softcap, sinks)

        for row in range(batch.num_decodes, len(self._context_lens)):
            context_len, start, end = self._context_lens[row], self._starts[row], self._starts[row + 1]
            if context_len == 0 or start == end:
                continue
            keys, values = k[start:end], v[start:end]
            if context_len > end - start:  # not all of the context came in this step: the rest is in the pages
                # From the first key on that some query sees: behind the window there may be no pages any more.
                first = max(0, start + context_len - end - window + 1) if window else 0
                begin = first // block_size
                blocks = batch.block_tables[group, self._row_slots[row], begin : -(-context_len // block_size)]
                visible = slice(first - begin * block_size, context_len - begin * block_size)
                keys = k_cache.index_select(0, blocks).flatten(0, 1)[visible]
                values = v_cache.index_select(0, blocks).flatten(0, 1)[visible]
            out[start:end] = _attend_chunk(q[start:end], keys, values, scale, window, softcap, sinks)
        return out

    def _write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, group: int) -> None:
        key = (group, k_cache.shape[1])
        if key not in self._slots:
            slots = self._batch.slot_mapping[group, : k.shape[0]].long()
            self._slots[key] = (slots // k_cache.shape[1], slots % k_cache.shape[1])
        k_cache[self._slots[key]] = k
        v_cache[self._slots[key]] = v

    def _decode_in_place(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: _DecodePlan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        """The fast way: float32 on the CPU. K is gathered by pages; V is read where it lies, and only valid tokens."""
        num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k_cache.shape[2]
        group_size = num_heads // num_kv_heads
        # MKL's batched GEMM takes 2.6 ms with 3 rows and 1.9 with 4 (all layers, one KV head): 2 and 3 are padded to 4.
        padded = 4 if group_size in (2, 3) else group_size
        num_chunks, chunk = plan.num_chunks, plan.chunk

        queries = q.new_zeros(num_kv_heads, plan.num_rows, padded, head_dim)
        decodes = q[: plan.num_rows].unflatten(1, (num_kv_heads, group_size)).transpose(0, 1)
        torch.mul(decodes, scale, out=queries[:, :, :group_size])
        queries = queries.index_select(1, plan.chunk_rows).flatten(0, 1)
        pages, page_size = plan.key_pages(k_cache), plan.block_size * head_dim
        keys = self._buffer("keys", pages.numel(), page_size)
        torch.index_select(_table(k_cache, page_size), 0, pages, out=keys)

        # One chunk more than there are: what rows shorter than their band read beyond their end.
        num_lines = num_kv_heads * num_chunks * padded
        scores = self._buffer("scores", num_lines + padded, chunk)
        scores[num_lines:] = float("-inf")
        computed = scores[:num_lines].view(-1, padded, chunk)
        torch.bmm(queries, keys.view(-1, chunk, head_dim).transpose(1, 2), out=computed)
        if softcap:
            computed.div_(softcap).tanh_().mul_(softcap)
        computed.unflatten(0, (num_kv_heads, -1))[:, : plan.num_partial].masked_fill_(plan.hidden, float("-inf"))

        values = _table(v_cache, v_cache.shape[3])
        for band in plan.bands(v_cache, num_heads, padded):
            banded = scores.index_select(0, band.from_scores).view(band.rows.numel(), num_heads, -1)
            weights = _softmax(banded, sinks).view(-1, chunk).index_select(0, band.to_bags)
            context = F.embedding_bag(
                band.tokens, values, band.offsets, mode="sum", per_sample_weights=weights.view(-1)
            )
            out.index_copy_(0, band.rows, context.view(-1, num_heads, v_cache.shape[3]))

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """A float32 [rows, columns] scratch that is kept between calls. Allocates only when it has to grow."""
        flat = self._scratch.get(name)
        if flat is None or flat.numel() < rows * columns:
            flat = self._scratch[name] = torch.empty(rows * columns * 5 // 4, dtype=torch.float32, device="cpu")
        return flat[: rows * columns].view(rows, columns)


@dataclass
class _Band:
    """Rows of similar length, softmaxed as one rectangle [n, num_heads, chunks * chunk]."""

    rows: Tensor  # [n] rows of the step
    from_scores: Tensor  # [n * num_heads * chunks] lines of the scores, a chunk each; the -inf one beyond a row's end
    to_bags: Tensor  # [num_lines] lines of the rectangle that exist, by row, head, chunk
    tokens: Tensor  # [num_lines * chunk] line of the value table for each weight
    offsets: Tensor  # [n * num_heads] where a row and head's weights start


class _DecodePlan:
    """What the decode rows of one step read, for one group of layers and one window. Shared by those layers.

    A row's visible context is cut into chunks of whole pages. Chunks that hold hidden tokens come first, so that only
    they are masked.
    """

    def __init__(self, lens: list[int], batch: AttentionBatch, group: int, window: int, block_size: int) -> None:
        device = batch.context_lens.device
        self.num_rows = len(lens)
        self.block_size = block_size
        self.chunk = max(block_size, CHUNK // block_size * block_size)
        self._lens = batch.context_lens[: self.num_rows].long()
        self._tables = batch.block_tables[group].index_select(0, batch.row_slots[: self.num_rows])
        self._visible_from = (self._lens - window).clamp_(min=0) if window else torch.zeros_like(self._lens)
        first_chunks = self._visible_from // self.chunk
        self._counts = (self._lens + self.chunk - 1) // self.chunk - first_chunks
        self._firsts = self._counts.cumsum(0) - self._counts  # a row's first chunk, with chunks in order of rows
        counts: list[int] = self._counts.tolist()
        self.num_chunks = sum(counts)
        if not self.num_chunks:
            return
        self._rows = torch.arange(self.num_rows, device=device).repeat_interleave(self._counts)
        numbers = torch.arange(self.num_chunks, device=device) + (first_chunks - self._firsts)[self._rows]
        self._positions = numbers[:, None] * self.chunk + torch.arange(self.chunk, device=device)
        hidden = (self._positions >= self._lens[self._rows, None]) | (
            self._positions < self._visible_from[self._rows, None]
        )
        partial = hidden.any(1)
        order = torch.argsort(partial, descending=True, stable=True)  # scores keep their chunks in this order
        self._places = torch.empty_like(order)
        self._places[order] = torch.arange(self.num_chunks, device=device)
        self.num_partial = int(partial.sum())
        self.hidden = hidden[order[: self.num_partial], None]  # [num_partial, 1, chunk]
        self.chunk_rows = self._rows[order]
        pages_per_chunk = self.chunk // block_size
        pages = numbers[order, None] * pages_per_chunk + torch.arange(pages_per_chunk, device=device)
        pages = pages.minimum((self._lens[self.chunk_rows, None] - 1) // block_size)  # past the end: the last, masked
        self._pages = self._tables[self.chunk_rows[:, None], pages].long()  # [num_chunks, pages_per_chunk]
        self.row_bands = [(torch.tensor(rows, device=device), most) for rows, most in _split_into_bands(counts)]
        self._bands: dict[tuple[int, ...], list[_Band]] = {}
        self._key_pages: dict[tuple[int, ...], Tensor] = {}

    def key_pages(self, k_cache: Tensor) -> Tensor:
        """Each KV head's part of the pages, by head and chunk: which page_size elements of the pool it is."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        key = (k_cache.stride(0), num_kv_heads, head_dim)
        if key not in self._key_pages:
            heads = torch.arange(num_kv_heads, device=self._pages.device)
            firsts = self._pages * (k_cache.stride(0) // (self.block_size * head_dim))
            self._key_pages[key] = (firsts + heads[:, None, None]).flatten()
        return self._key_pages[key]

    def bands(self, v_cache: Tensor, num_heads: int, padded: int) -> list[_Band]:
        """The bands for caches of v_cache's shape and strides, where scores have padded lines a chunk and KV head."""
        num_kv_heads, head_dim = v_cache.shape[2:]
        key = (v_cache.stride(0), num_kv_heads, head_dim, num_heads, padded)
        if key not in self._bands:
            # Hidden tokens have weight 0, but 0 * NaN is NaN: they read a visible token of the same row instead.
            position = self._positions.minimum(self._lens[self._rows, None] - 1)
            position = position.maximum(self._visible_from[self._rows, None])
            blocks = self._tables[self._rows[:, None], position // self.block_size].long()
            lines = blocks * (v_cache.stride(0) // head_dim) + position % self.block_size
            self._bands[key] = [
                self._band(rows, most, lines, num_kv_heads, num_heads, padded) for rows, most in self.row_bands
            ]
        return self._bands[key]

    def rectangles(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each band its rows [n], their blocks [n, most] and the visible tokens [n, most * block_size]."""
        for rows, most in self.row_bands:
            first = self._visible_from[rows] // self.chunk * self.chunk
            positions = first[:, None] + torch.arange(most * self.chunk, device=rows.device)
            lens = self._lens[rows, None]
            visible = (positions < lens) & (positions >= self._visible_from[rows, None])
            pages = positions[:, :: self.block_size].minimum(lens - 1) // self.block_size
            yield rows, self._tables[rows[:, None], pages], visible

    def _band(self, rows: Tensor, most: int, lines: Tensor, num_kv_heads: int, num_heads: int, padded: int) -> _Band:
        heads = torch.arange(num_heads, device=rows.device)
        group_size = num_heads // num_kv_heads
        columns = torch.arange(most, device=rows.device)
        exists = columns < self._counts[rows, None]  # [n, most]
        chunks = torch.where(exists, self._firsts[rows, None] + columns, 0)
        places = self._places[chunks][:, None, :] + (heads // group_size * self.num_chunks)[:, None]
        places = torch.where(exists[:, None, :], places, num_kv_heads * self.num_chunks)
        from_scores = places * padded + (heads % group_size)[:, None]  # [n, num_heads, most]
        row, head, column = exists[:, None, :].expand(-1, num_heads, -1).nonzero(as_tuple=True)
        tokens = lines.index_select(0, chunks[row, column]) + (head // group_size * self.block_size)[:, None]
        sizes = (self._counts[rows] * self.chunk).repeat_interleave(num_heads)
        return _Band(
            rows=rows,
            from_scores=from_scores.flatten(),
            to_bags=(row * num_heads + head) * most + column,
            tokens=tokens.flatten(),
            offsets=sizes.cumsum(0) - sizes,
        )


def _split_into_bands(counts: list[int]) -> list[tuple[list[int], int]]:
    """Group rows so that one long row does not make a rectangle of all: (rows, chunks of the longest) a band.

    A band costs four more operators a layer, about as much as softmax over ``BAND_COST`` chunks.
    """
    order = sorted((row for row in range(len(counts)) if counts[row]), key=lambda row: -counts[row])
    bands: list[tuple[list[int], int]] = []
    for i, row in enumerate(order):
        if not bands or (bands[-1][1] - counts[row]) * (len(order) - i) > BAND_COST:
            bands.append(([], counts[row]))
        bands[-1][0].append(row)
    return [(_deal(rows), most) for rows, most in bands]


def _deal(rows: list[int]) -> list[int]:
    """Order rows sorted by length so that halves, quarters and so on weigh the same.

    embedding_bag gives each thread a run of bags: in order, the thread with the long rows took 14 ms instead of 11.
    """
    return rows if len(rows) < 3 else _deal(rows[::2]) + _deal(rows[1::2])


def _has_table(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the fast way serves: it wants float32, head behind head, and the pool as tables of lines of one size."""
    block_size, head_dim = k_cache.shape[1], k_cache.shape[3]
    return (
        v_cache.device.type == "cpu"
        and v_cache.dtype == k_cache.dtype == torch.float32
        and all(cache.stride(2) == block_size * cache.shape[3] for cache in (k_cache, v_cache))
        and k_cache.stride(0) % (block_size * head_dim) == 0
        and v_cache.stride(0) % v_cache.shape[3] == 0
    )


def _table(cache: Tensor, size: int) -> Tensor:
    """All of the pool from this layer's first key or value on, as [lines, size], without copying."""
    num_lines = ((cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()) // size
    return cache.as_strided((num_lines, size), (size, 1))


def _decode_gathered(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: _DecodePlan,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """The general way: any device and dtype. Gathers each band's K and V as rectangles, copied in float32."""
    num_kv_heads = k_cache.shape[2]
    for rows, blocks, visible in plan.rectangles():
        keys = k_cache.index_select(0, blocks.flatten()).view(*visible.shape, num_kv_heads, -1)
        values = v_cache.index_select(0, blocks.flatten()).view(*visible.shape, num_kv_heads, -1)
        values = values.masked_fill(~visible[..., None, None], 0)  # stale NaN times weight 0 would be NaN
        context = _attend_dense(
            q[rows][:, None], keys, values, visible[:, None], scale=scale, softcap=softcap, sinks=sinks
        )
        out.index_copy_(0, rows, context[:, 0])


def _attend_chunk(
    q: Tensor,  # [query_len, num_heads, k_head_dim]
    keys: Tensor,  # [context_len, num_kv_heads, k_head_dim]
    values: Tensor,  # [context_len, num_kv_heads, v_head_dim]
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """One prefill row: its queries are the last query_len positions of its context, or of what they see of it."""
    query_len, context_len, num_kv_heads = q.shape[0], keys.shape[0], keys.shape[1]
    simple = not softcap and sinks is None
    if simple and query_len == context_len and (not window or window >= context_len):
        visible = None  # plain causal
    else:
        query_positions = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
        key_positions = torch.arange(context_len, device=q.device)
        visible = key_positions <= query_positions
        if window:
            visible &= query_positions - key_positions < window
    if simple:
        # A KV head is a batch item and its group of query heads the heads: K and V are expanded without a copy.
        group_size = q.shape[1] // num_kv_heads
        context = F.scaled_dot_product_attention(
            q.unflatten(1, (num_kv_heads, group_size)).permute(1, 2, 0, 3),
            keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
            values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
        )
        return context.permute(2, 0, 1, 3).flatten(1, 2)
    assert visible is not None
    blocks = [
        _attend_dense(queries[None], keys[None], values[None], rows[None], scale=scale, softcap=softcap, sinks=sinks)
        for queries, rows in zip(q.split(QUERY_BLOCK), visible.split(QUERY_BLOCK), strict=True)
    ]
    return torch.cat(blocks, dim=1)[0]


def _attend_dense(
    q: Tensor,  # [batch, query_len, num_heads, k_head_dim]
    keys: Tensor,  # [batch, context_len, num_kv_heads, k_head_dim]
    values: Tensor,  # [batch, context_len, num_kv_heads, v_head_dim]
    visible: Tensor,  # [batch, query_len, context_len] bool
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Scores, softmax and weighted sum in float32. Returns [batch, query_len, num_heads, v_head_dim] in q's dtype."""
    batch, query_len, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    # A KV head's group of query heads becomes more queries of it.
    queries = q.float().view(batch, query_len, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = torch.matmul(queries, keys.float().permute(0, 2, 3, 1)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(batch, num_heads, query_len, -1).masked_fill_(~visible[:, None], float("-inf"))
    weights = _softmax(scores, sinks).view(batch, num_kv_heads, -1, keys.shape[1])
    context = torch.matmul(weights, values.float().transpose(1, 2))
    return context.view(batch, num_heads, query_len, -1).transpose(1, 2).to(q.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [batch, num_heads, ...] and a column of sinks, which is then dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(-1, *[1] * (scores.dim() - 2))  # [num_heads, 1 ...]: one fewer than scores
    top = scores.amax(-1, keepdim=True).maximum(column)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(column - top))
