"""Gated DeltaNet on a CPU: one definition for packed training, pieces and single tokens; accuracy; gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewinding import rewound, within_a_block
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.delta import backward, ops, reference
from jetrl.kernels.delta.parts import CHUNK, DeltaState, HeadSizes, Parts, empty_state
from jetrl.kernels.delta.table import OPS
from jetrl.kernels.update.gradient import Gradient
from jetrl.types import StateRows

SIZES = HeadSizes(2, 4, 16, 16)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 129, 200)
KINDS = ("random", "keys", "slow")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(count: int, kind: str, seed: int, sizes: HeadSizes = SIZES) -> Inputs:
    """q, k, v [T, H, d] in BF16, g, beta [T, Hv]; `keys`: correlated ones; `slow`: slow decays and steps near 1."""
    generator = torch.Generator().manual_seed(seed)
    hk, hv, dk, dv = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1).to(torch.bfloat16)

    shift = 0.0 if kind == "random" else normal(1, hk, dk) + 0.5
    q, k = (unit(F.silu(normal(count, hk, dk) + shift) if kind != "random" else normal(count, hk, dk)) for _ in "qk")
    v = F.silu(normal(count, hv, dv)).to(torch.bfloat16)
    if kind == "slow":
        g, beta = -(0.001 + 0.02 * torch.rand(hv, generator=generator)) * F.softplus(normal(count, hv)), 3.0
    else:
        g, beta = -4.0 * torch.rand(hv, generator=generator) * F.softplus(normal(count, hv) - 3.0), 0.0
    return q, k, v, g, torch.sigmoid(normal(count, hv) + beta)


def parts_of(lengths: Sequence[int], before: Sequence[int] = (), rows: StateRows | None = None) -> Parts:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Parts(ends, tuple(lengths), torch.tensor(before, dtype=torch.int32) if before else None, rows)


def packed(sequences: Sequence[Inputs]) -> Inputs:
    return tuple(torch.cat(tensors) for tensors in zip(*sequences, strict=True))  # type: ignore[return-value]


def whole(sequences: Sequence[Inputs]) -> list[Tensor]:
    lengths = [len(x[0]) for x in sequences]
    return list(ops.delta_rule(*packed(sequences), parts_of(lengths)).split(lengths))


def in_pieces(
    sequences: Sequence[Inputs], sizes: Callable[[int], int], rng: random.Random
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """Outputs of sequences that run next to each other in pieces, each at its own pace, and their states at the end.

    A sequence reads one row and writes it, or another one that held something else before.
    """
    count = len(sequences)
    kept = DeltaState(*(t.fill_(0.37) for t in empty_state(2 + 2 * count, SIZES, torch.bfloat16)))
    for tensor in kept:
        tensor[0] = 0.0
    free, row, done = list(range(2, 2 + 2 * count)), [0] * count, [0] * count
    outs: list[list[Tensor]] = [[] for _ in sequences]
    while any(n < len(x[0]) for n, x in zip(done, sequences, strict=True)):
        chosen = [s for s in range(count) if done[s] < len(sequences[s][0]) and rng.random() < 0.8]
        if not chosen:
            continue
        lengths = [min(len(sequences[s][0]) - done[s], sizes(done[s])) for s in chosen]
        read, write = [row[s] for s in chosen], []
        for s in chosen:
            if row[s] == 0 or rng.random() < 0.3:
                old, row[s] = row[s], free.pop(0)
                free += [old] if old else []
            write.append(row[s])
        rows = StateRows(torch.tensor(read), torch.tensor(write))
        spans = [(sequences[s], done[s], done[s] + n) for s, n in zip(chosen, lengths, strict=True)]
        cut = packed([tuple(t[first:end] for t in x) for x, first, end in spans])  # type: ignore[misc]
        parts = parts_of(lengths, [done[s] for s in chosen], rows)
        for s, n, o in zip(chosen, lengths, ops.delta_rule(*cut, parts, kept).split(lengths), strict=True):
            outs[s].append(o)
            done[s] += n
    return [torch.cat(o) for o in outs], [tuple(t[r] for t in kept) for r in row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pace", ["single tokens", "7", "150", "a prompt, then single tokens"])
@torch.no_grad()
def test_pieces_have_the_bits_of_the_whole(kind: str, pace: str) -> None:
    rng = random.Random(f"{kind} {pace}")
    sequences = [inputs(n, kind, i) for i, n in enumerate(LENGTHS)]
    cuts = {
        "single tokens": lambda _: 1, "7": lambda _: rng.randint(1, 7), "150": lambda _: rng.randint(1, 150),
        "a prompt, then single tokens": lambda at: rng.randint(1, 130) if at == 0 else 1,
    }
    outs, states = in_pieces(sequences, cuts[pace], rng)
    for o, want in zip(outs, whole(sequences), strict=True):
        assert_bitwise_equal(o, want)
    fresh, rows = empty_state(1 + len(sequences), SIZES, torch.bfloat16), torch.arange(1, 1 + len(sequences))
    once = StateRows(torch.zeros_like(rows), rows)
    ops.delta_rule(*packed(sequences), parts_of(LENGTHS, [0] * len(LENGTHS), once), fresh)
    for s, (n, state) in enumerate(zip(LENGTHS, states, strict=True)):
        assert_bitwise_equal(state[0], fresh.state[1 + s])
        live = n % CHUNK
        for mine, theirs in zip(state[1:4], fresh[1:4], strict=True):  # rows of the running chunk
            assert_bitwise_equal(mine[:, :live], theirs[1 + s][:, :live])


@torch.no_grad()
def test_every_phase() -> None:
    """A prompt of each length from 1 to 64, then single tokens over the next ends of chunks."""
    sequences = [inputs(n + 70, "keys", n) for n in range(1, 65)]
    done, (n, outs) = [n for n in range(1, 65)], (64, [list[Tensor]() for _ in range(64)])
    kept, rows = empty_state(66, SIZES, torch.bfloat16), torch.arange(2, 66)
    first = packed([tuple(t[:m] for t in x) for x, m in zip(sequences, done, strict=True)])  # type: ignore[misc]
    begun = StateRows(torch.zeros_like(rows), rows)
    for out, o in zip(outs, ops.delta_rule(*first, parts_of(done, [0] * n, begun), kept).split(done), strict=True):
        out.append(o)
    for step in range(70):
        at = [d + step for d in done]
        cut = packed([tuple(t[a : a + 1] for t in x) for x, a in zip(sequences, at, strict=True)])  # type: ignore[misc]
        o = ops.delta_rule(*cut, parts_of([1] * n, at, StateRows(rows, rows)), kept)
        for out, one in zip(outs, o.split(1), strict=True):
            out.append(one)
    for out, want in zip(outs, whole(sequences), strict=True):
        assert_bitwise_equal(torch.cat(out), want)


@pytest.mark.parametrize("deepest", [1, 2, 3, 7, 15])
def test_drafts_are_taken_back(deepest: int) -> None:
    """In every phase of a chunk, after steps of every length."""
    for got, want in rewound(reference, range(1, 65), 70, deepest, within_a_block, SIZES):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize("last", [lambda at: at + 15, lambda at: at + 16 - (at + 1) % 16], ids=["any", "one more"])
def test_drafts_beyond_a_block_are_found(last: Callable[[int], int]) -> None:
    """The block's X and T, or the state itself, would be those of tokens that did not stay."""
    assert any(not torch.equal(got, want) for got, want in rewound(reference, range(1, 65), 70, 7, last, SIZES))


@torch.no_grad()
def test_rows_depend_on_nothing_else() -> None:
    """Neither on other sequences, nor on what follows, nor on the contents of rows that are not there yet."""
    sequences = [inputs(n, "random", i) for i, n in enumerate(LENGTHS)]
    for x, want in zip(sequences, whole(sequences), strict=True):
        n = len(want)
        assert_bitwise_equal(whole([x])[0], want)
        m = (n + 1) // 2
        assert_bitwise_equal(whole([tuple(t[:m] for t in x)])[0], want[:m])  # type: ignore[list-item]


@torch.no_grad()
def test_chunks_counted_from_a_pieces_start_are_another_function() -> None:
    """The negative control: what engines do that begin a new chunk at the end of a prompt."""
    x = inputs(200, "keys", 3)
    (want,) = whole([x])
    kept, row, outs, at = empty_state(2, SIZES, torch.bfloat16), torch.tensor([1]), [], 0
    for n in (100, 37, 63):
        # rows of zeros up to a whole chunk change nothing but that the state moves there
        cut = tuple(F.pad(t[at : at + n], [0, 0] * (t.ndim - 1) + [0, -n % CHUNK]) for t in x)
        rows = StateRows(row if at else row - 1, row)
        outs.append(ops.delta_rule(*cut, parts_of([len(cut[0])], [0], rows), kept)[:n])  # type: ignore[arg-type]
        at += n
    other = torch.cat(outs)
    assert_bitwise_equal(other[:100], want[:100])
    differ = (other[100:] != want[100:]).float().mean()
    assert differ > 0.2, differ


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule token by token, in float64."""
    repeat = v.shape[1] // k.shape[1]
    q, k = (t.double().repeat_interleave(repeat, 1) for t in (q, k))
    state, outs = q.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(v)):
        state = state * g[t].double().exp()[:, None, None]
        error = (v[t].double() - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t].double()[:, None]
        state = state + k[t][..., None] * error[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[-1] ** -0.5)
    return torch.stack(outs)


@pytest.mark.parametrize(("kind", "most"), [("random", 5e-3), ("keys", 7e-3), ("slow", 1.2e-2)])
@torch.no_grad()
def test_against_the_recurrence_in_float64(kind: str, most: float) -> None:
    """In BF16 to its rounding; in FP32 to that of exact sums of aligned rows."""
    x = inputs(300, kind, 5)
    want = recurrent(*x)
    error = (whole([x])[0].double() - want).norm() / want.norm()
    assert 1e-3 < error < most, error
    wide = tuple(t.to(torch.float32) for t in x)
    error = (whole([wide])[0].double() - want).norm() / want.norm()  # type: ignore[list-item]
    assert error < 2e-6, error


def test_gradients_are_those_of_the_recurrence() -> None:
    """Of two sequences, in float64 by autograd through the recurrence."""
    lengths = (70, 131)
    sequences = [inputs(n, "keys", i) for i, n in enumerate(lengths)]
    leaves = [t.detach().requires_grad_() for t in packed(sequences)]
    out = ops.delta_rule(*leaves, parts_of(lengths))  # type: ignore[arg-type]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    out.backward(up.to(out.dtype))
    doubles = [t.detach().double().requires_grad_() for t in packed(sequences)]
    rows = [recurrent(*cut) for cut in zip(*(t.split(lengths) for t in doubles), strict=True)]
    (torch.cat(rows) * up.to(out.dtype).double()).sum().backward()
    for mine, theirs in zip(leaves, doubles, strict=True):
        assert mine.grad is not None and theirs.grad is not None and mine.grad.dtype == mine.dtype
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < (3e-3 if mine.dtype == torch.bfloat16 else 1e-5), error


CHANNELS = sum(SIZES.columns)


def conv_inputs(count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, weight = torch.randn(count, CHANNELS, generator=generator), torch.rand(CHANNELS, 4, generator=generator)
    return x.to(dtype), weight.sub_(0.5).to(dtype)


def conv_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of torch's convolution in float64, [T, C]."""
    padded = F.pad(x.double().T[None], (3, 0))
    return F.silu(F.conv1d(padded, weight.double()[:, None], groups=len(weight)))[0].T


@pytest.mark.parametrize("size", [3, 18])
@torch.no_grad()
def test_conv_heads(size: int) -> None:
    """The convolution of each sequence by torch's; in pieces, with `size` rows before, the same bits."""
    lengths = (1, 2, 5, 30)
    x, weight = conv_inputs(sum(lengths))
    gradient = Gradient(weight)
    q, k, v = ops.conv_heads(x, gradient, weight, SIZES, parts_of(lengths))
    for cut, mine in zip(x.split(lengths), torch.cat([t.flatten(1) for t in (q, k, v)], 1).split(lengths), strict=True):
        wq, wk, wv = conv_by_torch(cut, weight).split(SIZES.columns, -1)
        for got, want in zip(mine.double().split(SIZES.columns, -1), (wq, wk, wv), strict=True):
            want = want if want is wv else F.normalize(want.unflatten(-1, (2, 16)), dim=-1, eps=1e-3).flatten(1)
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.01)
    kept, row = torch.full((5, size, CHANNELS), 7.0, dtype=x.dtype), 0
    long, outs = x[8:], []
    for at, n in ((0, 2), (2, 1), (3, 1), (4, 20), (24, 6)):
        rows = StateRows(torch.tensor([row]), torch.tensor([row := 3 if at < 4 else 2]))
        outs.append(ops.conv_heads(long[at : at + n], gradient, weight, SIZES, parts_of([n], [at], rows), kept))
        for position in range(max(0, at + n - size), at + n):
            assert_bitwise_equal(kept[row, position % size], long[position])
    for whole_one, pieces in zip((q, k, v), zip(*outs, strict=True), strict=True):
        assert_bitwise_equal(torch.cat(pieces), whole_one[8:])


def test_gradients_of_the_convolution_gates_and_norms() -> None:
    """Against autograd through float64 formulas, in FP32."""
    lengths, generator = (3, 8), torch.Generator().manual_seed(1)
    x, weight = (t.to(torch.float32).requires_grad_() for t in conv_inputs(11))
    q, k, v = ops.conv_heads(x, Gradient(weight), weight, SIZES, parts_of(lengths))
    ups = [torch.randn(t.shape, generator=generator) for t in (q, k, v)]
    torch.autograd.backward((q, k, v), ups)
    dx, dw = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = torch.cat([conv_by_torch(cut, dw) for cut in dx.split(lengths)])
    wq, wk, wv = y.split(SIZES.columns, -1)
    wq, wk = (t.unflatten(-1, (2, 16)) for t in (wq, wk))
    wq, wk = (t / (t.square().sum(-1, True) + 1e-6).sqrt() for t in (wq, wk))
    torch.autograd.backward((wq, wk, wv.unflatten(-1, (4, 16))), [t.double() for t in ups])
    for mine, theirs in ((x, dx), (weight, dw)):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    logits, a_log, dt = (torch.randn(s, generator=generator).requires_grad_() for s in ((11, 8), (4,), (4,)))
    g, beta = ops.delta_gates(logits, (a_log, dt), a_log, dt)
    b, a = logits.double().chunk(2, -1)
    want = -a_log.double().exp() * F.softplus(a + dt.double()), b.sigmoid()
    torch.testing.assert_close((g.double(), beta.double()), want, rtol=1e-6, atol=1e-7)
    assert float((g.exp() <= 1.0).float().mean()) == 1.0
    h, z, w = (torch.randn(s, generator=generator).requires_grad_() for s in ((11, 4, 16), (11, 4, 16), (16,)))
    n = h.double() / (h.double().square().mean(-1, True) + 1e-6).sqrt() * w.double()
    for mine_out, want_out, leaves in (
        ((g, beta), want, (logits, a_log, dt)), (ops.gated_norm(h, z, w, w, 1e-6), n * F.silu(z.double()), (h, z, w)),
        (ops.output_gate(h, z), h.double() * z.double().sigmoid(), (h, z)),
    ):
        outs = mine_out if isinstance(mine_out, tuple) else (mine_out,)
        wants = want_out if isinstance(want_out, tuple) else (want_out,)
        up = [torch.randn(t.shape, generator=generator) for t in outs]
        found = torch.autograd.grad(outs, leaves, up)
        expected = torch.autograd.grad(wants, leaves, [u.double() for u in up])
        for d, e, o, wo in zip(found, expected, outs * 3, wants * 3, strict=False):
            torch.testing.assert_close(o.double(), wo, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(d, e.to(d.dtype), rtol=1e-4, atol=1e-5)


def test_names_of_the_ops() -> None:
    """What the table registers, and where a CPU finds it: conv_heads, delta_gates, delta_rule, gated_norm,
    output_gate; and the gradients that a GPU has kernels for."""
    names = ["delta_gates"]
    for name in ("conv_heads", "delta_rule", "gated_norm", "output_gate"):
        names += [name, f"{name}_backward"]
    assert sorted(op.name for op in OPS) == sorted(names)
    for name in names:
        forward = name.removesuffix("_backward")
        assert getattr(ops, forward).__name__ == getattr(reference, forward).__name__ == forward
        assert forward == name or getattr(backward, name).__name__ == name
    assert backward.CHUNK == CHUNK == 64


def test_what_kernels_make_of_lengths_is_made_once() -> None:
    parts = parts_of([3, 1, 2])
    assert parts.owners().tolist() == [0, 0, 0, 1, 2, 2] and parts.owners() is parts.owners()
    rows = StateRows(torch.tensor([0, 0, 0]), torch.tensor([2, 3, 4]))
    assert [p.single for p in (parts, parts_of([1, 1, 1]), parts_of([1, 1, 1], [4, 0, 9], rows))] == [0, 0, 1]
    assert not parts_of([1, 2, 1], [4, 0, 9], rows).single


@pytest.mark.parametrize(("capability", "whole"), [
    ((9, 0), ["sums", "chunk_blocks", "walk"]), ((8, 6), ["sums", "chunk_blocks", "walk"]), ((10, 0), ["rule"]),
])
def test_which_kernels_a_gpu_launches(
    capability: tuple[int, int], whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of each sequence, pieces, whole sequences; nothing is compiled. Data center Blackwell moves states by
    an instruction that was not compared with `mma.sync`, so there training has the general form."""
    pytest.importorskip("triton")
    from jetrl.kernels import launch
    from jetrl.kernels.compiling.recorded import recording
    from jetrl.kernels.delta import triton as kernels

    monkeypatch.setattr(launch, "CAPABILITY", capability)
    q, v, g = torch.zeros(4, 1, 16).bfloat16(), torch.zeros(4, 2, 16).bfloat16(), torch.zeros(4, 2)
    rows = StateRows(torch.tensor([2, 3, 4, 5]), torch.tensor([2, 3, 4, 5]))
    kept, two = empty_state(6, HeadSizes(1, 2, 16, 16), torch.bfloat16), StateRows(rows.read[:2], rows.write[:2])

    def launched(parts: Parts, kept: DeltaState | None) -> list[str]:
        jobs: list[Any] = []
        with recording(jobs.append, libraries=False):
            kernels.delta_rule(q, q, v, g, g, parts, kept)
        return [job.arguments[1].strip("_").removesuffix("_kernel") for job in jobs]

    assert launched(parts_of([1, 1, 1, 1], [5, 0, 63, 2], rows), kept) == ["token_keys", "token"]
    assert launched(parts_of([1, 3], [5, 0], two), kept) == ["fork", "rule", "keep"]
    assert launched(parts_of([1, 3]), None) == whole
