"""What a program launches, recorded, and the same kernels compiled for the disk by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetrl.kernels.compiling import recorded

CASES = Path(__file__).with_name("recorded_cases.py")


@pytest.mark.slow
def test_triton_finds_what_jobs_have_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "jobs" in done.stdout


@pytest.mark.slow
def test_a_kernel_has_one_key_whatever_a_process_has_compiled_before() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)

    def keys(*arguments: str) -> dict[str, str]:
        command = [sys.executable, str(CASES.with_name("kernel_keys.py")), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    whole = keys("all")
    assert len(whole) > 40
    for seed in range(3):
        assert keys("alone", str(seed)) == whole  # each settled when it is asked for, in any order
    assert any(keys("unsettled", str(seed)) != whole for seed in range(8)), "Triton's keys need no settling any more"


def test_a_call_is_rebuilt_with_shapes_strides_types_and_shared_tensors() -> None:
    out = torch.ones(6, 4).t()
    lengths = torch.ones(3, dtype=torch.int32)
    grad = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    seen: list[torch.Tensor] = []
    call = recorded.described(((codes, lengths), out, grad, 3, None), seen), recorded.described(out, seen)
    made: dict[int, torch.Tensor] = {}
    ((codes2, lengths2), out2, grad2, three, none), same = (recorded.rebuilt(one, made, "cpu") for one in call)
    assert same is out2 and (three, none) == (3, None)
    assert out2.shape == out.shape and out2.stride() == out.stride() and not out2.any()
    assert lengths2.dtype == torch.int32 and not lengths2.any()
    assert grad2.requires_grad and grad2.dtype == torch.bfloat16 and not lengths2.requires_grad
    assert codes2.dtype == torch.float8_e4m3fn and not codes2.float().any()


def fp8_call(m: int, n: int = 4096, k: int = 4096) -> tuple[object, ...]:
    scale = torch.empty_strided((m, k // 128), (1, -(-m // 4) * 4))
    a = torch.zeros(m, k, dtype=torch.float8_e4m3fn), scale
    b = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n // 128, k // 128)
    return a, b, torch.empty(m, n, dtype=torch.bfloat16)


def test_a_gemm_becomes_a_job_for_each_kernel_that_some_number_of_rows_takes() -> None:
    swept: set[str] = set()
    options = {"disable_ue8m0_cast": True}
    jobs = list(recorded.gemm_jobs("fp8_gemm_nt", fp8_call(5), options, 8192, swept))
    keys = {job.key for job in jobs if job.stage == 0}
    assert len(keys) == 19  # kernels; the sizes of matrices are their arguments
    (sweep,) = (job for job in jobs if job.stage == 1)
    again = list(recorded.gemm_jobs("fp8_gemm_nt", fp8_call(300), options, 8192, swept))
    assert len(again) == 1 and again[0].key in keys
    other = list(recorded.gemm_jobs("fp8_gemm_nt", fp8_call(5, n=12288, k=4096), options, 8192, swept))
    assert keys & {job.key for job in other}, "two matrices share kernels"
    rows = [given[2][2][0] for given in sweep.arguments[1]]
    assert rows[:2] == [1, 2] and rows[-1] == 8192


def test_a_gemm_for_other_rows_has_their_strides() -> None:
    given, _ = recorded._call_described(fp8_call(300), {})
    want, _ = recorded._call_described(fp8_call(7), {})
    assert recorded.with_rows(given, 7) == want


def test_gemms_of_other_kinds_are_one_job_for_sums_of_about_one_length() -> None:
    def key(length: int, size: int = 32) -> str:
        x = torch.zeros(length, size, dtype=torch.bfloat16)
        (job,) = recorded.gemm_jobs("bf16_gemm_tn", (x, x, torch.zeros(size, size)), {}, 8192, set())
        assert job.arguments[2][0][2] == (length, size)
        return job.key

    assert key(4096) == key(8000)
    assert len({key(4096), key(64), key(4096, 64)}) == 3


def test_grouped_gemms_are_one_job_for_all_divisions_into_groups() -> None:
    def key(sizes: tuple[int, ...], columns: int = 256) -> str:
        codes = torch.zeros(sum(sizes) * columns, dtype=torch.float8_e4m3fn), torch.zeros(columns, sum(sizes) // 128)
        given = codes, codes, torch.zeros(len(sizes), columns, columns), sizes, torch.zeros(len(sizes))
        return next(recorded.gemm_jobs("k_grouped_fp8_gemm_nt_contiguous", given, {}, 8192, set())).key

    assert key((128, 256)) == key((256, 256)) != key((128, 256), 512)


def test_flash_attention_is_one_job_for_all_lengths_above_a_tile() -> None:
    def key(tokens: int, heads: int = 8, pages: int | None = None, count: int = 2, groups: int = 8) -> str:
        q, k = (torch.zeros(tokens, n, 128, dtype=torch.bfloat16) for n in (heads, groups))
        table = None if pages is None else torch.zeros(2, pages, dtype=torch.int32)
        starts = torch.zeros(count + 1, dtype=torch.int32)
        named = {"page_table": table, "max_seqlen_q": tokens, "cu_seqlens_q": starts}
        return recorded.flash_job("_flash_attn_fwd", (q, k, k), named).key

    assert key(300) == key(4000) == key(300, count=256) and key(300, pages=3) == key(300, pages=5)
    assert len({key(300), key(300, heads=4, groups=4), key(300, pages=3), key(300, count=257), key(128)}) == 5
    assert key(5) == key(128), "one tile of 128 rows"
    assert key(33, heads=32) != key(32, heads=32), "heads of a key/value head are rows too"


def test_flash_attentions_gradients_know_a_tile_of_keys_and_one_of_queries() -> None:
    def key(queries: int, keys: int) -> str:
        q = torch.zeros(queries, 8, 128, dtype=torch.bfloat16)
        named = {"max_seqlen_q": queries, "max_seqlen_k": keys, "cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}
        return recorded.flash_job("_flash_attn_bwd", (q, q, q), named).key

    assert key(5, 5) == key(64, 128) and key(65, 65) == key(128, 128) and key(129, 129) == key(4000, 4000)
    assert len({key(5, 5), key(100, 100), key(129, 129), key(5, 129)}) == 4


def test_grouped_gemms_are_compiled_with_the_tiles_that_they_were_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    library = SimpleNamespace(tiles=128)
    library.get_mk_alignment_for_contiguous_layout = lambda: library.tiles
    library.set_mk_alignment_for_contiguous_layout = lambda tiles: setattr(library, "tiles", tiles)
    library.m_grouped_bf16_gemm_nt_contiguous = lambda *args: made.append(("called", library.tiles))
    monkeypatch.setattr(recorded, "_deep_gemm", lambda: library)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    jobs, x = [], torch.zeros(64, 32, dtype=torch.bfloat16)
    for tiles in (16, 32):
        library.tiles = tiles
        jobs += recorded.gemm_jobs("m_grouped_bf16_gemm_nt_contiguous", (x, x[None], x), {}, 8192, set())
    assert len({job.key for job in jobs}) == 2
    monkeypatch.setattr(recorded, "rebuilt", lambda value, made: value)
    for one in jobs:
        recorded.repeat_call(*one.arguments)
    assert made == [("called", 16), ("called", 32)]


def test_jobs_that_take_longest_come_first() -> None:
    pytest.importorskip("triton")
    kernel = SimpleNamespace(params=[], is_gluon=lambda: False, __module__="m", __name__="_chain_kernel")
    other = SimpleNamespace(params=[], is_gluon=lambda: False, __module__="m", __name__="_add_kernel")
    assert recorded.triton_job(kernel, (), {}).seconds > 5 * recorded.triton_job(other, (), {}).seconds


def test_kernels_have_one_variant_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from jetrl.kernels.attention.advance import advance
    from jetrl.kernels.attention.state import DecodeState
    from jetrl.kernels.logprob.triton import logprobs_and_statistics, sample
    from jetrl.kernels.pointwise.swiglu import swiglu_quantize
    from jetrl.kernels.pointwise.triton import add_rms_norm_quantize
    from jetrl.kernels.quantize.triton import quantize_act, quantize_act_t
    from jetrl.kernels.update.triton import row_squares

    found: dict[str, dict[str, int]] = {}

    def emit(job: recorded.Job) -> None:
        found.setdefault(job.name, {}).setdefault(job.key, 0)

    weight = torch.ones(256, dtype=torch.bfloat16)
    with ExitStack() as stack:
        for patch in recorded._triton(emit):
            stack.enter_context(patch)
        for rows in (1, 2, 5, 16, 128, 129, 2048):
            x, logits = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(rows, 4096)
            quantize_act(x)
            quantize_act_t(x, tile=True)
            add_rms_norm_quantize(x, x, weight, 1e-6, False)
            swiglu_quantize(x, False)
            state = DecodeState.empty(rows, 32, 1 if rows == 5 else 8, 128, torch.device("cpu"))
            draws = sample(logits, torch.ones(rows), state.integers[3], state.integers[4])
            logprobs_and_statistics(logits, torch.zeros(rows, dtype=torch.int64), torch.ones(rows))
            if rows <= 256:
                advance(state, *draws)
            row_squares(x.float(), torch.zeros(rows + 1, dtype=torch.float64)[1:])
    many = {name: len(keys) for name, keys in found.items()}
    # sums with and without entropy
    assert many.pop("Triton sum_kernel") == 2 and set(many.values()) == {1} and len(many) == 9, many


def test_models_of_the_meta_device_stay_there_while_tensors_are_filled() -> None:
    """In a new process: torch notes the functions that a device context is for when the first one is entered."""
    code = """
import torch
from contextlib import ExitStack
from jetrl.kernels.compiling import recorded
with ExitStack() as stack:
    for patch in recorded._filled():
        stack.enter_context(patch)
    with torch.device("meta"):
        assert torch.empty(3).is_meta and torch.empty(2, 2, dtype=torch.int8).is_meta
    assert torch.empty(3).tolist() == [1, 1, 1] and torch.empty_like(torch.arange(2)).tolist() == [0, 0]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_process_that_only_records_spares_flash_attentions_import() -> None:
    code = """
import sys
from jetrl.kernels.compiling import recorded
recorded.spare_imports()
from jetrl.kernels.attention import flash
assert "cutlass" not in sys.modules
try:
    flash._flash_attn_fwd(None)
except AssertionError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "FlashAttention-4 was called where calls are recorded\n", ended


def test_what_stands_in_leaves_no_trace() -> None:
    """Of functions of a module, of methods of a class, of what a class inherits, and after an error."""
    class Base:
        def inherited(self) -> str:
            return "before"

        @staticmethod
        def static() -> str:
            return "before"

    class Owner(Base):
        def own(self) -> str:
            return "before"

    module = SimpleNamespace(call=lambda: "before")
    before = [dict(vars(one)) for one in (Base, Owner, module)]
    with pytest.raises(KeyError), ExitStack() as stack:
        for owner, name in ((Owner, "own"), (Owner, "inherited"), (Base, "static"), (module, "call")):
            stack.enter_context(recorded.standing_in(owner, name, lambda *_: "within"))
        stack.enter_context(recorded.standing_in(module, "call", lambda: "twice"))
        assert (Owner().own(), Owner().inherited(), Base.static(), module.call()) == ("within",) * 3 + ("twice",)
        assert Base().inherited() == "before"
        raise KeyError
    assert [dict(vars(one)) for one in (Base, Owner, module)] == before
    assert (Owner().own(), Owner().inherited(), Base().static(), module.call()) == ("before",) * 4
    empty, made = torch.empty, torch.Tensor.new_empty
    with ExitStack() as stack:
        for one in recorded._filled():
            stack.enter_context(one)
        assert torch.empty(3).tolist() == [1, 1, 1]
        assert torch.zeros(1).new_empty(2, dtype=torch.int32).tolist() == [0, 0]
    assert torch.empty is empty and torch.Tensor.new_empty is made
