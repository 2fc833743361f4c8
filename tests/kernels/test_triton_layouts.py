"""Decode kernels compiled for Hopper on any machine: the order in which the tensor core multiplies (no GPU needed).

An operand that a thread holds four neighbouring keys of (`kWidth = 4`, Triton's choice for loads of 8 bits) is
multiplied in another order than FlashAttention-4's. That changes last bits of few outputs, which a short run may miss.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import portable_resources as resources

from jetrl.kernels import tiles
from jetrl.kernels.attention import decode_chain as chain
from jetrl.kernels.attention import decode_shared as shared
from jetrl.kernels.attention import decode_split as split
from jetrl.kernels.attention import (
    latent,
    latent_chain,
    latent_products,
    latent_shared,
    latent_split,
    latent_triton,
    portable_few,
)
from jetrl.kernels.gemm import coded_rows as coded
from jetrl.kernels.quantize import e4m3
from jetrl.kernels.quantize import triton as tq

COMMON = {"FLOOR": 0x2B8CBCCC, "POW2": True, "PDL": True, "G": 8, "H": 128, "PAGE": 128, "QUANT": True, "N": 32}
POINTERS = {
    "table": "*i32", "starts": "*i32", "lengths": "*i32", "members": "*i32", "tiles_of": "*i32", "arrived": "*i32",
    "codes": "*u8", "q": "*bf16", "scales": "*bf16", "x": "*bf16", "weights": "*bf16", "out": "*bf16", "scale": "fp32",
} | dict.fromkeys(
    ("units", "scores", "maxima", "shrinks", "acc", "accs", "sums", "tops", "parts", "code_scales"), "*fp32"
)


def for_hopper(kernel: Any, fp8: bool, **constants: Any) -> tuple[str, int]:
    """The kernel in Triton's GPU dialect, and its shared memory."""
    done = compiled(kernel, fp8, 90, **constants)
    return done.asm["ttgir"], done.metadata.shared


def compiled(
    kernel: Any, fp8: bool, arch: int, more: dict[str, str] | None = None, launch: tuple[int, int] = (4, 3),
    **constants: Any,
) -> Any:
    """The kernel as Triton compiles it; `more` types of pointers, and `launch`: warps and stages."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = COMMON | {"FP8": fp8} | constants
    pages = "*u8" if fp8 else "*bf16"
    kinds = {name: "constexpr" for name in constants} | POINTERS | {"keys": pages, "values": pages} | (more or {})
    if kernel in (shared._shared_kernel, portable_few._few_kernel) and fp8:
        kinds["scales"] = "*i32"
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    whole = ("n", "x_stride", "codes_stride", "x_token", "x_head", "kv_token", "w_head", "w_k", "w_out", "out_token")
    # multiples of 16, as launches find them
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name in whole
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch[0], "num_stages": launch[1], "enable_fp_fusion": False}
    options |= {"launch_pdl": True} if arch >= 90 else {}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("fp8", [False, True])
def test_chains_multiply_keys_in_their_natural_order(fp8: bool) -> None:
    shape = split.shape_for(8, 128, fp8)
    code, _ = for_hopper(chain.chain_kernel, fp8, Q=4, COLS=shape.cols, AHEAD=shape.ahead, SUMS_AHEAD=split.SUMS_AHEAD)
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"}
    assert code.count("tt.dot ") == shape.ahead and "warp_group_dot" not in code


@pytest.mark.parametrize("fp8", [False, True])
def test_shared_tiles_are_multiplied_in_their_natural_order_and_sums_stay_in_one_thread(fp8: bool) -> None:
    code, shared_bytes = for_hopper(shared._shared_kernel, fp8, S=16, STAGES=shared.STAGES)
    assert code.count("async_copy_global_to_local") >= (3 if fp8 else 2) * shared.STAGES
    assert set(re.findall(r"kWidth = (\d+)", code)) <= {"2"} and "warp_group_dot" in code
    assert shared_bytes <= 227 * 1024
    (name,) = set(re.findall(r"tensor<64x4x32xf32, #(\w+)>\) -> tensor<64x4xf32", code))
    (layout,) = re.findall(rf"#{name} = #ttg.linear<(.*)>", code)
    registers, others = layout.split("lane = ")
    assert len(re.findall(r"\[0, 0, \d+\]", registers)) == 5 and not re.findall(r"\[0, 0, \d+\]", others)


@pytest.mark.parametrize("fp8", [False, True])
def test_scores_multiply_the_head_in_its_natural_order(fp8: bool) -> None:
    code, _ = for_hopper(split._scores_kernel, fp8, Q=4)
    assert code.count("tt.dot ") == 1 and set(re.findall(r"kWidth = (\d+)", code)) == {"2"}
    code, _ = for_hopper(split._weights_kernel, fp8, Q=4, TP=256)
    assert "tt.dot" not in code


@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (32, 16), (64, 8), (64, 64)])
def test_coded_weights_are_multiplied_in_the_order_of_a_bf16_gemm(rows: int, columns: int) -> None:
    """One chain over K in steps of 16, each thread with two neighbours of K: also where codes are widened before it."""
    code, shared_bytes = for_hopper(coded._coded_rows_kernel, True, ROWS=rows, COLS=columns, STAGES=coded.STAGES)
    assert set(re.findall(r"kWidth = (\d+)", code)) <= {"2"} and shared_bytes <= 227 * 1024
    chain = re.findall(r"%(\S+) = ttng.warp_group_dot %\S+ %\S+ %([^ #,]+)", code)
    if chain:  # of a step of 128: each adds to the one before
        assert len(chain) == 8 and code.count("tt.dot ") == 0
        waits = dict(re.findall(r"%(\S+):2 = ttng.warp_group_dot_wait %([^,]+), ", code))
        assert [waits[before] for _, before in chain[1:]] == [name for name, _ in chain[:-1]]
    else:
        assert code.count("tt.dot ") == 1, "no product is split"
    assert code.count("async_copy_global_to_local") == 3 * coded.STAGES, "reads run ahead"


SIMPLE = {
    "mov": int, "and": int.__and__, "or": int.__or__, "shr": int.__rshift__,
    "shl": lambda x, by: x << by & 0xFFFFFFFF,
}


def assembled(text: str, word: int, **more: int) -> list[int]:
    """What the few PTX instructions of `text` make of `word` (and of `more`): the 16-bit halves of $0 and $1."""
    found = {"$2": word} | {f"${name[1:]}": value for name, value in more.items()}

    def halves(x: int) -> torch.Tensor:
        return torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def value(of: str) -> int:
        return found[of] if of in found else int(of, 0)

    for line in text.strip("{} \n").split(";"):
        op, _, rest = line.strip().partition(" ")
        if op in ("", ".reg"):
            continue
        target, *names = (part.strip() for part in rest.split(","))
        x = [value(name) for name in names]
        if op == "prmt.b32":
            parts = [x[i // 4] >> 8 * (i % 4) & 0xFF for i in range(8)]
            found[target] = sum(parts[x[2] >> 4 * i & 7] << 8 * i for i in range(4))
        elif op == "mul.bf16x2":
            low, high = ((halves(x[0]).double() * halves(x[1]).double()).bfloat16().view(torch.int16)).tolist()
            found[target] = (low & 0xFFFF) | (high & 0xFFFF) << 16
        elif op == "fma.rn.bf16x2":  # products of BF16 are exact in float64, and so is their sum with -0
            total = (halves(x[0]).double() * halves(x[1]).double() + halves(x[2]).double()).bfloat16()
            low, high = total.view(torch.int16).tolist()
            found[target] = (low & 0xFFFF) | (high & 0xFFFF) << 16
        else:
            found[target] = SIMPLE[op.removesuffix(".b32")](*x)
    return [found[name] >> shift & 0xFFFF for name in ("$0", "$1") for shift in (0, 16)]


def test_the_assembly_that_widens_codes() -> None:
    """Every code at every place of a word, in order (but NaN, which attention never reads)."""
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    for i, code in enumerate(codes):
        four = [code, codes[i * 7 % len(codes)], codes[i * 31 % len(codes)], codes[i * 101 % len(codes)]]
        for turn in range(4):
            now = four[turn:] + four[:turn]
            want = torch.tensor(now, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16)
            got = assembled(tq._WIDEN.value, sum(c << 8 * k for k, c in enumerate(now)))
            assert got == [w & 0xFFFF for w in want.tolist()], now


@pytest.mark.parametrize("power", [0, -9, 7, 8, 30, -60])
def test_the_assembly_that_reads_codes_of_a_cache(power: int) -> None:
    """All 256 codes times a power of two; NaN codes are where the power is NaN."""
    unit = torch.tensor([2.0**power, float("nan")]).bfloat16()
    for code in range(256):
        four = [code, (code * 7 + 1) % 256, (code * 31 + 5) % 256, (code * 101 + 9) % 256]
        values = torch.tensor(four, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        units = torch.where(values.isnan(), unit[1], unit[0])
        want = (values * units.float()).bfloat16()
        assert torch.equal((want.double() == values.double() * units.double()), ~values.isnan()), "exact"
        words = [(x & 0xFFFF) | (y & 0xFFFF) << 16 for x, y in units.view(torch.int16).view(2, 2).tolist()]
        got = assembled(e4m3._SCALED.value, sum(c << 8 * k for k, c in enumerate(four)), _3=words[0], _4=words[1])
        for x, y in zip(got, want, strict=True):
            value = torch.tensor(x - (x >> 15 << 16), dtype=torch.int16).view(torch.bfloat16)
            assert value.isnan() if y.isnan() else x == int(y.view(torch.int16)) & 0xFFFF, four


@pytest.mark.parametrize(("arch", "fp8"), [(80, False), (89, True), (90, True)])
def test_portable_decode_steps_keep_the_order_of_keys_and_read_ahead(arch: int, fp8: bool) -> None:
    """By what is compiled: each warp has keys of its own, operands hold two neighbours, and nothing spills."""
    tile = tiles.few((arch // 10, arch % 10))
    made = {"COLS": 16, "KEYS": 64, "HB": 128, "ONES": tile.ones, "STAGES": tile.stages, "QUANT": False}
    done = compiled(portable_few._few_kernel, fp8, arch, **made, PDL=arch >= 90)
    code = done.asm["ttgir"]
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"} and set(re.findall(r"warpsPerCTA = (.*?), i", code)) == {
        "[4, 1]"
    }
    assert code.count("warp_group_dot " if arch == 90 else "tt.dot ") == 3
    loop = code[code.index("scf.for") :]
    pending = re.search(r"async_wait .*num = (\d)", loop[: loop.index("dot")])
    assert pending is not None and int(pending[1]) > 0, "while a step is computed, the next one is on its way"
    assert done.metadata.shared <= 64 * 1024 and resources.used(done.asm["cubin"])["stack"] == 0


@pytest.mark.parametrize(("backend", "arch"), [("hopper", 90), ("triton", 90), ("triton", 89)])
def test_shared_latents_fit_and_are_multiplied_as_a_sequences_own(backend: str, arch: int) -> None:
    """Both kernels of a decode step that merges: no registers spill, shared memory suffices, operands hold two
    neighbours; programs of many rows have the instruction that they have in training."""
    steps = latent.STEPS[backend]
    sizes: dict[str, Any] = {"N": 16, "L": 512, "R": 64, "CHUNK": 1024, "UNIT": 128, "TILE": steps.tile}
    few = {"ROWS": 16, "ONE": True, "WHOLE": False, "LSE": False}
    mma, columns = "mma", {"ROWS": 16, "COLUMNS": 64, "WHOLE": False}
    for kernel, more, warps, stages, word in (
        (latent_shared._shared_kernel, {"ROWS": steps.shared, "S": 4}, 8, 2, "wgmma" if backend == "hopper" else mma),
        *((latent_triton._rows_kernel, few, 4, stages, mma) for stages in sorted(set(steps.stages))),
        (latent_split._scores_kernel, {"ROWS": 16}, 4, 1, mma), (latent_split._values_kernel, columns, 4, 4, mma),
    ):
        pointers = dict.fromkeys(("queries", "keys", "done"), "*i32")
        pointers |= {"rows": "*bf16", "lse": "*fp32", "natural": "fp32"}
        done = compiled(kernel, False, arch, pointers, (warps, stages), **sizes, **more, PDL=arch >= 90)
        code = done.asm["ttgir"]
        assert ("warp_group_dot " in code) == (word == "wgmma") and ("tt.dot " in code) == (word == mma)
        assert set(re.findall(r"kWidth = (\d+)", code)) <= {"2"}
        assert resources.used(done.asm["cubin"])["stack"] == 0
        assert done.metadata.shared <= (227 if backend == "hopper" else 99) * 1024
        if stages > 2:
            pending = re.search(r"async_wait .*num = (\d)", code)
            assert pending is not None and int(pending[1]) > 0, "while a tile is computed, the next one is on its way"
    assert latent_shared.add_tile is latent_chain.add_tile is latent_triton.add_tile, "one order of operations"
    assert latent_split.add_scores is latent_chain.add_scores and latent_split.scores_of is latent_chain.scores_of


def in_gluon(kernel: Any, warps: int, **constants: Any) -> Any:
    """A kernel of `latent_rows` or `latent_few`, compiled for Moonlight's sizes on Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as build
    from triton.experimental.gluon._runtime import GluonASTSource

    constants |= {"N": 16, "L": 512, "R": 64, "CHUNK": 1024, "WHOLE": False, "LSE": False, "PDL": True}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = dict.fromkeys(("table", "queries", "keys", "done", "members", "tiles_of"), "*i32")
    kinds |= dict.fromkeys(("q", "rows", "out"), "*bf16")
    kinds |= dict.fromkeys(("lse", "tops", "sums", "accs"), "*fp32") | {"scale": "fp32", "natural": "fp32"}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    places = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    return build(
        GluonASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": True},
    )


@pytest.mark.parametrize(("name", "page"), [("rows_kernel", 0), ("rows_kernel", 128), ("shared_kernel", 128)])
def test_many_rows_of_latents_are_multiplied_as_few(name: str, page: int) -> None:
    """In Gluon: no scores are computed twice, instructions are those of Triton's kernel, nothing spills."""
    from jetrl.kernels.attention import latent_rows

    done = in_gluon(getattr(latent_rows, name), 8, PAGE=page, S=4, UNIT=128)
    products = re.findall(r"wgmma\.mma_async\S*?\.(m64n\d+k16)", done.asm["ptx"])
    assert [products.count(p) for p in ("m64n32k16", "m64n8k16", "m64n256k16")] == [512 // 16 + 64 // 16, 4, 4]
    assert len(products) == 44 and done.asm["ptx"].count("fence.proxy.async") >= 2
    assert resources.used(done.asm["cubin"])["stack"] == 0 and done.metadata.shared <= 227 * 1024


def test_scores_of_the_next_tile_of_latents_are_computed_between_outputs() -> None:
    """In Gluon: each of 8 warps has one chain of 36 products for scores (and before the loop), and 32 for outputs."""
    from jetrl.kernels.attention import latent_few

    done = in_gluon(latent_few.few_kernel, latent_few.WARPS, PAGE=128)
    code = done.asm["ttgir"]
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"} and "warp_group_dot " not in code
    assert code.count("tt.dot ") == 9 + 9 + 8 + 1 and done.asm["ptx"].count("mma.sync") == 36 + 36 + 32 + 4
    assert done.metadata.shared <= 227 * 1024 and resources.used(done.asm["cubin"])["stack"] <= 64


def test_products_of_latents_fit() -> None:
    """What enters and what leaves latent attention, of few tokens and of many."""
    import triton.language as tl

    sizes: dict[str, Any] = {"N": 16, "L": 512, "R": 64, "P": 128, "STEP": 64, "DTYPE": tl.bfloat16, "POW2": False}
    enter: dict[str, Any] = {"EPS": 1e-6, "PAGED": True, "FEW": latent_products._ROWS, "AHEAD": 128}
    lift: dict[str, Any] = {"K": 512, "COLUMNS": 128, "COPIED": 0, "w_k": 1, "AHEAD": True}
    pointers = dict.fromkeys(("kv", "w", "norm", "rows"), "*bf16") | dict.fromkeys(("positions", "slots"), "*i64")
    pointers |= {"cos": "*fp32", "sin": "*fp32"}
    for kernel, more in (
        (latent_products._enter_kernel, {**enter, "B": 64}), (latent_products._enter_kernel, {**enter, "B": 128}),
        (latent_products._product_kernel, {**lift, "B": 128}), (latent_products._product_kernel, {**lift, "B": 32}),
    ):
        done = compiled(kernel, False, 90, pointers, (4, 4), **sizes, **more)
        assert done.asm["ptx"].index("prefetch.global.L2") < done.asm["ptx"].index("griddepcontrol.wait")
        assert done.asm["ttgir"].count("warp_group_dot ") == 1
        assert resources.used(done.asm["cubin"])["stack"] == 0 and done.metadata.shared <= 113 * 1024
