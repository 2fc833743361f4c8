"""Which kernels a program launches, found by running it without compiling or launching any, and how each is compiled.

`recording` takes the place of what launches kernels in this process: Triton's and Gluon's, DeepGEMM's GEMMs,
FlashAttention-4. Each call becomes a `Job` (`compiling.pool`) for another process. New tensors are filled, integers
and codes with zeros, other numbers with ones, so that what kernels would have written is at least in range: an index, a
token, a length; weights to draw a token with and their total.

A job repeats the call so that the compiler's cache on disk gets the very entry that the real call will look for:
Triton's from types, alignments and values of numbers by class (1, a multiple of 16, another), FlashAttention-4's and
DeepGEMM's from tensors of the same shapes, of zeros: sequences without tokens, pages without keys.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from jetrl.kernels.compiling.pool import Job
from jetrl.kernels.gemm.layouts import Kind, layouts, representatives
from jetrl.precision.formats import BLOCK

_HERE = "jetrl.kernels.compiling.recorded"
_SECONDS = {"Triton": 1.5, "Gluon": 6.0, "DeepGEMM": 8.0}  # about, of one core
_FLASH_SECONDS = {"fwd": 10.0, "bwd": 16.0}  # with the library's import; the backward pass has three kernels
_LONGER = {"chain_kernel": 14.0, "shared_kernel": 9.0, "draft_kernel": 9.0}  # they come first
_MOST_BYTES = 3 << 30  # of a GEMM's output in a job
# FlashAttention-4 has other kernels where the longest sequence fits one tile, and for more sequences than these. Tiles
# on Hopper: by the largest head size, rows of queries in the forward pass; rows of queries and keys in the backward.
_FORWARD_TILES = {96: 192, 256: 128}
_BACKWARD_TILES = {64: (128, 128), 128: (64, 128), 192: (64, 96), 256: (64, 48)}
_MANY_SEQUENCES = 256

Emit = Callable[[Job], object]
StandIns = Iterator[AbstractContextManager[None]]
_T = TypeVar("_T")
_NONE = object()


def prepare(device: int) -> None:
    """What a worker does first: start on its GPU. A library is imported by the first job that calls it: kernels of
    Triton's, which come first, need none, and importing all in every process would keep all cores busy for seconds."""
    torch.cuda.set_device(device)
    torch.empty(1, device="cuda")


def spare_imports() -> None:
    """Names in place of FlashAttention-4, in a process that does nothing but record: its import takes 7 s, and no call
    of it is made."""
    def never(*args: object, **options: object) -> None:
        raise AssertionError("FlashAttention-4 was called where calls are recorded")

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        sys.modules[name] = types.ModuleType(name)
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        setattr(sys.modules["flash_attn.cute.interface"], name, never)


@contextmanager
def recording(emit: Emit, most_rows: int = 1, libraries: bool = True) -> Iterator[None]:
    """Within it, kernels are neither compiled nor launched, and `emit` gets a job for each call.

    `most_rows`: a GEMM's jobs are those for 1 to so many rows, whatever number of rows is seen. Without `libraries`
    nothing but Triton's kernels will be called, and no library has to be there.
    """
    with ExitStack() as stack:
        for one in (*_filled(), *_triton(emit)):
            stack.enter_context(one)
        for one in (*_deepgemm(emit, most_rows), *_flash(emit)) if libraries else ():
            stack.enter_context(one)
        yield


@contextmanager
def standing_in(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Within it `owner.name` is `other`. Afterwards it is what it was: the owner's own, or what it inherits."""
    own = vars(owner).get(name, _NONE)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if own is _NONE:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _filled() -> StandIns:
    """`torch.empty` and its kin give zeros and ones."""
    with torch.device("meta"):
        torch.empty(0)  # torch notes now which functions such a context is for; later it would miss these

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            with torch.no_grad():
                return made.fill_(made.is_floating_point() and made.element_size() > 1)

        return run

    for name in ("empty", "empty_like", "empty_strided"):
        yield standing_in(torch, name, filled(getattr(torch, name)))
    yield standing_in(Tensor, "new_empty", filled(Tensor.new_empty))


# --- Triton and Gluon


def _triton(emit: Emit) -> StandIns:
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        emit(triton_job(self, args, options))

    yield standing_in(JITFunction, "run", run)


def triton_job(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> Job:
    """The job for a launch `kernel[grid](*args, **options)`."""
    params = {p.name: p for p in kernel.params}

    def classed(name: str, value: Any) -> Any:
        return value if name not in params or params[name].is_constexpr else _classed(value, params[name])

    given = [classed(name, value) for name, value in zip(params, args, strict=False)]
    more = {name: classed(name, value) for name, value in options.items()}
    maker = "Gluon" if kernel.is_gluon() else "Triton"
    key = f"{kernel.__module__}.{kernel.__name__} {given} {sorted(more.items())}"
    name = kernel.__name__.strip("_")
    return Job(
        key, f"{maker} {name}", f"{_HERE}:compile_triton", (kernel.__module__, kernel.__name__, given, more),
        _LONGER.get(name, _SECONDS[maker]),
    )


def _classed(value: Any, param: Any) -> Any:
    """A launch's argument as far as Triton compiles for it: ("tensor", type, aligned), ("descriptor", type,
    box, layout), or a number of its class."""
    if isinstance(value, Tensor):
        aligned = value.data_ptr() % 16 == 0 or param.do_not_specialize_on_alignment
        return "tensor", str(value.dtype).removeprefix("torch."), aligned
    if hasattr(value, "block_shape"):  # a descriptor for TMA
        dtype = str(value.base.dtype).removeprefix("torch.")
        return "descriptor", dtype, tuple(value.block_shape), value.layout
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return 1.5
    if value < 0 or (value == 1 and not param.do_not_specialize):
        return value
    even = value % 16 == 0 and not param.do_not_specialize
    return (1 << 32 if value >= 1 << 31 else 0) + (16 if even else 3)


class _Pointer:
    """Stands for a tensor of a type and alignment where nothing is launched."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._at = dtype, 0 if aligned else 8

    def data_ptr(self) -> int:
        return self._at

    def ptr_range(self) -> int:
        return 0


def compile_triton(module: str, name: str, args: Sequence[Any], options: dict[str, Any]) -> None:
    """Compile one Triton or Gluon kernel into Triton's cache."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from jetrl.kernels.compiling.keys import settle

    def value(one: Any) -> Any:
        if isinstance(one, tuple) and one[:1] == ("tensor",):
            return _Pointer(getattr(torch, one[1]), one[2])
        if isinstance(one, tuple) and one[:1] == ("descriptor",):
            _, dtype, box, layout = one
            strides = [BLOCK] * (len(box) - 1) + [1]
            base = _Pointer(getattr(torch, dtype), True)
            return TensorDescriptor(base, [BLOCK] * len(box), strides, list(box), layout)
        return one

    settle(home := importlib.import_module(module))
    kernel = getattr(home, name)
    filled = {k: value(v) for k, v in options.items()}
    kernel.run(*map(value, args), grid=(1,), warmup=True, **filled)


# --- calls with tensors: DeepGEMM, FlashAttention-4


def described(value: Any, seen: list[Tensor]) -> Any:
    """An argument without its content: tensors as ("tensor", number, shape, strides, type, whether it needs a
    gradient), one object one number."""
    if isinstance(value, Tensor):
        number = next((i for i, one in enumerate(seen) if one is value), len(seen))
        if number == len(seen):
            seen.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return "tensor", number, tuple(value.shape), value.stride(), dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(described(one, seen) for one in value)
    return value


def rebuilt(value: Any, made: dict[int, Tensor], device: str = "cuda") -> Any:
    """The argument again, with zeros in its tensors."""
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        _, number, shape, strides, dtype, grad = value
        if number not in made:
            tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
            (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).zero_()
            made[number] = tensor.requires_grad_() if grad else tensor
        return made[number]
    if isinstance(value, tuple):
        return tuple(rebuilt(one, made, device) for one in value)
    return value


def _call_described(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    seen: list[Tensor] = []
    return described(tuple(args), seen), {k: described(v, seen) for k, v in kwargs.items()}


def repeat_call(module: str, name: str, args: Any, kwargs: dict[str, Any], tiles: int | None = None) -> None:
    """Call a library with tensors of zeros: it compiles its kernel, and may launch it. `tiles`: the rows of DeepGEMM's
    grouped GEMMs, a setting of the process."""
    made: dict[int, Tensor] = {}
    library = _deep_gemm() if module == "deep_gemm" else importlib.import_module(module)
    if tiles is not None:
        library.set_mk_alignment_for_contiguous_layout(tiles)
    call = getattr(library, name)
    with torch.no_grad():
        call(*rebuilt(args, made), **{k: rebuilt(v, made) for k, v in kwargs.items()})
    torch.cuda.synchronize()
    made.clear()
    torch.cuda.empty_cache()


def _deep_gemm() -> Any:
    """The library, with the settings that the backend makes."""
    from jetrl.kernels.gemm import deepgemm

    return deepgemm.deep_gemm


def _deepgemm(emit: Emit, most_rows: int) -> StandIns:
    import deep_gemm

    swept: set[str] = set()
    for name in dir(deep_gemm):
        if "gemm" in name and callable(getattr(deep_gemm, name)) and not name.startswith("_"):

            def call(*args: Any, _name: str = name, **kwargs: Any) -> None:
                for job in gemm_jobs(_name, args, kwargs, most_rows, swept):
                    emit(job)

            yield standing_in(deep_gemm, name, call)


def gemm_jobs(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], most_rows: int, swept: set[str]
) -> Iterator[Job]:
    """The jobs of one call of DeepGEMM.

    For `a` [M, K] by `b` [N, K]: each kernel that some M takes, once, at the smallest such M; and last, when all are
    compiled, the matrix with many numbers of rows, which finds on disk what it needs or compiles it (see
    `gemm/layouts.py`: a prediction). `swept` remembers the matrices.
    """
    given, named = _call_described(args, kwargs)
    plain = _shape_of(name, given, named)
    if plain is None:
        tiles = _deep_gemm().get_mk_alignment_for_contiguous_layout() if name.startswith("m_grouped") else None
        yield _gemm_job(name, name, given, named, tiles)
        return
    kind, rows, n, k, out_bytes = plain
    taken = layouts(kind, _column(rows), n, k, out_bytes, adds=kind == "wgrad", processors=_processors())[0]
    yield _gemm_job(name, f"{name} {kind} {out_bytes} {taken}", given, named)
    most = min(most_rows, _MOST_BYTES // (n * out_bytes))
    if kind == "wgrad" or most < 2 or (matrix := f"{name} {n} {k} {out_bytes}") in swept:
        return
    swept.add(matrix)
    for layout, m in representatives(kind, most, n, k, out_bytes, processors=_processors()).items():
        yield _gemm_job(name, f"{name} {kind} {out_bytes} {layout}", with_rows(given, m), named)
    sizes = sorted({*range(1, min(most, 256) + 1), *range(256, most, 64), most})
    sweep = name, [with_rows(given, m) for m in sizes], named
    yield Job(f"sweep {matrix}", "DeepGEMM's check", f"{_HERE}:repeat_gemms", sweep, 0.5, stage=1)


def repeat_gemms(name: str, calls: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """One GEMM with several numbers of rows, the most first: the others' tensors fit into its memory."""
    for args in reversed(calls):
        made: dict[int, Tensor] = {}
        getattr(_deep_gemm(), name)(*rebuilt(args, made), **kwargs)
    torch.cuda.synchronize()
    made.clear()
    torch.cuda.empty_cache()


def _gemm_job(name: str, key: str, given: Any, named: dict[str, Any], tiles: int | None = None) -> Job:
    if key == name:  # its layout depends little on the length of the sum: one job for lengths of about one size
        sizes = [_coarse(one) for one in given]
        key = f"{name} {sizes} {tiles} {sorted((k, str(v)) for k, v in named.items())}"
    call = ("deep_gemm", name, given, named, tiles)
    return Job(key, f"DeepGEMM {name}", f"{_HERE}:repeat_call", call, _SECONDS["DeepGEMM"])


def _coarse(given: Any) -> Any:
    """An argument of a GEMM as far as its layout depends on it: codes stand for their scales, numbers of rows of groups
    for nothing."""
    if isinstance(given, tuple) and given[:1] == ("tensor",):
        return given[2][0].bit_length() // 4, *given[2][1:], given[4]
    return (_coarse(given[0]) if isinstance(given[0], tuple) else ()) if isinstance(given, tuple) and given else given


def _shape_of(name: str, given: Any, named: dict[str, Any]) -> tuple[Kind, int, int, int, int] | None:
    """(kind, M, N, K, bytes of an output element) of a plain GEMM of two row-major matrices; None for others."""
    if not re.fullmatch(r"(fp8|bf16)_gemm_nt", name) or len(given) < 3:
        return None
    a, b, out = (one[0] if one[:1] != ("tensor",) else one for one in given[:3])
    kind: Kind = "bf16" if name.startswith("bf16") else "wgrad" if "recipe" in named else "fp8"
    return kind, a[2][0], b[2][0], a[2][1], getattr(torch, out[4]).itemsize


def with_rows(given: Any, m: int) -> Any:
    """The arguments of a plain GEMM for `m` rows instead."""
    def resized(one: Any) -> Any:
        kind, number, shape, strides, dtype, grad = one
        if strides[0] == 1 and len(shape) == 2:  # scales, stored by columns that are a multiple of 4 apart
            strides = (1, -(-m // 4) * 4)
        return kind, number, (m, *shape[1:]), strides, dtype, grad

    a, b, out, *rest = given
    a = resized(a) if a[:1] == ("tensor",) else tuple(resized(one) for one in a)
    return (a, b, resized(out), *rest)


def _column(value: int) -> Any:
    import numpy as np

    return np.array([value])


def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132


def _flash(emit: Emit) -> StandIns:
    from jetrl.kernels.attention import flash

    def forward(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        emit(flash_job("_flash_attn_fwd", (q, *args), kwargs))
        out = kwargs.get("out")
        lse = torch.ones(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        return torch.ones_like(q) if out is None else out, lse if kwargs.get("return_lse") else None

    def backward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        emit(flash_job("_flash_attn_bwd", (q, k, v, *args), kwargs))
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    yield standing_in(flash, "_flash_attn_fwd", forward)
    yield standing_in(flash, "_flash_attn_bwd", backward)


def flash_job(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Job:
    """The job of a call of FlashAttention-4: one for all lengths of a class (`_lengths`)."""
    given, named = _call_described(args, kwargs)

    def coarse(value: Any) -> Any:
        if isinstance(value, tuple) and value[:1] == ("tensor",):
            _, _, shape, _, dtype, grad = value
            return len(shape), dtype, grad, shape[1:] if "float" in dtype and len(shape) > 2 else ()
        return tuple(map(coarse, value)) if isinstance(value, tuple) else value

    rest = {k: coarse(v) for k, v in named.items() if not k.startswith("max_seqlen")}
    key = f"{name} {coarse(given)} {_lengths(name, args, kwargs)} {sorted(rest.items(), key=lambda item: item[0])}"
    call, kind = ("jetrl.kernels.attention.flash", name, given, named), name.rpartition("_")[2]
    return Job(key, f"FlashAttention-4 {kind}", f"{_HERE}:repeat_call", call, _FLASH_SECONDS[kind])


def _lengths(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, ...]:
    """What FlashAttention-4's kernels depend on of the lengths: whether the longest sequence fits a tile, and whether
    there are many. The heads of a key/value head are rows of one tile in the forward pass."""
    q, k, queries = args[0], args[1], kwargs["max_seqlen_q"]
    many = len(kwargs["cu_seqlens_q"]) - 1 > _MANY_SEQUENCES
    if name == "_flash_attn_fwd":
        return queries * (q.shape[-2] // k.shape[-2]) <= _tile(_FORWARD_TILES, q.shape[-1]), many
    of_queries, of_keys = _tile(_BACKWARD_TILES, q.shape[-1])
    return queries <= of_queries, kwargs["max_seqlen_k"] <= of_keys, many


def _tile(tiles: dict[int, _T], size: int) -> _T:
    return tiles[min(largest for largest in tiles if size <= largest)]
