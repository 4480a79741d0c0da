"""What the kernels must compute, in plain torch: attention row by row and slowly, the rest as a CPU runs it.

Any device; tests compare against it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.kernels import slot_layout as layout


def write_kv(
    k: Tensor,  # [num_tokens, num_kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset
) -> None:
    """Put token t's K and V at slot_mapping[t]. Block 0 is the dummy: what padding writes there is never read."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        k_cache[block, offset] = k[token]
        v_cache[block, offset] = v[token]


def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
    block_tables: Tensor,  # [num_slots, max_blocks] int32
    row_slots: Tensor,  # [num_rows] int32
    cu_seqlens_q: Tensor,  # [num_rows + 1] int32
    context_lens: Tensor,  # [num_rows] int32
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Return [num_tokens, num_heads, v_head_dim] in q's dtype, computed in float32 (float64 for float64 inputs).

    Of a row's context_lens[r] tokens, only those that some query sees are taken out of its pages. So what else lies
    there, NaN included, cannot reach it, and what lies behind the window needs no page. Rows with context 0, and tokens
    of no row, are zeros.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_heads = q.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], num_heads, v_cache.shape[3])
    starts, slots = cu_seqlens_q.tolist(), row_slots.tolist()
    for row, context_len in enumerate(context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if context_len == 0 or start == end:
            continue
        first = max(0, context_len - (end - start) - window + 1) if window else 0
        begin = first // block_size
        blocks = block_tables[slots[row], begin : -(-context_len // block_size)].long()
        # [context_len - first, num_heads, head_dim]: each KV head serves a run of query heads
        seen = slice(first - begin * block_size, context_len - begin * block_size)
        group_size = num_heads // num_kv_heads
        keys = k_cache[blocks].flatten(0, 1)[seen].to(dtype).repeat_interleave(group_size, 1)
        values = v_cache[blocks].flatten(0, 1)[seen].to(dtype).repeat_interleave(group_size, 1)

        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(dtype), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(context_len - (end - start), context_len, device=q.device)[:, None]
        key_positions = torch.arange(first, context_len, device=q.device)[None, :]
        visible = key_positions <= query_positions
        if window:
            visible &= query_positions - key_positions < window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # one more column, which takes its share of the softmax and brings no value
            column = sinks.to(dtype)[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : context_len - first]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; weight is float32."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,  # [num_rows, num_columns], or its parts [num_splits, num_rows, num_columns] float32
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor | None,  # [num_columns] float32; None: no norm behind the sum
    eps: float,
    *,
    scale: float = 1.0,
    post_weight: Tensor | None = None,  # [num_columns] float32: x is normalised too, before it is added
    rows: Tensor | None = None,  # [num_out] int32 or int64: compute these rows alone
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) where total = residual + scale * x, rounded to the residual's dtype."""
    total = _residual_sum(x, residual, eps, scale, post_weight, rows)
    return (total if weight is None else rms_norm(total, weight, eps)), total


def add_layer_norm(
    x: Tensor,  # [num_rows, num_columns], or its parts [num_splits, num_rows, num_columns] float32
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor,  # [num_columns] float32
    bias: Tensor | None,  # [num_columns] float32
    eps: float,
    *,
    scale: float = 1.0,
    rows: Tensor | None = None,  # [num_out] int32 or int64: compute these rows alone
) -> tuple[Tensor, Tensor]:
    """(layer_norm(total), total) where total = residual + scale * x, rounded to the residual's dtype."""
    total = _residual_sum(x, residual, eps, scale, None, rows)
    return layer_norm(total, weight, bias, eps), total


def _residual_sum(
    x: Tensor, residual: Tensor, eps: float, scale: float, post_weight: Tensor | None, rows: Tensor | None
) -> Tensor:
    if rows is not None:
        x, residual = x[..., rows, :], residual[rows]
    value = _add_up(x).float()
    if post_weight is not None:
        value = F.rms_norm(value, x.shape[-1:], post_weight, eps)
    return torch.add(residual.float(), value, alpha=scale).to(residual.dtype)


def _add_up(x: Tensor) -> Tensor:
    """The sum of a matrix product's parts, [num_splits, num_rows, num_columns] float32, in their order; or x itself."""
    return x if x.dim() == 2 else reduce(torch.add, x.unbind())


def qk_norm_rope(
    qk: Tensor,  # [num_tokens, num_heads + num_kv_heads, head_dim], changed in place
    num_heads: int,
    positions: Tensor,  # [num_tokens] int32 or int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32, a position's cosines and then its sines
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads
    eps: float,
) -> None:
    """Normalise each head (RMS), then turn elements i and i + rotary_dim / 2 together by the token's position."""
    if cos_sin is None and weights is None:
        return
    heads = qk.float()
    if weights is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads:]
        shape = qk.shape[2:]
        heads = torch.cat([F.rms_norm(q, shape, weights[0], eps), F.rms_norm(k, shape, weights[1], eps)], dim=1)
    if cos_sin is not None:
        rotary_dim = cos_sin.shape[1]
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        heads = torch.cat([*turned, heads[..., rotary_dim:]], dim=-1)
    qk.copy_(heads)


def rope_and_store(
    qkv: Tensor,  # [num_tokens, num_columns], or its parts [num_splits, num_tokens, num_columns] float32
    num_heads: int,
    num_kv_heads: int,  # num_columns = (num_heads + 2 * num_kv_heads) * head_dim
    positions: Tensor,  # [num_tokens] int32 or int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32, a position's cosines and then its sines
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads
    eps: float,
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset
) -> Tensor:
    """``qk_norm_rope`` behind a fused projection, and ``write_kv`` at once.

    Returns the queries, [num_tokens, num_heads, head_dim] in the caches' dtype.
    """
    heads = _add_up(qkv).to(torch.float32, copy=True).unflatten(1, (-1, k_cache.shape[3]))
    qk_norm_rope(heads[:, : num_heads + num_kv_heads], num_heads, positions, cos_sin, weights, eps)
    q, k, v = heads.to(k_cache.dtype).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    block, offset = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
    k_cache[block, offset], v_cache[block, offset] = k, v
    return q.contiguous()


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}


def activate(x: Tensor, act: str) -> Tensor:
    """act(x), in float32."""
    return ACTIVATIONS[act](x.float()).to(x.dtype)


def act_and_mul(x: Tensor, act: str) -> Tensor:
    """act(gate) * up, in float32, where x [num_rows, 2 * num_columns] is the gate and then up."""
    gate, up = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[act](gate) * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, partial: bool = False) -> Tensor:
    """x @ weight.T + bias, always one whole sum: ``partial`` allows for parts and does not ask for them."""
    return F.linear(x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, *, gated: bool) -> Tensor:
    """act(linear(x)), gated act(gate) * up of its two halves, behind a sum that is rounded to x's dtype."""
    out = F.linear(x, weight, bias)
    return act_and_mul(out, act) if gated else activate(out, act)


def begin_step(
    input_ids: Tensor,  # [num_tokens] int32
    carry_slots: Tensor,  # [num_tokens] int32
    last_tokens: Tensor,  # [num_slots] int32
    tables: Tensor,  # flat int32, changed in place
    table_index: Tensor,  # [num_updates] int32
    table_value: Tensor,  # [num_updates] int32
    params: Tensor,  # [num_slots, num_words] int32, changed in place
    param_slots: Tensor,  # [num_new] int32
    param_values: Tensor,  # [num_new, num_words] int32
) -> Tensor:
    """tables[table_index] = table_value, params[param_slots] = param_values, and the tokens of the step.

    Those are input_ids where carry_slots is negative, else last_tokens[carry_slots]: [num_tokens] int32. An index that
    comes twice may get either value.
    """
    if table_index.numel():
        tables.index_put_((table_index,), table_value)
    if param_slots.numel():
        params.index_put_((param_slots,), param_values)
    carried = last_tokens.index_select(0, carry_slots.clamp(min=0))
    return torch.where(carry_slots >= 0, carried, input_ids)


def greedy(
    logits: Tensor,  # [num_rows, num_columns]
    out_slots: Tensor,  # [num_rows] int32
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
) -> None:
    """Put the first column of each row's largest logit into last_tokens[out_slots] and sampled. NaN is the largest."""
    _keep_tokens(logits.argmax(dim=-1).int(), out_slots, last_tokens, sampled)


def process_logits(
    logits: Tensor,  # [num_rows, num_columns]
    params: Tensor,  # [num_slots, NUM_WORDS] int32, as slot_layout says; so are counts and lists
    counts: Tensor,  # [num_slots, num_columns] int32
    lists: Tensor,  # [num_slots, num_list_words(num_columns)] int32
    positions: Tensor,  # [num_tokens] int32
    sample_rows: Tensor,  # [num_rows] int32: the token behind which a row draws
    out_slots: Tensor,  # [num_rows] int32: whose words, counts and lists
) -> Tensor:
    """The logits to draw from, [num_rows, num_columns] float32: those of rows that ask for nothing are theirs.

    In this order: what is not allowed is -inf, and what would complete a bad word, and what cannot come before a later
    position; biases are added; the repetition penalty divides positive logits of tokens in prompt or outputs and
    multiplies negative ones; presence and frequency penalties are taken from those of outputs.
    """
    logits = logits.to(torch.float32, copy=True)
    num_columns, width, most = logits.shape[1], layout.MAX_BAD_WORD_LEN, layout.MAX_BIASES
    for row, slot, place in zip(logits, out_slots.tolist(), sample_rows.tolist(), strict=True):
        words, state, position = params[slot], lists[slot], int(positions[place]) + 1
        features, num_biases, num_bad_words = words[[layout.FEATURES, layout.NUM_BIASES, layout.NUM_BAD_WORDS]].tolist()
        if features & layout.ALLOWED:
            token = torch.arange(num_columns, device=logits.device)
            allowed = (state[layout.MASK + token // 32] >> (token % 32)) & 1
            row.masked_fill_(allowed == 0, -torch.inf)
        if num_bad_words:
            bad = state[layout.BAD_WORDS : layout.MASK].view(-1, width)[:num_bad_words]
            recent = state[layout.RECENT + torch.arange(position - width + 1, position, device=logits.device) % width]
            complete = ((bad[:, :-1] == recent) | (bad[:, :-1] < 0)).all(dim=1)
            row[bad[complete, -1]] = -torch.inf
        if num_biases:
            ids, values, untils = state[layout.BIASES : layout.BAD_WORDS].view(3, most)[:, :num_biases]
            known = ids < num_columns
            row.index_add_(0, ids[known], values.view(torch.float32)[known])
            row[ids[known & (position < untils)]] = -torch.inf
        if features & layout.COUNTED:
            repetition, presence, frequency = words[layout.REPETITION : layout.FREQUENCY + 1].view(torch.float32)
            repeated = torch.where(row > 0, row / repetition, row * repetition)
            times = counts[slot] >> 1
            row.copy_(torch.where(counts[slot] > 0, repeated, row))
            row.sub_(times * frequency + (times > 0) * presence)
    return logits


def draw(
    logits: Tensor,  # [num_rows, num_columns]
    params: Tensor,  # [num_slots, NUM_WORDS] int32, as slot_layout says
    positions: Tensor,  # [num_tokens] int32
    sample_rows: Tensor,  # [num_rows] int32: the token behind which a row draws
    out_slots: Tensor,  # [num_rows] int32: whose params, and whose token it is
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
    *,
    filtered: bool,  # whether some row asks for top-k, top-p or min-p
    counts: Tensor | None = None,  # and lists: to be kept, changed in place
    lists: Tensor | None = None,
) -> None:
    """Draw a token of each row from softmax(logits / temperature) over what ``thresholds`` keeps of it.

    The Gumbel-max trick, with noise that is a function of seed, position and token alone: the same in any batch. Rows
    of temperature 0 take the first largest logit. A row whose logits are all -inf takes token 0.
    """
    logits = logits.float()
    largest = logits.argmax(dim=-1)
    words, position = params.index_select(0, out_slots), positions.index_select(0, sample_rows) + 1
    temperature = words[:, layout.TEMPERATURE].view(torch.float32)
    if filtered:
        logits = logits.masked_fill(logits < thresholds(logits, params, out_slots)[:, None], -torch.inf)
    # argmax(logits / t + g) without the division: a temperature of 1e-7 cannot overflow.
    noise = gumbel(words[:, layout.SEED : layout.SEED + 2], position, logits.shape[-1])
    drawn = noise.mul_(temperature[:, None]).add_(logits).argmax(dim=-1)
    tokens = torch.where(temperature > 0, drawn, largest).int()
    _keep_tokens(tokens, out_slots, last_tokens, sampled)
    if counts is not None and lists is not None:
        more = torch.where(words[:, layout.FEATURES] & layout.COUNTED != 0, layout.OUTPUT, 0).int()
        counts.index_put_((out_slots, tokens), more, accumulate=True)
        lists.index_put_((out_slots, layout.RECENT + position % layout.MAX_BAD_WORD_LEN), tokens)


def thresholds(
    logits: Tensor,  # [num_rows, num_columns]
    params: Tensor,  # [num_slots, NUM_WORDS] int32
    out_slots: Tensor,  # [num_rows] int32
) -> Tensor:
    """The smallest logit that each row keeps, [num_rows] float32; -inf where it asks for all, or is greedy. Sorts.

    top-k keeps the k largest, and top-p of those the largest until they weigh top_p of what top-k kept: a logit stays
    if those above it weigh less, exp((logit - largest) / temperature) each. Ties with the last one stay too. min-p
    cuts what is further below the largest than its margin.
    """
    logits, num_columns = logits.float(), logits.shape[-1]
    words = params.index_select(0, out_slots)
    temperature, top_p, margin = (
        words[:, word].view(torch.float32) for word in (layout.TEMPERATURE, layout.TOP_P, layout.MIN_P_MARGIN)
    )
    top_k = words[:, layout.TOP_K]
    k = torch.where(top_k > 0, top_k, num_columns).clamp(max=num_columns)
    ranked = logits.sort(dim=-1, descending=True).values
    in_k = torch.arange(num_columns, device=logits.device) < k[:, None]
    # Relative to the largest before dividing: at temperature 1e-7 the rest weighs nothing, and is never nan.
    weights = ((ranked - ranked[:, :1]) / temperature.clamp(min=1e-30)[:, None]).exp_().masked_fill_(~in_k, 0)
    above = weights.cumsum(dim=-1)
    target = top_p[:, None] * above[:, -1:]
    # A row that asks for all keeps all: rounding in the sum must not cut what its neighbours' filters look at.
    in_p = (above.sub_(weights) < target) | (top_p >= 1)[:, None]
    kept = (in_p & in_k).sum(dim=-1, keepdim=True)
    cut = (temperature > 0) & ((k < num_columns) | (top_p < 1))
    floor = ranked.gather(1, kept.clamp(min=1) - 1)[:, 0].masked_fill(~cut, -torch.inf)
    near = torch.where((temperature > 0) & (margin > -torch.inf), ranked[:, 0] + margin, -torch.inf)
    return floor.maximum(near)


def logprobs(
    logits: Tensor,  # [num_rows, num_columns]
    sampled: Tensor,  # [at least num_rows] int32
    records: Tensor,  # [at least num_rows, num_record_words(k)] int32, changed in place
) -> None:
    """log_softmax of each row at the sampled token and at the k largest, in order, the lower id first of equals.

    The sampled token's rank is its place in that order, from 1. Where there are fewer than k tokens, the last columns
    have id -1 and -inf.
    """
    num_rows, num_columns = logits.shape
    k = records.shape[1] // 2 - 2
    logits, tokens = logits.float(), sampled[:num_rows, None].long()
    # Integers that order as the logits do, and then as ids fall: no two are equal. NaN is the largest, whatever its
    # sign: x86 gives what it computes the minus sign, whose bits would order below -inf.
    bits = torch.where(logits.isnan(), torch.nan, logits + 0.0).view(torch.int32)
    order = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long().bitwise_left_shift_(32)
    order |= 0x7FFFFFFF - torch.arange(num_columns, device=logits.device)
    largest = order.topk(min(k, num_columns)).indices
    ids = torch.cat([tokens, largest], dim=1)
    largest_logit = logits.amax(dim=-1, keepdim=True)  # taken off before the sum is: 300 has no room for small parts
    chosen = logits.gather(1, ids) - largest_logit - (logits - largest_logit).exp_().sum(dim=-1, keepdim=True).log()
    spare = (0, max(k - num_columns, 0))
    records[:num_rows, : k + 1] = F.pad(ids, spare, value=-1)
    records[:num_rows, k + 1] = (order > order.gather(1, tokens)).sum(dim=-1) + 1
    records[:num_rows, k + 2 : 2 * k + 3] = F.pad(chosen, spare, value=-torch.inf).view(torch.int32)


def gumbel(seeds: Tensor, positions: Tensor, num_columns: int) -> Tensor:
    """Standard Gumbel noise ``[rows, num_columns]`` (float32) from seeds ``[rows, 2]`` and positions ``[rows]``, int32.

    Two rounds of MurmurHash3's 32-bit finaliser (Appleby, 2011) over the token, each keyed from seed and position:
    with one, the noise of two rows would be shifts of each other along the vocabulary.
    """
    low, high = seeds[:, 0], seeds[:, 1]
    first = _mix(_mix(positions * -1640531527 + low) ^ high)  # 0x9E3779B9, the golden ratio of 2**32
    second = _mix(_mix(positions ^ high) + low * -2048144789)
    token = torch.arange(num_columns, dtype=torch.int32, device=seeds.device)
    bits = _mix((token * -1640531527)[None, :] + first[:, None])
    bits = _mix(bits ^ second[:, None])
    # 23 bits and a half: the largest is 1 - 2**-24. With 24 it would round to 1, whose noise is infinite.
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """The finaliser on int32 (wrapping), in place on a fresh tensor."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x.mul_(-2048144789)
    x ^= (x >> 13) & 0x7FFFF
    x = x.mul_(-1028477387)
    x ^= (x >> 16) & 0xFFFF
    return x


def _keep_tokens(tokens: Tensor, out_slots: Tensor, last_tokens: Tensor, sampled: Tensor) -> None:
    last_tokens.index_put_((out_slots,), tokens)
    sampled[: len(tokens)].copy_(tokens)
