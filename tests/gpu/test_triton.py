"""Every case of `tests/kernels/triton_*cases.py` on the GPU, bit for bit against the CPU definitions."""

from __future__ import annotations

import importlib

import pytest
import torch

pytestmark = pytest.mark.gpu


FILES = ("triton_cases", "triton_cache_cases", "triton_experts_cases")
if torch.cuda.is_available():
    CASES = [case for name in FILES for case in importlib.import_module(name).all_cases()]
else:  # collected on a machine without a GPU: the marker keeps it from running
    CASES = []


@pytest.mark.parametrize("case", [c for _, c in CASES], ids=[n for n, _ in CASES])
def test_kernel_equals_its_definition(case) -> None:
    case()


def test_large_shapes_equal_their_definitions() -> None:
    """Shapes of a real model, where other tile sizes and 64-bit offsets are in use."""
    import triton_cases as cases

    for rows, cols in ((5000, 4096), (257, 12288)):
        x = cases.sample(rows, cols, "normal", 7)
        a, t = cases.tq.quantize_act(x.cuda()), cases.tq.quantize_act_t(x.cuda())
        cases.equal_q("1x128", a, cases.ref.quantize_1x128(x))
        cases.equal_q("128x1", t, cases.ref.quantize_128x1(x))
        tiles = cases.tq.quantize_act_t(x.cuda(), False, True)
        cases.equal_q("tiles", tiles, cases.backend.quantize_act_t(x, False, True))
        g = cases.sample(rows, cols // 2, "normal", 9)
        got = cases.ts.swiglu_backward_act(g.cuda(), x.cuda(), False)
        want = cases.ref.swiglu_backward_act(g, x, False)
        cases.equal("swiglu gradient", got[0], want[0])
        cases.equal_q("swiglu again", got[1], want[1])
        w = cases.sample(1, cols, "normal", 8)[0]
        if cols <= 8192:  # beyond, the definition itself leaves the order of the sum open
            got, want = cases.tp.rms_norm(x.cuda(), w.cuda(), 1e-6), cases.ref.rms_norm(x, w, 1e-6)
            cases.equal("rms_norm", got, want)
        q = cases.ts.swiglu_quantize(x.cuda(), False)
        cases.equal_q("swiglu", q, cases.ref.quantize_1x128(cases.ref.swiglu(x)))


def test_full_vocabulary_equals_the_definition() -> None:
    import triton_cases as cases

    z = torch.randn(6, 151936, generator=torch.Generator().manual_seed(0)) * 5
    targets, temperature = torch.arange(6) * 30000, torch.tensor([1.0, 1.0, 0.6, 1.4, 1.0, 0.9])
    zt = z / temperature[:, None]
    weights, top, total = cases.ref.exp_weights(zt)
    want = cases.ref.logprob(zt, targets, top, total)
    cases.equal("logprob", cases.tv.logprobs(z.cuda(), targets.cuda(), temperature.cuda()), want)
    got = cases.tv.exp_weights(zt.cuda())
    cases.equal("weights", got[0], weights)
    cases.equal("total", got[2], total)


def test_every_bf16_value_with_4096_scales() -> None:
    """Codes and scales against true division: all significands of value and maximum, 22 exponents, both signs."""
    import triton_cases as cases

    exponents = torch.linspace(80, 254, 32).int()  # biased, from below the floor to the largest
    top = (exponents[:, None] * 128 + torch.arange(128)).view(-1, 1)
    below = top - torch.arange(22 * 128)[None, :]  # as integers, BF16 are in the order of their values
    below = below.clamp_min(0).repeat(1, 2)
    below[:, 22 * 128 :] += 0x8000
    groups = torch.cat([below, torch.zeros(len(top), -below.shape[1] % 127)], 1).int().view(len(top), -1, 127)
    bits = torch.cat([top[:, :, None].expand(-1, groups.shape[1], 1), groups], 2).view(len(top), -1)
    x = bits.to(torch.int32).bitwise_and(0xFFFF).to(torch.uint16).view(torch.bfloat16).cuda()
    amax = x.float().view(len(x), -1, 128).abs().amax(-1)
    want_scale = cases.ref.scale_of(amax.cpu(), False).cuda()  # torch's CUDA kernel multiplies by 1 / 448
    quotients = x.float().view(len(x), -1, 128) / want_scale[..., None]
    want = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape)
    got = cases.tq.quantize_act(x)
    cases.equal("scales", got.scale, want_scale)
    cases.equal("codes", got.codes, want)
    got = cases.tq.quantize_act_t(x.T.contiguous())
    cases.equal("transposed scales", got.scale, want_scale)
    cases.equal("transposed codes", got.codes, want)


def test_sigmoid_of_every_bf16_value() -> None:
    import triton_cases as cases

    gate = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(64, 1024)
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    cases.equal("swiglu", cases.ts.swiglu(x.cuda()), cases.ref.swiglu(x))
    got, want = cases.ts.swiglu_quantize(x.cuda(), False), cases.ref.quantize_1x128(cases.ref.swiglu(x))
    cases.equal_q("codes", got, want)
