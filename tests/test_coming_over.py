"""docs/FROM_TRL.md and docs/FROM_VERL.md hold the table of names in `config/peers.py`; every key in them exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from jetrl.config import Config, load_config, sections
from jetrl.config.docs import peer_table
from jetrl.config.explain import find_settings
from jetrl.config.load import parse_config
from jetrl.config.peers import FOREIGN_SECTIONS, SAME, peer_name, peers
from jetrl.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = {"TRL": ROOT / "docs/FROM_TRL.md", "verl": ROOT / "docs/FROM_VERL.md"}
KEYS = {f"{name}.{key}" for name, section in sections().items() for key in section.model_fields} | set(
    Config.model_fields)
COMING = {"train.epochs", "track.project", "track.run_name", "environment.tools"}  # to be gone where all parts are in
FILES = {"metrics.jsonl", "report.html", "samples.jsonl", "train.jsonl", "train.parquet"}


@pytest.mark.parametrize("whose", PAGES)
def test_the_page_has_the_table_and_the_table_the_page(whose: str) -> None:
    page = PAGES[whose].read_text(encoding="utf-8")
    assert page.endswith(f"a test compares. -->\n\n{peer_table(whose)}"), f"python -m jetrl.config.docs {whose}"
    for peer in peers():
        if whose in peer.whose.split(", "):
            assert f"`{peer.name}`" in page


def test_every_key_of_ours_that_is_named_exists() -> None:
    for text in [*(peer.ours for peer in peers()), *(page.read_text() for page in PAGES.values())]:
        text = re.sub(r"```(python|sh).*?```|\| `[^|]*` (?=\|)", "", text, flags=re.S)  # the other system's own words
        named = set(re.findall(r"(?<![\w./*-])([a-z]+\.[a-z_]+)\b(?![./])", text)) - FILES
        named = {name for name in named if name.partition(".")[0] in sections()}
        assert named <= KEYS | COMING, named - KEYS
    for peer in peers():
        first = re.match(r"[\w.]+", peer.ours)
        assert peer.ours.startswith("- ") or (first is not None and first[0] in KEYS | COMING), peer
    assert all(key in KEYS for keys in SAME.values() for key in keys)
    assert all(not peer_name(key.rpartition(".")[2]) for keys in SAME.values() for key in keys)
    assert not FOREIGN_SECTIONS & set(sections())


@pytest.mark.parametrize("whose", PAGES)
def test_the_recipe_on_the_page_is_one(whose: str, tmp_path: Path) -> None:
    page = PAGES[whose].read_text(encoding="utf-8")
    [block] = re.findall(r"```toml\n(.*?)```", page, re.S)
    (tmp_path / "first.toml").write_text(block)
    config = load_config(tmp_path / "first.toml", (), pytest.fail)
    assert (config.name, config.rollout.group_size, config.train.steps) == ("first", 8, 200)
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        compile(block, "page", "exec")
    for cell in re.findall(r"\| (`[^|]*`) \|$", page.partition("## Key by key")[0], re.M):  # the last column
        for override in re.findall(r"\b[a-z]+(?:\.[a-z_]+)?=\S+?(?=[`, ]|$)", cell):
            key, _, value = override.partition("=")
            assert key in KEYS and (value or key), override


def test_defaults_on_the_pages_are_the_defaults() -> None:
    config = parse_config({"name": "x", "model": {"path": "p"}, "task": {"name": "addition"}})
    assert (config.train.adam_betas, config.train.lr_schedule, config.rl.adv_epsilon) == ((0.9, 0.95), "constant", 1e-6)
    assert (config.rl.loss_agg, config.rl.kl_coef, config.rl.clip_ratio_c, config.rl.value_clip) == (
        "token_mean", 0, None, 0.2)
    assert (config.eval.eval_interval, config.task.num_eval, config.eval.temperature) == (10, 128, 0.0)
    rollout = config.rollout
    assert (rollout.max_response_length, rollout.group_size, rollout.prompts_per_step) == (64, 8, 16)
    assert (config.checkpoint.save_interval, config.checkpoint.keep, config.checkpoint.resume) == (10, 2, "never")
    assert (config.task.max_prompt_length, config.task.overlong_prompts, config.rl.masked_sequences) == (
        512, "error", "drop")
    assert (config.train.weight_decay, config.rl.updates_per_step, config.rl.kl_in, config.rl.rollout_is) == (
        0, 1, "loss", "none")
    assert not config.train.activation_checkpointing and config.precision == "fp8"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("use_vllm", 'rollout.engine = "vllm"'), ("bf16", "precision"), ("num_train_epochs", "train.epochs"),
        ("importance_sampling_level", "rl.ratio"), ("run_name", "name (of the run"), ("logging_steps", "every step"),
        ("log_completions", "samples.jsonl"), ("top_entropy_quantile", "all tokens"), ("push_to_hub", "jetrl export"),
        ("use_peft", "no LoRA"), ("lora_r", "no LoRA"), ("lora_rank", "no LoRA"), ("peft_config", "no LoRA"),
        ("lora", "no LoRA"), ("gradient_accumulation_steps", "rollout.prompts_per_step"), ("loss_type", '"dr_grpo" is'),
        ("n_gpus_per_node", "--nproc"), ("trainer.n_gpus_per_node", "--nproc"), ("logger", "track.backends"),
        ("trainer.save_freq", "checkpoint.save_interval"), ("test_freq", "eval.eval_interval"),
        ("experiment_name", "name (of the run"), ("total_epochs", "train.epochs"), ("project_name", "track.project"),
        ("use_kl_in_reward", 'rl.kl_in = "reward", with rl.kl_coef above 0'),
        ("gpu_memory_utilization", "rollout.kv_cache_tokens"), ("tensor_model_parallel_size", "no tensor"),
        ("reward_model", "no reward models"), ("reward_model.enable", "no reward models"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.num_samples"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
    ],
)
def test_messages_and_settings_know_the_names(name: str, words: str, tmp_path: Path) -> None:
    told = peer_name(name)
    assert told is not None and words in told
    if name.rpartition(".")[2] not in {key.rpartition(".")[2] for key in KEYS}:
        with pytest.raises(UserError, match=re.escape(words)):
            find_settings(name)
    (tmp_path / "r.toml").write_text('name = "x"\n[model]\npath = "p"\n[task]\nname = "addition"\n')
    with pytest.raises(UserError, match=re.escape(words)):
        load_config(tmp_path / "r.toml", [f"{name}=1"])


@pytest.mark.parametrize("section", sorted(FOREIGN_SECTIONS))
def test_foreign_sections_are_told_key_by_key(section: str) -> None:
    data = {"name": "x", "model": {"path": "p"}, "task": {"name": "addition"}}
    with pytest.raises(UserError) as caught:
        parse_config({**data, section: {"save_freq": 1, "deeper": {"n": 1}}})
    assert "did you mean [" not in str(caught.value)


def test_the_recipes_on_the_pages_are_toml() -> None:
    for page in PAGES.values():
        assert all(tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S))
