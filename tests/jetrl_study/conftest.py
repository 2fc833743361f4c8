"""A tiny study, and runs that end in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import ARMS
from tiny import tiny_config

from jetrl.config import load_config, resolve, to_toml
from jetrl.run.loop import StopRequest, run
from jetrl_study import conduct as conducting
from jetrl_study.jobs import Ended, Halt, Job
from jetrl_study.plan import Study, load_study


@pytest.fixture
def tiny(tmp_path: Path) -> Study:
    config = tiny_config(tmp_path, {"train.steps": 2, "eval.eval_interval": 1, "checkpoint.save_interval": 1})
    (tmp_path / "tiny.toml").write_text(to_toml(config))
    (tmp_path / "study.toml").write_text(ARMS)
    return load_study(tmp_path / "study.toml")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run in this process, one after the other; gives the list of what has run."""
    ran: list[str] = []

    def run_here(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        for job in jobs:
            config = resolve(load_config(job.arguments[1]), cuda_available=False)
            ran.append(job.name)
            on_poll([job.name], [])
            run(config, Path(config.output_dir) / config.name, ["test"], StopRequest())
            on_end(Ended(job, 0, False, 1.0))

    monkeypatch.setattr(conducting, "run_jobs", run_here)
    return ran
