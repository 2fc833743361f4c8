"""docs/FROM_TRL.md and docs/FROM_VERL.md hold the table of names (`config/peers.py`); every key in them exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from jetrl.config import Config, load_config, sections
from jetrl.config.docs import peer_table
from jetrl.config.explain import find_settings
from jetrl.config.load import parse_config
from jetrl.config.peers import FOREIGN_SECTIONS, peer_name, peers, same_in
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
    assert page.endswith(f"a test compares. -->\n\n{peer_table(whose, page)}"), f"python -m jetrl.config.docs {whose}"
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
        assert peer.key is None or (first is not None and first[0] == peer.key in KEYS), peer
    for whose in PAGES:
        assert len(same_in(whose)) > 10
        assert not any(peer_name(key.rpartition(".")[2]) for key in same_in(whose))
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
        ("use_peft", "lora.rank"), ("lora_r", "lora.rank"), ("lora_rank", "lora.rank"), ("use_dora", "no dropout"),
        ("gradient_accumulation_steps", "rollout.prompts_per_step"), ("loss_type", '"dr_grpo" is'),
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


# verl's settings as its users write them: where its name is another key here, or one of several there.
VERL = {
    "actor_rollout_ref.actor.optim.lr": "train.lr", "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "train.min_lr_ratio",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.optim.warmup_style": "train.lr_schedule",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "train.lr_schedule",
    "actor_rollout_ref.actor.optim.betas": "train.adam_betas", "critic.optim.lr": "rl.critic_lr",
    "actor_rollout_ref.actor.clip_ratio_low": "rl.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_c": "rl.clip_ratio_c",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "rl.surrogate", "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "train.offload_optimizer",
    "actor_rollout_ref.rollout.name": "rollout.engine", "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p", "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.response_length": "rollout.max_response_length",
    "actor_rollout_ref.rollout.dtype": "precision", "actor_rollout_ref.rollout.enforce_eager": "vllm.enforce_eager",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_seqs", "actor_rollout_ref.rollout.seed": "seed",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.num_samples",
    "actor_rollout_ref.rollout.multi_turn.enable": "environment.name",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "environment.tools",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "data.max_prompt_length": "task.max_prompt_length", "data.max_response_length": "rollout.max_response_length",
    "data.seed": "seed", "data.tokenizer": "model.tokenizer", "data.gen_batch_size": "rollout.prompts_per_step",
    "data.apply_chat_template_kwargs.enable_thinking": "task.chat_template_kwargs",
    "algorithm.adv_estimator": "rl.adv_estimator", "algorithm.gamma": "rl.gamma", "algorithm.lam": "rl.gae_lambda",
    "algorithm.kl_ctrl.kl_coef": "rl.kl_coef", "algorithm.filter_groups.enable": "rl.dynamic_sampling",
    "algorithm.filter_groups.metric": "rl.signal",
    "algorithm.filter_groups.max_num_gen_batches": "rl.max_refill_rounds",
    "algorithm.rollout_correction.rollout_is": "rl.rollout_is",
    "reward_model.overlong_buffer.len": "rl.overlong_buffer_len",
    "reward_model.overlong_buffer.penalty_factor": "rl.overlong_penalty_factor",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "rl.overlong_buffer_len",
    "reward_model.reward_manager": "task.reward", "reward_model.launch_reward_fn_async": "task.reward_calls",
    "custom_reward_function.path": "task.reward", "custom_reward_function.name": "task.reward",
    "reward.custom_reward_function.path": "task.reward", "trainer.device": "device",
    "trainer.default_local_dir": "output_dir", "trainer.experiment_name": "name",
}
TRL = {
    "learning_rate": "train.lr", "optim": "train.optimizer_dtype", "warmup_ratio": "train.warmup_steps",
    "lr_scheduler_type": "train.lr_schedule", "adam_beta2": "train.adam_betas", "max_steps": "train.steps",
    "gradient_checkpointing_kwargs": "train.activation_checkpointing", "ddp_timeout": "train.collective_timeout",
    "use_cpu": "device", "eval_dataset": "task.eval_dataset", "reward_weights": "task.reward_weights",
    "beta": "rl.kl_coef", "epsilon": "rl.clip_ratio_low", "num_iterations": "rl.updates_per_step",
    "temperature": "rollout.temperature", "max_completion_length": "rollout.max_response_length",
}


def ways(name: str, tmp_path: Path) -> list[str]:
    """What is said of a foreign name: on the command line, in a recipe as a table, and by `jetrl settings`."""
    (tmp_path / "r.toml").write_text('name = "x"\n[model]\npath = "p"\n[task]\nname = "addition"\n')
    *sections_, last = name.split(".")
    table = f"[{'.'.join(sections_)}]\n" if sections_ else ""
    (tmp_path / "t.toml").write_text(f'{last} = 1\n' * (not table) + (tmp_path / "r.toml").read_text()
                                     + f"{table}{last} = 1\n" * bool(table))
    told = []
    for call in (lambda: load_config(tmp_path / "r.toml", [f"{name}=1"]), lambda: load_config(tmp_path / "t.toml"),
                 lambda: find_settings(name)):
        try:
            found = call()
            told.append(" ".join(row.full_key for _, _, rows in found for row in rows))  # type: ignore[union-attr]
        except UserError as error:
            told.append(str(error).split("unknown key; ")[-1].split("there is no setting ")[-1])
    return told


@pytest.mark.parametrize(("name", "ours"), [*VERL.items(), *TRL.items()], ids=str)
def test_settings_of_both_lead_to_ours(name: str, ours: str, tmp_path: Path) -> None:
    for told in ways(name, tmp_path):
        words = re.sub(r"'[^']*'\. |\"[^\"]*\" is [^;]*;|[Dd]id you mean ", "", told)  # the name itself
        first = re.search(r"(?<![\w.])[a-z]+\.[a-z_]+\b|(?<=it is )\w+|(?<=mean )\w+|^\w+", words)
        assert first is not None and first[0] == ours, told


@pytest.mark.parametrize("whose", PAGES)
def test_every_name_of_the_tables_leads_to_its_row(whose: str, tmp_path: Path) -> None:
    """Alone, and, of verl, inside of a section of it."""
    rows = [peer for peer in peers() if whose in peer.whose.split(", ")]
    assert len(rows) > 100
    first = {peer.name: peer for peer in reversed([p for p in peers() if whose in p.whose.split(", ")])}
    for peer in first.values():
        name = peer.name.replace("*", "x")
        for said in [name, f"actor_rollout_ref.any.{name}"] if whose == "verl" else [name]:
            told = peer_name(said)
            assert told is not None, said
            assert told.endswith(peer.answer) or whose not in told.partition(" is ")[2].partition(";")[0], (said, told)
    if whose == "verl":
        for key in same_in("verl"):
            assert peer_name(f"algorithm.{key.rpartition('.')[2]}") is not None


def test_a_key_of_our_own_is_never_taken_for_another(tmp_path: Path) -> None:
    assert peer_name("train.lr") is None and peer_name("rollout.temperature") is None
    assert peer_name("actor_rollout_ref.no_such_key") is None
    assert find_settings("train.lr")[0][2][0].full_key == "train.lr"


def test_the_command_on_the_page_is_answered_key_by_key() -> None:
    [block] = re.findall(r"```sh\n(.*?)```", PAGES["verl"].read_text(), re.S)
    keys = re.findall(r"(\S+?)=\S+", block)
    assert len(keys) > 25 and [key for key in keys if peer_name(key) is None] == []
