"""What `table.py` runs: the pieces of each table. A piece is one process, or one work of a process that it shares."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench_rollout import peer_command
from bench_workloads import PLAIN, RAGGED, WORKS
from common import SPEC

HERE = Path(__file__).parent
PEER, BEFORE, START = "peer", "before", 25.0  # seconds of a process's start with a model of 8B
COMPILING = "compilation"


@dataclass(frozen=True)
class Piece:
    """`seconds` is its expected time, including its start but not compiling kernels for the first time.

    Pieces with the same `process` share one, whose start is not in their `seconds`; it is then `bench_workloads.py`,
    and the name is that of the work.
    """

    name: str
    seconds: float
    script: str  # of benchmarks/; PEER; or BEFORE: bench_step.py of an older commit
    variant: str  # or the dtype of vLLM
    options: tuple[str, ...] = ()
    sizes: tuple[list[int], int, int] = ([], 0, 0)  # of a rollout: batches, prompt, new tokens
    group: int = 1
    slots: int = 0
    ragged: str = ""
    process: str = ""
    flag: str = "--one"  # begins the options that make a process measure and print rows
    optional: bool = False  # runs only by name, or with --all

    def command(self, peer: str, before: Path | None = None) -> list[str] | str:
        if self.script == PEER:
            more = {"group": self.group, "slots": self.slots, "ragged": self.ragged}
            return peer_command(peer, self.variant, *self.sizes, SPEC.num_layers, **more)  # type: ignore[arg-type]
        script = HERE / self.script
        if self.script == BEFORE:
            assert before is not None
            script = before / "benchmarks" / "bench_step.py"
        return [sys.executable, str(script), self.flag, *([self.variant] if self.variant else []), *self.options]

    @property
    def is_ours(self) -> bool:
        """Code of this commit."""
        return self.script not in (PEER, BEFORE, "foreign_update.py")

    def environment(self, before: Path | None, kernels: Path | None) -> dict[str, str]:
        """Variables of its process: the older commit's package, and where compilers keep kernels."""
        from bench_first_run import CACHES

        more = {} if kernels is None else {name: str(kernels / where) for name, where in CACHES.items()}
        return more | ({"PYTHONPATH": str(before)} if self.script == BEFORE else {})


# ---- the first goals ------------------------------------------------------------------------------------------------


def _rollout(name: str, seconds: float, variant: str, sizes: tuple[list[int], int, int]) -> Piece:
    batches, prompt, new = sizes
    options = ("--batch", *map(str, batches), f"--prompt={prompt}", f"--new={new}")
    return Piece(name, seconds, PEER if name.startswith("peer") else "bench_rollout.py", variant, options, sizes)


def _step(name: str, seconds: float) -> Piece:
    kind, variant = name.split(" ", 1)
    return Piece(name, seconds, "bench_step.py", variant, (f"--only={kind}",))


SHORT, LONG = ([64, 256], 512, 1024), ([64], 8192, 512)
GOALS = [  # ours and what it is compared with, one after the other
    _rollout("rollout fp8", 40, "fp8", SHORT),
    _rollout("rollout fp8 kv8", 35, "fp8 kv8", SHORT),
    _rollout("peer rollout bf16", 85, "bf16", SHORT),
    _rollout("rollout bf16", 45, "bf16", SHORT),
    _step("update fp8", 25),
    _step("update bf16", 25),
    _rollout("long fp8", 30, "fp8", LONG),
    _rollout("peer long fp8", 90, "fp8", LONG),
    _rollout("long fp8 kv8", 30, "fp8 kv8", LONG),
    _step("whole fp8", 70),
    _step("whole fp8 kv8", 60),
    _step("whole bf16", 80),
    _step("whole fp8 nonexact", 70),
    _step("update fp8 nonexact", 25),
    _step("update bf16 nonexact", 25),
    _rollout("peer rollout fp8", 80, "fp8", SHORT),
    _rollout("peer rollout fp8 kv8", 80, "fp8 kv8", SHORT),
]

# ---- rollouts as RL has them ----------------------------------------------------------------------------------------

BEST = "fp8 kv8"  # the fastest formats of both engines


def _work(name: str, seconds: float, optional: bool = False) -> Piece:
    return Piece(name, seconds, "bench_workloads.py", BEST, process="works", optional=optional)


def _peer(name: str, seconds: float, variant: str, batches: list[int], optional: bool = False) -> Piece:
    """vLLM's side of a work. Where a batch is named several times, each is a round, after a warm-up of its own."""
    work = WORKS[name]
    title = f"peer {name}" if variant == BEST else f"peer {name} {variant}"
    slots = work.slots if not work.new else 0
    ragged = ",".join(f"{x:g}" for x in RAGGED) if not work.new else ""
    sizes = batches, work.prompt, work.new or 1024
    return Piece(
        title, seconds, PEER, variant, sizes=sizes, group=work.group, slots=slots, ragged=ragged, optional=optional
    )


def group_name(size: int, prompt: int) -> str:
    return f"groups of {size}, prompt {prompt}"


OTHER_GROUPS = [
    (size, prompt) for size in (16, 8) for prompt in (512, 2048, 4096, 8192) if (size, prompt) != (16, 4096)
]
ROLLOUTS = [
    Piece(COMPILING, 55, "bench_first_run.py", "ahead", ("--layers=12", "--parts", "rollout"), flag="--way"),
    _work("unique 64", 36),  # these find the kernels of the piece before
    _work("unique 256", 45),
    _work(group_name(16, 4096), 50),
    _work("alone 10000", 15),
    _work("alone 32768", 20),
    _work("ragged", 170),
    Piece("peer unique fp8 kv8", 127, PEER, BEST, sizes=([64] * 3 + [256] * 3, 512, 1024)),
    Piece("peer unique bf16", 100, PEER, "bf16", sizes=([64] * 3 + [256], 512, 1024)),
    _peer(group_name(16, 4096), 85, BEST, [256]),
    _peer("ragged", 210, BEST, [512]),
    *(
        piece
        for size, prompt in OTHER_GROUPS
        for piece in (
            _work(group_name(size, prompt), 30 + prompt / 150, optional=True),
            _peer(group_name(size, prompt), 70 + prompt / 150, BEST, [256], optional=True),
        )
    ),
    Piece("peer unique fp8", 110, PEER, "fp8", sizes=([64] * 3 + [256], 512, 1024), optional=True),
]

# ---- the update -----------------------------------------------------------------------------------------------------

SHARED_LAYERS = 18  # a group of 8 with a prompt of 8,192 does not fit at 36


def _update(
    name: str, seconds: float, state: str, variants: list[str], precision: str = "fp8", optional: bool = False
) -> Piece:
    options = (f"--precision={precision}", f"--state={state}", "--variants", *variants)
    return Piece(name, seconds, "bench_update.py", "", options, optional=optional)


def _foreign(kernels: str, seconds: float, *attention: str) -> Piece:
    options = ("--rounds=2", "--attention", *attention)
    return Piece(f"foreign {kernels}", seconds, "foreign_update.py", kernels, options)


SHARED = "2048+1024x8", "8192+1024x8"
UPDATES = [
    _update("update", 50, "bf16", ["lean", "lean nonexact"]),
    _update("update that trains", 45, "fp32-8bit", ["lean"]),
    _foreign("liger", 65, "sdpa", "cudnn", "fa4"),
    _foreign("compile", 115, "cudnn", "fa4"),  # torch's own choice is cuDNN's or an older FlashAttention
    Piece("whole fp8 kv8", 60, "bench_step.py", BEST, ("--only=whole",)),
    Piece("whole bf16 before", 80, BEFORE, "bf16", ("--only=whole",)),
    Piece("peer whole bf16", 88, PEER, "bf16", sizes=([64], 512, 4096), group=8),
    Piece("shared prompts", 75, "bench_shared.py", "", (
        "--cases", *SHARED, f"--layers={SHARED_LAYERS}", "--no-cosine", "--micro-tokens=16391",
    )),
    # a difference of 1 %: one after the other, on one machine
    Piece("whole exact", 60, "bench_step.py", BEST, ("--only=whole",), optional=True),
    Piece("whole nonexact", 65, "bench_step.py", f"{BEST} nonexact", ("--only=whole",), optional=True),
    _update("update bf16", 45, "bf16", ["head"], "bf16", optional=True),
]
assert all(work.switches[0] == PLAIN for work in WORKS.values())
