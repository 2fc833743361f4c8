"""Study files: what they say, what they extend, the config of each run, and mistakes in plain words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from studies import conducted

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import load_config, to_toml
from jetrl.errors import UserError
from jetrl.tasks.task import build_task
from jetrl_study.plan import ENGINES, all_planned, find_study, load_study, planned, shipped_studies
from jetrl_study.state import read_state, run_folder, write_state


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


MINE = """\
name = "mine"
recipe = "quickstart"
seeds = [3, 4]
[[arm]]
name = "a"
[[arm]]
name = "b"
overrides = ["precision=bf16"]
"""


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_are_valid_and_their_configs_survive_a_file(name: str, tmp_path: Path) -> None:
    study = load_study(find_study(name))
    runs = all_planned(study, tmp_path)
    assert len({run.name for run in runs}) == len(runs) == len(study.arms) * len(study.seeds) >= 6
    assert len({run.digest for run in runs}) == len(runs)
    for run in runs[: len(study.arms)]:
        path = written(tmp_path, to_toml(run.config), f"{run.name}.toml")
        assert load_config(path) == run.config and run.config.checkpoint.resume == "auto"
    assert study.against[0] in {arm.name for arm in study.arms} and len(study.seeds) >= 3
    named = {"wgrad": study.against[0], "lora_quickstart": "whole"}
    first = "synchronous" if name.startswith("carry") else named.get(name, "bf16")
    assert study.against[0] == first


@pytest.mark.parametrize("name", ["h200_1k", "h200_4k", "h200_8k", "h200_wide"])
def test_worked_solutions_fit_the_studies_with_long_answers(name: str) -> None:
    study = load_study(find_study(name))
    config = planned(study, Path("out"), study.arms[0], study.seeds[0]).config
    tokenizer = arithmetic_tokenizer()
    made = build_task(config.task, config.seed, tokenizer)
    problems = [*map(made.problem, range(150)), *made.eval_problems(config.task.num_eval)]
    longest = max(len(tokenizer.encode(p.solution)) + 1 for p in problems)  # with the token that ends it
    assert 0.75 * config.rollout.max_response_length < longest <= config.rollout.max_response_length
    assert max(len(tokenizer.encode(p.prompt)) for p in problems) <= config.task.max_prompt_length
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    assert config.rollout.kv_cache_tokens >= answers * longest, "all answers of a step at once"


def test_quick_has_the_arms_of_the_question() -> None:
    arms = {arm.name: planned(load_study(find_study("quick")), Path("x"), arm, 1).config
            for arm in load_study(find_study("quick")).arms}
    assert {name: config.precision for name, config in arms.items()} == {
        "bf16": "bf16", "fp8": "fp8", "fp8-kv": "fp8", "mixed": "fp8_rollout", "mixed-tis": "fp8_rollout",
        "mixed-mis": "fp8_rollout", "fp8-other-bits": "fp8",
    }
    assert arms["fp8-kv"].quant.kv_cache == "fp8" and arms["mixed-tis"].rl.rollout_is_threshold == 2.0
    assert arms["mixed-mis"].rl.rollout_rs == "token"
    assert arms["fp8-other-bits"].rollout.engine == ENGINES["attention", "quantizer"]
    same = {"name", "precision", "quant", "rollout", "rl"}
    base = arms["fp8"].model_dump(exclude=same)
    assert all(config.model_dump(exclude=same) == base for config in arms.values())  # data, model, steps, seed
    assert {config.rollout.model_copy(update={"engine": ""}) for config in arms.values()} == {
        arms["fp8"].rollout.model_copy(update={"engine": ""})
    }


def test_the_studies_of_real_models_differ_only_in_their_flows() -> None:
    studies = {name: load_study(find_study(name)) for name in ("gsm8k", "gsm8k_updates", "gsm8k_1.5b")}
    configs = {
        name: {arm.name: planned(study, Path("x"), arm, 0).config for arm in study.arms}
        for name, study in studies.items()
    }
    for found in configs.values():
        same = {"name", "precision", "quant", "rollout", "rl"}
        assert len({config.model_dump_json(exclude=same) for config in found.values()}) == 1
        for config in found.values():
            assert config.task.num_eval == 1319 and config.eval.temperature == 0 and config.train.lr == 2e-6
            assert config.train.steps % config.eval.eval_interval == 0, "the last evaluation is of the last step"
            assert config.checkpoint.save_interval >= config.train.steps // 2, "saves are rare"
    one, four = configs["gsm8k"], configs["gsm8k_updates"]
    assert {name: (c.precision, c.quant.kv_cache, c.rl.rollout_is) for name, c in one.items()} == {
        "bf16": ("bf16", "bf16", "none"), "fp8": ("fp8", "bf16", "none"), "fp8-kv": ("fp8", "fp8", "none"),
        "mixed": ("fp8_rollout", "bf16", "none"), "mixed-tis": ("fp8_rollout", "bf16", "token"),
        "fp8-other-bits": ("fp8", "bf16", "none"), "w8a16": ("w8a16", "bf16", "none"),
    }
    assert four["w8a16"].precision == "w8a16"
    assert one["fp8-other-bits"].rollout.engine == ENGINES["attention", "quantizer"]
    assert {c.rl.updates_per_step for c in four.values()} == {4} and four["fp8-cispo"].rl.surrogate == "cispo"
    assert configs["gsm8k_1.5b"]["fp8-kv"].rollout.max_response_length == 1024


def test_what_a_config_leaves_out_is_said_once_for_all_arms(capsys: pytest.CaptureFixture[str]) -> None:
    study = load_study(find_study("gsm8k"), ["task.train_file=train.jsonl", "task.eval_file=test.jsonl"])
    all_planned(study, Path("x"))
    said = capsys.readouterr().err
    assert said.count("dropped task.dataset ") == said.count("dropped task.eval_split ") == 1


def test_extending_adds_overrides_and_replaces_arms_by_name(tmp_path: Path) -> None:
    written(tmp_path, MINE)
    later = written(tmp_path, 'name = "later"\nextends = "mine.toml"\noverrides = ["train.steps=7"]\n'
                    '[[arm]]\nname = "a"\nlabel = "A"\n[[arm]]\nname = "c"\n', "later.toml")
    study = load_study(later, ["train.lr=1e-3"])
    assert [(arm.name, arm.label) for arm in study.arms] == [("a", "A"), ("b", "b"), ("c", "c")]
    run = planned(study, tmp_path, study.arms[0], 4)
    assert (run.config.train.steps, run.config.train.lr, run.name) == (7, 1e-3, "a-s4")


def test_the_digest_does_not_depend_on_the_place_and_does_on_the_settings(tmp_path: Path) -> None:
    study, more = load_study(path := written(tmp_path, MINE)), load_study(path, ["train.lr=1e-3"])
    first, elsewhere, other = (planned(s, Path(out), s.arms[0], 3) for s, out in
                               ((study, "x"), (study, "y"), (more, "x")))
    assert first.digest == elsewhere.digest != other.digest
    run_folder(tmp_path, first).mkdir(parents=True)
    write_state(tmp_path, first, "finished", 40)
    assert read_state(tmp_path, first).done and read_state(tmp_path, first).step == 40
    with pytest.raises(UserError, match="other settings"):
        read_state(tmp_path, other)


def test_parts_of_a_study(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, MINE))
    part = study.only("b", "9,9,2")
    assert [arm.name for arm in part.arms] == ["b"] and part.seeds == (9, 2) and part.against == ("b",)
    assert study.only() == study
    for arms, seeds, message in [
        ("x", None, "no arm 'x'"), (None, "1,-2", "is not a seed"), ("", None, "--arms is empty"),
        (None, " , ", "--seeds is empty"),
    ]:
        with pytest.raises(UserError, match=message):
            study.only(arms, seeds)


@pytest.mark.parametrize("text, message", [
    ('name = "x"\nrecipe = "quickstart"\n', "arm is missing"),
    (MINE.replace("seeds", "seed"), "did you mean seeds"),
    (MINE.replace("[3, 4]", "[]"), "list of numbers"),
    (MINE.replace('"b"', '"a"'), "name of its own"),
    (MINE.replace('"b"', '"a/b"'), r"an arm's name must be letters, .*got 'a/b'"),
    (MINE.replace('name = "mine"', 'name = "../mine"', 1), r"toml: name must be letters, .*got '../mine'"),
    (MINE + "break_exactness = ['weights']\n", "attention, quantizer or both"),
    (MINE + "colour = 'red'\n", "not a key of an arm"),
    ('against = ["z"]\n' + MINE, "which is not an arm"),
    ('overrides = "train.steps=3"\n' + MINE, "must be a list of strings"),
    ('extends = "mine.toml"\n' + MINE, "extends itself"),
    ('arm = 3\n', "as a table"),
    ('keep_checkpoints = "false"\n' + MINE, "keep_checkpoints must be true or false, got 'false'"),
    ('keep_checkpoints = 1\n' + MINE, "keep_checkpoints must be true or false, got 1"),
    ('about = ["x"]\n' + MINE, "about must be a string, "),
    (MINE.replace('"mine"', "3"), "name must be a string, .* got 3"),
    (MINE.replace('"quickstart"', "true"), "recipe must be a string, .* got True"),
    ('extends = ["quick"]\n' + MINE, "extends must be a string, "),
    (MINE + "label = 3\n", "label of the arm b must be a string, .* got 3"),
    ("against = []\n" + MINE, "against is empty. Name the arms"),
    ("against = 'a'\n" + MINE, "against must be a list of strings"),
    ('name = "x"\nrecipe = "quickstart"\narm = []\n', "there is no arm"),
    # in a file that extends another one
    ('extends = "quick"\noverrides = "train.steps=3"\n', "overrides must be a list of strings"),
    ('extends = "quick"\noverrides = 3\n', "overrides must be a list of strings"),
    ('extends = "quick"\narm = [3]\n', "needs a name"),
    ('extends = "quick"\n[[arm]]\nname = "a"\n[[arm]]\nname = "a"\n', "name of its own"),
])
def test_mistakes_in_a_study_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_study(written(tmp_path, text))


def test_settings_that_a_study_cannot_do_without(tmp_path: Path) -> None:
    path = written(tmp_path, MINE)
    for override, message in [("checkpoint.save_interval=0", "could not continue"),
                              ("eval.eval_interval=0", "to compare"),
                              ("train.lr=x", "arm a")]:
        with pytest.raises(UserError, match=message):
            all_planned(load_study(path, [override]), tmp_path)
    with pytest.raises(UserError, match="Did you mean quick"):
        find_study("quik")


@pytest.mark.parametrize("override", ["eval.eval_interval=3", "train.steps=9"])
def test_arms_are_evaluated_at_equal_steps(override: str, tmp_path: Path) -> None:
    """Otherwise one arm's score of a step would be compared with an older one of the other."""
    study = load_study(written(tmp_path, MINE))
    arms = (study.arms[0], replace(study.arms[1], overrides=(*study.arms[1].overrides, override)))
    with pytest.raises(UserError, match=f"arm {arms[1].name}: arms are compared at equal steps.* in {arms[0].name}"):
        all_planned(replace(study, arms=arms), tmp_path)


@pytest.mark.parametrize(("override", "told"), [
    ("train.max_grad_norm=0.5", "train.max_grad_norm = 0.5 here, 1.0 in a"),
    ("train.weight_decay=0.2", "train.weight_decay = 0.2 here, 0.0 in a"),
    ("sft.steps=70", "sft.steps = 70 here, 300 in a"),
    ("sft.steps=0", "sft.steps = 0 here, 300 in a. Set"),
    ("task.params={digits=[3]}", r"task.params.digits = \[3\] here, \[2, 3\] in a"),
    ("model.init_seed=5", "model.init_seed = 5 here, 0 in a"),
    ("train.master_dtype=bfloat16", 'train.master_dtype = "bfloat16" here, "float32" in a'),
    ("num_threads=3", 'num_threads = 3 here, "none" in a'),
])
def test_arms_start_from_one_warm_start(override: str, told: str, tmp_path: Path) -> None:
    study = load_study(written(tmp_path, MINE))
    arms = (study.arms[0], replace(study.arms[1], overrides=(*study.arms[1].overrides, override)))
    with pytest.raises(UserError, match=f"^arm b: all arms start from one warm start of their seed, .*: {told}"):
        all_planned(replace(study, arms=arms), tmp_path)
    with pytest.raises(UserError, match="^arm b: all arms start"):  # before a run of another arm
        conducted(replace(study, arms=arms), tmp_path / "out", arms="a")
    assert all_planned(replace(study, arms=arms, overrides=(override,)), tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("override", [
    "train.lr=1e-3", "rollout.engine=vllm", "quant.kv_cache=fp8", "rl.rollout_is=token", "rl.algo=dapo",
    "task.num_eval=5", "rl.updates_per_step=2", "rollout.group_size=4", "precision=fp8_rollout",
    "task.reward=jetrl.rewards.gsm8k:gsm8k_reward", "device=auto",
])
def test_arms_may_differ_in_what_no_warm_start_reads(override: str, tmp_path: Path) -> None:
    study = load_study(written(tmp_path, MINE))
    arms = (study.arms[0], replace(study.arms[0], name="c", overrides=(override,)))
    assert all_planned(replace(study, arms=arms), tmp_path)


def test_without_warm_starts_arms_may_have_other_models(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, MINE), ["sft.steps=0"])
    arms = (study.arms[0], replace(study.arms[1], overrides=("model.init_seed=5", "train.max_grad_norm=0.5")))
    assert all_planned(replace(study, arms=arms), tmp_path)


def test_names_and_places_that_are_not_plain(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="warm-start names the warm starts of a study"):
        load_study(written(tmp_path, MINE + '\n[[arm]]\nname = "warm-start"\n'))
    for name in ("back\\slash", 'quo"te', "line\nbreak"):
        study = load_study(written(tmp_path, MINE))
        assert planned(study, tmp_path / name, study.arms[0], 0).config.output_dir == str(tmp_path / name / "runs")
