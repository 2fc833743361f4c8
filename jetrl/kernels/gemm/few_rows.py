"""FP8 GEMMs for few tokens: weights are the tensor core's rows, tokens its columns; each byte of a weight is read once.

`deepgemm.fp8_gemm` computes the same, and every bit here must equal its bits: training and prefill use it. An output is

    y = round_bf16(acc),  acc = fma(a_scale[t, g] * b_scale[n, g], p_g, acc)  for groups g of 128 of K, from acc = 0,

with p_g the tensor core's sum over the group: four `wgmma` of 32, begun anew in each group. An element of `wgmma(B, A)`
has the bits of its mirror image in `wgmma(A, B)`, and they do not depend on the other rows and columns. So only the
groups' chain has an order, and a program keeps that: it owns some rows of the weight and walks along all of K. Nothing
is split over programs, nothing is added up later.

What makes it fast:

- a program's rows (16 to 256) are chosen so that all programs are resident at once; where they end within the 64 rows
  of a `wgmma`, the other rows of the product are whatever lies behind in shared memory, and are not used;
- a ring of shared memory (up to 227 KB) is filled by TMA; half of a stage's products are scaled and added while the
  tensor core computes the other half;
- inside a graph (`early`), loads of weights begin before the kernel that makes the activations has ended.

Gluon has no interpreter: `tests/kernels/test_few_rows.py` reads what is compiled, and
`tests/gpu/test_few_rows_hopper.py` runs it.

`choice.py` says for which sizes it is used, `cut` how much each program does. Source of the order: DeepGEMM's
sm90 1D2D kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (kernels take pointers and compile-time numbers, for which there are no types; their tuples grow)
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.kernels.launch import LAUNCH
from jetrl.precision.formats import BLOCK

COLUMNS = (8, 16, 32, 64)  # tokens of a program; more than it has are zeros
GROUPS = (8, 4, 2, 1)  # groups of K in a stage
_PROGRAM, _PROCESSOR, _RESERVED = 227 << 10, 228 << 10, 1 << 10  # bytes of shared memory: at most; in all; beside each
_LEAST_STAGES, _MOST_STAGES = 3, 12
_CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_CODES_3D = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3))
_UNITS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@dataclass(frozen=True, slots=True)
class Shape:
    """How a program works: `boxes` copies bring `box` rows each of a group; `stages` of `groups` fit in its ring."""

    box: int
    boxes: int
    groups: int
    stages: int
    columns: int

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.box * self.boxes

    @property
    def products(self) -> int:
        """`wgmma` of 64 rows side by side; the last may be partly unused."""
        return -(-self.rows // 64)

    @property
    def units(self) -> int:
        """Scales of tokens that are copied for a group: a copy ends at a multiple of 128 bytes."""
        return max(self.columns, 32 // self.groups)

    def shared(self) -> int:
        """Bytes of shared memory."""
        stage = self.groups * ((self.rows + self.columns) * BLOCK + self.units * 4) + 8
        return self.stages * stage + (self.products * 64 - self.rows) * BLOCK


def cut(rows: int, k: int, columns: int, share: int = 1, most_groups: int = GROUPS[0]) -> Shape | None:
    """The shape for `rows` (a multiple of 16) of a weight with `k` columns in a program, where `share` programs have a
    multiprocessor together: at least 4 stages if that goes, with as many groups as they may have. None if too large.
    """
    box = next(size for size in (64, 32, 16) if rows % size == 0)
    memory = min(_PROGRAM, _PROCESSOR // share - _RESERVED)
    found = []
    for groups in GROUPS:
        one = Shape(box, rows // box, groups, 1, columns)
        registers = one.products * columns
        if groups > most_groups or k // BLOCK % groups or registers > 192 or (groups > 1 and registers * groups > 256):
            continue
        fixed = (one.products * 64 - rows) * BLOCK
        stages = min((memory - fixed) // (one.shared() - fixed), k // BLOCK // groups, _MOST_STAGES)
        if stages >= min(_LEAST_STAGES, k // BLOCK // groups):
            found.append(replace(one, stages=stages))
    deep = [one for one in found if one.stages >= min(4, k // BLOCK // one.groups)]
    return next(iter(deep or found), None)


@gluon.jit
def _copy_weights(
    desc, ring, unit_ring, full, step, stage, row, pred, BOX: gl.constexpr, BOXES: gl.constexpr, COLS: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Announce a stage's bytes and copy its part of the weight."""
    BYTES: gl.constexpr = GROUPS * ((BOX * BOXES + COLS) * 128 + unit_ring.shape[2] * 4)
    mbarrier.expect(full.index(stage), BYTES, pred=pred)
    EACH: gl.constexpr = GROUPS if BOXES == 1 else 1  # groups of a copy
    for g in gl.static_range(GROUPS // EACH):
        for b in gl.static_range(BOXES):
            place = ring.index((stage * GROUPS + g) * BOXES + b)._reinterpret(
                ring.dtype, [EACH, BOX, 128], _CODES_3D
            )
            at = [step * GROUPS + g, row + b * BOX, 0]
            tma.async_copy_global_to_shared(desc, at, full.index(stage), place, pred=pred)


@gluon.jit
def _copy_tokens(
    desc, scale_desc, ring, unit_ring, full, step, stage, token, pred, COLS: gl.constexpr, GROUPS: gl.constexpr
):
    """Copy a stage's part of the activations and their scales."""
    place = ring.index(stage)._reinterpret(ring.dtype, [GROUPS, COLS, 128], _CODES_3D)
    tma.async_copy_global_to_shared(desc, [step * GROUPS, token, 0], full.index(stage), place, pred=pred)
    units = unit_ring.index(stage)
    tma.async_copy_global_to_shared(scale_desc, [step * GROUPS, token], full.index(stage), units, pred=pred)


@gluon.jit
def _multiply(
    ring, token_ring, stage, FIRST: gl.constexpr, LAST: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    COLS: gl.constexpr, PRODUCTS: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr,
):
    """Start some products of a stage: number g * PRODUCTS + j is group g of the rows from 64 * j on."""
    tokens = token_ring.index(stage)._reinterpret(ring.dtype, [GROUPS, COLS, 128], _CODES)
    zeros = gl.zeros([64, COLS], gl.float32, layout=MMA)
    parts = ()
    for q in gl.static_range(FIRST, LAST):
        place = (stage * GROUPS + q // PRODUCTS) * BOXES + q % PRODUCTS * (64 // BOX)
        weight = ring.index(place)._reinterpret(ring.dtype, [64, 128], _CODES)
        right = tokens.index(q // PRODUCTS).permute((1, 0))
        parts = parts + (warpgroup_mma(weight, right, zeros, use_acc=False, is_async=True),)
    return parts


@gluon.jit
def _weight_scales(
    scales, stride, step, row, n, ROWS: gl.constexpr, PRODUCTS: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr
):
    """The weight's scale for each product of a stage: one number, or one a row where 64 rows may lie in two blocks."""
    found = ()
    for q in gl.static_range(GROUPS * PRODUCTS):
        at, first = scales + step * GROUPS + q // PRODUCTS, row + q % PRODUCTS * 64
        if ROWS % 64 == 0 or 64 % ROWS == 0:
            found = found + (gl.load(at + gl.minimum(first, n - 1) // 128 * stride),)
        else:
            each = gl.minimum(first + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), n - 1)
            found = found + (gl.load(at + each // 128 * stride)[:, None],)
    return found


@gluon.jit
def _token_scales(unit_ring, stage, COLS: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr):
    """The scales of a stage's tokens, for each group."""
    lines = unit_ring.index(stage)._reinterpret(gl.float32, [GROUPS, unit_ring.shape[2]], _LINE)
    found = ()
    for g in gl.static_range(GROUPS):
        found = found + (lines.index(g).slice(0, COLS).load(gl.SliceLayout(0, MMA)),)
    return found


@gluon.jit
def _add(accs, parts, units, scales, FIRST: gl.constexpr, LAST: gl.constexpr, PRODUCTS: gl.constexpr):
    """The chain, for products FIRST to LAST of a stage: `acc = fma(a_scale * b_scale, p, acc)`."""
    for q in gl.static_range(FIRST, LAST):
        new = ()
        for j in gl.static_range(PRODUCTS):
            if j == q % PRODUCTS:
                factor = units[q // PRODUCTS][None, :] * scales[q]
                new = new + (gl.fma(factor, parts[q - FIRST], accs[j]),)
            else:
                new = new + (accs[j],)
        accs = new
    return accs


@gluon.jit
def _wait(parts, LEFT: gl.constexpr, COUNT: gl.constexpr):
    """The values of products once all but LEFT have ended."""
    done = warpgroup_mma_wait(num_outstanding=LEFT, deps=parts)
    if COUNT == 1:
        return (done,)
    else:
        return done


@gluon.jit
def _store(accs, out, row, token, n, m, ROWS: gl.constexpr, COLS: gl.constexpr, PRODUCTS: gl.constexpr):
    """Round once, and write 16 bytes at a time."""
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    for j in gl.static_range(PRODUCTS):
        y = gl.convert_layout(accs[j].to(gl.bfloat16), LINES)
        r = j * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
        t = token + gl.arange(0, COLS, layout=gl.SliceLayout(0, LINES))
        mine = ((r < ROWS) & (row + r < n))[:, None] & (t < m)[None, :]
        gl.store(out + t.to(gl.int64)[None, :] * n + (row + r)[:, None], y, mask=mine)


@gluon.jit(do_not_specialize=["m", "early"])
def _few_rows_kernel(
    weight, tokens, token_scales, scales, out, scale_stride, n, m, steps, early, BOX: gl.constexpr,
    BOXES: gl.constexpr, STAGES: gl.constexpr, COLS: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):
    """BOX * BOXES rows of the weight by COLS tokens, in `steps` of GROUPS * 128 along K."""
    ROWS: gl.constexpr = BOX * BOXES
    PRODUCTS: gl.constexpr = (ROWS + 63) // 64
    ALL: gl.constexpr = GROUPS * PRODUCTS
    HALF: gl.constexpr = (ALL + 1) // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    UNUSED: gl.constexpr = (PRODUCTS * 64 - ROWS) // BOX
    CODE: gl.constexpr = weight.dtype
    ring = gl.allocate_shared_memory(CODE, [STAGES * GROUPS * BOXES + UNUSED, BOX, 128], _CODES)
    token_ring = gl.allocate_shared_memory(CODE, [STAGES, GROUPS * COLS, 128], _CODES)
    unit_ring = gl.allocate_shared_memory(gl.float32, [STAGES, GROUPS, token_scales.block_shape[1]], _UNITS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    row, token = gl.program_id(0) * ROWS, gl.program_id(1) * COLS
    for s in range(STAGES):
        _copy_weights(weight, ring, unit_ring, full, s, s, row, (early != 0) & (s < steps), BOX, BOXES, COLS, GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for s in range(STAGES):
        _copy_weights(weight, ring, unit_ring, full, s, s, row, (early == 0) & (s < steps), BOX, BOXES, COLS, GROUPS)
        _copy_tokens(tokens, token_scales, token_ring, unit_ring, full, s, s, token, s < steps, COLS, GROUPS)
    accs = ()
    for _ in gl.static_range(PRODUCTS):
        accs = accs + (gl.zeros([64, COLS], gl.float32, layout=MMA),)
    ahead = _weight_scales(scales, scale_stride, 0, row, n, ROWS, PRODUCTS, GROUPS, MMA)
    stage, phase = 0, 0
    for i in range(steps):
        b_scales = ahead
        ahead = _weight_scales(scales, scale_stride, gl.minimum(i + 1, steps - 1), row, n, ROWS, PRODUCTS, GROUPS, MMA)
        mbarrier.wait(full.index(stage), phase)
        units = _token_scales(unit_ring, stage, COLS, GROUPS, MMA)
        first = _multiply(ring, token_ring, stage, 0, HALF, BOX, BOXES, COLS, PRODUCTS, GROUPS, MMA)
        if HALF < ALL:
            last = _multiply(ring, token_ring, stage, HALF, ALL, BOX, BOXES, COLS, PRODUCTS, GROUPS, MMA)
            first = _wait(first, ALL - HALF, HALF)
            accs = _add(accs, first, units, b_scales, 0, HALF, PRODUCTS)
            last = _wait(last, 0, ALL - HALF)
            accs = _add(accs, last, units, b_scales, HALF, ALL, PRODUCTS)
        else:
            first = _wait(first, 0, HALF)
            accs = _add(accs, first, units, b_scales, 0, HALF, PRODUCTS)
        gl.thread_barrier()  # all warps have read the stage
        more = i + STAGES < steps
        _copy_weights(weight, ring, unit_ring, full, i + STAGES, stage, row, more, BOX, BOXES, COLS, GROUPS)
        _copy_tokens(
            tokens, token_scales, token_ring, unit_ring, full, i + STAGES, stage, token, more, COLS, GROUPS
        )
        stage += 1
        if stage == STAGES:
            stage, phase = 0, phase ^ 1
    _store(accs, out, row, token, n, m, ROWS, COLS, PRODUCTS)


def matmul(
    codes: Tensor, units: Tensor, weight: Tensor, scales: Tensor, shape: Shape, early: bool = False
) -> Tensor:
    """`codes` [M, K] with `units` [M, K/128] (each group's scales together) by `weight` [N, K] with `scales`
    [N/128, K/128] -> BF16 [M, N].

    K is a multiple of 128 and N of 16. `early`: the weight was written before the kernel that runs before this one.
    """
    (m, k), n = codes.shape, weight.shape[0]
    groups, columns = k // BLOCK, shape.columns
    assert codes.is_contiguous() and weight.is_contiguous() and weight.shape[1] == k and k % BLOCK == n % 16 == 0
    assert units.shape == (m, groups) and (m == 1 or units.stride(0) == 1) and units.stride(1) % 4 == 0
    assert scales.shape[1] == groups and scales.stride(1) == 1 and groups % shape.groups == 0
    out = torch.empty(m, n, dtype=torch.bfloat16, device=codes.device)
    each = shape.groups if shape.boxes == 1 else 1
    if m:
        _few_rows_kernel[(-(-n // shape.rows), -(-m // columns))](
            _by_groups(weight, [each, shape.box, BLOCK]), _by_groups(codes, [shape.groups, columns, BLOCK]),
            TensorDescriptor(units, [groups, m], [units.stride(1), 1], [shape.groups, shape.units], _UNITS.value),
            scales, out, scales.stride(0), n, m, groups // shape.groups, int(early), BOX=shape.box, BOXES=shape.boxes,
            STAGES=shape.stages, COLS=columns, GROUPS=shape.groups, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return out


def _by_groups(codes: Tensor, box: list[int]) -> TensorDescriptor:
    """Codes [R, K] for TMA as [K/128, R, 128]: so one copy brings several groups, each as the tensor core wants it."""
    rows, k = codes.shape
    return TensorDescriptor(codes, [k // BLOCK, rows, BLOCK], [BLOCK, k, 1], box, _CODES_3D.value)
