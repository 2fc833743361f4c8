"""The warm start: it learns, every flow finds the same cached weights, and what determines them names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny import tiny_config
from tolerances import assert_bitwise_equal

from jetrl.errors import UserError
from jetrl.huggingface.read import save_model
from jetrl.model.weights import checksum, published
from jetrl.run import sft
from jetrl.run.setup import Session, build
from jetrl.run.sft import cache_path, made_of, starts_from, warm_start
from jetrl.train.trainer import NonFiniteError

SFT = {"sft.steps": 6, "sft.batch_size": 8, "sft.lr": 5e-3}


def session_of(folder: Path, changes: dict[str, Any]) -> Session:
    threads = torch.get_num_threads()
    session = build(tiny_config(folder, SFT | {"sft.cache_dir": str(folder / "cache")} | changes))
    torch.set_num_threads(threads)
    return session


def path_of(session: Session) -> Path:
    return cache_path(session.config, session.model, session.task, session.tokenizer)


def train(session: Session, told: list[str] | None = None) -> tuple[Path, list[float]]:
    losses: list[float] = []
    made = warm_start(
        session.model, session.config, session.task, session.tokenizer, lambda step, loss: losses.append(loss),
        (told if told is not None else []).append,
    )
    return made, losses


def test_it_learns_and_the_second_time_it_is_cached(tmp_path: Path) -> None:
    told: list[str] = []
    first = session_of(tmp_path, {})
    path, losses = train(first, told)
    assert len(losses) == 6 and losses[-1] < 0.85 * losses[0]
    assert len(told) == 1
    assert told[0].startswith("no warm start in the cache for this model, tokenizer, task, seed and [sft]")
    told.clear()
    second = session_of(tmp_path, {})
    again, nothing = train(second, told)
    assert again == path and nothing == [] and told == [f"warm start loaded from {path}"]
    assert checksum(published(second.model)) == checksum(published(first.model))
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a temporary file is left"


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    session, losses = session_of(tmp_path, {"sft.cache_dir": str(tmp_path / where)}), list[float]()
    with pytest.raises(UserError, match=f"cannot be saved in sft.cache_dir = .*/{where}: .*Set sft.cache_dir to a "):
        warm_start(
            session.model, session.config, session.task, session.tokenizer, lambda _, loss: losses.append(loss), print
        )
    assert losses == []


def test_all_flows_start_from_the_same_weights_and_one_cache(tmp_path: Path) -> None:
    sessions = {p: session_of(tmp_path, {"precision": p}) for p in ("bf16", "fp8", "fp8_rollout")}
    results = {p: train(s) for p, s in sessions.items()}
    assert len({path for path, _ in results.values()}) == 1, "each flow trains a warm start of its own"
    assert [len(losses) for _, losses in results.values()] == [6, 0, 0]
    reference = sessions["bf16"].model.state_dict()
    for session in sessions.values():
        for name, value in session.model.state_dict().items():
            assert_bitwise_equal(value, reference[name], name)


def test_micro_batches_do_not_change_the_loss(tmp_path: Path) -> None:
    whole = train(session_of(tmp_path / "a", {"sft.steps": 1}))[1]
    parts = train(session_of(tmp_path / "b", {"sft.steps": 1, "train.max_tokens_per_gpu": 40}))[1]
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"sft.steps": 7}, {"sft.lr": 1e-3}, {"seed": 1}, {"model.init_seed": 1}, {"task.params.digits": [3]},
     {"sft.batch_size": 9}, {"train.max_grad_norm": 0.5}],
    ids=str,
)
def test_what_determines_the_weights_names_the_file(tmp_path: Path, change: dict[str, Any]) -> None:
    paths = [path_of(s) for s in (session_of(tmp_path, {}), session_of(tmp_path, change))]
    assert paths[0] != paths[1]


@pytest.mark.parametrize("change", [
    {"seed": 1}, {"model.init_seed": 1}, {"model.arch.num_hidden_layers": 1}, {"train.master_dtype": "bfloat16"},
    {"num_threads": 3}, {"rollout.stop": ["7"]}, {"task.params.digits": [3]}, {"task.num_eval": 5}, {"sft.lr": 1e-3},
    {"sft.cache_dir": "elsewhere"}, {"train.weight_decay": 0.1}, {"train.adam_betas": [0.9, 0.99]},
    {"train.adam_eps": 1e-7}, {"train.max_grad_norm": 0.5}, {"train.max_tokens_per_gpu": 99}, {"train.lr": 1e-4},
    {"precision": "bf16"}, {"rollout.group_size": 2}, {"eval.eval_interval": 0}, {"task.reward_calls": "group"},
    {"train.reduction": "fixed"}, {"task.reward_weights": [0.5]},
], ids=str)
def test_the_settings_that_a_study_compares_are_those_that_name_the_file(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """jetrl_study.plan refuses arms by these settings, before there are weights to hash."""
    names, settings = set(), []
    threads = torch.get_num_threads()
    for changes in ({}, change):
        config = tiny_config(tmp_path, SFT | changes)
        session = build(config)
        names.add(path_of(session).name)
        settings.append(made_of(config) | starts_from(config))
        torch.set_num_threads(threads)
    assert (len(names) == 2) == (settings[0] != settings[1])


def test_the_content_of_a_data_file_names_the_file_too(tmp_path: Path) -> None:
    data, paths = tmp_path / "t.jsonl", []
    change = {"task.name": "file", "task.train_file": str(data), "task.reward": "jetrl.rewards.gsm8k:gsm8k_reward",
              "eval.eval_interval": 0, "task.params": {}}
    for solution in ("12", "11"):
        rows = [f'{{"prompt": "{i}+1=", "answer": "{solution}", "solution": "{solution}"}}' for i in range(8)]
        data.write_text("\n".join(rows) + "\n")
        session = session_of(tmp_path, change)
        paths.append(path_of(session))
    assert paths[0] != paths[1]


def test_the_content_of_an_evaluation_file_names_the_file_too(tmp_path: Path) -> None:
    data, held_out, paths = tmp_path / "t.jsonl", tmp_path / "e.jsonl", []
    change = {"task.name": "file", "task.train_file": str(data), "task.eval_file": str(held_out), "task.params": {},
              "task.reward": "jetrl.rewards.gsm8k:gsm8k_reward", "task.num_eval": 4}
    rows = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}", "solution": "{i + 1}"}}' for i in range(9)]
    data.write_text("\n".join(rows) + "\n")
    for first in (0, 2):
        held_out.write_text("\n".join(rows[first : first + 4]) + "\n")
        session = session_of(tmp_path, change)
        paths.append(path_of(session))
    assert paths[0] != paths[1]


ENDED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE = ENDED + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def before_and_after(folder: Path, change: Callable[[Path, Any], None]) -> list[str]:
    """The names of the warm starts of a model, tokenizer and data in folders, before and after a change in them."""
    model, tokenizer = folder / "m", byte_tokenizer(TEMPLATE)
    session = session_of(folder, {"model.arch.vocab_size": 260})
    save_model(model, session.model.spec, session.model.state_dict(), generation_config={"eos_token_id": [256, 258]})
    (folder / "data").mkdir()
    rows = [{"prompt": f"q{i}", "answer": "1", "solution": "A1"} for i in range(8)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save_pretrained(str(model))
    given = {
        "model.arch": None, "model.tokenizer": None, "model.path": str(model), "task.name": "file",
        "task.dataset": str(folder / "data"), "task.num_eval": 2, "task.max_prompt_length": 48,
        "task.params": {"check_gold": False}, "sft.num_examples": 2, "sft.batch_size": 2,
    }
    names = [path_of(session_of(folder, given)).name]
    change(folder, tokenizer)
    return [*names, path_of(session_of(folder, given)).name]


def edited(**changes: Any) -> Callable[[Path, Any], None]:
    def change(folder: Path, tokenizer: Any) -> None:
        for key, value in changes.items():
            setattr(tokenizer, key, value)
        tokenizer.save_pretrained(str(folder / "m"))

    return change


def json_edited(file: str, **changes: Any) -> Callable[[Path, Any], None]:
    def change(folder: Path, _: Any) -> None:
        held = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(held | changes))

    return change


def other_row(folder: Path, _: Any) -> None:
    """A row that the first batch does not have."""
    file = folder / "data" / "train.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line.replace("A1", "A2") for line in lines[:8]) + "\n")


FOLDERS = {
    "same": (edited(), True), "template": (edited(chat_template=TEMPLATE.replace("\n", " ")), False),
    "eos": (edited(eos_token="<|end|>"), False), "later rows": (other_row, False),
    "stops": (json_edited("m/generation_config.json", eos_token_id=[258]), False),
    "template of later messages": (
        edited(chat_template="{% if messages | length > 1 %}x{% endif %}" + TEMPLATE), False),
    "vocabulary": (lambda folder, _: byte_tokenizer(TEMPLATE, ["new"]).save_pretrained(str(folder / "m")), False),
    "sampling": (json_edited("m/generation_config.json", temperature=0.5), True),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_folders_hold_names_the_file_not_what_they_are_called(tmp_path: Path, name: str) -> None:
    """Same paths, other content: a warm start of the old content would be loaded without a word."""
    pytest.importorskip("datasets")
    change, same = FOLDERS[name]
    before, after = before_and_after(tmp_path, change)
    assert (before == after) == same


def test_what_does_not_determine_them_does_not(tmp_path: Path) -> None:
    plain = session_of(tmp_path, {})
    for change in (
        {"task.num_eval": 5}, {"train.steps": 9}, {"rollout.group_size": 2}, {"train.lr": 1e-6}, {"rl.kl_coef": 0.5},
    ):
        other = session_of(tmp_path, change)
        assert path_of(other) == path_of(plain), change


def test_problems_without_worked_solutions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(9)))
    changes = {
        "task.name": "file", "task.train_file": str(tmp_path / "data.jsonl"), "task.params": None,
        "task.reward": "jetrl.rewards.text:exact_match",
    }
    with pytest.raises(UserError, match="needs worked solutions"):
        train(session_of(tmp_path, changes))


@pytest.mark.parametrize(
    ("fails_at", "advice"),
    [(1, r"the weights themselves .* those of model.arch \(random\)\.$"), (3, "Lower sft.lr")],
)
def test_numbers_that_are_not_finite_stop_it_and_the_first_ones_are_no_learning_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, advice: str
) -> None:
    step, calls = sft.optimizer_step, []

    def broken(*args: Any, **options: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == fails_at:
            raise NonFiniteError("loss inf, gradient norm nan")
        return step(*args, **options)

    monkeypatch.setattr(sft, "optimizer_step", broken)
    with pytest.raises(UserError, match=f"stops at step {fails_at}: loss inf, gradient norm nan. .*{advice}"):
        train(session_of(tmp_path, {}))


@pytest.mark.parametrize(
    ("changes", "names_it"),
    [({}, True), ({"eval.eval_interval": 0}, False), ({"task.eval_file": "{}/held.jsonl"}, False)], ids=str,
)
def test_the_number_of_held_out_problems_names_the_file_where_it_takes_rows_from_training(
    tmp_path: Path, changes: dict[str, Any], names_it: bool
) -> None:
    """And only there: elsewhere the warm start's examples are the same."""
    for file, first in (("train", 0), ("held", 50)):
        row = '{{"prompt": "{0}+1=", "answer": "{1}", "solution": "{1}"}}\n'
        (tmp_path / f"{file}.jsonl").write_text("".join(row.format(i, i + 1) for i in range(first, first + 20)))
    given = {
        "task.name": "file", "task.train_file": str(tmp_path / "train.jsonl"), "task.params": {},
        "task.reward": "jetrl.rewards.gsm8k:gsm8k_reward",
    } | {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
    sessions = [session_of(tmp_path, given | {"task.num_eval": count}) for count in (4, 8)]
    examples = [{session.task.problem(i).prompt for i in range(40)} for session in sessions]
    assert (examples[0] != examples[1]) == names_it
    paths = [path_of(session) for session in sessions]
    assert (paths[0] != paths[1]) == names_it


def test_all_tokens_of_the_first_batch_name_the_file(tmp_path: Path) -> None:
    """As lists: the text of an array is cut where it is long, and changes with numpy's settings."""
    session = session_of(tmp_path, {})
    content = sft._content(session.config, session.task, session.tokenizer, session.model.spec.vocab_size)
    first = json.loads(json.dumps(content["first batch"]))  # no default: nothing in it is an object
    assert len(first) == 8 and all(type(t) is int for one in first for _, tokens in one for t in tokens)
