"""The kernels of mixtures of experts against `kernels/experts/reference.py`; run by the interpreter test and on a GPU.

Groups of a GPU are padded, the definition's are not, so grouped matrices are compared token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import triton_cases as base  # also makes the interpreter round as a GPU does
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.experts import few_tokens as td
from jetrl.kernels.experts import quantize as tq
from jetrl.kernels.experts import reference as rm
from jetrl.kernels.experts import route as tr
from jetrl.kernels.experts import rows as tm
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.qtensor import QTensor

BLOCKS = (16, 32, 64, 128)

DEVICE, INTERPRET, Case, equal, few, sample = (
    base.DEVICE, base.INTERPRET, base.Case, base.equal, base.few, base.sample,
)

if INTERPRET:
    tr._AT_ONCE, tr._PART = 300, 32  # several parts, and more than are read at once
    td._AT_ONCE = 60


def logits_of(kind: str, tokens: int, experts: int) -> Tensor:
    z = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 3
    if kind == "ties":
        z = z.round()
        z[::2] = z[::2].abs() * (z[::2] - 1).sign()  # both zeros
    elif kind == "bad":
        z[0, 3], z[1, 0], z[2, 1], z[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
        z[4, :2] = torch.tensor([float("nan"), -float("nan")])
    elif kind == "far":
        z = z * 200
    return z


def chosen_of(tokens: int, experts: int, k: int, kind: str = "spread") -> Tensor:
    """Distinct experts for each token; `crowd`: all tokens at the same ones."""
    g = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, experts, generator=g).argsort(1)
    return (order if kind == "spread" else order[:1].expand(tokens, -1))[:, :k].contiguous()


def route_case(kind: str, tokens: int, experts: int, k: int) -> None:
    z = logits_of(kind, tokens, experts)
    for normalized in (True, False):
        got, want = tr.route(z.to(DEVICE), k, normalized), rm.route(z, k, normalized)
        equal("chosen", got[0], want[0])
        equal("weights", got[1], want[1])


def route_sigmoid_case(kind: str, tokens: int, experts: int, k: int, groups: int, kept: int) -> None:
    z = logits_of(kind, tokens, experts)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)) * (0.0 if kind == "ties" else 0.1)
    for normalized in (True, False):
        choice = rm.Choice(k, groups, kept, normalized, 2.446)
        got = tr.route_sigmoid(z.to(DEVICE), bias.to(DEVICE), choice)
        want = rm.route_sigmoid(z, bias, choice)
        equal("chosen", got[0], want[0])
        equal("weights", got[1], want[1])


def group_case(tokens: int, experts: int, k: int, block: int, kind: str) -> None:
    chosen = chosen_of(tokens, experts, k, kind)
    got, want = tr.group(chosen.to(DEVICE), experts, block), rm.group(chosen, experts)
    starts, counts = got.starts.tolist(), got.counts.tolist()
    assert counts == want.counts.tolist()
    assert got.ends.tolist() == [s + n for s, n in zip(starts, counts, strict=False)]
    assert got.sizes.tolist() == [-(-n // block) * block for n in counts]
    assert starts == [0, *itertools.accumulate(got.sizes.tolist())] and starts[-1] <= len(got.tokens)
    assert got.total.tolist() == starts[-1:]
    moved = want.rows + torch.tensor(starts)[chosen] - want.starts[chosen]  # the same order within each expert
    equal("rows", got.rows, moved)
    tokens_of = torch.full((len(got.tokens),), -1, dtype=torch.int32)
    tokens_of[moved.flatten()] = torch.arange(tokens, dtype=torch.int32).repeat_interleave(k)
    equal("tokens", got.tokens, tokens_of)


def grouped(tokens: int = 37, experts: int = 6, k: int = 3, block: int = 16) -> tuple[tr.PaddedGroups, Groups]:
    chosen = chosen_of(tokens, experts, k)
    return tr.group(chosen.to(DEVICE), experts, block), rm.group(chosen, experts)


def between(groups: tr.PaddedGroups) -> Tensor:
    """Rows of padding that lie before the end of the last group."""
    none = groups.tokens.cpu() < 0
    return none.nonzero()[:, 0][none.nonzero()[:, 0] < int(groups.total)]


def dispatch_case(kind: str, d: int, block: int) -> None:
    got, want = grouped(block=block)
    x = sample(37, d, kind)
    rows = tm.dispatch(x.to(DEVICE), got)
    equal("rows", rows[got.rows], rm.dispatch(x, want)[want.rows])
    assert not rows[between(got).to(DEVICE)].to(torch.float32).any(), "padding is not zero"
    for pow2 in (False, True)[: 1 if kind == "nan" else 2]:
        q, once = tm.dispatch_quantize(x.to(DEVICE), got, pow2), ref.quantize_1x128(x, pow2)
        for j in range(3):
            at = got.rows[:, j]
            equal("codes", q.codes.view(torch.uint8)[at].view(q.codes.dtype), once.codes)
            equal("scale", q.scale[at], once.scale)
        stored = q.codes.as_strided((q.codes.shape[0], q.codes.stride(0)), (q.codes.stride(0), 1))
        assert not stored.view(torch.uint8)[got.rows.flatten(), d:].any(), "the last block's padding is not zero"


def group_quantize_case(tokens: int, experts: int, k: int, d: int, block: int, kind: str) -> None:
    """One kernel, or two where choices are many: the groups and rows of `group` and `dispatch_quantize`."""
    chosen, x = chosen_of(tokens, experts, k, kind), sample(tokens, d, "wide")
    for pow2 in (False, True):
        got, q = td.group_quantize(chosen.to(DEVICE), x.to(DEVICE), experts, pow2, block)
        want = tr.group(chosen.to(DEVICE), experts, block)
        once = tm.dispatch_quantize(x.to(DEVICE), want, pow2)
        assert got.block == block and got.total.tolist() == want.total.tolist() and q.codes.shape == once.codes.shape
        for name in ("rows", "starts", "counts", "ends", "sizes"):
            equal(name, getattr(got, name), getattr(want, name).cpu())
        at = got.rows.flatten()
        width = slice(0, q.codes.stride(0))  # with the last block's padding
        mine, other = (
            t.codes.as_strided((len(t.codes), width.stop), (width.stop, 1)).view(torch.uint8)[at] for t in (q, once)
        )
        equal("codes", mine, other.cpu())
        equal("scale", q.scale[at], once.scale[at].cpu())
    few_choices = tokens * k <= td._AT_ONCE
    assert len(got.tokens) == (0 if few_choices else len(want.tokens)), "the kernel that was meant"


def sums_case(kind: str, d: int) -> None:
    got, want = grouped()
    y = sample(37 * 3, d, kind)
    weights = torch.rand(37, 3, generator=torch.Generator().manual_seed(1))
    padded = torch.full((len(got.tokens), d), float("nan"), dtype=torch.bfloat16)  # padding is not read
    padded[got.rows.flatten().cpu()] = y[want.rows.flatten()]
    on_device = padded.to(DEVICE)
    equal("combine", tm.combine(on_device, weights.to(DEVICE), got), rm.combine(y, weights, want))
    shared = sample(37, d, kind)
    added = tm.combine(on_device, weights.to(DEVICE), got, shared.to(DEVICE))
    equal("combine with a shared row", added, rm.combine(y, weights, want, shared))
    equal("dispatch_backward", tm.dispatch_backward(on_device, got), rm.dispatch_backward(y, want))


def gate_case(tokens: int, d: int) -> None:
    g = torch.Generator().manual_seed(d)
    wide, logits = torch.randn(tokens, d + 8, generator=g).bfloat16(), torch.randn(tokens, 1, generator=g) * 6
    equal("gate_rows", tm.gate_rows(wide.to(DEVICE)[:, :d], logits.to(DEVICE)), rm.gate_rows(wide[:, :d], logits))


def combine_gradient_case(d: int) -> None:
    got, want = grouped()
    y, dy = sample(37 * 3, d, "normal"), sample(37, d, "normal", 1)
    weights = torch.rand(37, 3, generator=torch.Generator().manual_seed(1))
    padded = torch.full((len(got.tokens), d), float("nan"), dtype=torch.bfloat16)
    padded[got.rows.flatten().cpu()] = y[want.rows.flatten()]
    args = dy.to(DEVICE), padded.to(DEVICE), weights.to(DEVICE), got
    rows, d_weights = tm.combine_backward(*args)
    want_rows, want_weights = rm.combine_backward(dy, y, weights, want)
    equal("rows", rows[got.rows], want_rows[want.rows])
    assert not rows[between(got).to(DEVICE)].to(torch.float32).any(), "padding is not zero"
    torch.testing.assert_close(d_weights.cpu(), want_weights, rtol=1e-5, atol=1e-4)
    equal("again", tm.combine_backward(*args)[1], d_weights)


def swiglu_case(kind: str, f: int) -> None:
    got, want = grouped()
    x = sample(37 * 3, 2 * f, kind)
    padded = torch.full((len(got.tokens), 2 * f), float("nan"), dtype=torch.bfloat16)
    padded[got.rows.flatten().cpu()] = x[want.rows.flatten()]
    for pow2 in (False, True)[: 1 if kind == "nan" else 2]:
        q, definition = tm.swiglu_quantize_rows(padded.to(DEVICE), got, pow2), rm.swiglu_quantize_rows(x, want, pow2)
        equal("codes", q.codes.view(torch.uint8)[got.rows.flatten()].view(q.codes.dtype),
              definition.codes.view(torch.uint8)[want.rows.flatten()].view(q.codes.dtype))
        equal("scale", q.scale[got.rows.flatten()], definition.scale[want.rows.flatten()])


def swiglu_gradient_case(kind: str, f: int) -> None:
    """The two ops of training: padding, which may hold anything before, holds zeros after."""
    got, want = grouped()
    x, dy = sample(37 * 3, 2 * f, kind), sample(37 * 3, f, kind, 1)
    padded, d_padded = (torch.full((len(got.tokens), n), float("nan"), dtype=torch.bfloat16) for n in (2 * f, f))
    for to, values in ((padded, x), (d_padded, dy)):
        to[got.rows.flatten().cpu()] = values[want.rows.flatten()]
    padded, d_padded = padded.to(DEVICE), d_padded.to(DEVICE)
    y, dx = tm.swiglu_rows(padded, got), tm.swiglu_rows_backward(d_padded, padded, got)
    equal("forward", y[got.rows], rm.swiglu_rows(x, want)[want.rows])
    equal("backward", dx[got.rows], rm.swiglu_rows_backward(dy, x, want)[want.rows])
    for rows in (y, dx):
        assert not rows[between(got).to(DEVICE)].view(torch.int16).any(), "padding is not zero"


def uneven(kind: str, cols: int) -> tuple[tr.PaddedGroups, Groups, Tensor]:
    """Experts with more than 128 rows, with few and with none, and 200 tokens."""
    chosen = torch.tensor([[0, 3]] * 150 + [[3, 1]] * 50)
    return tr.group(chosen.to(DEVICE), 5, 128), rm.group(chosen, 5), sample(200, cols, kind)


def with_padding(x: Tensor, got: tr.PaddedGroups, want: Groups) -> Tensor:
    """The rows `x` of the definition at the places of a GPU's, NaN in padding."""
    out = torch.full((len(got.tokens), x.shape[1]), float("nan"), dtype=x.dtype)
    out[got.rows.flatten().cpu()] = x[want.rows.flatten()]
    return out.to(DEVICE)


def equal_columns(
    name: str, pair: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], got: tr.PaddedGroups, want: Groups,
) -> None:
    """Operands of wgrad: expert after expert, each [C, its padded rows]."""
    (codes, scale), (want_codes, want_scale), c = pair, wanted, len(wanted[0])
    assert codes.shape == (c, len(got.tokens)) and scale.shape == (c, len(got.tokens) // 128) and scale.stride(0) == 1
    flat, first, blocks = codes.reshape(-1), 0, 0
    for size, count, start in zip(got.sizes.tolist(), got.counts.tolist(), want.starts.tolist(), strict=False):
        mine = flat[first * c : (first + size) * c].view(torch.uint8).view(c, size)
        equal(f"{name} codes", mine[:, :count].view(codes.dtype), want_codes[:, start : start + count])
        bad = want_scale[:, blocks : blocks + size // 128].isnan().any(1)  # zero times such a scale is no zero
        assert not mine[:, count:].cpu()[~bad].any(), f"{name}: padding is not zero"
        equal(f"{name} scale", scale[:, first // 128 : (first + size) // 128],
              want_scale[:, blocks : blocks + size // 128])
        first, blocks = first + size, blocks + size // 128


def equal_rows(name: str, q: QTensor, definition: QTensor, got: tr.PaddedGroups, want: Groups) -> None:
    """Codes and scales of the rows of tokens; what a GEMM reads besides is zero."""
    assert (q.granularity, q.col_sections) == (definition.granularity, definition.col_sections)
    at, other = got.rows.flatten(), want.rows.flatten()
    stored = q.codes.as_strided((len(q.codes), q.codes.stride(0)), (q.codes.stride(0), 1)).view(torch.uint8)
    cols = q.codes.shape[1]
    equal(f"{name} codes", stored[at, :cols].view(q.codes.dtype), definition.codes.view(torch.uint8)[other].view(
        q.codes.dtype))
    equal(f"{name} scale", q.scale[at], definition.scale[other])
    assert not stored[between(got).to(DEVICE), :cols].any(), f"{name}: padding is not zero"
    if len(q.col_sections) == 1:
        clean = ~definition.scale[other][:, -1].isnan()
        assert not stored[at, cols:].cpu()[clean].any(), f"{name}: the last block's padding is not zero"


def columns_case(kind: str, c: int, pow2: bool) -> None:
    got, want, x = uneven(kind, c)
    rows = rm.dispatch(x, want) * torch.arange(1, 3).repeat(200).to(x.dtype)[:, None]  # not the same for all experts
    equal_columns("rows", tq.quantize_rows_t(with_padding(rows, got, want), got, pow2),
                  rm.quantize_rows_t(rows, want, pow2), got, want)
    equal_columns("tokens", tq.dispatch_quantize_t(x.to(DEVICE), got, pow2),
                  rm.dispatch_quantize_t(x, want, pow2), got, want)


def combine_quantize_case(kind: str, d: int, pow2: bool) -> None:
    """The bits of `combine_backward`'s kernel, also of the weights' sums, and the definition's codes of its rows."""
    got, want, dy = uneven(kind, d)
    y = with_padding(sample(400, d, "normal", 1), got, want)
    weights = torch.rand(200, 2, generator=torch.Generator().manual_seed(1))
    args = dy.to(DEVICE), y, weights.to(DEVICE), got
    q, columns, d_weights = tq.combine_backward_quantize(*args, pow2, pow2)
    plain = rm.combine_backward(dy, torch.zeros(400, d, dtype=dy.dtype), weights, want)[0]
    equal("weights", d_weights, tm.combine_backward(*args)[1])
    equal_rows("rows", q, ref.quantize_1x128(plain, pow2), got, want)
    equal_columns("columns", columns, rm.quantize_rows_t(plain, want, pow2), got, want)


def swiglu_quantize_case(kind: str, f: int, pow2: bool) -> None:
    got, want, _ = uneven("normal", 8)
    x, dy = sample(400, 2 * f, kind), sample(400, f, "normal", 1)
    q, d_t, act_t = tq.swiglu_rows_backward_quantize(
        with_padding(dy, got, want), with_padding(x, got, want), got, pow2, pow2
    )
    wanted = rm.swiglu_rows_backward_quantize(dy, x, want, pow2, pow2)
    equal_rows("rows", q, wanted[0], got, want)
    equal_columns("columns", d_t, wanted[1], got, want)
    equal_columns("output", act_t, wanted[2], got, want)


def transpose_case(sections: tuple[int, ...], k: int) -> None:
    codes = sample(4 * sum(sections), k, "normal").to(torch.float8_e4m3fn).to(DEVICE).unflatten(0, (4, -1))
    out = torch.zeros(4, k, sum(-(-n // 128) * 128 for n in sections), dtype=torch.uint8, device=DEVICE)
    tm.transpose_matrices(codes, sections, out.view(codes.dtype))
    for e in range(4):
        start = first = 0
        for size in sections:
            mine = codes[e, start : start + size].cpu().view(torch.uint8)
            equal("transposed", out[e, :, first : first + size], mine.T)
            start, first = start + size, first + -(-size // 128) * 128
    assert int((out != 0).sum()) == int((codes.view(torch.uint8) != 0).sum()), "padding is not zero"


def all_cases() -> list[tuple[str, Case]]:
    def cases() -> Iterator[tuple[str, Case]]:
        for size in ((1, 40), (9, 1100)):
            yield f"gate_rows {size}", partial(gate_case, *size)
        for kind in ("normal", "ties", "bad", "far"):
            for size in few(((9, 5, 2), (37, 128, 8), (700, 128, 8), (33, 60, 4))):
                yield f"route {kind} {size}", partial(route_case, kind, *size)
        for kind in ("normal", "ties", "far"):
            sizes = [(9, 5, 2, 1, 1), (37, 24, 4, 4, 2), (13, 64, 6, 8, 3), (400, 256, 8, 8, 4), (300, 384, 8, 1, 1)]
            for sigmoid in sizes:
                if sigmoid[0] < 300 or not INTERPRET:
                    yield f"route_sigmoid {kind} {sigmoid}", partial(route_sigmoid_case, kind, *sigmoid)
        sizes = [(1, 5, 2), (37, 16, 4), (3, 128, 8)]
        sizes += [(260, 160, 2), (310, 5, 1)] if INTERPRET else [
            (300, 128, 8), (5000, 128, 8), (20_000, 60, 4), (256, 128, 8), (512, 128, 8), (513, 128, 8),
            (70_000, 128, 8),
        ]
        for size, block, kind in itertools.product(sizes, BLOCKS, ("spread", "crowd")):
            if block in (16, 128) or size[0] < 50:
                yield f"group {size} {block} {kind}", partial(group_case, *size, block, kind)
        sizes = [(1, 5, 2, 136), (11, 16, 3, 192), (3, 128, 8, 2304), (31, 6, 2, 136)] if INTERPRET else [
            (1, 128, 8, 2048), (16, 128, 8, 2048), (64, 128, 8, 2048), (256, 128, 8, 2048), (257, 128, 8, 2048),
            (100, 60, 4, 2304), (512, 160, 4, 192), (37, 16, 3, 136),
        ]
        for size, block, kind in itertools.product(sizes, BLOCKS, ("spread", "crowd")):
            if not INTERPRET or block == (128 if size[0] < 11 else 16):
                yield f"group_quantize {size} {block} {kind}", partial(group_quantize_case, *size, block, kind)
        for kind in ("normal", "wide", "nan"):
            for d in few((136, 2304, 2048, 192)):
                yield f"dispatch {kind} {d}", partial(dispatch_case, kind, d, 16 if d < 1000 else 128)
                yield f"sums {kind} {d}", partial(sums_case, kind, d)
            for f in few((72, 256, 768)):
                yield f"swiglu {kind} {f}", partial(swiglu_case, kind, f)
                yield f"swiglu gradient {kind} {f}", partial(swiglu_gradient_case, kind, f)
        for d in few((136, 2048, 192)):
            yield f"combine gradient {d}", partial(combine_gradient_case, d)
        for kind, c, pow2 in itertools.product(("normal", "wide", "nan"), few((72, 136, 1536)), (False, True)):
            if (kind, pow2) != ("nan", True):
                yield f"quantize_rows_t {kind} {c} {pow2}", partial(columns_case, kind, c, pow2)
                if not INTERPRET or (c == 136 and (kind, pow2) != ("wide", True)):
                    yield f"combine, quantized {kind} {c} {pow2}", partial(combine_quantize_case, kind, c, pow2)
                    yield f"swiglu gradient, quantized {kind} {c} {pow2}", partial(swiglu_quantize_case, kind, c, pow2)
        for sections, k in few((((72, 72), 136), ((192,), 96), ((768, 768), 2048))):
            yield f"transpose {sections} {k}", partial(transpose_case, sections, k)

    return list(cases())


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
