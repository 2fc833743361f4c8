"""Recipes are read strictly, mistakes are explained, and a config survives the way to TOML and back."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from jetrl.config.base import Section
from jetrl.config.docs import describe_config
from jetrl.config.errors import describe_type
from jetrl.config.load import digest, load_config, parse_config, resolve, sections, to_toml
from jetrl.config.peers import peer_name, peers
from jetrl.config.rl import RLConfig
from jetrl.config.sections import Config, QuantConfig
from jetrl.config.shipped import find_recipe, shipped
from jetrl.config.syntax import explain_syntax
from jetrl.config.toml import set_override, split_override, toml_literal
from jetrl.errors import UserError
from jetrl.presets import PRESETS

ROOT = Path(__file__).parents[1]
BASE: dict[str, Any] = {"name": "x", "model": {"path": "folder"}, "task": {"name": "addition"}}
OF: dict[str, dict[str, Any]] = {"distill": {"teacher": {"path": "folder"}}}  # what an algorithm cannot do without
RECIPE = 'name = "x"\n[model]\npath = "folder"\n[task]\nname = "addition"\n'


def all_keys() -> set[str]:
    nested = {f"{name}.{key}" for name, section in sections().items() for key in section.model_fields}
    return nested | (set(Config.model_fields) - set(sections()))


def message(source: str = "here", /, **tables: Any) -> str:
    """The message for a config with these tables; fails where there is none."""
    with pytest.raises(UserError) as caught:
        parse_config({**BASE, **tables}, source)
    return str(caught.value)


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


# ---- the tree -------------------------------------------------------------------------------------------------------


def test_defaults_and_types() -> None:
    config = parse_config(BASE)
    assert (config.precision, config.device, config.kernels, config.output_dir) == ("fp8", "auto", "auto", "runs")
    assert config.rl.rollout_is == "none" and config.rl.rollout_rs == "none" and config.rl.clip_ratio_c is None
    assert config.train.adam_betas == (0.9, 0.95) and config.rollout.stop == () and config.task.params == {}
    assert parse_config({**BASE, "train": {"lr": 1}}).train.lr == 1.0
    assert parse_config({**BASE, "rollout": {"stop": ["a", "b"]}}).rollout.stop == ("a", "b")


def test_frozen() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_every_key_has_a_description() -> None:
    models: list[type[BaseModel]] = [Config, *sections().values()]
    assert [k for m in models for k, field in m.model_fields.items() if not field.description] == []


def test_every_rule_names_keys_that_exist_and_a_value_that_switches_off() -> None:
    owners: list[type[Section]] = [Config, *sections().values()]
    for section in owners:
        for key, rule in section.rules():
            assert {section.full_key(key), rule.switch} <= set(all_keys()), key
            assert rule.off


def test_no_torch_needed() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from jetrl.config import load_config; "
        "print(load_config(sys.argv[1]).name, 'torch' in [m for m in sys.modules if sys.modules[m]])"
    )
    command = [sys.executable, "-c", program, str(ROOT / "jetrl/recipes/quickstart.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "quickstart False\n", done.stderr


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("rollout", "num_generations", '"num_generations" is TRL\'s name; here it is rollout.group_size'),
        ("rollout", "n", "verl's name; here it is rollout.group_size"),
        ("rl", "beta", "TRL's name; here it is rl.kl_coef"),
        ("rl", "kl-loss-coef", "verl, slime and SkyRL's name; here it is rl.kl_coef"),
        ("rl", "vllm_importance_sampling_cap", "here it is rl.rollout_is and rl.rollout_is_threshold"),
        ("train", "ppo_mini_batch_size", "here it is rl.updates_per_step"),
        ("rollout", "clip_ratio_low", "did you mean rl.clip_ratio_low?"),
        ("train", "temperature", "did you mean rollout.temperature or eval.temperature?"),
        ("rollout", "tempereture", "did you mean rollout.temperature?"),
        ("train", "overlong_bufer_len", "did you mean rl.overlong_buffer_len?"),
        ("checkpoint", "qqq", "its keys are save_interval, keep, background, resume"),
    ],
)
def test_unknown_key(section: str, key: str, hint: str) -> None:
    text = message(**{section: {key: 1}})
    assert text.startswith(f"here: {section}.{key}: unknown key; ") and hint in text


def test_unknown_keys_at_the_top() -> None:
    assert message(lr=1) == "here: lr: unknown key; did you mean train.lr or sft.lr?"
    assert message(precison="fp8") == "here: precison: unknown key; did you mean precision?"
    assert message(rolout={"group_size": 3}) == "here: rolout: unknown section; did you mean [rollout]?"
    foreign = message(actor_rollout_ref={"rollout": {"n": 8}, "actor": {"ppo_epochs": 1}})
    assert "actor_rollout_ref.rollout.n: unknown key" in foreign and "rollout.group_size" in foreign
    assert "actor_rollout_ref.actor.ppo_epochs: unknown key" in foreign and "rl.updates_per_step" in foreign
    assert "the sections are model, quant" in message(zzz={})


def test_types_in_words() -> None:
    assert describe_type(int | None, " >= 1") == 'an integer >= 1 or "none"'
    assert describe_type(tuple[str, ...]) == "a list of strings"


def test_peers_table() -> None:
    for peer in peers():
        assert peer.whose and peer.name and "; " not in peer.answer, peer
        assert peer_name(peer.name.replace("*", "x")) is not None, peer
    own = {key.rpartition(".")[2] for key in all_keys()} - {"batch_size"}
    assert [key for key in own if f".{key}" not in (peer_name(key) or f".{key}")] == []


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"precision": "fp88"},
         'precision: must be "bf16", "fp8", "fp8_rollout" or "w8a16", got "fp88"; did you mean "fp8"?'),
        ({"train": {"lr": "1e-6"}}, 'train.lr: must be a number, got "1e-6"'),
        ({"train": {"steps": True}}, "train.steps: must be an integer, got true"),
        ({"train": {"steps": 1.5}}, "train.steps: must be an integer, got 1.5"),
        ({"train": {"router_z_loss_coef": 1e38}}, "train.router_z_loss_coef: must be at most 1, got 1e+38"),
        ({"train": {"router_aux_loss_coef": 1.5}}, "train.router_aux_loss_coef: must be at most 1, got 1.5"),
        ({"train": {"lr": 0.0}}, "train.lr: must be above 0, got 0.0"),
        ({"train": {"lr": float("nan")}}, "train.lr: must be a finite number, got nan"),
        ({"train": {"adam_betas": [0.9]}}, "train.adam_betas: must be a list of 2 numbers, got [0.9]"),
        ({"train": {"adam_betas": [0.9, 1.0]}}, "train.adam_betas[1]: must be below 1, got 1.0"),
        ({"rollout": {"stop": "a"}}, 'rollout.stop: must be a list of strings, got "a"'),
        ({"rollout": {"stop": ["a", ""]}}, 'rollout.stop[1]: must not be empty, got ""'),
        ({"rollout": {"stop": ["a", 1]}}, "rollout.stop[1]: must be a string, got 1"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature: must be above 0, got 0.0"),
        ({"eval": {"temperature": -1}}, "eval.temperature: must be at least 0, got -1"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p: must be above 0, got 0.0"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p: must be at most 1, got 1.5"),
        ({"rollout": {"kv_cache_tokens": "many"}}, 'must be an integer or "none", got "many"'),
        ({"rl": {"updates_per_step": 2, "clip_ratio_c": 1.0}}, "rl.clip_ratio_c: must be above 1, got 1.0"),
        ({"rl": {"rollout_is": "tokens"}}, '"none", "token" or "sequence", got "tokens"; did you mean "token"?'),
        ({"rl": {"rollout_rs": "token", "rollout_rs_lower": 1.0}}, "rl.rollout_rs_lower: must be below 1, got 1.0"),
        ({"rl": {"rollout_rs": "token", "rollout_rs_lower": "of"}}, 'must be a number or "inverse", got "of"'),
        ({"rl": {"mask_truncated": True, "masked_sequences": "keep"}}, '"drop" or "count", got "keep"'),
        ({"rl": 5}, "rl: is a section, so it must be a table of keys, got 5"),
        ({"task": {"name": "addition", "chat_template": "yes"}}, 'must be true, false or "auto", got "yes"'),
        ({"quant": {"num_first_layers_in_bf16": -1}}, "quant.num_first_layers_in_bf16: must be at least 0, got -1"),
        ({"train": {"master_dtype": "float16"}}, 'must be "float32" or "bfloat16", got "float16"; did you mean'),
        ({"track": {"backends": ["wandbb"]}}, 'track.backends[0]: must be "tensorboard", "wandb"'),
        ({"track": {"backends": ["wandb", "wandb"]}}, "track.backends: names a tracker twice"),
        ({"name": "a/b"}, "name: must be letters, digits"),
        ({"output_dir": ""}, 'output_dir: must not be empty, got ""'),
        ({"task": {}}, 'task.name: is missing; it takes "addition", "file", "gym", "environment", '
                                  '"chain", "sorting", "tracking" or "recurrence"'),
        ({"task": {"name": "addition", "params": {"digits": None}}}, "task.params.digits is None"),
        ({"task": {"name": "addition", "params": {"a": [{1}]}}}, "task.params.a[0] is a set"),
        ({"model": {"arch": {}, "tokenizer": "t"}}, "model.arch: must not be empty"),
    ],
)
def test_bad_value(tables: dict[str, Any], expected: str) -> None:
    text = message(**tables)
    assert expected in text and text.startswith("here: ")


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": {}}, "exactly one of model.path (a folder, or a name on the hub) and model.arch"),
        ({"model": {"path": "a", "arch": {"b": 1}, "tokenizer": "t"}}, "both are set"),
        ({"model": {"arch": {"b": 1}}}, "model.tokenizer: is needed with model.arch"),
        ({"model": {"arch": {"b": 1}, "tokenizer": "t", "revision": "main"}}, "model.revision: has no effect while"),
        ({"task": {"name": "file"}}, "exactly one of task.train_file (a jsonl or parquet file) and task.dataset"),
        ({"task": {"name": "file", "train_file": "a", "dataset": "b/c"}}, "both are set"),
        ({"task": {"name": "addition", "dataset": "b/c"}}, "task.dataset: has no effect while task.name"),
        ({"task": {"name": "file", "train_file": "a", "train_split": "x"}}, "train_split: has no effect while task."),
        ({"task": {"name": "file", "train_file": "a", "eval_split": "x"}}, "eval_split: has no effect without task."),
        ({"task": {"name": "file", "dataset": "b/c", "eval_dataset": "d/e"}}, "eval_split: is needed with task.eva"),
        (
            {"task": {"name": "file", "dataset": "b/c", "eval_split": "x", "eval_file": "y"}},
            "task.eval_split: does not go together with task.eval_file",
        ),
        (
            {"task": {"name": "file", "dataset": "b/c", "prompt_template": "{x}", "prompt_column": "y"}},
            "task.prompt_column: has no effect, because task.prompt_template makes the prompts",
        ),
        (
            {"task": {"name": "file", "dataset": "b/c", "eval_answer_column": "y"}},
            "task.eval_answer_column: has no effect, because problems are held out of the training ones",
        ),
        ({"train": {"steps": 5, "warmup_steps": 6}}, "train.warmup_steps: must be at most train.steps = 5, got 6"),
        (
            {"sft": {"steps": 5, "warmup_steps": 6}},
            "sft.warmup_steps: must be at most sft.steps = 5, got 6; for a short warm start add sft.warmup_steps=0",
        ),
        ({"eval": {"num_samples": 4}}, "eval.num_samples: 4 greedy samples"),
        ({"rollout": {"group_size": 1}}, 'rollout.group_size: rl.adv_estimator = "grpo" needs at least 2'),
        ({"rl": {"updates_per_step": 17}}, "rl.updates_per_step: must be at most rollout.prompts_per_step = 16"),
        ({"rl": {"overlong_buffer_len": 65}}, "must be at most rollout.max_response_length = 64, got 65"),
        ({"train": {"max_tokens_per_gpu": 575}}, "rollout.max_response_length = 576, got 575"),
        ({"rollout": {"kv_cache_tokens": 575}}, "rollout.kv_cache_tokens: must be at least"),
        ({"rollout": {"page_size": 1_000_000}}, "rollout.page_size: must be at most 1024, as the longest sequence has"),
        (
            {"rollout": {"page_size": 2049}, "eval": {"max_response_length": 1536}},
            "at most 2048, as the longest sequence has 2048 tokens (prompt and response); got 2049",
        ),
        (
            {"rollout": {"page_size": 129, "max_response_length": 4}, "task": {"name": "file", "train_file": "a",
             "max_prompt_length": 9}},
            "rollout.page_size: must be at most 128, as the longest sequence has 13 tokens",
        ),
        (
            {"model": {"arch": {"num_hidden_layers": 3}, "tokenizer": "t"},
             "quant": {"num_first_layers_in_bf16": 2, "num_last_layers_in_bf16": 2}},
            "quant.num_first_layers_in_bf16: 4 first and last layers in BF16, but the model has 3",
        ),
    ],
)
def test_contradiction(tables: dict[str, Any], expected: str) -> None:
    assert expected in message(**tables)


def test_columns_without_effect_are_not_written(tmp_path: Path) -> None:
    task = {"name": "file", "dataset": "b/c", "prompt_template": "{x} = ?", "eval_split": "test"}
    config = parse_config(BASE | {"task": task})
    text = to_toml(config)
    assert "prompt_column" not in text and 'train_split = "train"' in text and 'answer_column = "answer"' in text
    (tmp_path / "a.toml").write_text(text)
    assert load_config(tmp_path / "a.toml") == config


def test_at_the_bounds() -> None:
    tables = {"train": {"steps": 5, "warmup_steps": 5, "max_tokens_per_gpu": 576}, "rollout": {"kv_cache_tokens": 576}}
    tables["rollout"]["page_size"] = 1024
    rl = {"updates_per_step": 16, "overlong_buffer_len": 64}
    assert parse_config({**BASE, **tables, "rl": rl}).train.warmup_steps == 5


@pytest.mark.parametrize(
    ("section", "off", "on", "key", "value"),
    [
        ("rl", {}, {"rollout_is": "token"}, "rollout_is_threshold", 3.0),
        ("rl", {"rollout_is": "none"}, {"rollout_is": "sequence"}, "rollout_is_threshold", 3.0),
        ("rl", {}, {"rollout_rs": "geometric"}, "rollout_rs_threshold", 3.0),
        ("rl", {}, {"rollout_rs": "sequence"}, "rollout_rs_lower", 0.0),
        ("rl", {}, {"mask_truncated": True}, "masked_sequences", "count"),
        ("rl", {"norm_adv_by_std": False}, {}, "adv_epsilon", 1e-4),
        ("rl", {"algo": "rloo"}, {"algo": "reinforce_pp"}, "adv_epsilon", 1e-4),
        ("rl", {"kl_coef": 0}, {"kl_coef": 0.1}, "kl_estimator", "k2"),
        ("rl", {}, {"overlong_buffer_len": 8}, "overlong_penalty_factor", 0.5),
        ("rl", {}, {"updates_per_step": 2}, "clip_ratio_low", 0.1),
        ("rl", {}, {"updates_per_step": 2}, "clip_ratio_c", 3.0),
        ("train", {}, {"lr_schedule": "cosine"}, "min_lr_ratio", 0.1),
        ("sft", {}, {"steps": 3}, "lr", 1e-4),
        ("checkpoint", {"save_interval": 0}, {}, "keep", 3),
        ("task", {"name": "addition"}, {"name": "file", "train_file": "t"}, "eval_file", "e.jsonl"),
        ("task", {"name": "addition", "chat_template": False}, {"name": "addition"}, "system_prompt", "Be brief."),
        ("model", {"path": "p"}, {"arch": {"a": 1}, "tokenizer": "t"}, "init_seed", 1),
    ],
)
def test_option_without_effect(section: str, off: dict[str, Any], on: dict[str, Any], key: str, value: Any) -> None:
    text = message(**{section: {**off, key: value}})
    assert text.startswith(f"here: {section}.{key}: has no effect while {section}.")
    config = parse_config({**BASE, section: {**on, key: value}})
    assert getattr(getattr(config, section), key) == value


def test_quantization_has_no_effect_in_bf16() -> None:
    text = message(precision="bf16", quant={"weight_scale": "pow2", "num_last_layers_in_bf16": 1})
    assert text.splitlines() == [
        "here has 2 errors:",
        '  quant.weight_scale: has no effect while precision = "bf16"; change that, or remove this key',
        '  quant.num_last_layers_in_bf16: has no effect while precision = "bf16"; change that, or remove this key',
    ]


def test_only_bf16_layers_and_the_cache_have_an_effect_in_w8a16() -> None:
    quant = {"weight_scale": "pow2", "activation_scale": "pow2", "wgrad": "row"}
    text = message(precision="w8a16", quant=quant)
    off = 'has no effect while precision = "w8a16"; change that, or remove this key'
    assert sorted(text.splitlines()[1:]) == sorted(f"  quant.{key}: {off}" for key in quant)
    kept = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2, "kv_cache": "fp8"}
    assert parse_config({**BASE, "precision": "w8a16", "quant": kept}).quant.kv_cache == "fp8"


def test_kv_cache() -> None:
    assert parse_config(BASE).quant.kv_cache == "bf16"
    assert parse_config({**BASE, "quant": {"kv_cache": "fp8"}}).quant.kv_cache == "fp8"
    text = message(quant={"kv_cache": "fp4"})
    assert text == 'here: quant.kv_cache: must be "bf16" or "fp8", got "fp4"; did you mean "fp8"?'
    text = message(precision="bf16", quant={"kv_cache": "fp8"})
    assert text.startswith('here: quant.kv_cache: has no effect while precision = "bf16"')
    assert peer_name("kv_cache_dtype") == '"kv_cache_dtype" is vLLM and SGLang\'s name; here it is quant.kv_cache'


def test_all_mistakes_at_once() -> None:
    text = message("r.toml", train={"lr": -1, "stepz": 3}, eval={"num_samples": 2}, rl={"kl_estimator": "k4"}, nam="x")
    lines = text.splitlines()
    assert lines[0] == "r.toml has 5 errors:" and len(lines) == 6
    keys = {line.strip().partition(":")[0] for line in lines[1:]}
    assert keys == {"train.lr", "train.stepz", "eval.num_samples", "rl.kl_estimator", "nam"}


def test_missing_parts() -> None:
    with pytest.raises(UserError) as caught:
        parse_config({}, "r.toml")
    assert [line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:]] == ["name", "model", "task"]
    assert "[task] table" in str(caught.value)


# ---- files and overrides --------------------------------------------------------------------------------------------


def test_file_problems(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.toml, line 3: not valid TOML \(Invalid value\): 'path = folder'"):
        load(tmp_path, 'name = "x"\n[model]\npath = folder\n')
    with pytest.raises(UserError, match=r"line 2: not valid TOML \(Cannot overwrite a value\)"):
        load(tmp_path, "seed = 1\nseed = 2\n")
    with pytest.raises(UserError, match="line 1: not valid TOML"):
        load(tmp_path, 'name = "x')
    with pytest.raises(UserError, match=r"recipes\.toml: no such file"):
        load_config(tmp_path / "recipes.toml")
    with pytest.raises(UserError, match=r"is a folder, not a recipe. Did you mean \S*recipe\.toml\?"):
        load_config(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"is a folder, not a recipe. Give a TOML file"):
        load_config(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(RECIPE)
    with pytest.raises(UserError, match=r"Did you mean \S*run/config\.toml\?"):
        load_config(tmp_path / "run")
    (tmp_path / "recipe.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match="not UTF-8 text"):
        load_config(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed = 1\n[train]\n[rl]\n[train]\n", "line 4: .*; [train] is already there, in line 2: '[train]'"),
        ("[train]\nlr = 1\nsteps = 2\nlr = 3", "line 4: .*; train.lr is already there, in line 2: 'lr = 1'"),
        ("[rl]\nlr = 1\n[train]\nlr = 1\n\n'lr' = 2", "line 6: .*; train.lr is already there, in line 4: 'lr = 1'"),
        ("train.lr = 1\n[train]\nsteps = 2", "line 2: .*; [train] is already there, in line 1: 'train.lr = 1'"),
        ("seed = 1\nseed.x = 2", "line 2: .*; seed.x is already there, in line 1: 'seed = 1'"),
        ("[model]\npath = 1\n[model.path]\n", "line 3: .*; [model.path] is already there, in line 2: 'path = 1'"),
        ("a = {b = 1, b = 2}", "line 1: .*'b' is twice between these braces"),
        ("name: x\n", "line 1: .*; this looks like YAML. Recipes are TOML: [model] on a line"),
        ("# mine\nmodel:\n  path: x\n", "line 2: .*; this looks like YAML"),
        ("---\nname: x\n", "line 1: .*; this looks like YAML"),
        ("name = 'x'\n- a\n", "line 2: .*; this looks like YAML"),
        ('{"name": "x"}', "line 1: .*; this looks like JSON"),
        ("# mine\nimport random\n", "line 2: .*; this looks like Python. Recipes are TOML; code is named"),
        ("class Game:\n    pass\n", "line 1: .*; this looks like Python"),
        ("name = first  # run\n", 'line 1: .*; strings need quotes: name = "first"'),
        ("path = C:\\models", "line 1: .*; strings need quotes: path = 'C:\\models'"),
        ("path = ../m", 'line 1: .*; strings need quotes: path = "../m"'),
        ("[task]\nchat_template = True\n", "line 2: .*; write chat_template = true"),
        ("kv = None", 'line 1: .*; write kv = "none"'),
        ("name = “x”", "line 1: .*; it has typographic quotes"),
        ('name = "x', "line 1: .*; a string has no closing quote"),
        ("name =", "line 1: .*; there is no value after the ="),
        ("lr = .5", "line 1: not valid TOML (Invalid value): 'lr = .5'$"),
        ("lr = [1", "line 1: not valid TOML (Unclosed array): 'lr = [1'$"),
        ("", ": the file is empty. `jetrl recipes quickstart > "), ("# nothing\n\n", ": the file is empty"),
    ],
)
def test_what_is_no_toml_is_told_by_its_kind(tmp_path: Path, text: str, expected: str) -> None:
    """`config/syntax.py`; `.*` in `expected` stands for anything, the rest for itself."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    pattern = re.escape(expected).replace(r"\.\*", ".*").replace(r"\$", "$")
    assert re.search(pattern, str(caught.value)), caught.value
    assert ("quotes" in str(caught.value)) == ("quotes" in expected)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["[a]", "[[a]]", "[a.b]", *"ab.=1{},:-'\n", '"x'])))
def test_every_syntax_error_is_explained_in_one_line(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = explain_syntax(text, error)
        assert re.match(r"line \d+: not valid TOML \(", told) and "\n" not in told


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    plain = load(tmp_path, RECIPE)
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    assert load_config(tmp_path / "recipe.toml") == plain
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-16")
    with pytest.raises(UserError, match="not UTF-8 text .*save it as UTF-8"):
        load_config(tmp_path / "recipe.toml")


def test_the_message_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^\S*recipe\.toml: train\.lr: must be above 0, got -1$"):
        load(tmp_path, RECIPE + "[train]\nlr = -1\n")
    with pytest.raises(UserError, match=r"^\S*recipe\.toml with overrides: train\.lr: must be above 0, got -1$"):
        load(tmp_path, RECIPE, "train.lr=-1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1), ("a.b=1e-5", 1e-5), ("a.b=true", True), ("a.b=[1, 2]", [1, 2]), ("a.b={c = 1}", {"c": 1}),
        ("a.b=fp8", "fp8"), ('a.b="1"', "1"), ("a.b=", ""), ("a.b=x=y", "x=y"), ("a.b=1\nc = 2", "1\nc = 2"),
        (" a.b = 1 ", 1), ("a.b=models/x", "models/x"),
    ],
)
def test_override_values(text: str, value: Any) -> None:
    assert split_override(text) == ("a.b", value)


@pytest.mark.parametrize("text", ["a.b", "=1", "a..b=1", ".a=1", ""])
def test_override_syntax(text: str) -> None:
    with pytest.raises(UserError, match=r"is not an override: write section\.key=value"):
        split_override(text)


def test_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path, RECIPE + "[train]\nlr = 1e-4\n",
        "train.lr=1e-5", "precision=bf16", "task.params.digits=[4]", "seed=1", "seed=2", "rollout.kv_cache_tokens=none",
        "model.path=none", "model.arch.hidden_size=64", "model.tokenizer=builtin:arithmetic", "checkpoint.resume=auto",
    )
    assert (config.train.lr, config.precision, config.seed, config.task.params) == (1e-5, "bf16", 2, {"digits": [4]})
    assert config.model.path is None and config.model.arch == {"hidden_size": 64}
    assert config.rollout.kv_cache_tokens is None and config.checkpoint.resume == "auto"
    with pytest.raises(UserError, match=r"lr: unknown key; did you mean train\.lr"):
        load(tmp_path, RECIPE, "lr=1")
    with pytest.raises(UserError, match=r"override train\.lr\.x: train\.lr is a value \(1\), so it has no key x"):
        load(tmp_path, RECIPE + "[train]\nlr = 1\n", "train.lr.x=1")


def test_overrides_count_in_the_order_of_what_was_said_last(tmp_path: Path) -> None:
    said = ("task.params.check_gold=true", "task.params={}", "task.params.check_gold=false")
    assert load(tmp_path, RECIPE, *said).task.params == {"check_gold": False}
    assert load(tmp_path, RECIPE, *said[:2]).task.params == {}


def test_set_override_makes_tables() -> None:
    data: dict[str, Any] = {"a": {"b": 1}}
    set_override(data, "a.c.d", 2)
    set_override(data, "e", 3)
    assert data == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_override_that_switches_off_takes_the_dependents_along(tmp_path: Path) -> None:
    recipe = RECIPE + '[rl]\nrollout_is = "token"\nrollout_is_threshold = 3.0\n[quant]\nweight_scale = "pow2"\n'
    assert load(tmp_path, recipe).rl.rollout_is_threshold == 3.0
    config = load(tmp_path, recipe, "rl.rollout_is=none", "precision=bf16")
    assert config.rl.rollout_is == "none" and config.rl.rollout_is_threshold == 2.0 and config.quant == QuantConfig()
    assert load(tmp_path, recipe, "precision=fp8_rollout").quant.weight_scale == "pow2"
    with pytest.raises(UserError, match=r"rl\.rollout_is_threshold: has no effect"):  # asked for in the same breath
        load(tmp_path, recipe, "rl.rollout_is=none", "rl.rollout_is_threshold=5.0")


# ---- resolve, TOML, digest ------------------------------------------------------------------------------------------


def test_resolve() -> None:
    config = parse_config(BASE)
    on_gpu, on_cpu = resolve(config, cuda_available=True), resolve(config, cuda_available=False)
    assert (on_gpu.device, on_gpu.kernels) == ("cuda", "hopper")
    assert (on_cpu.device, on_cpu.kernels) == ("cpu", "reference")
    for capability, kernels in (((9, 0), "hopper"), ((8, 0), "triton"), ((12, 0), "triton")):
        assert resolve(config, cuda_available=True, capability=capability).kernels == kernels
        assert resolve(on_gpu, cuda_available=True, capability=capability) == on_gpu, "what is set stays"
    assert resolve(on_gpu, cuda_available=True) == on_gpu
    forced = resolve(parse_config({**BASE, "device": "cpu"}), cuda_available=True)
    assert (forced.device, forced.kernels) == ("cpu", "reference")
    with pytest.raises(UserError, match="torch sees no GPU"):
        resolve(parse_config({**BASE, "device": "cuda"}), cuda_available=False)
    for tables in ({"kernels": "hopper", "device": "cpu"}, {"kernels": "reference", "device": "cuda"}):
        with pytest.raises(UserError, match='kernels = "(hopper|reference)" with device = '):
            resolve(parse_config({**BASE, **tables}), cuda_available=True)
    with pytest.raises(UserError, match='kernels = "hopper" with device = "cpu"'):
        resolve(parse_config({**BASE, "kernels": "hopper"}), cuda_available=False)


FULL: dict[str, Any] = {
    "name": "full", "num_threads": 2, "precision": "fp8_rollout",
    "model": {
        "arch": {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie": True, "rope scaling": {"factor": 8.0, "a": [1]}},
        "tokenizer": "builtin:arithmetic", "init_seed": 3,
    },
    "quant": {"weight_scale": "pow2"},
    "task": {
        "name": "file", "train_file": 'a"b\\c.jsonl', "system_prompt": "line 1\nline 2 \x7f é 😀",
        "params": {"digits": (1, 2)},
    },
    "rollout": {"stop": ["\n", "]"], "kv_cache_tokens": 1000},
    "rl": {
        "kl_coef": 0.1, "kl_estimator": "k2", "rollout_is": "token", "rollout_is_threshold": 5, "updates_per_step": 2,
        "clip_ratio_c": 3.0,
    },
    "train": {"lr": 3, "adam_betas": [0.8, 0.99], "adam_eps": 1e-12, "lr_schedule": "linear", "min_lr_ratio": 0.1},
    "sft": {"steps": 5, "num_examples": 7},
    "eval": {"num_samples": 4, "temperature": 0.7, "max_response_length": 9},
    "track": {
        "backends": ["tensorboard", "wandb"], "project": "p", "entity": "e", "tags": ["a", "b=c"], "num_samples": 0,
    },
}


@pytest.mark.parametrize("tables", [BASE, FULL, {**BASE, "precision": "bf16", "checkpoint": {"save_interval": 0}}])
def test_round_trip(tables: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(parse_config(tables), cuda_available=False)
    again = load(tmp_path, to_toml(config))
    assert again == config and digest(again) == digest(config) and to_toml(again) == to_toml(config)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        TEXT | st.integers() | st.booleans() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    )
)
def test_toml_literals_read_back(value: Any) -> None:
    assert tomllib.loads(f"x = {toml_literal(value)}")["x"] == value


def test_toml_holds_every_value_that_has_an_effect() -> None:
    data = tomllib.loads(to_toml(parse_config(FULL)))
    given = {f"{name}.{key}" for name in sections() for key in FULL.get(name, {})}
    assert given <= {f"{name}.{key}" for name, table in data.items() if isinstance(table, dict) for key in table}
    assert data["train"]["adam_eps"] == 1e-12 and data["model"]["arch"]["rope scaling"] == {"factor": 8.0, "a": [1]}


def test_digest() -> None:
    config = parse_config(BASE)
    assert digest(config) == digest(parse_config({**BASE, "train": {"lr": 1e-6}})) and len(digest(config)) == 16
    assert int(digest(config), 16) >= 0
    others = [{"seed": 1}, {"train": {"lr": 1.1e-6}}, {"task": {"name": "addition", "params": {"digits": [2]}}}]
    others.append({"quant": {"kv_cache": "fp8"}})
    assert len({digest(config), *(digest(parse_config({**BASE, **other})) for other in others)}) == 5
    assert digest(parse_config({**BASE, "quant": {"kv_cache": "bf16"}})) == digest(config)


def test_what_is_trained_follows_what_is_drawn(tmp_path: Path) -> None:
    """Without a filter the key says nothing, and digests are those of before it."""
    plain = parse_config(BASE)
    assert plain.rollout.logprobs == "full" and "logprobs" not in to_toml(plain)
    assert digest(plain) == digest(parse_config({**BASE, "rollout": {"logprobs": "full"}}))
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        config, old = (parse_config({**BASE, "rollout": cut | more}) for more in ({}, {"logprobs": "full"}))
        assert (config.rollout.logprobs, old.rollout.logprobs) == ("sampled", "full")
        assert digest(config) != digest(old) and load(tmp_path, to_toml(config)) == config
        assert load(tmp_path, to_toml(old)) == old
        ((key, _),) = cut.items()
        (tmp_path / "cut.toml").write_text(to_toml(config))
        notes: list[str] = []
        usual = toml_literal(config.rollout.usual(key))
        assert load_config(tmp_path / "cut.toml", [f"rollout.{key}={usual}"], notes.append) == plain
        assert len(notes) == 1 and notes[0].startswith('dropped rollout.logprobs = "sampled" (from the recipe)')
    assert "rollout.logprobs: has no effect while rollout.top_p, top_k and min_p truncate nothing" in message(
        rollout={"logprobs": "sampled"})


# ---- algorithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", PRESETS)
def test_a_preset_sets_defaults_that_can_be_overridden(algo: str, tmp_path: Path) -> None:
    config = parse_config({**BASE, **OF.get(algo, {}), "rl": {"algo": algo}})
    for key, value in PRESETS[algo].values.items():
        assert getattr(config.rl, key) == value
    assert load(tmp_path, to_toml(config)) == config, "the values are written out, and read back"
    others = {k: v for k, v in RLConfig().model_dump().items() if k not in PRESETS[algo].values and k != "algo"}
    if algo == "dapo":
        assert config.rl.overlong_buffer_len == config.rollout.max_response_length // 5
        del others["overlong_buffer_len"]
    assert {key: getattr(config.rl, key) for key in others} == others
    mixed = parse_config({**BASE, **OF.get(algo, {}), "rl": {
        "algo": algo, "entropy_coef": 0.5, "loss_agg": "seq_mean_token_sum",
    }})
    assert mixed.rl.loss_agg == "seq_mean_token_sum" and mixed.rl.adv_estimator == config.rl.adv_estimator


@pytest.mark.parametrize(
    ("rl", "expected"),
    [
        ({"algo": "gppo"}, 'rl.algo: must be "grpo", .*did you mean "ppo"'),
        ({"algo": "rloo", "norm_adv_by_std": False}, "rl.norm_adv_by_std: has no effect while rl.adv_estimator ="),
        ({"gae_lambda": 0.9}, 'rl.gae_lambda: has no effect while rl.adv_estimator = "grpo"'),
        ({"critic_lr": 1e-4}, 'rl.critic_lr: has no effect while rl.adv_estimator = "grpo"'),
        ({"algo": "ppo", "critic": "shared", "critic_lr": 1e-4}, "rl.critic_lr: has no effect while rl.critic ="),
        ({"algo": "ppo", "value_coef": 1.0}, 'rl.value_coef: has no effect while rl.critic = "separate"'),
        ({"max_refill_rounds": 3}, 'rl.max_refill_rounds: has no effect while rl.dynamic_sampling = "off"'),
        ({"algo": "cispo", "updates_per_step": 2, "clip_ratio_c": 3.0}, "rl.clip_ratio_c: has no effect while"),
        ({"ratio": "sequence_mean", "adv_estimator": "gae"}, 'rl.ratio: "sequence_mean" needs rl.adv_estimator'),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, 'rl.kl_estimator: "k1" needs rl.kl_in = "reward"'),
        ({"algo": "ppo", "critic_warmup_steps": 100}, "rl.critic_warmup_steps: must be below train.steps = 100"),
        ({"clip_low": 0.1}, "rl.clip_low: unknown key; did you mean rl.clip_ratio_low"),
    ],
    ids=str,
)
def test_what_an_algorithm_ignores_is_refused(rl: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse_config({**BASE, "rl": rl})


def test_another_algorithm_on_the_command_line_takes_ignored_keys_back(tmp_path: Path) -> None:
    recipe = RECIPE + '[rl]\nnorm_adv_by_std = false\nentropy_coef = 0.5\n'
    assert load(tmp_path, recipe).rl.norm_adv_by_std is False
    config = load(tmp_path, recipe, "rl.algo=rloo")
    assert config.rl.adv_estimator == "rloo" and config.rl.entropy_coef == 0.5
    with pytest.raises(UserError, match="rl.norm_adv_by_std: has no effect"):
        load(tmp_path, recipe, "rl.algo=rloo", "rl.norm_adv_by_std=false")


def test_leaving_an_algorithm_takes_its_own_keys_back(tmp_path: Path) -> None:
    recipe = RECIPE + '[rl]\nalgo = "ppo"\ngae_lambda = 0.9\ncritic_lr = 1e-4\nvalue_clip = 0.1\nupdates_per_step = 2\n'
    assert load(tmp_path, recipe).rl.gae_lambda == 0.9
    assert load(tmp_path, recipe, "rl.algo=grpo").rl.adv_estimator == "grpo"
    assert load(tmp_path, recipe, "rl.algo=grpo", "rl.adv_estimator=gae").rl.gae_lambda == 0.9, "GAE is still asked for"
    for bad in ("rl.algo=[]", "rl.algo={}", "rl.algo=3"):
        with pytest.raises(UserError, match='rl.algo: must be "grpo"'):
            load(tmp_path, recipe, bad)
    with pytest.raises(UserError, match="rl: is a section"):
        load(tmp_path, recipe, "rl.algo=grpo", "rl=3")


@pytest.mark.parametrize("old", PRESETS)
@pytest.mark.parametrize("new", PRESETS)
def test_a_runs_own_config_takes_another_algorithm(old: str, new: str, tmp_path: Path) -> None:
    """config.toml states every key; those that the old algorithm had filled in must not hold the new one back."""
    rl = {"updates_per_step": 2, "kl_coef": 0.1, "entropy_coef": 0.5}
    written = to_toml(parse_config({**BASE, **OF.get(old, {}), "rl": {"algo": old, **rl}}))
    said = [f"rl.algo={new}", *(["teacher.path=folder"] if new == "distill" else ["teacher.path=none"])]
    expected = parse_config({**BASE, **OF.get(new, {}), "rl": {"algo": new, **rl}}).rl
    assert load(tmp_path, written, *said).rl == expected


def test_a_group_of_one_needs_another_baseline() -> None:
    for algo in ("reinforce_pp", "ppo"):
        assert parse_config({**BASE, "rollout": {"group_size": 1}, "rl": {"algo": algo}}).rollout.group_size == 1
    with pytest.raises(UserError, match="rl.dynamic_sampling: a group of one .* never carries a signal"):
        parse_config({**BASE, "rollout": {"group_size": 1}, "rl": {"algo": "ppo", "dynamic_sampling": "drop"}})


def test_a_recipe_is_a_file_or_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart") == ROOT / "jetrl/recipes/quickstart.toml" == shipped()["quickstart"]
    (tmp_path / "quickstart").mkdir()  # a folder of this name hides nothing
    assert find_recipe("quickstart").name == "quickstart.toml"
    (tmp_path / "mine.toml").write_text('name = "mine"')
    assert find_recipe("mine.toml") == Path("mine.toml")
    for wrong, hint in (
        ("quikstart", r"Did you mean quickstart\?"), ("recipes/quickstart.toml", r"Did you mean quickstart\?"),
        ("min.toml", r"Did you mean mine\.toml\?"), ("nowhere/r.toml", "one of `jetrl recipes`"),
    ):
        with pytest.raises(UserError, match=f"{wrong}: there is no such file and no recipe of this name. .*{hint}"):
            find_recipe(wrong)


# ---- recipes and documentation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "jetrl" / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_recipes_are_valid(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert load(tmp_path, to_toml(config)) == config
    for precision in ("bf16", "fp8", "fp8_rollout", "w8a16"):
        assert load_config(path, [f"precision={precision}"]).precision == precision


def test_config_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "CONFIG.md").read_text(encoding="utf-8")
    assert page == describe_config(), "run: python -m jetrl.config.docs > docs/CONFIG.md"
    for key in all_keys():
        assert f"| `{key.rpartition('.')[2]}` |" in page
