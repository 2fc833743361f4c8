"""Cases that compare every Triton kernel with its definition; run by the interpreter test and on a GPU.

`python tests/kernels/triton_cases.py` prints one line a failure and a JSON summary. Device: CUDA if there is one, else
the CPU through Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.sampler import SamplingTable, sample_rows
from jetrl.kernels import reference as ref
from jetrl.kernels.attention import advance as td
from jetrl.kernels.attention import cache as tc
from jetrl.kernels.attention import heads as tb
from jetrl.kernels.attention.state import DecodeState
from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.logprob import triton as tv
from jetrl.kernels.pointwise import normed as tn
from jetrl.kernels.pointwise import swiglu as ts
from jetrl.kernels.pointwise import triton as tp
from jetrl.kernels.quantize import transpose as tt
from jetrl.kernels.quantize import triton as tq
from jetrl.kernels.update import triton as ta
from jetrl.kernels.update.adamw import AdamWStep
from jetrl.kernels.update.digest import Words, words_of
from jetrl.types import LayerCache, SamplingParams

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRET else "cuda")
Case = Callable[[], None]
backend = load_backend("reference")


def fix_interpreter_rounding() -> None:
    """Triton's interpreter truncates where a GPU rounds half to even: give it torch's conversions."""
    import triton.language as language
    from triton.runtime import interpreter

    kinds = {language.float32: torch.float32, language.bfloat16: torch.bfloat16}
    kinds[language.float8e4nv] = torch.float8_e4m3fn
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}

    def convert(data: np.ndarray, source: language.dtype, target: language.dtype, mode: object) -> np.ndarray:
        bits = np.ascontiguousarray(data).view({1: np.uint8, 2: np.int16, 4: np.int32}[data.itemsize])
        value = torch.from_numpy(bits.copy()).view(kinds[source])
        if target is language.float8e4nv:
            value = value.clamp(-448.0, 448.0)
        out = value.to(kinds[target])
        signed = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]).numpy()
        return signed.view(unsigned[out.element_size()])

    interpreter._convert_float = convert

    def fma(self: object, x: Any, y: Any, z: Any) -> object:
        with np.errstate(all="ignore"):  # one rounding, as on a GPU: the product is exact in float64
            value = (x.data.astype(np.float64) * y.data + z.data).astype(x.data.dtype)
        return interpreter.TensorHandle(value, x.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        plain_patch(tensor, scope)  # newer numpy does not turn an array of one element into a number
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if INTERPRET:
    fix_interpreter_rounding()
    tb._PROGRAMS = 16  # several tokens for each
    ta._PLACES = 64  # several programs for a tensor


def equal(name: str, got: Tensor, want: Tensor) -> None:
    """Same bits; NaN equals NaN of any sign and payload."""
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, (name, got.shape, want.shape, got.dtype, want.dtype)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    a, b = got.contiguous().view(kind), want.contiguous().view(kind)
    if got.is_floating_point():
        both_nan = got.to(torch.float32).isnan() & want.to(torch.float32).isnan()
        a, b = a.masked_fill(both_nan, 0), b.masked_fill(both_nan, 0)
    different = torch.nonzero(a != b)
    if different.numel():
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{name}: {len(different)} of {a.numel()} differ, first at {at}: "
            f"{got[at].to(torch.float64)} instead of {want[at].to(torch.float64)}"
        )


def sample(rows: int, cols: int, kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    if kind == "wide":  # magnitudes over the whole range of BF16, denormals included
        x = torch.sign(x) * torch.exp2(torch.rand(rows, cols, generator=g) * 250 - 131)
    elif kind == "grid":  # quotients on and next to the rounding boundaries of E4M3
        codes = torch.randint(0, 127, (rows, cols), generator=g).to(torch.uint8).view(torch.float8_e4m3fn)
        x = torch.sign(x) * codes.to(torch.float32) * (1 + torch.randint(-1, 2, x.shape, generator=g) * 2.0**-4)
        x[:, 0] = 448.0
    elif kind == "zero":
        x = x * (torch.rand(rows, cols, generator=g) > 0.9)
        x[: rows // 2] = 0
    elif kind == "nan":
        x[rows // 2, cols // 3] = float("nan")
        x[0, -1] = float("inf")
    elif kind == "tiny":
        x = x * 2.0**-130
    elif kind == "huge":
        x = x * 2.0**126
    return x.to(dtype)


def few(cases: tuple[Any, ...]) -> tuple[Any, ...]:
    """All of them on a GPU, the first two in the interpreter, which is slow."""
    return cases[:2] if INTERPRET else cases


KINDS = ("normal", "wide", "grid", "zero", "nan", "tiny", "huge")


def quantizer_cases() -> Iterator[tuple[str, Case]]:
    def nan_pow2() -> None:
        x = sample(256, 256, "normal")
        x[130, 5] = float("nan")
        block = torch.tensor([[False, False], [True, False]])
        scale = tq.quantize_act(x.to(DEVICE), True).scale.cpu()
        assert scale.isnan().nonzero().tolist() == [[130, 0]]
        assert tq.quantize_act_t(x.to(DEVICE), True).scale.cpu().isnan().nonzero().tolist() == [[5, 1]]
        assert torch.equal(tq.quantize_weight(x.to(DEVICE), True).scale.cpu().isnan(), block)

    yield "NaN is never hidden by a power of two", nan_pow2
    for kind, pow2 in itertools.product(KINDS, (False, True)):
        if (kind, pow2) != ("nan", True):

            def act(kind: str = kind, pow2: bool = pow2) -> None:
                shapes = ((5, 136, None), (130, 168, (40, 128)), (130, 328, (200, 128)), (7, 384, (256, 128)))
                for rows, cols, sections in few(shapes):
                    x = sample(rows, cols, kind)
                    got, want = tq.quantize_act(x.to(DEVICE), pow2, sections), ref.quantize_1x128(x, pow2, sections)
                    equal("codes", got.codes, want.codes)
                    equal("scale", got.scale, want.scale)
                    t, want_t = tq.quantize_act_t(x.to(DEVICE), pow2), ref.quantize_128x1(x, pow2)
                    equal("codes_t", t.codes, want_t.codes)
                    equal("scale_t", t.scale, want_t.scale)
                    padding = t.codes.as_strided((cols, t.codes.stride(0)), (t.codes.stride(0), 1))[:, rows:]
                    assert kind == "nan" or not padding.to(torch.float32).any(), "padding is not zero"

            yield f"quantize_act {kind} pow2={pow2}", act

            def weight(kind: str = kind, pow2: bool = pow2) -> None:
                for n, k, sections in few(((256, 128, None), (200, 136, (72, 128)), (320, 200, (192, 64, 64)))):
                    w = sample(n, k, kind)
                    got = tq.quantize_weight(w.to(DEVICE), pow2, sections)
                    want = ref.quantize_128x128(w, pow2, sections)
                    equal("codes", got.codes, want.codes)
                    equal("scale", got.scale, want.scale)
                    master = sample(n, k, kind, dtype=torch.float32)
                    got = tq.quantize_weight(master.to(DEVICE), pow2, sections, got, dtype=torch.bfloat16)
                    equal("codes of what is rounded", got.codes, want.codes)
                    equal("scale of what is rounded", got.scale, want.scale)
                    t = tt.transpose_codes(got.codes, got.row_sections)
                    start = first = 0
                    for size in got.row_sections:
                        equal("transposed", t[:, first : first + size], want.codes[start : start + size].T)
                        start, first = start + size, first + tq.padded(size)
                    assert int((t.to(torch.float32) != 0).sum()) == int((want.codes.to(torch.float32) != 0).sum())

            yield f"quantize_weight {kind} pow2={pow2}", weight


def equal_q(name: str, got: object, want: object) -> None:
    equal(f"{name} codes", got.codes, want.codes)
    equal(f"{name} scale", got.scale, want.scale)


def tile_cases() -> Iterator[tuple[str, Case]]:
    def tiles(kind: str, pow2: bool) -> None:
        for rows, cols in few(((130, 168), (5, 136), (300, 256), (257, 1032))):
            x = sample(rows, cols, kind)
            got, want = tq.quantize_act_t(x.to(DEVICE), pow2, True), backend.quantize_act_t(x, pow2, True)
            equal_q("tiles", got, want)
            assert got.granularity == want.granularity and got.row_sections == want.row_sections
            codes = got.codes.as_strided((cols, got.codes.stride(0)), (got.codes.stride(0), 1)).float()
            assert kind == "nan" or not codes[:, rows:].any(), "padding is not zero"

    def swiglu(kind: str, pow2: bool) -> None:
        for rows, f in few(((130, 168), (5, 128), (300, 384), (257, 1000))):
            x, g = sample(rows, 2 * f, kind), sample(rows, f, "normal", 1)
            for saved in (False, True):
                a = tq.quantize_act(x.to(DEVICE), pow2, (f, f)) if saved else x.to(DEVICE)
                b = ref.quantize_1x128(x, pow2, (f, f)) if saved else x
                got, want = ts.swiglu_backward_act(g.to(DEVICE), a, pow2), ref.swiglu_backward_act(g, b, pow2)
                equal(f"gradient, of a quantized input: {saved}", got[0], want[0])
                equal_q(f"output, of a quantized input: {saved}", got[1], want[1])

    for kind, pow2 in itertools.product(KINDS, (False, True)):
        if (kind, pow2) != ("nan", True):
            yield f"transposed tiles {kind} pow2={pow2}", partial(tiles, kind, pow2)
    for kind, pow2 in itertools.product(("normal", "zero", "nan", "wide"), (False, True)):
        if (kind, pow2) != ("nan", True):
            yield f"swiglu gradient and output {kind} pow2={pow2}", partial(swiglu, kind, pow2)


def norm_cases() -> Iterator[tuple[str, Case]]:
    for kind in KINDS:
        for rows, d in few(((37, 64), (3, 576), (3, 1000), (2, 4096))):

            def norm(kind: str = kind, rows: int = rows, d: int = d) -> None:
                x, r = sample(rows, d, kind), sample(rows, d, "normal", 1)
                w = sample(1, d, "normal", 2)[0]
                for eps in (1e-6, 1e-5):
                    equal("rms_norm", tp.rms_norm(x.to(DEVICE), w.to(DEVICE), eps), ref.rms_norm(x, w, eps))
                got = tp.add_rms_norm(*(t.to(DEVICE) for t in (x, r, w)), 1e-6)
                want = backend.add_rms_norm(x, r, w, 1e-6)
                equal("normed", got[0], want[0])
                equal("sum", got[1], want[1])
                q, total = tp.add_rms_norm_quantize(*(t.to(DEVICE) for t in (x, r, w)), 1e-6, False)
                equal_q("fused", q, ref.quantize_1x128(want[0], False))
                equal("fused sum", total, want[1])
                pow2 = kind not in ("nan", "huge")
                q, _ = tp.add_rms_norm_quantize(x.to(DEVICE), None, w.to(DEVICE), 1e-6, pow2)
                equal_q("fused alone", q, ref.quantize_1x128(ref.rms_norm(x, w, 1e-6), pow2))
                coded, total = tp.add_rms_norm_coded(*(t.to(DEVICE) for t in (x, r, w)), 1e-6, pow2)
                equal("in BF16 beside codes", coded.values, want[0])
                equal_q("codes beside BF16", coded.codes, ref.quantize_1x128(want[0], pow2))
                equal("sum of both", total, want[1])
                kept = tn.add_rms_norm_kept(*(t.to(DEVICE) for t in (x, r, w)), 1e-6, pow2)
                equal_q("fused, kept", kept[0], ref.quantize_1x128(want[0], pow2))
                equal("kept sum", kept[1], want[1])
                equal("inverse", kept[2], ref.inv_rms(want[1], 1e-6)[:, 0])
                for tile in (False, True):
                    again = tn.normed_t(kept[1], kept[2], w.to(DEVICE), pow2, tile)
                    equal_q(f"again, tile={tile}", again, backend.quantize_act_t(want[0], pow2, tile))
                more = w.float() + 1.0  # FP32: what a norm with an offset multiplies by
                y, total, inverses = tn.add_rms_norm_kept(x.to(DEVICE), r.to(DEVICE), more.to(DEVICE), 1e-6, pow2)
                want = backend.add_rms_norm(x, r, more, 1e-6)
                equal_q("offset", y, ref.quantize_1x128(want[0], pow2))
                again = tn.normed_t(total, inverses, more.to(DEVICE), pow2, True)
                equal_q("offset, again", again, backend.quantize_act_t(want[0], pow2, True))
                equal("add", tp.add(x.to(DEVICE), r.to(DEVICE)), ref.add(x, r))
                equal("bias", tp.add(x.to(DEVICE), w.to(DEVICE)), ref.add(x, w))

            yield f"norm {kind} {rows}x{d}", norm

    def gradient() -> None:
        for rows, d in ((300, 576), (70, 128))[: 1 if INTERPRET else 2]:
            x, g, w = sample(rows, d, "normal"), sample(rows, d, "normal", 3), sample(1, d, "normal", 2)[0]
            dx, dw = tp.rms_norm_backward(g.to(DEVICE), x.to(DEVICE), w.to(DEVICE), 1e-6)
            want_dx, want_dw = backend.rms_norm_backward(g, x, w, 1e-6)
            torch.testing.assert_close(dx.cpu(), want_dx, rtol=1e-2, atol=1e-5)
            torch.testing.assert_close(dw.cpu(), want_dw, rtol=1e-5, atol=1e-4)
            again = tp.rms_norm_backward(g.to(DEVICE), x.to(DEVICE), w.to(DEVICE), 1e-6)
            equal("dx again", again[0], dx)
            equal("dw again", again[1], dw)
            more = sample(rows, d, "normal", 4)
            both = tp.rms_norm_backward(g.to(DEVICE), x.to(DEVICE), w.to(DEVICE), 1e-6, more.to(DEVICE))
            equal("dx and the stream's", both[0], ref.add(dx.cpu(), more))
            equal("dw next to the stream's", both[1], dw)

    yield "norm gradient", gradient


def attention_input_cases() -> Iterator[tuple[str, Case]]:
    for kind in ("normal", "wide", "zero", "nan"):
        for n, g, h, norm in few(((9, 3, 64, False), (4, 2, 128, True), (16, 8, 128, True))):

            def prepare(kind: str = kind, n: int = n, g: int = g, h: int = h, norm: bool = norm) -> None:
                t = 6
                qkv = sample(t, (n + 2 * g) * h, kind)
                wq, wk = sample(2, h, "normal", 5)
                angles = torch.rand(50, h // 2, generator=torch.Generator().manual_seed(1)) * 7
                cos, sin = angles.cos(), angles.sin()
                positions = torch.tensor([3, 0, 49, 12, 7, 7])
                q, k, v = qkv.view(t, -1, h).split((n, g, g), 1)
                if norm:
                    on_device = qkv.to(DEVICE).view(t, -1, h).split((n, g, g), 1)
                    equal("strided norm", tp.rms_norm(on_device[1], wk.to(DEVICE), 1e-6), ref.rms_norm(k, wk, 1e-6))
                    q, k = ref.rms_norm(q, wq, 1e-6), ref.rms_norm(k, wk, 1e-6)
                c, s = cos[positions], sin[positions]
                args = [x.to(DEVICE) for x in (c, s)]
                equal("rope", tp.rope(q.to(DEVICE), *args), ref.rope(q, c, s))
                equal("rope_backward", tp.rope_backward(k.to(DEVICE), *args), backend.rope_backward(k, c, s))
                q, k = ref.rope(q, c, s), ref.rope(k, c, s)
                norms = (wq.to(DEVICE), wk.to(DEVICE)) if norm else None
                tables = (cos.to(DEVICE), sin.to(DEVICE))
                shared = (qkv.to(DEVICE), (n, g), h, norms, 1e-6, tables, positions.to(DEVICE))
                got = tb.qkv_norm_rope(*shared, None, False)
                for name, a, b in zip("qkv", got, (q, k, v), strict=True):
                    equal(name, a, b.contiguous())
                slots = torch.tensor([4, -1, 9, 0, 11, 2])
                keys, values = torch.zeros(2, 3, 4, g, h, dtype=torch.bfloat16, device=DEVICE)
                other = (keys.clone(), values.clone())
                cache = (LayerCache(keys, values), slots.to(DEVICE))
                paged = tb.qkv_norm_rope(*shared, cache, False)
                equal("paged q", paged[0], q)
                tc.write_cache(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), LayerCache(*other))
                for name, a, b, x in (("keys", keys, other[0], k), ("values", values, other[1], v)):
                    want = torch.zeros(12, g, h, dtype=torch.bfloat16)
                    want[slots[slots >= 0]] = x[slots >= 0]
                    equal(f"fused {name}", a, want.view(3, 4, g, h))
                    equal(name, b, want.view(3, 4, g, h))

            yield f"qkv {kind} {n}/{g}/{h}", prepare

    for n, g, h, norm in few(((9, 3, 64, False), (4, 2, 80, True), (16, 8, 128, True))):
        for t in (1, 37) if INTERPRET else (1, 37, 2500):
            yield f"qkv gradient {n}/{g}/{h} of {t}", partial(heads_gradient, t, n, g, h, norm)


def heads_gradient(t: int, n: int, g: int, h: int, norm: bool) -> None:
    qkv, norms = sample(t, (n + 2 * g) * h, "normal"), tuple(sample(2, h, "normal", 5)) if norm else None
    grads = [sample(t, m * h, "normal", 6 + i).view(t, m, h) for i, m in enumerate((n, g, g))]
    angles = torch.rand(50, h // 2, generator=torch.Generator().manual_seed(1)) * 7
    tables, positions = (angles.cos(), angles.sin()), torch.arange(t) * 7 % 50

    def backward() -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        on_device = tuple(w.to(DEVICE) for w in norms) if norms else None
        return tb.qkv_norm_rope_backward(
            tuple(x.to(DEVICE) for x in grads), qkv.to(DEVICE), on_device, 1e-6, tuple(x.to(DEVICE) for x in tables),
            positions.to(DEVICE),
        )

    (got, d_norms), (again, d_again) = backward(), backward()
    want, want_norms = backend.qkv_norm_rope_backward(tuple(grads), qkv, norms, 1e-6, tables, positions)
    equal("the same twice", again, got)
    if norms is None:
        equal("d_qkv", got, want)
        assert d_norms is None and want_norms is None
        return
    equal("d_v", got[:, (n + g) * h :], want[:, (n + g) * h :])
    torch.testing.assert_close(got.cpu(), want, rtol=1e-2, atol=1e-5)
    for i in range(2):
        equal("norm twice", d_again[i], d_norms[i])
        torch.testing.assert_close(d_norms[i].cpu(), want_norms[i], rtol=1e-5, atol=1e-4)


def swiglu_cases() -> Iterator[tuple[str, Case]]:
    for kind in KINDS:
        for rows, f in few(((20, 200), (5, 192), (3, 1536))):

            def swiglu(kind: str = kind, rows: int = rows, f: int = f) -> None:
                x = sample(rows, 2 * f, kind)
                if kind == "normal":
                    x = x * 40  # sigmoid saturates on both sides
                equal("swiglu", ts.swiglu(x.to(DEVICE)), ref.swiglu(x))
                for pow2 in (False, True) if kind != "nan" else (False,):
                    equal_q("fused", ts.swiglu_quantize(x.to(DEVICE), pow2), ref.quantize_1x128(ref.swiglu(x), pow2))
                g = sample(rows, f, "normal", 4)
                equal("backward", ts.swiglu_backward(g.to(DEVICE), x.to(DEVICE)), ref.swiglu_backward(g, x))

            yield f"swiglu {kind} {rows}x{f}", swiglu


def logprob_cases() -> Iterator[tuple[str, Case]]:
    for vocab in (40, 4096, 9001):
        for spread in few((12.0, 80.0, 1.0)):

            def logprob(vocab: int = vocab, spread: float = spread) -> None:
                g = torch.Generator().manual_seed(vocab)
                rows = 4
                z = torch.randn(rows, vocab, generator=g) * spread
                z[1, vocab // 2 :: 3] = z[1].max()  # equal maxima
                z[2, ::2] = float("-inf")
                targets = torch.tensor([0, vocab - 1, 1, vocab // 2])
                temperature = torch.tensor([1.0, 0.7, 1.3, 0.0])
                positive = torch.where(temperature == 0, 1.0, temperature)
                zt = z / positive[:, None]
                weights, top, total = ref.exp_weights(zt)
                args = [t.to(DEVICE) for t in (z, targets, positive)]
                got = tv.exp_weights(zt.to(DEVICE))
                for name, a, b in zip(("weights", "max", "total"), got, (weights, top, total), strict=True):
                    equal(name, a, b)
                want = ref.logprob(zt, targets, top, total)
                equal("logprob", tv.logprobs(*args), want)
                lp, entropy, maximum, log_total = tv.logprobs_and_statistics(*args)
                equal("logprob with entropy", lp, want)
                equal("maximum", maximum, top)
                equal("log of the total", log_total, ref.log_total(total).to(torch.float32))
                kept = zt.masked_fill(zt == float("-inf"), -1e30)
                torch.testing.assert_close(entropy.cpu(), ref.entropy(kept, weights, top, total), rtol=1e-6, atol=1e-6)
                params = [SamplingParams(1, temperature=t, seed=3) for t in temperature.tolist()]
                table, positions = SamplingTable.build(params, [5, 6, 7, 8]), np.array([9, 0, 4, 2])
                for step in range(6 if vocab < 5000 else 2):
                    at = positions + step
                    want_tokens, want_lp = sample_rows(z, table, at)
                    keys = torch.from_numpy(table.key.astype(np.int64))
                    draw = tv.sample(args[0], temperature.to(DEVICE), keys.to(DEVICE), torch.from_numpy(at).to(DEVICE))
                    equal("tokens", draw[0], want_tokens)
                    equal("sampled logprob", draw[1], want_lp)

            yield f"logprob {vocab} x{spread}", logprob

    def gradient() -> None:
        g = torch.Generator().manual_seed(1)
        z = torch.randn(5, 5003, generator=g) * 3
        targets, temperature = torch.tensor([0, 5002, 17, 4096, 4095]), torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0])
        gl, ge = torch.randn(2, 5, generator=g)
        zt = z.requires_grad_()
        lp = torch.log_softmax(zt / temperature[:, None], -1)
        entropy = -(lp.exp() * lp).sum(-1)
        args = [t.detach().to(DEVICE) for t in (z, targets, temperature)]
        args += [tv.logprobs_and_statistics(*args)[1:], gl.to(DEVICE)]
        (want,) = torch.autograd.grad((lp.gather(1, targets[:, None])[:, 0] * gl).sum(), zt, retain_graph=True)
        torch.testing.assert_close(tv.dlogits(*args, None).float().cpu(), want, rtol=5e-3, atol=1e-6)
        total = (lp.gather(1, targets[:, None])[:, 0] * gl).sum() + (entropy * ge).sum()
        (want,) = torch.autograd.grad(total, zt)
        torch.testing.assert_close(tv.dlogits(*args, ge.to(DEVICE)).float().cpu(), want, rtol=5e-3, atol=1e-6)

    yield "logits gradient", gradient

    def residual() -> None:
        z = torch.randn(5, 5003, generator=torch.Generator().manual_seed(1)) * 3
        targets, temperature = torch.tensor([0, 5002, 17, 4096, 4095]), torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0])
        args = [t.to(DEVICE) for t in (z, targets, temperature)]
        out = torch.full((5, 5008), 7.0, dtype=torch.bfloat16, device=DEVICE)
        tv.residual(*args, tv.logprobs_and_statistics(*args)[1:], out[:, :5003])
        want = torch.softmax(z.double() / temperature[:, None], -1)
        want[torch.arange(5), targets] -= 1
        torch.testing.assert_close(out[:, :5003].double().cpu(), want, rtol=4e-3, atol=1e-6)
        assert (out[:, 5003:] == 7).all(), "padding is not the kernel's"

    yield "softmax without the target", residual

    def broken() -> None:
        z = torch.zeros(3, 50)
        z[1, 7] = float("nan")
        keys = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        top = tv.sample(z.to(DEVICE), torch.ones(3, device=DEVICE), keys, keys)[2]
        assert top.isnan().tolist() == [False, True, False]

    yield "logits that are not finite", broken


def gradient_cases() -> Iterator[tuple[str, Case]]:
    for dtype in (torch.float32, torch.bfloat16):

        def add(dtype: torch.dtype = dtype) -> None:
            for rows, cols in few(((7, 300), (16, 128), (2049, 4096))):
                grad = sample(rows, cols, "normal", dtype=dtype)
                for kind in (torch.float32, torch.bfloat16):
                    x = (sample(rows, cols, "normal", 1, torch.float32) / 100).to(kind)
                    want, got = (grad.float() + x.float()).to(dtype), grad.to(DEVICE, copy=True)
                    ta.add_rounded(got, x.to(DEVICE))
                    equal("sum", got, want)
                    if kind == dtype == torch.bfloat16:
                        both = ta.sum_of_two(grad.to(DEVICE), x.to(DEVICE))
                        equal("sum of two", both, grad.float() + x.float())

        yield f"gradients added in {dtype}", add


def decode_cases() -> Iterator[tuple[str, Case]]:
    def advance(size: int, width: int, page: int) -> None:
        g = torch.Generator().manual_seed(size)
        host = DecodeState.empty(size, width, 3, page, torch.device("cpu"))
        real = size - size // 4
        host.integers[:] = torch.randint(0, 1 << 40, (5, size), generator=g)
        host.integers[1] = torch.randint(0, width * page - 4, (size,), generator=g)
        host.integers[2, real:] = -1
        host.table[:] = torch.randperm(size * width, generator=g).view(size, width)
        fields = (host.integers, host.table, host.kv_lengths, host.drawn, host.count)
        device = DecodeState(*(x.to(DEVICE, copy=True) for x in fields), page)
        for _ in range(4):  # one more than the record holds
            draw = torch.randint(0, 1000, (size,), generator=g), *torch.randn(2, size, generator=g)
            backend.advance(host, *draw)
            td.advance(device, *(x.to(DEVICE) for x in draw))
            for name in ("integers", "kv_lengths", "drawn", "count"):
                got = getattr(device, name).cpu()
                assert torch.equal(got, getattr(host, name)), f"{name}: {got} instead of {getattr(host, name)}"

    for size, width, page in ((1, 1, 16), (5, 3, 16), (64, 32, 128), (300, 4, 64)):
        yield f"advance {size} rows, {width} pages of {page}", partial(advance, size, width, page)


def adamw_cases() -> Iterator[tuple[str, Case]]:
    def step(master: torch.dtype, grad: torch.dtype, moments: torch.dtype) -> None:
        g = torch.Generator().manual_seed(5)
        shape = (37, 113)
        host = [torch.randn(shape, generator=g).to(master), (torch.randn(shape, generator=g) * 1e-3).to(grad)]
        host += [torch.zeros(shape, dtype=moments), torch.zeros(shape, dtype=moments)]
        device = [x.to(DEVICE, copy=True) for x in host]
        for t, factor in enumerate((1.0, 0.7390625763, 1 / 3), 1):  # of clipping
            numbers = AdamWStep(1e-3, (0.9, 0.95), 1e-8, 0.1, t, factor)
            backend.adamw_step_(*host, numbers)
            ta.adamw_step_(*device, numbers)
            for name, got, want in zip(("param", "grad", "exp_avg", "exp_avg_sq"), device, host, strict=True):
                equal(f"{name} after step {t}", got.cpu(), want)

    def squares(size: int, dtype: torch.dtype) -> None:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        rows = -(-size // 4096)
        want, got = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64, device=DEVICE)
        backend.row_squares(x, want)
        ta.row_squares(x.to(DEVICE), got)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-14, atol=0)

    def sums(size: int, count: int, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(size)
        total, parts = torch.randn(size, generator=g).to(dtype), torch.randn(count, size, generator=g).to(dtype)
        for first in (False, True):
            want, got = total.clone(), total.to(DEVICE, copy=True)
            backend.add_in_order(want, parts, first)
            ta.add_in_order(got, parts.to(DEVICE), first)
            equal(f"sum, first {first}", got.cpu(), want)

    def digest(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, start: int) -> None:
        g = torch.Generator().manual_seed(len(shapes))
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        values = [
            torch.randint(256, (size,), generator=g, dtype=torch.uint8).view(dtype).view(shape)
            for size, shape in zip(sizes, shapes, strict=True)
        ]
        values.append(values[-1][1:])  # rows of a rank; their address may be no multiple of 16
        on_device = [value.to(DEVICE) for value in values[:-1]]
        on_device.append(on_device[-1][1:])
        words, here = ([Words(words_of(v), start) for v in some] for some in (values, on_device))
        equal("digests", ta.digests(here), backend.digests(words))

    # a fold of 64, columns that are no multiple of 4, one column, words of 16 bits and of 8, vectors, nothing
    shapes = ((67, 1280), (9, 2 * 17 * 64), (5, 1), (3, 41), (70,), (1,), (), (0, 8), (2, 6, 1), (5, 6))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        for start in (0, 1 << 33):
            yield f"digests {dtype} from row {start}", partial(digest, shapes, dtype, start)
    for size, count in ((1, 1), (2048, 2), (5001, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"add_in_order {size} of {count} {dtype}", partial(sums, size, count, dtype)
    for size in (1, 4096, 10_001):
        yield f"row_squares {size}", partial(squares, size, torch.bfloat16)
    for kinds in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        yield "adamw {}, gradient {}, moments {}".format(*kinds), partial(step, *kinds)


def all_cases() -> list[tuple[str, Case]]:
    kinds = (
        quantizer_cases, tile_cases, norm_cases, attention_input_cases, swiglu_cases, logprob_cases, gradient_cases,
        decode_cases, adamw_cases,
    )
    return [case for kind in kinds for case in kind()]


def main(every: list[tuple[str, Case]]) -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    cases, failed = [c for c in every if wanted in c[0]], []
    for name, case in cases:
        try:
            case()
        except Exception as error:  # reported below, with a failing exit status
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}")
    print(json.dumps({"cases": len(cases), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(all_cases()))
