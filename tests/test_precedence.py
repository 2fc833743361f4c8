"""What gives way to what, and what is never refused: over all rules, all keys, all shipped recipes (no training)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from jetrl.config import Config, load_config, parse_config, sections, to_toml
from jetrl.config.base import Section
from jetrl.config.keys import changes_no_bit, keys, marked
from jetrl.config.load import digest
from jetrl.config.markers import NoEffectWhile, PartOf
from jetrl.config.shipped import shipped
from jetrl.config.task import LONG
from jetrl.config.toml import read_toml, set_override, toml_literal
from jetrl.errors import UserError
from jetrl.parity.model_under_test import _chosen, config_for
from jetrl.presets import OWN, PRESETS

FILE: dict[str, Any] = {"name": "file", "train_file": "t.jsonl"}
BASE: dict[str, Any] = {"name": "x", "model": {"path": "folder"}, "task": {"name": "addition"}}
ARCH: dict[str, Any] = {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"}
OF: dict[str, dict[str, Any]] = {"distill": {"teacher": {"path": "folder"}}}  # what an algorithm cannot do without

SECTIONS: list[type[Section]] = [Config, *sections().values()]

# Configs that between them switch every rule off, and every other check into its other branch.
BASES: dict[str, dict[str, Any]] = {
    "plain": BASE,
    **{algo: {**BASE, **OF.get(algo, {}), "rl": {"algo": algo}} for algo in PRESETS},
    **{f"{algo}, off-policy": {**BASE, **OF.get(algo, {}), "rl": {"algo": algo, "updates_per_step": 2}}
       for algo in PRESETS},
    "teacher and rewards": {**BASE, "teacher": {"path": "folder"}},
    "own estimator": {**BASE, "rl": {"adv_estimator": "mine.py:f"}},
    **{precision: {**BASE, "precision": precision} for precision in ("bf16", "fp8_rollout", "w8a16")},
    "row": {**BASE, "quant": {"wgrad": "row"}},
    "random": {**BASE, "model": ARCH},
    "vllm": {**BASE, "rollout": {"engine": "vllm"}},
    "vllm, fp8": {**BASE, "rollout": {"engine": "vllm"}, "vllm": {"kv_cache": "fp8"}},
    "own engine": {**BASE, "rollout": {"engine": "mine.py:Engine"}},
    "drafts": {**BASE, "rollout": {"speculate": "auto"}},
    "conversations": {**BASE, "environment": {"name": "calculator"}},
    "environment": {**BASE, "task": {"name": "environment"}, "environment": {"name": "retry"}},
    "group of one": {**BASE, "rl": {"algo": "ppo"}, "rollout": {"group_size": 1}},
    "shared critic": {**BASE, "rl": {"algo": "ppo", "critic": "shared"}},
    "no std": {**BASE, "rl": {"norm_adv_by_std": False}},
    "drop": {**BASE, "rl": {"dynamic_sampling": "drop"}},
    "masked": {**BASE, "rl": {"mask_truncated": True}},
    "no chat": {**BASE, "task": {"name": "addition", "chat_template": False}},
    "file": {**BASE, "task": FILE},
    "file, template": {**BASE, "task": {**FILE, "prompt_template": "{x}"}},
    "file, both": {**BASE, "task": {**FILE, "eval_file": "e.jsonl", "eval_prompt_template": "{x}"}},
    "data set": {**BASE, "task": {"name": "file", "dataset": "a/b"}},
    "data sets": {**BASE, "task": {"name": "file", "dataset": "a/b", "eval_dataset": "c/d", "eval_split": "test"}},
    **{name: {**BASE, "task": {"name": name}} for name in ("gym", *LONG)},
    "bfloat16": {**BASE, "train": {"master_dtype": "bfloat16", "grad_dtype": "bfloat16", "optimizer_dtype": "8bit"}},
    "one step": {**BASE, "train": {"steps": 1}, "sft": {"steps": 1}, "eval": {"temperature": 1.0, "num_samples": 2}},
    "tensorboard": {**BASE, "track": {"backends": ["tensorboard"]}},
    "nothing saved": {**BASE, "checkpoint": {"save_interval": 0}},
}


def all_fields() -> Iterator[tuple[str, Any]]:
    """(full key, field) of every setting."""
    for section in SECTIONS:
        for key, field in section.model_fields.items():
            if section is not Config or key not in sections():
                yield section.full_key(key), field


FIELDS = dict(all_fields())
RULES = [(key.full, rule) for key in keys().values() for rule in key.all(NoEffectWhile)]


def example(off: Any) -> Any:
    """A value that switches off: where every function of the user's does, one of them."""
    return "mine.py:f" if off is OWN else off


PAIRS = sorted({(rule.switch, example(value), key) for key, rule in RULES for value in rule.off}, key=str)


def merged(data: dict[str, Any], **dotted: Any) -> dict[str, Any]:
    """A deep copy of `data` with values at dotted keys; None becomes TOML's "none"."""
    copied = {k: merged(v) if isinstance(v, dict) else v for k, v in data.items()}
    for key, value in dotted.items():
        set_override(copied, key, "none" if value is None else value)
    return copied


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def another(key: str) -> Any:
    """A valid value of the key that is not its default."""
    default, annotation = FIELDS[key].get_default(call_default_factory=True), FIELDS[key].annotation
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for member in members:
        member = get_args(member)[0] if get_origin(member) is Annotated else member
        if get_origin(member) is Literal:
            return next(value for value in get_args(member) if value != default)
        if member is bool:
            return not default
        if member is float:
            if key == "rl.clip_ratio_c" or not isinstance(default, float) or default == 0:
                return 3.0 if key == "rl.clip_ratio_c" else 0.5
            return default / 2 if default <= 1 else default * 2
        if member is int:
            return 3 if default is None else default + 1 if default < 7 else default - 1
        if member is str:
            return "other"
        if get_origin(member) is dict:
            return {"a": 1}
        if get_origin(member) is tuple and get_origin(get_args(member)[0]) is Literal:
            return [next(value for value in get_args(get_args(member)[0]) if value not in default)]
        if get_origin(member) is tuple:
            return [1.0] if get_args(member)[0] is float else ["a"]
    raise AssertionError(f"no value for {key}")


def in_file(data: dict[str, Any], path: Path) -> Path:
    """`data` as a recipe."""
    rows = [f"{k} = {toml_literal(v)}" for k, v in data.items() if not isinstance(v, dict)]
    for name, table in data.items():
        if isinstance(table, dict):
            rows += [f"[{name}]", *(f"{k} = {toml_literal(v)}" for k, v in table.items())]
    path.write_text("\n".join(rows))
    return path


def with_switch(switch: str, value: Any) -> dict[str, Any]:
    """A recipe in which the switch can have this value."""
    base = BASE
    if switch in ("model.path", "model.tokenizer") and value is None:
        base = BASE if switch == "model.tokenizer" else {**BASE, "model": ARCH}
    if switch in ("task.dataset", "task.eval_dataset"):
        base = {**BASE, "task": FILE}
    if switch == "rl.critic":
        base = {**BASE, "rl": {"adv_estimator": "gae"}}
    if (switch, value) == ("task.name", "environment"):
        base = {**BASE, "environment": {"name": "retry"}}
    if (switch, value) == ("rl.adv_estimator", "teacher"):
        base = {**BASE, **OF["distill"]}
    return base


# ---- what is never refused ------------------------------------------------------------------------------------------


def test_the_bases_switch_every_rule_off() -> None:
    found = [parse_config(base) for base in BASES.values()]
    for _, rule in RULES:
        for value in rule.off:
            assert any(value_of(config, rule.switch) == value for config in found), (rule, value)


@pytest.mark.parametrize("name", BASES)
def test_the_value_that_a_key_has_anyway_is_never_refused(name: str, tmp_path: Path) -> None:
    """From a script, a recipe, the command line, a run's folder: for every key, whatever is switched off."""
    base = BASES[name]
    plain = parse_config(base)
    path = in_file(base, tmp_path / "r.toml")
    notes: list[str] = []
    for key in FIELDS:
        value = value_of(plain, key)
        told = list(value) if isinstance(value, tuple) else value
        if value is None and key.split(".")[0] == "model":
            continue
        assert parse_config(merged(base, **{key: told})) == plain, key
        if not isinstance(value, dict):
            assert load_config(path, [f"{key}={toml_literal(told)}"], notes.append) == plain, key
    everything = merged(base, **{
        key: list(value) if isinstance(value := value_of(plain, key), tuple) else value for key in FIELDS
        if value_of(plain, key) is not None
    })
    assert parse_config(everything) == plain
    assert load_config(in_file(everything, tmp_path / "all.toml"), (), notes.append) == plain and notes == []
    assert load_config(in_file(everything, tmp_path / "all.toml"), ["precision=bf16", "rl.kl_coef=0"]).rl == plain.rl


@pytest.mark.parametrize(("switch", "off", "key"), PAIRS, ids=str)
def test_every_rule_with_its_key_at_the_default_is_accepted(switch: str, off: Any, key: str) -> None:
    base = merged(with_switch(switch, off), **{switch: off})
    default = FIELDS[key].get_default(call_default_factory=True)
    told = list(default) if isinstance(default, tuple) else default
    assert parse_config(merged(base, **{key: told})) == parse_config(base)


@pytest.mark.parametrize(("precision", "kv_cache"), [("bf16", "bf16"), ("fp8_rollout", "bf16"), ("fp8", "fp8"),
    ("w8a16", "fp8")])
def test_parity_and_load_model_take_the_cache_that_a_precision_has(precision: str, kv_cache: str) -> None:
    data, formats = _chosen(None, "", precision, kv_cache)
    config = config_for({"model": ARCH} | data, "cpu")
    assert (config.precision, config.quant.kv_cache) == (precision, kv_cache) and f"{kv_cache} (as asked)" in formats
    with pytest.raises(UserError, match='quant.kv_cache: has no effect while precision = "bf16"'):
        config_for({"model": ARCH} | _chosen(None, "", "bf16", "fp8")[0], "cpu")


# ---- what gives way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "off", "key"),
    [pair for pair in PAIRS if (pair[0], pair[2]) not in (
        ("rollout.engine", "vllm.kv_scale_tokens"), ("precision", "rl.clip"),
        ("rollout.overcommit", "environment.reply_tokens"))],  # they need another key, too
    ids=str)
def test_what_depends_on_a_switch_gives_way_to_it(switch: str, off: Any, key: str, tmp_path: Path) -> None:
    """Stated in the file: dropped with a note, whether the switch is edited there or given on the line. On one line:
    dropped with a note if it changes no bit, else refused. In a config that a script makes: refused."""
    base, value = with_switch(switch, off), another(key)
    literal = toml_literal("none" if off is None else off)
    plain = parse_config(merged(base, **{switch: off}))
    notes: list[str] = []

    path = in_file(merged(base, **{key: value}), tmp_path / "r.toml")
    config = load_config(path, [f"{switch}={literal}"], notes.append)
    assert config == plain and digest(config) == digest(plain)
    assert re.match(rf"dropped {re.escape(key)}\b.* \(from the recipe\): no effect with \S+ = ", notes[0]), notes

    edited = in_file(merged(base, **{key: value, switch: off}), tmp_path / "edited.toml")
    assert load_config(edited, (), notes.append) == plain and len(notes) >= 2
    given = in_file(base, tmp_path / "base.toml"), [f"{switch}={literal}", f"{key}={toml_literal(value)}"], notes.append
    if changes_no_bit(key):
        notes.clear()
        assert load_config(*given) == load_config(*given[:2]) == plain
        assert re.match(rf"dropped {re.escape(key)}\b.* \(from the overrides\): no effect with \S+ = ", notes[0]), notes
    else:
        with pytest.raises(UserError, match=rf"{re.escape(key)}: has no effect while \S+ = "):
            load_config(*given)
    with pytest.raises(UserError, match=rf"{re.escape(key)}: has no effect while \S+ = "):
        parse_config(merged(base, **{switch: off, key: value}))


@pytest.mark.parametrize(
    ("recipe", "overrides", "dropped", "expected"),
    [
        ("gsm8k_qwen3_0.6b", "task.train_file=F task.dataset=none", "task.eval_split task.dataset_config",
         {"task.train_file": "F", "task.dataset": None, "task.eval_split": None}),
        ("gsm8k_qwen3_0.6b", "task.train_file=F", "task.dataset task.eval_split task.dataset_config",
         {"task.train_file": "F", "task.dataset": None}),
        ("gsm8k_qwen3_0.6b", "task.eval_file=F", "task.eval_split", {"task.eval_file": "F"}),
        ("gsm8k_qwen3_0.6b", "task.dataset=my/data", "task.dataset_config", {"task.eval_split": "test"}),
        ("gsm8k_qwen3_0.6b", "checkpoint.save_interval=0", "checkpoint.keep", {"checkpoint.keep": 2}),
        ("dapo_qwen3_8b", "task.eval_file=F", "task.eval_dataset task.eval_split", {"task.eval_dataset": None}),
        ("dapo_qwen3_8b", "task.eval_split=none", "task.eval_dataset", {"task.eval_dataset": None}),
        ("dapo_qwen3_8b", "rollout.max_response_length=1024", "rl.overlong_buffer_len",
         {"rl.overlong_buffer_len": 204}),
        ("dapo_qwen3_8b", "eval.temperature=0", "eval.num_samples", {"eval.num_samples": 1}),
        ("quickstart", "sft.steps=5", "sft.warmup_steps", {"sft.warmup_steps": 0}),
        ("quickstart", "train.steps=1", "train.warmup_steps", {"train.warmup_steps": 0}),
        ("quickstart", "model.path=F", "model.arch model.tokenizer", {"model.path": "F", "model.tokenizer": None}),
        ("quickstart", "model.path=F model.tokenizer=T", "model.arch", {"model.tokenizer": "T"}),
    ],
)
def test_what_an_override_makes_void_is_dropped_with_a_note(
    recipe: str, overrides: str, dropped: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_config(shipped()[recipe], overrides.split())
    told = capsys.readouterr().err.splitlines()
    assert [re.match(r"dropped (\S+).* \(from the recipe\): \S", line)[1] for line in told] == dropped.split()  # type: ignore[index]
    assert {key: value_of(config, key) for key in expected} == expected
    assert "got" not in "".join(told) and ";" not in "".join(told)


def test_the_note_reads_as_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = in_file(merged(BASE, **{"checkpoint.save_interval": 0, "checkpoint.keep": 3}), tmp_path / "copy.toml")
    assert load_config(path).checkpoint.keep == 2
    told = "dropped checkpoint.keep = 3 (from the recipe): no effect with checkpoint.save_interval = 0\n"
    assert capsys.readouterr() == ("", told)
    load_config(shipped()["quickstart"], ["model.path=F"])
    assert capsys.readouterr().err.splitlines()[0] == 'dropped model.arch (from the recipe): model.path = "F" is given'


def test_one_line_may_say_where_things_go_that_it_switches_off(tmp_path: Path) -> None:
    """As scripts do, and programs in `overrides`; what would compute something else is still a contradiction."""
    notes: list[str] = []
    both = ["sft.steps=0", "sft.cache_dir=/x", "checkpoint.save_interval=0", "checkpoint.keep=5",
            "rollout.speculate=off", "rollout.max_draft_tokens=7"]
    for overrides in (both, both[::-1]):
        config = load_config(shipped()["quickstart"], overrides, notes.append)
        assert config == load_config(shipped()["quickstart"], both[::2], lambda note: None)
    assert 'dropped sft.cache_dir = "/x" (from the overrides): no effect with sft.steps = 0' in notes
    with pytest.raises(UserError, match='quant.kv_cache: has no effect while precision = "bf16"'):
        load_config(shipped()["quickstart"], ["precision=bf16", "quant.kv_cache=fp8"])


def test_other_ranks_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    load_config(shipped()["quickstart"], ["train.steps=1"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("data", "overrides", "words"),
    [
        ({"rl.kl_estimator": "k2"}, (), "rl.kl_estimator: has no effect while rl.kl_coef = 0"),  # forgotten
        ({"environment.max_turns": 3}, (), "environment.max_turns: has no effect while environment.name"),
        ({"vllm.sleep": False}, (), "vllm.sleep: has no effect while rollout.engine"),
        ({"train.warmup_steps": 9, "train.steps": 5}, (), "train.warmup_steps: must be at most train.steps = 5"),
        ({"model.arch": {"a": 1}, "model.tokenizer": "t"}, (), "both are set"),
        ({}, ("train.warmup_steps=9", "train.steps=5"), "train.warmup_steps: must be at most train.steps = 5"),
        ({"train.steps": 5}, ("train.warmup_steps=9",), "train.warmup_steps: must be at most train.steps = 5"),
        ({"rl.kl_coef": 0}, ("rl.kl_estimator=k2",), "rl.kl_estimator: has no effect while rl.kl_coef = 0"),
        ({}, ("model.path=F", "model.arch.a=1", "model.tokenizer=t"), "both are set"),
        ({"rl.algo": "rloo", "rl.kl_coef": 0.1}, ("rl.kl_in=loss",),
         'rl.kl_estimator: "k1" (of rl.algo = "rloo") needs rl.kl_in = "reward"'),
        ({"train.steps": 5, "train.warmup_steps": 3}, ("train.steps=2", "train.lr=-1"), "train.lr: must be above 0"),
    ],
)
def test_what_nobody_switched_off_or_one_place_asks_for_twice_is_refused(
    data: dict[str, Any], overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_config(in_file(merged(BASE, **data), tmp_path / "r.toml"), overrides)
    assert words in str(caught.value)


def test_a_refusal_says_what_was_dropped_before(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'model\.tokenizer: is needed(.|\n)*\(dropped model\.path = "folder"'):
        load_config(in_file(BASE, tmp_path / "r.toml"), ["model.arch.a=1"])


@pytest.mark.parametrize(
    ("data", "override", "dropped"),
    [
        ({"task": {**FILE, "eval_file": "e"}}, "task.dataset=a/b", ["task.train_file"]),
        ({"task": {**FILE, "eval_file": "e"}}, "task.eval_split=x", []),  # refused: there is no data set
        ({"task": {**FILE, "eval_file": "e", "eval_answer_column": "a"}}, "task.eval_file=none",
         ["task.eval_answer_column"]),
        ({"task": {**FILE, "prompt_column": "q"}}, "task.prompt_template={x}", ["task.prompt_column"]),
        ({"task": {"name": "addition", "reward": ["a:b", "c:d"], "reward_weights": [1.0, 2.0]}}, "task.reward=e:f",
         ["task.reward_weights"]),
        ({"model": {"path": "a/b", "revision": "v1"}}, "model.path=c/d", ["model.revision"]),
        ({"model": {"path": "a/b", "revision": "v1"}}, "model.path=a/b", []),
        ({"train": {"optimizer_dtype": "8bit"}}, "train.offload_optimizer=true", ["train.optimizer_dtype"]),
        ({"rollout": {"kv_cache_tokens": 600}}, "rollout.max_response_length=200", ["rollout.kv_cache_tokens"]),
        ({"rollout": {"page_size": 1024}}, "task.max_prompt_length=10", ["rollout.page_size"]),
        ({"rl": {"updates_per_step": 4, "clip_ratio_c": 3.0}}, "rollout.prompts_per_step=2",
         ["rl.updates_per_step", "rl.clip_ratio_c"]),
        ({"rl": {"algo": "ppo", "critic_warmup_steps": 5}}, "train.steps=5", ["rl.critic_warmup_steps"]),
        ({"rl": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}}, "rl.kl_in=loss", ["rl.kl_estimator"]),
        ({"environment": {"name": "retry"}, "vllm": {"sleep": False}, "rollout": {"engine": "vllm"}},
         "rollout.engine=mine.py:E", ["vllm.sleep"]),
    ],
)
def test_sources_columns_and_sums_give_way_too(
    data: dict[str, Any], override: str, dropped: list[str], tmp_path: Path
) -> None:
    path, notes = in_file({**BASE, **data}, tmp_path / "r.toml"), list[str]()
    if not dropped and "eval_split" in override:
        with pytest.raises(UserError, match="task.eval_split: "):
            load_config(path, [override])
        return
    config = load_config(path, [override], notes.append)
    assert [note.split()[1] for note in notes] == dropped
    assert config == load_config(in_file(read_toml(path) | {}, tmp_path / "s.toml"), [override], notes.append)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml", (), pytest.fail) == config


def test_what_names_a_part_of_something_else_is_a_setting() -> None:
    assert {key for part, mark in marked(PartOf).items() for key in (part, mark.whole)} <= FIELDS.keys()


# ---- every shipped recipe with common changes -----------------------------------------------------------------------

COMMON = """
train.steps=1 train.steps=3 train.lr=1e-5 train.lr_schedule=constant train.lr_schedule=linear train.optimizer_dtype=8bit
train.optimizer_dtype=float32 train.offload_optimizer=true train.offload_optimizer=false train.master_dtype=float32
train.master_dtype=bfloat16 train.reduction=fixed train.reduction=fast sft.steps=0 sft.steps=5 precision=bf16
precision=fp8 precision=fp8_rollout quant.kv_cache=bf16 device=cpu seed=1 output_dir=x name=y num_threads=1
model.path=F task.train_file=F task.dataset=D/E task.eval_file=F task.name=addition task.name=gym task.name=chain
task.reward=m.py:f task.reward=none task.chat_template=false task.num_eval=8 task.max_prompt_length=16
task.overlong_prompts=error rollout.prompts_per_step=1 rollout.prompts_per_step=2 rollout.group_size=2
rollout.max_response_length=8 rollout.max_response_length=16 rollout.temperature=0.5 rollout.speculate=off
rollout.speculate=auto environment.name=none environment.name=retry rl.algo=grpo rl.algo=dr_grpo rl.algo=dapo
rl.algo=gspo rl.algo=cispo rl.algo=rloo rl.algo=reinforce_pp rl.algo=ppo rl.kl_coef=0 rl.kl_coef=0.01
rl.updates_per_step=1 rl.updates_per_step=4 rl.dynamic_sampling=off rl.dynamic_sampling=refill rl.adv_estimator=gae
rl.mask_truncated=true rl.rollout_is=token rl.rollout_is=none rl.overlong_buffer_len=0 eval.eval_interval=0
eval.temperature=0 eval.temperature=0.6 eval.num_samples=1 checkpoint.save_interval=0 checkpoint.keep=5
checkpoint.resume=auto track.backends=["wandb"]
""".split()
# What belongs to another kind of task, or to a feature that the recipe does not have, and is refused there by its name.
NEEDS_TASK_FILE = {"task.train_file=F", "task.dataset=D/E", "task.eval_file=F"}


@pytest.mark.parametrize("recipe", shipped())
def test_shipped_recipes_take_common_changes(recipe: str) -> None:
    path = shipped()[recipe]
    for override in COMMON:
        try:
            load_config(path, [override], lambda note: None)
        except UserError as error:
            if override == "rl.adv_estimator=gae" and load_config(path).lora.rank is not None:
                assert "does not go with a critic of its own" in str(error)
                continue
            if load_config(path).supervised and 'has no effect while method = "sft"' in str(error):
                continue  # a key of RL
            if recipe == "distill_quickstart" and override == "rl.dynamic_sampling=refill":
                continue  # groups are chosen by rewards, which a distillation does not learn from
            assert override in NEEDS_TASK_FILE and load_config(path).task.name != "file", f"{override}: {error}"
            assert f"{override.partition('=')[0]}: has no effect while task.name = " in str(error)


@pytest.mark.parametrize("recipe", shipped())
def test_a_switch_edited_in_a_copied_recipe_drops_what_depends_on_it(recipe: str, tmp_path: Path) -> None:
    """Every rule whose switch can be edited in the recipe without more ado: the copy is the recipe with an override."""
    data = read_toml(shipped()[recipe])
    for switch, offs in sorted({(rule.switch, rule.off) for _, rule in RULES}, key=str):
        for off in map(example, offs):
            if switch.startswith("model.") or switch in ("task.dataset", "task.name", "teacher.path") or (
                off in ("vllm", "teacher")
            ):
                continue  # those need another key in their place
            edited = in_file(merged(data, **{switch: off}), tmp_path / "copy.toml")
            override = f"{switch}={toml_literal('none' if off is None else off)}"
            try:
                config = load_config(shipped()[recipe], [override], lambda note: None)
            except UserError as error:  # the switch itself depends on another one, which is off
                assert f": {switch}: has no effect while " in str(error)
                continue
            assert load_config(edited, (), lambda note: None) == config


def test_every_rule_names_settings() -> None:
    assert all(key in FIELDS for whose, rule in RULES for key in (whose, rule.switch, *rule.instead))
    checked = [(section.full_key(key), rule) for section in SECTIONS for key, rule in section.rules()]
    assert sorted(checked, key=str) == sorted(RULES, key=str), "each is checked by one section"
