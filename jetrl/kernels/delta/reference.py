"""The definition of Gated DeltaNet on the CPU: one for packed training, prefill in pieces and token-by-token decoding.

Per value head, `i`, `j`: rows 0..63 of a chunk, counted from position 0 of the sequence; blocks of 16 rows; S: FP32
state at the chunk's start; `bf`: rounded to BF16 (the model's dtype); all else is FP32, each operation rounded.

    G_i = G_(i-1) + g_i, in order          E_ij = exp(G_i - G_j), j <= i          gam_i = exp(G_i)
    R_i = beta_i (v_i - gam_i (k_i . hi(S)))                        hi: S rounded to BF16, ties away from zero
    L_ij = (beta_i E_ij) (k_i . k_j), j < i                         P_ij = bf(E_ij (q_i . k_j)), j <= i
    X_i = bf(R_i - sum over earlier blocks of bf(L_ij) d_j)
    T = (I + L_block)^-1: row_t = e_t - L_t0 T_0 - L_t1 T_1 ..., in that order
    d_i = bf(sum over j <= i of its block of bf(T_ij) X_j)
    o_i = bf(dk^-0.5 (gam_i (q_i . hi(S)) + sum_(j <= i) P_ij d_j))
    after row 63:  S <- exp(G_63) S + sum_j k_j (x) bf(exp(G_63 - G_j) d_j)

A row reads S and rows up to itself, and S moves once in 64 tokens: so no row depends on how passes divided the tokens.
Sums are exact before they are rounded to FP32 (`kernels.exact`). In a sum over rows d_j, the rows' units are folded
into the weights, as in attention, so that rows not seen cannot move a row's grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import exact
from jetrl.kernels import reference as ref
from jetrl.kernels.delta.parts import BLOCK, CHUNK, DeltaState, HeadSizes, Parts, empty_state

L2_EPS = 1e-6
_ROW_BITS, _WEIGHT_BITS = 23, 24  # 64 products of 47 bits stay below 2**53
_FINE_BITS, _FINE_K = 23, 128  # likewise


def conv_heads(
    x: Tensor, weight: Tensor, sizes: HeadSizes, parts: Parts, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Depthwise causal convolution of queries, keys and values, SiLU, and L2 norms of queries and keys.

    y_t = sum over i of w_i x_(t-W+1+i): FP32 products, added in order, the oldest first; silu(y) is rounded; q and k
    are divided by sqrt(sum of squares + 1e-6), rounded again. `x` [T, C], `weight` [C, W] -> q, k [T, Hk, dk],
    v [T, Hv, dv].

    `state` [rows, R, C], R >= W-1: the last R rows of x before the pass, that of position p at place p % R, so that a
    sequence can go back to R-W+1 rows before the last one; the pass leaves its own.
    """
    width, rows = weight.shape[1], parts.rows
    kept = x.new_zeros(len(parts.lengths), width - 1, x.shape[1])
    if state is not None and rows is not None:
        assert parts.before is not None
        before = parts.before[:, None].to(torch.int64) - torch.arange(width - 1, 0, -1)
        found = state[rows.read[:, None], before % state.shape[1]]
        kept = torch.where((before >= 0)[..., None], found, kept)
    source = torch.cat([x, kept.flatten(0, 1)])
    local, sequence = _local(parts)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for i in range(width):
        total = total + weight[:, i].to(torch.float32) * source[_row_before(width - 1 - i, local, sequence, width)]
    if state is not None and rows is not None:
        assert parts.before is not None
        new = state[rows.read]
        place = parts.before.to(torch.int64)[sequence] + local
        last = local >= (torch.tensor(parts.lengths) - state.shape[1])[sequence]  # no two of a sequence in one place
        new[sequence[last], (place % state.shape[1])[last]] = x[last]
        state[rows.write] = new
    y = (total * ref.sigmoid(total)).to(x.dtype)
    q, k, v = y.split(sizes.columns, -1)
    q, k = (_l2_normed(t.unflatten(-1, (sizes.key_heads, sizes.key_dim))) for t in (q, k))
    return q, k, v.unflatten(-1, (sizes.value_heads, sizes.value_dim)).contiguous()


def _local(parts: Parts) -> tuple[Tensor, Tensor]:
    """Of each row: its place within its part, and the number of the part."""
    count = torch.tensor(parts.lengths)
    sequence = torch.arange(len(count)).repeat_interleave(count)
    return torch.arange(int(count.sum())) - torch.tensor(parts.starts())[sequence], sequence


def _row_before(back: int, local: Tensor, sequence: Tensor, width: int) -> Tensor:
    """Where the row `back` before each row is: among the rows of the pass, or behind them among those that are kept."""
    kept = len(local) + sequence * (width - 1) + (width - 1 + local - back)
    return torch.where(local >= back, torch.arange(len(local)) - back, kept)


def _l2_normed(x: Tensor) -> Tensor:
    inverse = (1.0 / (exact.sum_of_squares(x) + L2_EPS).sqrt()).to(torch.float32)
    return (x.to(torch.float32) * inverse).to(x.dtype)


def delta_gates(logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, FP32 [T, Hv]; `logits` [T, 2 Hv] are b, then a.

    softplus(x) = max(x, 0) + log(1 + exp(-|x|)), the logarithm in float64, rounded to FP32.
    """
    b, a = logits.to(torch.float32).chunk(2, -1)
    x = a + dt_bias.to(torch.float32)
    tail = exact.log(exact.exp(-x.abs()).to(torch.float64) + 1.0).to(torch.float32)
    return -(exact.exp(a_log.to(torch.float32)) * (x.clamp_min(0.0) + tail)), ref.sigmoid(b)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rounded(rms_norm(x) * (gate * sigmoid(gate)))` of each head, FP32 products. `x`, `gate` [T, Hv, dv]."""
    g = gate.to(torch.float32)
    return (ref.rms_norm(x, weight, eps).to(torch.float32) * (g * ref.sigmoid(g))).to(x.dtype)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`rounded(x * sigmoid(gate))`, an FP32 product. `x`, `gate` [T, N, H]."""
    return (x.to(torch.float32) * ref.sigmoid(gate)).to(x.dtype)


# ---- the delta rule -------------------------------------------------------------------------------------------------


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None
) -> Tensor:
    """`q`, `k` [T, Hk, dk], `v` [T, Hv, dv], `g`, `beta` [T, Hv] FP32 -> o [T, Hv, dv]. See the module.

    With `kept`, sequences go on from rows `parts.rows.read` of it and leave rows `parts.rows.write`.
    """
    sizes = HeadSizes(k.shape[1], v.shape[1], k.shape[2], v.shape[2])
    count = len(parts.lengths)
    before = [0] * count if parts.before is None else parts.before.tolist()
    if kept is None:
        held = empty_state(count, sizes, v.dtype)
    else:
        assert parts.rows is not None
        held = DeltaState(*(tensor[parts.rows.read] for tensor in kept))
    walk = _Walk(q, k, v, g, beta, held)
    done, starts = [0] * count, parts.starts()
    while members := [s for s in range(count) if done[s] < parts.lengths[s]]:
        first = [before[s] + done[s] for s in members]
        sizes_now = [
            min(BLOCK - f % BLOCK, parts.lengths[s] - done[s]) for s, f in zip(members, first, strict=True)
        ]
        walk.block(members, [starts[s] + done[s] for s in members], first, sizes_now)
        for s, n in zip(members, sizes_now, strict=True):
            done[s] += n
    if kept is not None and parts.rows is not None:
        for tensor, new in zip(kept, held, strict=True):
            tensor[parts.rows.write] = new
    return walk.out


class _Walk:
    """Blocks of many sequences at a time; `held` has the state of each and is changed in place."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, held: DeltaState) -> None:
        self.inputs, self.held, self.out = (q, k, v, g, beta), held, torch.empty_like(v)
        self.repeat = v.shape[1] // k.shape[1]

    def block(self, members: list[int], rows: list[int], first: list[int], sizes: list[int]) -> None:
        """The next rows of sequences `members`, which lie in one block of each: `sizes[a]` rows from row `rows[a]` of
        the inputs on, at positions from `first[a]` on."""
        m, held = max(sizes), self.held
        who, n = torch.tensor(members), torch.tensor(sizes)
        at = torch.tensor(first) % CHUNK  # the first row within the chunk
        i = at[:, None] + torch.arange(m)  # [A, m], beyond n: not there
        live = torch.arange(m) < n[:, None]
        # padding repeats the last row, and its results are not written
        index = torch.tensor(rows)[:, None] + torch.minimum(torch.arange(m), n[:, None] - 1)
        i = torch.minimum(i, (at + n - 1)[:, None])
        q, k, v, g, beta = (tensor[index].transpose(1, 2) for tensor in self.inputs)  # [A, H, m, ...]
        beta = beta[..., None]
        seen = (int((at + n).max()) + BLOCK - 1) // BLOCK * BLOCK  # columns of the chunk that any of them reads
        sums = self._sums(g, who, at, n)[:, :, :seen]
        a = torch.arange(len(members))[:, None].expand_as(i)
        keys = held.keys[who, :, :seen]
        keys[a[live], :, i[live]] = k.transpose(1, 2)[live]
        held.keys[who, :, :seen] = keys
        here = i[:, None, :, None]  # [A, 1, m, 1]
        j = torch.arange(seen)
        start = here // BLOCK * BLOCK
        sum_i = sums.gather(2, i[:, None].expand(-1, sums.shape[1], -1))[..., None]  # [A, Hv, m, 1]
        decay = exact.exp(torch.where(j <= here, sum_i - sums[:, :, None], 0.0))
        gam, high = exact.exp(sum_i), _high(held.state[who], v.dtype).mT
        zero = torch.zeros(())
        lower = torch.where(j < here, (beta * decay) * self._heads(_mm(k, keys)), zero)
        weights = torch.where(j <= here, decay * self._heads(_mm(q, keys)), zero).to(v.dtype)
        right = beta * (v.to(torch.float32) - gam * _mm(self._heads(k), high))
        updates = held.updates[who, :, :seen]
        if seen > BLOCK:
            right = right - _mix(torch.where(j < start, lower, zero).to(v.dtype), updates)
        d = self._solved(who, at, i, live, lower, right.to(v.dtype))
        updates[a[live], :, i[live]] = d.transpose(1, 2)[live]
        held.updates[who, :, :seen] = updates
        o = gam * _mm(self._heads(q), high) + _mix(weights, updates)
        o = (k.shape[-1] ** -0.5 * o).to(v.dtype)
        self.out[index[live]] = o.transpose(1, 2)[live]
        self._move(who[at + n == CHUNK])

    def _heads(self, x: Tensor) -> Tensor:
        """What belongs to key heads, for each value head."""
        return x.repeat_interleave(self.repeat, 1)

    def _sums(self, g: Tensor, who: Tensor, at: Tensor, n: Tensor) -> Tensor:
        """G of the chunk's rows so far [A, Hv, 64], with the new ones: added one by one."""
        sums = self.held.sums[who]
        places = torch.arange(len(who))
        run = torch.where((at > 0)[:, None], sums[places, :, (at - 1).clamp_min(0)], torch.zeros(()))
        for r in range(g.shape[2]):
            new = r < n
            run = torch.where(new[:, None], run + g[:, :, r], run)
            sums[places[new], :, (at + r)[new]] = run[new]
        self.held.sums[who] = sums
        return sums

    def _solved(self, who: Tensor, at: Tensor, i: Tensor, live: Tensor, lower: Tensor, x: Tensor) -> Tensor:
        """d [A, Hv, m, dv] of the new rows, from L [A, Hv, m, ..] and X; X and T of the block are kept."""
        held, r, heads = self.held, i % BLOCK, lower.shape[1]
        start = (at // BLOCK * BLOCK)[:, None, None, None] + torch.arange(BLOCK)
        own = lower.gather(3, start.expand(-1, heads, lower.shape[2], -1))  # [A, Hv, m, 16]
        a = torch.arange(len(who))[:, None].expand_as(r)[live]
        square = torch.zeros(len(who), heads, BLOCK, BLOCK)
        square[a, :, r[live]] = own.transpose(1, 2)[live]
        inverse, errors = held.inverse[who], held.errors[who]
        inverse[a, :, r[live]] = torch.eye(BLOCK)[r[live]][:, None].expand(-1, heads, -1)
        errors[a, :, r[live]] = x.transpose(1, 2)[live]
        for s in range(int(r.max())):  # row s is complete when it is subtracted from those below it
            inverse = inverse - square[..., s : s + 1] * inverse[..., s : s + 1, :]
        held.inverse[who], held.errors[who] = inverse, errors
        rows = inverse.gather(2, r[:, None, :, None].expand(-1, heads, -1, BLOCK))
        rows = torch.where(torch.arange(BLOCK) <= r[:, None, :, None], rows, torch.zeros(()))
        return _mix(rows.to(x.dtype), errors).to(x.dtype)

    def _move(self, who: Tensor) -> None:
        """The states of sequences whose chunk is complete."""
        if not len(who):
            return
        held = self.held
        sums, d = held.sums[who], held.updates[who]
        last = sums[..., -1:]
        u = (exact.exp(last - sums)[..., None] * d.to(torch.float32)).to(d.dtype)
        new = exact.exp(last)[..., None] * held.state[who] + _mm(self._heads(held.keys[who]).mT, u.mT)
        held.state[who] = new


def _high(state: Tensor, dtype: torch.dtype) -> Tensor:
    """What products read of the FP32 state: its upper 16 bits, rounded, ties away from zero. (In an FP32 model all.)"""
    if dtype != torch.bfloat16:
        return state
    bits = state.contiguous().view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(torch.float32)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.mT`: exact sums, rounded once to FP32."""
    bits = _FINE_BITS if a.shape[-1] <= _FINE_K else exact.GEMM_BITS
    (left, left_unit), (right, right_unit) = exact.align(a.contiguous(), bits), exact.align(b.contiguous(), bits)
    return (exact.matmul_nt(left, right) * left_unit * right_unit.mT).to(torch.float32)


def _mix(weights: Tensor, rows: Tensor) -> Tensor:
    """`weights` [.., m, J] @ `rows` [.., J, dv], a sum over rows of which some are not seen (weight 0)."""
    right, unit = exact.align(rows, bits=_ROW_BITS)
    left, left_unit = exact.align(weights.to(torch.float64) * unit.mT, bits=_WEIGHT_BITS)
    return (exact.matmul_nt(left, right.mT.contiguous()) * left_unit).to(torch.float32)
