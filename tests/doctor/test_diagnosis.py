"""The verdict, the exit status, the page and the JSON; and what a failing GPU means for the CPU."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import Cli
from test_cli import jetrl as jetrl

from jetrl import __version__
from jetrl.doctor import diagnosis, gpu, libraries, machine, show, trial
from jetrl.doctor.diagnosis import Diagnosis
from jetrl.doctor.finding import Finding
from jetrl.kernels import dispatch
from jetrl.parity.certificate import Certificate
from jetrl.parity.rows import LinkResult

GOOD = LinkResult("a", "one = the other", 7, 0, 0.0, 0.1, None)
WRONG = replace(GOOD, link="c", rows_different=2, max_abs_diff=0.5, first_difference="sequence 1, position 3")


def tried(device: str = "cpu", asked: str = "auto", *links: LinkResult, failure: str | None = None) -> trial.Trial:
    certificate = Certificate("fp8", "bf16", device, "a random Qwen3", 9, links or (GOOD,)) if not failure else None
    return trial.Trial(asked, device, certificate, failure, 1.5)


def page(found: Diagnosis) -> str:
    console = Console(width=80, file=io.StringIO(), soft_wrap=True)
    show.show(found, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("findings", "trials", "ok", "devices"),
    [
        ((), (tried(),), True, ("cpu",)),
        ((), (tried("cuda"),), True, ("cuda",)),
        ((), (tried("cuda", failure="broken"), tried("cpu", "cpu")), True, ("cpu",)),
        ((("GPU", "bad"),), (tried("cuda", failure="broken"), tried("cpu", "cpu")), True, ("cpu",)),
        ((("GPU", "bad"),), (tried("cuda", failure="broken"), tried("cpu", "cpu", WRONG)), False, ()),
        ((("Disk", "bad"),), (tried(),), False, ("cpu",)),
        ((("Disk", "note"), ("Extras", "note")), (tried(),), True, ("cpu",)),
        ((("Packages", "bad"),), (), False, ()),
    ],
)
def test_when_a_machine_can_train(
    findings: tuple[tuple[str, Any], ...], trials: tuple[trial.Trial, ...], ok: bool, devices: tuple[str, ...]
) -> None:
    found = Diagnosis(tuple(Finding(section, "x", "y", level, "do z") for section, level in findings), trials)
    assert (found.ok, found.devices) == (ok, devices)
    assert found.to_do() == (("do z",) if any(level == "bad" for _, level in findings) else ())
    assert found.to_json()["ok"] is ok and json.loads(json.dumps(found.to_json()))["devices"] == list(devices)


def test_the_page_says_what_to_do() -> None:
    finding = Finding("GPU", "triton", "3.7.1 (needs ==3.6.*)", "bad", 'pip install "jetrl[hopper]"')
    long = Finding("GPU", "cuda:0", "a GPU " * 30)
    trials = (tried("cuda", failure="the hopper kernels cannot run here: [brackets]"), tried("cpu", "cpu"))
    text = page(Diagnosis((finding, finding, long, *map(diagnosis._verdict, trials)), trials))
    assert max(map(len, text.splitlines())) <= 80
    assert 'with device = "cpu"; "auto" takes the GPU and stops. To do:' in " ".join(text.split())
    assert "[brackets]" in text
    assert text.rstrip().endswith('-> pip install "jetrl[hopper]"')
    assert text.split("To do:")[1].count("pip install") == 1, "each once"
    good = page(Diagnosis((), (tried("cuda"),)))
    assert 'This machine can train on the GPU; device = "auto" takes it.' in good
    assert "cannot train" in page(Diagnosis((replace(finding, section="Packages"),), ()))


def test_a_certificate_that_differs_is_reported() -> None:
    finding = diagnosis._verdict(tried("cuda", "auto", GOOD, WRONG))
    assert finding.level == "bad" and "DIFFERENT in link c: sequence 1, position 3" in finding.found
    assert "14 rows" in diagnosis._verdict(tried("cuda", "auto", GOOD, GOOD)).found


def test_a_gpu_that_fails_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` ends with the very message of a run; the CPU is tried by its own name."""
    real = trial.load_for_parity

    def loaded(model: str, precision: str, device: str) -> object:
        if device == "auto":
            dispatch.load_backend.cache_clear()
            dispatch.select("hopper")
        return real(model, precision, device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(trial, "load_for_parity", loaded)
    first, second = trial.trials()
    assert (first.asked, first.device, first.ok) == ("auto", "cuda", False) and first.certificate is None
    assert (first.failure or "").startswith("the hopper kernels cannot run here: they need compute capability 9.0")
    assert (second.asked, second.device, second.ok) == ("cpu", "cpu", True)


def test_a_broken_library_does_not_stop_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Finding("Packages", "torch", "2.13.0, but its import fails: OSError: libgomp.so.1", "bad", "again")
    monkeypatch.setattr(libraries, "needed", lambda: [failed])
    monkeypatch.setattr(libraries, "import_error", lambda module: "OSError" if module == "torch" else None)
    monkeypatch.setattr(gpu, "examine", lambda: pytest.fail("needs torch"))
    found = diagnosis.examine(lambda text: None)
    assert not found.ok and found.to_do() == ("again",) and found.trials == () and "libgomp" in page(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this compiles kernels; tests/gpu certify there")
def test_the_command(jetrl: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, out, err = jetrl("doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["ok"] and found["devices"] == ["cpu"] and found["auto"] == "cpu", err
    assert found["jetrl"] == __version__ and found["certificates"][0]["bit_equal"]
    assert {f["section"] for f in found["findings"]} >= {"This machine", "Packages", "GPU", "Disk"}
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
    monkeypatch.setattr(machine, "LEAST_MEMORY", 2**60)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = jetrl("doctor")
    assert status == 1 and "This machine cannot train yet. To do:" in out and "free memory" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
