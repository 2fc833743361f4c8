"""What must be equal to resume a run: differences are named, the spelling of a path is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, tiny_run

from jetrl import moved
from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config.paths import absolute_paths
from jetrl.errors import UserError
from jetrl.report.recorder import read_metrics
from jetrl.run.checkpoint import resume
from jetrl.run.checkpoint.checkpoint import Meta
from jetrl.run.loop import StopRequest, run


def told(there: Any, here: Any, **meta: Any) -> str:
    """The message of a checkpoint written under `there` for a run under `here`; empty if it is resumed."""
    settings = json.loads(json.dumps([resume.settings(there), resume.paths(absolute_paths(there))]))
    found = Meta(1, 1, "flow", settings[0], settings[1])
    try:
        resume.check(Path("/nowhere/checkpoints/step_000001"), found, here, absolute_paths(here), "flow")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train.lr": 1e-4}, "train.lr = 0.003 there, 0.0001 here"),
        ({"seed": 5}, "seed = 0 there, 5 here"),
        ({"num_threads": 2}, "num_threads = 1 there, 2 here"),
        ({"name": "other"}, 'name = "tiny" there, "other" here'),
        ({"train.warmup_steps": 2}, "train.warmup_steps = "),
        ({"rl.algo": "dr_grpo"}, 'rl.algo = "grpo" there, "dr_grpo" here'),
        ({"model.arch.hidden_size": 48}, "model.arch.hidden_size = 40 there, 48 here"),
        ({"model.arch.attention_bias": True}, 'model.arch.attention_bias = "none" there, true here'),
        ({"task.params": {"digits": [3]}}, "task.params.digits = [2] there, [3] here"),
        ({"task.reward": "jetrl.rewards.text:exact_match"}, '"jetrl.rewards.text:exact_match" here'),
        ({"rollout.stop": ["x"]}, 'rollout.stop = [] there, ["x"] here'),
        ({"train.offload_optimizer": True}, "train.offload_optimizer = false there, true here"),
        ({"train.lr_schedule": "linear"}, 'train.lr_schedule = "constant" there, "linear" here'),
    ],
    ids=str,
)
def test_each_difference_is_named_with_both_values(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    message = told(tiny_config(tmp_path), tiny_config(tmp_path, changes))
    assert line in message and "written by a run with other settings" in message, message


@pytest.mark.parametrize(
    "changes",
    [
        {"train.steps": 9}, {"train.steps": 2}, {"eval.eval_interval": 0}, {"checkpoint.save_interval": 7},
        {"checkpoint.resume": "auto"}, {"track.backends": ["tensorboard"]}, {"output_dir": "elsewhere"},
    ],
    ids=str,
)
def test_what_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert told(tiny_config(tmp_path), tiny_config(tmp_path, changes)) == ""


@pytest.mark.parametrize(
    "reward",
    ["jetrl.rewards.text:last_integer", ["jetrl.rewards.text:exact_match", "jetrl.rewards.text:last_integer"]],
    ids=["one", "several"],
)
def test_names_that_an_earlier_version_wrote_are_no_difference(tmp_path: Path, reward: Any) -> None:
    config = tiny_config(tmp_path, {"task.reward": reward})
    task = config.task.model_copy(update={"reward": moved.first(config.task.reward)})
    before = config.model_copy(update={"task": task})
    assert "jetrl.tasks.rewards:last_integer" in json.dumps(resume.settings(before))
    assert told(before, config) == ""
    other = tiny_config(tmp_path, {"task.reward": "jetrl.rewards.gsm8k:gsm8k_reward"})
    assert '"jetrl.rewards.gsm8k:gsm8k_reward" here' in told(before, other)


def test_some_settings_are_free_or_not_beside_others(tmp_path: Path) -> None:
    vllm = tiny_config(tmp_path, {"rollout.engine": "vllm"})
    free = {"rollout.engine": "vllm", "vllm.sleep": False, "vllm.check_weights": True}
    assert told(vllm, tiny_config(tmp_path, free)) == ""
    assert "vllm.kv_cache = " in told(vllm, tiny_config(tmp_path, {"rollout.engine": "vllm", "vllm.kv_cache": "fp8"}))
    bf16 = {"train.master_dtype": "bfloat16"}
    assert told(tiny_config(tmp_path, bf16), tiny_config(tmp_path, bf16 | {"train.offload_optimizer": True})) == ""
    linear = {"train.lr_schedule": "linear"}
    longer = told(tiny_config(tmp_path, linear), tiny_config(tmp_path, linear | {"train.steps": 9}))
    assert "train.steps = 4 there, 9 here" in longer
    warm = {"sft.steps": 3, "sft.cache_dir": "a"}
    assert told(tiny_config(tmp_path, warm), tiny_config(tmp_path, warm | {"sft.cache_dir": "b"})) == ""
    more = told(tiny_config(tmp_path, warm), tiny_config(tmp_path, warm | {"sft.steps": 4}))
    assert "sft.steps = 3 there, 4 here" in more


def test_the_spelling_of_a_path_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "data.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    data = {"task.name": "file", "task.params": {}}
    spellings = ["data.jsonl", f"{tmp_path}/data.jsonl", "./data.jsonl", "other/../data.jsonl"]
    configs = [tiny_config(tmp_path, data | {"task.train_file": text}) for text in spellings]
    assert all(told(there, here) == "" for there in configs for here in configs)
    (tmp_path / "more.jsonl").write_text("")
    message = told(configs[0], tiny_config(tmp_path, data | {"task.train_file": "more.jsonl"}))
    assert 'task.train_file = "data.jsonl" there, "more.jsonl" here' in message


def test_another_flow_alone_is_told(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    meta = Meta(1, 1, "flow", resume.settings(config), {})
    with pytest.raises(UserError, match="the flow of the model: flow there, other here"):
        resume.check(tmp_path, meta, config, absolute_paths(config), "other")


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, {"train.steps": 4})
    meta = Meta(5, 5, "flow", resume.settings(config), {})
    with pytest.raises(UserError, match="is at step 5, beyond train.steps = 4. Raise train.steps"):
        resume.check(tmp_path, meta, config, absolute_paths(config), "flow")


def test_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {"train.steps": 2})
    file = run_dir / "checkpoints" / "step_000002" / "state.json"
    record = json.loads(file.read_text())
    del record["settings"], record["paths"]
    file.write_text(json.dumps(record | {"config_digest": "f680466ea48b892f"}))
    with pytest.raises(UserError, match="older version of jetrl and cannot be resumed. Start a new run"):
        tiny_run(tmp_path, {"checkpoint.resume": "auto"})


def test_whether_problems_are_held_out_counts(tmp_path: Path) -> None:
    """Evaluation may change, unless that changes which rows of a file are trained on."""
    (tmp_path / "data.jsonl").write_text("")
    data = {"task.name": "file", "task.params": {}, "task.train_file": str(tmp_path / "data.jsonl")}
    on, off = tiny_config(tmp_path, data), tiny_config(tmp_path, data | {"eval.eval_interval": 0})
    assert "holds problems out" in told(on, off) and told(on, on) == told(off, off) == ""


def test_another_content_of_a_data_file_is_refused_unless_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "task": {"name": "file", "train_file": str(file), "reward": f"{tmp_path}/reward.py:reward", "num_eval": 2,
                 "max_prompt_length": 16},
        "train.steps": 1, "checkpoint.save_interval": 1,
    }
    run_dir = tiny_run(tmp_path, changes)
    more = changes | {"train.steps": 2, "checkpoint.resume": "auto"}
    text = file.read_text()
    file.write_text(text.replace('"prompt": "3+1="', '"prompt": "3+2="'))
    with pytest.raises(UserError, match=rf"task.train_file \({file}\): the content has changed since .*step_000001"):
        tiny_run(tmp_path, more)
    tiny_run(tmp_path, more | {"checkpoint.allow_changed_data": True})
    tiny_run(tmp_path, more | {"train.steps": 3})  # the new content is the run's now
    file.write_text(text)
    with pytest.raises(UserError, match="Put the file back, or continue with the new one: checkpoint.allow_changed"):
        tiny_run(tmp_path, more | {"train.steps": 4})
    told = " ".join(capsys.readouterr().out.split())
    assert f"continues after step 2 of 3, from {run_dir}/checkpoints/step_000002" in told, told


def test_an_edited_chat_template_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    folder, template = tmp_path / "tokenizer", "{% for m in messages %}1{{ m.content }}{% endfor %}"
    changes = {"model.tokenizer": str(folder), "train.steps": 1, "checkpoint.save_interval": 1,
               "task.params": {"digits": [2], "style": "compact"}, "eval.eval_interval": 0,
               "task.max_prompt_length": 40}
    tokenizer = arithmetic_tokenizer()
    for step, text in enumerate((template, template.replace("1", "2"))):
        tokenizer.chat_template = text
        tokenizer.save_pretrained(str(folder))
        if not step:
            tiny_run(tmp_path, changes)
    more = changes | {"train.steps": 2, "checkpoint.resume": "auto"}
    with pytest.raises(UserError, match=rf"tokenizer \({folder}\): the content has changed .* with other tokens"):
        tiny_run(tmp_path, more)
    tiny_run(tmp_path, more | {"checkpoint.allow_changed_data": True})


def test_an_emptied_metrics_file_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    changes = {"train.steps": 2, "checkpoint.save_interval": 1}
    run_dir = tiny_run(tmp_path, changes)
    (run_dir / "metrics.jsonl").write_bytes(b"")
    more = changes | {"train.steps": 3, "checkpoint.resume": "auto"}
    with pytest.warns(UserWarning, match="lacks the rows of steps 0, 1, 2 before the checkpoint of step 2"):
        tiny_run(tmp_path, more)
    assert [row["step"] for row in read_metrics(run_dir)] == [3]


def test_a_run_that_goes_on_in_another_folder_lacks_no_rows(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Now, and when it is resumed there itself; rows that are lost there are missed."""
    first = tiny_run(tmp_path, {"train.steps": 1, "checkpoint.save_interval": 1})
    changes = {"checkpoint.save_interval": 1, "output_dir": str(tmp_path / "there")}
    there = tmp_path / "there" / "tiny"
    for steps, source in ((3, str(first)), (4, "auto")):
        config = tiny_config(tmp_path, changes | {"train.steps": steps, "checkpoint.resume": source})
        assert run(config, there, ["test"], StopRequest())
    assert [row["step"] for row in read_metrics(there)] == [2, 3, 4]
    assert not [w for w in recwarn if "lacks the rows" in str(w.message)]
    lines = (there / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (there / "metrics.jsonl").write_bytes(b"".join(lines[1:]))
    with pytest.warns(UserWarning, match="lacks the rows of steps 2 before"):
        assert run(tiny_config(tmp_path, changes | {"train.steps": 5, "checkpoint.resume": "auto"}), there, [],
                   StopRequest())
