"""Every kernel that a run with `kernels = "triton"` launches, compiled for each kind of GPU, on any machine.

    python benchmarks/portable_resources.py                    # sm_80, 86, 89, 90, 100 and 120: minutes of a CPU
    python benchmarks/portable_resources.py --arch 89 --precision bf16

A run in miniature (tests/run/portable_run.py) lists the launches of its rollout and its updates; Triton compiles each
of them, and `cuobjdump`, which comes with Triton, reads registers, stack and shared memory. No GPU is needed. A stack
is what did not fit into registers. Writes `benchmarks/results/portable_resources.json` and prints a table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import MARK, RESULTS, ROOT, ask, emit, table, write_json

ARCHS = (80, 86, 89, 90, 100, 120)
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a program may have
PRECISIONS = {arch: ("bf16", "w8a16", "fp8") if arch >= 89 else ("bf16", "w8a16") for arch in ARCHS}


def source_of(kernel: Any, given: list[Any], more: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles for a recorded launch, and its options."""
    from triton.compiler import ASTSource

    params = {p.name: p for p in kernel.params}
    values = dict(zip(params, given, strict=False)) | {k: v for k, v in more.items() if k in params}
    signature, constants, attrs = {}, {}, {}
    kinds = {
        "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64", "uint8": "u8",
        "int16": "i16", "float8_e4m3fn": "fp8e4nv", "bool": "i1", "uint64": "u64",
    }
    for place, (name, param) in enumerate(params.items()):
        value = values[name]
        if param.is_constexpr:
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, tuple):
            signature[name] = f"*{kinds[value[1]]}"
            if value[2] and not param.do_not_specialize:
                attrs[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[name], constants[(place,)] = "constexpr", 1
        else:
            signature[name] = "i64" if value >= 1 << 31 else "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(place,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in more.items() if k not in params and v is not None}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs), options


def resources(kernel: Any, given: list[Any], more: dict[str, Any], arch: int) -> dict[str, Any]:
    """Registers of a thread, bytes of its stack, bytes of shared memory, and which instruction multiplies."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = source_of(kernel, given, more)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code = done.asm["ttgir"]
    words = {"tc_gen5_mma": "tcgen05", "warp_group_dot ": "wgmma", "tt.dot ": "mma"}
    return used(done.asm["cubin"]) | {
        "shared": done.metadata.shared, "instruction": next((kind for word, kind in words.items() if word in code), ""),
    }


def used(cubin: bytes) -> dict[str, int]:
    """Registers of a thread of a compiled kernel, and bytes of its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def recorded(arch: int, precision: str, limit: int) -> Iterator[dict[str, Any]]:
    """A row of each kernel of a run."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "run")]
    import importlib

    from portable_run import launches

    jobs = launches((arch // 10, arch % 10), precision)
    for job in list(jobs)[: limit or None]:
        module, name, given, more = job.arguments
        kernel = getattr(importlib.import_module(module), name)
        row = {"arch": arch, "precision": precision, "kernel": f"{module.removeprefix('jetrl.kernels.')}.{name}"}
        shape = {k: v for k, v in more.items() if k.isupper() and isinstance(v, int) and not isinstance(v, bool)}
        try:
            yield row | {"constants": shape} | resources(kernel, given, more, arch)
        except Exception as error:  # a row of its own: the others go on
            yield row | {"constants": shape, "error": f"{type(error).__name__}: {error}"[:500]}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind of GPU how many kernels there are, and the most that one takes."""
    lines = []
    for arch in dict.fromkeys(row["arch"] for row in rows):
        of = [row for row in rows if row["arch"] == arch]
        made = [row for row in of if "error" not in row]
        lines.append({
            "arch": f"sm_{arch}", "kernels": len(of), "failed": len(of) - len(made),
            "shared KiB": max(row["shared"] for row in made) / 1024, "of": SHARED[arch],
            "with a stack": sum(row["stack"] > 0 for row in made), "largest stack": max(row["stack"] for row in made),
            "registers": max(row["registers"] for row in made),
        })
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--precision", nargs="+", choices=["bf16", "w8a16", "fp8"], default=["bf16", "w8a16", "fp8"])
    parser.add_argument("--limit", type=int, default=0, help="only so many kernels of each run")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        for row in recorded(args.arch[0], args.precision[0], args.limit):
            emit(row)
        return
    rows: list[dict[str, Any]] = []
    for arch in args.arch:
        for precision in (p for p in PRECISIONS[arch] if p in args.precision):
            command = [sys.executable, __file__, "--one", "--arch", str(arch), "--precision", precision]
            rows += list(ask([*command, f"--limit={args.limit}"], MARK))
        print(table(shown(rows)[-1:], ["arch", "kernels", "failed", "shared KiB", "of", "largest stack"]), flush=True)
        write_json(args.out / "portable_resources.json", {"rows": rows})
    for row in rows:
        if "error" in row or row["stack"]:
            print({k: v for k, v in row.items() if k != "constants"}, row["constants"])
    print(table(shown(rows), list(shown(rows)[0])))


if __name__ == "__main__":
    main()
