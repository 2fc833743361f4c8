"""What a user sees while kernels are compiled."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jetrl.run.compiling.display import Compiling


def shown(terminal: bool, fails: bool = False) -> str:
    file, now = io.StringIO(), iter(range(0, 1000, 6))
    console = Console(file=file, force_terminal=terminal, width=80)
    display = Compiling(16, console=console, clock=lambda: float(next(now)))
    with display:
        for done in range(5):
            display.progress(done, 41, ["DeepGEMM fp8_gemm_nt", "Triton norm_kernel", "Triton rope_kernel"])
        display.message("one of them failed")
        if fails:
            raise KeyboardInterrupt
    return file.getvalue()


def test_a_few_lines_in_a_log() -> None:
    assert shown(False).splitlines() == [
        "compiling kernels in 16 processes, kept on disk for the next run", "  compiling kernels: 1 of 41",
        "  compiling kernels: 3 of 41", "one of them failed", "compiled 4 of 41 kernels in 36 s",
    ]


def test_one_changing_line_on_a_terminal() -> None:
    text = shown(True)
    assert "compiling kernels: 4 of 41" in text and "DeepGEMM, Triton" in text and "compiled 4 of 41 kernels" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor must come back"


def test_an_interrupted_phase_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        shown(False, fails=True)
    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Compiling(1, console=Console(file=file)):
        raise KeyboardInterrupt
    assert "in 1 process," in file.getvalue() and "interrupted: 0 of 0 kernels" in file.getvalue()
