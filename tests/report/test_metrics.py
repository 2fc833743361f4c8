"""The table of metrics: all that runs log is in it, all that it names is logged, and the page and the report say it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_conversations import changes as conversation
from test_tool_runs import changes as tools
from tiny import tiny_run

from jetrl.config.keys import keys
from jetrl.engine.speculation.sources import SOURCES
from jetrl.presets import PRESETS
from jetrl.report.html import write_report
from jetrl.report.metrics import GROUPS, METRICS, describe_metrics, metric_of, title_of
from jetrl.report.recorder import Recorder, read_metrics
from jetrl.rewards.results import OWN_METRICS, OWN_OF_FUNCTION
from jetrl.rl.mismatch import BY_POSITION
from jetrl_study.collect import _NOT_TRAINING, SERIES

ROOT = Path(__file__).parents[2]
NAMES = {metric.name for metric in METRICS}
ANYTHING = {"reward/NAME", "reward/FUNCTION/KEY"}  # a user's own; what jetrl itself logs has a name of its own
OWN = {"reward/right/size", "reward/digits"}  # of the reward functions below
# Means that become something else before a row is written: `over_terms`, `explained_variance`, `with_sample_size`.
WITHIN_AN_UPDATE = {
    "policy/frac_in_terms", "policy/frac_ratio_beyond", "critic/return_square_mean", "critic/error_square_mean",
    "correction/weight_square_mean",
}
OLD = {"time/total"}  # of runs of before, which the report reads


def test_the_page_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "METRICS.md").read_text(encoding="utf-8")
    assert page == describe_metrics(), "run: python -m jetrl.report.metrics > docs/METRICS.md"


def test_every_metric_says_what_it_is_once() -> None:
    assert len(NAMES) == len(METRICS) > 100
    titles = [metric.title for metric in METRICS]
    assert len(set(titles)) == len(titles)
    for metric in METRICS:
        assert metric.meaning.endswith(".") and metric.title and metric.title[0].isupper(), metric
        assert not metric.healthy or metric.healthy.endswith("."), metric
    assert all(group.about.endswith(".") for group in GROUPS)


def test_settings_that_the_table_names_exist() -> None:
    named = {
        name for metric in METRICS for text in (metric.meaning, metric.healthy)
        for name in re.findall(r"`([a-z]+\.[a-z_]+)\b", text) if name != "report.html"
    }
    assert len(named) > 20 and named <= keys().keys(), named - keys().keys()


@pytest.mark.parametrize("key, name", [
    ("reward/mean", "reward/mean"), ("reward/right/mean", "reward/FUNCTION/mean"), ("reward/right/acc",
                                                                                   "reward/FUNCTION/KEY"),
    ("reward/length", "reward/NAME"), ("eval/addition/avg@1", "eval/TASK/avg@K"),
    ("eval/addition/right/avg@16", "eval/TASK/FUNCTION/avg@K"), ("eval/addition/pass@2", "eval/TASK/pass@K"),
    ("eval/addition/num_failed", "eval/TASK/num_failed"),
    (f"{BY_POSITION}64", "parity/abs_diff_from_token_N"), ("rollout/draft_acceptance", "rollout/draft_acceptance"),
    ("rollout/draft_acceptance_own", "rollout/draft_acceptance_SOURCE"), ("vllm/k_scale_max", "vllm/PART_scale_max"),
    ("in_eval/perf/graph_captures", "in_eval/METRIC"), ("time/warm start", "time/warm start"),
])
def test_a_name_in_a_row_is_found_in_the_table(key: str, name: str) -> None:
    found = metric_of(key)
    assert found is not None and found.name == name


def test_what_is_not_known_has_its_name_as_title() -> None:
    assert metric_of("mine/speed") is None and title_of("mine/speed") == "mine/speed"
    assert metric_of(f"{BY_POSITION}many") is None and metric_of("eval/addition/avg@k") is None
    assert title_of("policy/entropy") == "Entropy"


# ---- runs log what the table names ----------------------------------------------------------------------------------

PREFIXES = {name.partition("/")[0] for name in NAMES}
REWARDS = """
def right(completions, answer, log_metric=None, **_):
    log_metric("digits", float(sum(map(len, completions))))
    return [{"score": len(set(c) & set(a)) / len(set(a)), "size": len(c)} for c, a in zip(completions, answer)]


def short(completions, **_):
    return [-len(c) / 10 for c in completions]


def some(completions, answer, **_):
    return [None if int(a) % 2 and "#" not in c else float(len(c)) for c, a in zip(completions, answer)]
"""
EXPERTS: dict[str, Any] = {
    "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 6, "model.arch.num_experts_per_tok": 2,
    "model.arch.moe_intermediate_size": 72, "precision": "fp8_rollout",
    "train.router_aux_loss_coef": 0.01, "train.router_z_loss_coef": 0.001, "train.compare_routing": True,
}
CORRECTED = {
    "precision": "fp8_rollout", "rl.rollout_is": "token", "rl.rollout_rs": "geometric", "rl.rollout_veto": 1e-4,
    "rl.updates_per_step": 2, "rl.clip_ratio_c": 3.0, "rl.kl_coef": 0.1, "rl.overlong_buffer_len": 4,
}
SUPERVISED: dict[str, Any] = {
    "method": "sft", "rollout": {}, "task.reward": None, "task.max_prompt_length": None, "train.max_length": 64,
    "train.batch_size": 4, "train.steps": 2,
}
# Made on a GPU, by several ranks or with vLLM: where, and the text that makes it.
ELSEWHERE = {
    "perf/compile_s": ("run/compiling/ahead.py", '"perf/compile_s"'),
    "perf/graph_captures": ("engine/runner.py", '"perf/graph_captures"'),
    "perf/graph_capture_s": ("engine/runner.py", '"perf/graph_capture_s"'),
    "perf/kv_cache_kept_gib": ("engine/runner.py", '"perf/kv_cache_kept_gib"'),
    "perf/communication_s": ("parallel/measures.py", '"perf/communication_s"'),
    "perf/memory_peak_gib_max": ("parallel/measures.py", '"perf/memory_peak_gib_max"'),
    "perf/memory_peak_gib_mean": ("parallel/measures.py", '"perf/memory_peak_gib_mean"'),
    "perf/rank_idle_max_s": ("rollout/rollout.py", '"perf/rank_idle_max_s"'),
    "perf/rank_idle_mean_s": ("rollout/rollout.py", '"perf/rank_idle_mean_s"'),
    "perf/slowest_rank_share": ("rollout/rollout.py", '"perf/slowest_rank_share"'),
    **{f"perf/vllm_{what}_s": ("vllm/engine.py", f'_timed("{what}")')
       for what in ("sync", "check", "wake", "sleep", "calibrate")},
    "vllm/PART_scale_max": ("vllm/scales.py", 'f"vllm/{part}_scale_max"'),
    "vllm/kv_scale_tokens": ("vllm/scales.py", '"vllm/kv_scale_tokens"'),
}


def two_teachers(folder: Path, other: Path) -> dict[str, Any]:
    """Changes for rows of which half have a teacher of their own."""
    folder.mkdir()
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "kind": "ab"[i % 2]} for i in range(10, 30)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task.name": "file", "task.params": None, "task.train_file": str(folder / "sums.jsonl"),
        "teacher.column": "kind", "teacher.values": ["b"], "teacher.paths": [str(other)],
    }


def runs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, changes) of tiny runs that make all metrics which one process on a CPU can make."""
    (folder / "more.py").write_text(REWARDS)
    several = [f"{folder}/more.py:{name}" for name in ("right", "short")]
    for algo in PRESETS:
        more = {"ppo": {"rl.critic_lr": 1e-3}, "distill": {
            "teacher.path": str(folder / "grpo" / "runs" / "grpo"), "teacher.top_k": 2, "teacher.given_fraction": 0.25,
            "rollout.max_response_length": 32,
        }}
        yield algo, {"rl.algo": algo, "train.steps": 1} | more.get(algo, {})
    yield "corrected", CORRECTED | {"task.reward": several, "task.reward_weights": [1.0, 0.5]}
    yield "unscored", {"task.reward": f"{folder}/more.py:some", "task.reward_calls": "group"}
    yield "kl", {"rl.kl_coef": 0.1, "rl.kl_in": "reward", "rl.kl_estimator": "k1"}
    yield "experts", EXPERTS | {"rl.dynamic_sampling": "refill"}
    yield "calibrated", {"rl.clip": "calibrated", "rl.updates_per_step": 2, "train.steps": 2}
    yield "carried", {"rollout.overcommit": 0.5, "rl.rollout_is": "token", "train.steps": 2}
    yield "drafts", {"rollout.speculate": "on", "train.share_prompts": True, "train.steps": 2}
    yield "warm", {"sft.steps": 2, "sft.batch_size": 4, "task.reward": None, "sft.cache_dir": str(folder / "sft"),
                   "rollout.max_response_length": 24, "train.steps": 1}
    yield "sft", SUPERVISED
    trained = folder / "grpo" / "runs" / "grpo"
    of_two = two_teachers(folder / "two", trained)
    yield "teachers", {"rl.algo": "distill", "teacher.path": str(trained), "train.steps": 1} | of_two
    yield "tools", tools(folder / "t", eval__eval_interval=1, task__num_eval=2)
    yield "turns", conversation(folder / "c", {"fail": "some"}, eval__eval_interval=1, train__steps=2)


@pytest.mark.slow
def test_what_runs_log_is_what_the_table_names(tmp_path: Path) -> None:
    """Both ways: no row has a metric that the table lacks, and no metric of the table is in no row."""
    found: dict[str, str] = {}
    for name, changes in runs(tmp_path):
        for row in read_metrics(tiny_run(tmp_path / name, {"name": name} | changes, name=name)):
            for key in row.keys() - {"step"}:
                metric = metric_of(key)
                assert metric is not None, f"{name}: {key} is not in jetrl/report/metrics.py"
                assert metric.name not in ANYTHING or key in OWN, f"{name}: {key} has no name of its own"
                found[metric.name] = key
    for name, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / "jetrl" / file).read_text(encoding="utf-8"), name
    assert NAMES - found.keys() == ELSEWHERE.keys(), NAMES - found.keys() ^ ELSEWHERE.keys()


def texts_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_name_that_the_code_writes_is_in_the_table() -> None:
    """Names in full, anywhere in the package and in the study: a GPU's too."""
    files = [*(ROOT / "jetrl").rglob("*.py"), *(ROOT / "jetrl_study").rglob("*.py")]
    whole = re.compile(rf"(?:{'|'.join(sorted(PREFIXES - {'data'}))})/[a-z0-9_]*[a-z0-9]")
    written = {text: path for path in files for text in texts_of(path) if whole.fullmatch(text)}
    unknown = {text: str(path) for text, path in written.items() if text not in NAMES | WITHIN_AN_UPDATE | OLD}
    assert len(written) > 60 and not unknown, unknown


def test_every_phase_that_is_timed_is_in_the_table() -> None:
    phases = {
        node.args[0].value for path in (ROOT / "jetrl" / "run").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "clock" and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert phases | {"step"} == {name.removeprefix("time/") for name in NAMES if name.startswith("time/")}


def test_names_that_other_places_list_are_in_the_table() -> None:
    own = {name.removeprefix("reward/") for name in NAMES if re.fullmatch(r"reward/[a-z_]+", name)}
    assert own == OWN_METRICS
    of_function = {name.removeprefix("reward/FUNCTION/") for name in NAMES if name.startswith("reward/FUNCTION/")}
    assert of_function - {"KEY"} == OWN_OF_FUNCTION
    assert {*SERIES, *_NOT_TRAINING} <= NAMES
    sources = re.findall(r"`(\w+)` \(", next(m.meaning for m in METRICS if m.name.endswith("_SOURCE")))
    assert tuple(sources) == SOURCES


# ---- the report says it ---------------------------------------------------------------------------------------------


def test_the_report_says_what_its_metrics_are(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(1, {"reward/mean": 0.5, "policy/entropy": 1.0, "mine/speed": 3.0, "eval/addition/avg@1": 0.5})
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    shown = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert shown
    about = json.loads(shown[1])["metrics"]
    assert set(about) == {"reward/mean", "policy/entropy", "eval/addition/avg@1"}, "an engine's own is not explained"
    assert about["policy/entropy"]["unit"] == "nats per token" and about["policy/entropy"]["title"] == "Entropy"
    assert not [text for one in about.values() for text in one.values() if "`" in text]


def test_the_page_script_names_metrics_of_the_table() -> None:
    script = (ROOT / "jetrl" / "report" / "page.js").read_text(encoding="utf-8")
    named = set(re.findall(r'"([a-z_]+/[a-z_]+)"', script))
    assert len(named) > 10 and named <= NAMES, named - NAMES
