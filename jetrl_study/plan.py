"""Studies as data: a TOML file names a recipe, arms and seeds; each (arm, seed) is one run with its own config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetrl.config import Config, load_config
from jetrl.config.base import NAME, NAME_RULE
from jetrl.config.keys import marked
from jetrl.config.load import device_of, digest, quiet, tell
from jetrl.config.markers import NoBits
from jetrl.config.paths import absolute_paths
from jetrl.config.shipped import find_recipe, summary
from jetrl.config.toml import read_toml, split_override, toml_literal
from jetrl.errors import UserError
from jetrl.run.compare import said_of

WARM_START = "warm-start"  # with -s and the seed: the name of a seed's warm start among its runs
FOLDER = Path(__file__).parent / "studies"
_TEXT = (str, 'a string, such as "mine"')
_KEYS = {  # of a study file: what each must be; the functions below look into lists
    "name": _TEXT, "about": _TEXT, "extends": _TEXT, "recipe": _TEXT, "keep_checkpoints": (bool, "true or false"),
    "seeds": None, "overrides": None, "against": None, "arm": None,
}
_ARM_KEYS = ("name", "label", "overrides", "break_exactness")
ENGINES = {  # by what is broken (in this order): the value of rollout.engine
    ("attention", "quantizer"): "jetrl_study.perturb:OtherBits",
    ("attention",): "jetrl_study.perturb:OtherAttention",
    ("quantizer",): "jetrl_study.perturb:OtherQuantizer",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the recipe. `break_exactness`: which of the sampler's ops get other last bits (`perturb`)."""

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    break_exactness: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A study file. `against`: the arms that all others are compared with. `overrides` are for all arms."""

    name: str
    about: str
    recipe: Path
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    against: tuple[str, ...]
    keep_checkpoints: bool = False

    def only(self, arms: str | None = None, seeds: str | None = None) -> Study:
        """The study with these arms and seeds, both separated by commas; None: all."""
        known = [arm.name for arm in self.arms]
        for option, text in (("arms", arms), ("seeds", seeds)):
            if text is not None and not text.replace(",", "").strip():
                raise UserError(f"--{option} is empty. Name some, or leave the option out for all of them.")
        names = known if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"--arms {arms}: no arm {unknown[0]!r}; the study {self.name} has {', '.join(known)}.")
        given = [seed.strip() for seed in (seeds or "").split(",") if seed.strip()]
        if wrong := [seed for seed in given if not (seed.isascii() and seed.isdigit())]:
            raise UserError(f"--seeds {seeds}: {wrong[0]!r} is not a seed. Write numbers from 0 on, as in 0,1,2.")
        chosen = tuple(dict.fromkeys(map(int, given))) or self.seeds
        against = tuple(name for name in self.against if name in names) or (names[0],)
        return replace(
            self, arms=tuple(arm for arm in self.arms if arm.name in names), seeds=chosen, against=against
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: `name` is its folder in OUT/runs. `digest` names the config without its places on this machine."""

    arm: Arm
    seed: int
    config: Config
    digest: str

    @property
    def name(self) -> str:
        return self.config.name


def shipped_studies() -> dict[str, Path]:
    """Name and file of each study that comes with the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def listing() -> list[tuple[str, str]]:
    """Name and first line of each shipped study."""
    return [(name, summary(path)) for name, path in shipped_studies().items()]


def find_study(text: str) -> Path:
    """The user's own file if it exists, else the shipped study of this name."""
    known = shipped_studies()
    if Path(text).is_file():
        return Path(text)
    if text in known:
        return known[text]
    close = difflib.get_close_matches(text, known, 1)
    hint = f"Did you mean {close[0]}?" if close else f"Give a TOML file, or one of {', '.join(known)}."
    raise UserError(f"{text}: there is no such file and no study of this name. {hint}")


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` come after its own. UserError for what is wrong in it."""
    data = _read(path, ())
    for key in ("name", "recipe", "arm"):
        if key not in data:
            raise UserError(f"{path}: {key} is missing. `jetrl study` lists the studies to start from.")
    seeds = data.get("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not seeds or any(type(s) is not int or s < 0 for s in seeds):
        raise UserError(f"{path}: seeds must be a list of numbers from 0 on, got {seeds!r}.")
    arms = tuple(data["arm"])
    names = [arm.name for arm in arms]
    for what, name in (("name", data["name"]), *(("an arm's name", name) for name in names)):
        if not re.fullmatch(NAME, name):
            raise UserError(f"{path}: {what} {NAME_RULE}, got {name!r}: folders are named after it.")
    if WARM_START in names:
        raise UserError(f"{path}: {WARM_START} names the warm starts of a study; give this arm another name.")
    if not arms:
        raise UserError(f"{path}: there is no arm. Write each as a table [[arm]].")
    against = tuple(dict.fromkeys(data.get("against", names[:1])))
    if not against:
        raise UserError(f"{path}: against is empty. Name the arms to compare with, or leave it out for the first one.")
    if unknown := [name for name in against if name not in names]:
        raise UserError(f"{path}: against names {unknown[0]!r}, which is not an arm; arms: {', '.join(names)}.")
    return Study(
        data["name"], data.get("about", ""), find_recipe(data["recipe"]), tuple(dict.fromkeys(seeds)),
        (*data.get("overrides", []), *overrides), arms, against, data.get("keep_checkpoints", False),
    )


def planned(study: Study, out: Path, arm: Arm, seed: int, say: Callable[[str], object] = tell) -> Planned:
    """The run of an arm with a seed, in `out`; UserError if the recipe does not take the arm's settings. `say` gets
    what the config leaves out."""
    given = dict(map(split_override, (*study.overrides, *arm.overrides)))
    flow = given.get("precision") or load_config(study.recipe, (), quiet).precision
    own = [text for text in (*study.overrides, *arm.overrides) if split_override(text)[0] != "precision"]
    texts = [*said_of(flow, own), f"seed={seed}", f"name={arm.name}-s{seed}"]
    if arm.break_exactness:
        texts.append(f"rollout.engine={ENGINES[arm.break_exactness]}")
    try:
        plain = load_config(study.recipe, texts, say)
        places = {"output_dir": str(out / "runs")}
        if plain.sft.steps:
            places["sft.cache_dir"] = str(out / "warm")
        config = load_config(study.recipe, [*texts, *(f"{k}={toml_literal(v)}" for k, v in places.items())], quiet)
    except UserError as error:
        raise UserError(f"arm {arm.name}: {error}") from error
    if not plain.checkpoint.save_interval:
        raise UserError(f"arm {arm.name}: checkpoint.save_interval is 0, so a stopped study could not continue.")
    if plain.train.epochs is not None:
        raise UserError(f"arm {arm.name}: a study compares equal steps. Set train.steps instead of train.epochs.")
    if not plain.eval.eval_interval:
        raise UserError(f"arm {arm.name}: eval.eval_interval is 0, so there would be nothing to compare.")
    resumed = config.checkpoint.model_copy(update={"resume": "auto"})
    return Planned(arm, seed, config.model_copy(update={"checkpoint": resumed}), digest(plain, marked(NoBits)))


def all_planned(study: Study, out: Path) -> list[Planned]:
    """Every run, seed by seed, so that a study that was stopped has whole pairs."""
    said = set[str]()

    def say(text: str) -> None:  # what holds for all arms, once
        if text not in said:
            said.add(text)
            tell(text)

    plan = [planned(study, out, arm, seed, say) for seed in study.seeds for arm in study.arms]
    for run in plan:
        if evaluated(run.config) != evaluated(plan[0].config):
            raise UserError(
                f"arm {run.arm.name}: arms are compared at equal steps, so train.steps and eval.eval_interval must be "
                f"equal in all: {evaluated(run.config)} here, {evaluated(plan[0].config)} in {plan[0].arm.name}. Set "
                "them in the study's overrides."
            )
    _require_one_warm_start(plan)
    return plan


def _require_one_warm_start(plan: Sequence[Planned]) -> None:
    """UserError if an arm would make another warm start of a seed than the arms before it."""
    from jetrl.run.sft import made_of, starts_from  # loads torch, which a list of studies need not

    first: dict[int, Planned] = {}
    for run in plan:
        other = first.setdefault(run.seed, run)
        configs = [absolute_paths(_on_device(one.config)) for one in (run, other)]
        here, there = ({**made_of(config), **starts_from(config)} for config in configs)
        # without a warm start, its settings mean nothing
        keys = sorted(here.keys() | there.keys()) if all(config.sft.steps for config in configs) else ["sft.steps"]
        differ = [
            f"{key} = {toml_literal(here.get(key))} here, {toml_literal(there.get(key))} in {other.arm.name}"
            for key in keys if here.get(key) != there.get(key)
        ]
        if differ:
            raise UserError(
                f"arm {run.arm.name}: all arms start from one warm start of their seed, and this one would make "
                f"another: {'; '.join(differ)}. Set what a warm start reads in the study's overrides, for all arms, "
                "also where that is to leave warm starts out (sft.steps=0), or take this arm out of the study's file."
            )


def _on_device(config: Config) -> Config:
    import torch

    return config.model_copy(update={"device": device_of(config, cuda_available=torch.cuda.is_available())})


def evaluated(config: Config) -> tuple[int, int]:
    """What decides the steps of a run's evaluations: their number, and the interval."""
    return config.train.steps, config.eval.eval_interval


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's keys, checked, with "arm" as `Arm`s, on top of those that it extends: overrides are added, arms of the
    same name replaced."""
    data = read_toml(path)
    if unknown := [key for key in data if key not in _KEYS]:
        near = difflib.get_close_matches(unknown[0], _KEYS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}."
        raise UserError(f"{path}: {unknown[0]} is not a key of a study; {hint}")
    for key, value in data.items():
        if (kind := _KEYS[key]) is not None and not isinstance(value, kind[0]):
            raise UserError(f"{path}: {key} must be {kind[1]}, got {value!r}.")
        if key in ("overrides", "against"):
            _texts(value, path, key)
    if (path.parent / data.get("recipe", "")).is_file():
        data["recipe"] = str(path.parent / data["recipe"])
    if not isinstance(data.get("arm", []), list):
        raise UserError(f"{path}: write each arm as a table [[arm]].")
    if "arm" in data:
        data["arm"] = [_arm(one, path) for one in data["arm"]]
    names = [arm.name for arm in data.get("arm", [])]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: each [[arm]] needs a name of its own, got {names}.")
    if "extends" not in data:
        return data
    text = data.pop("extends")
    beside = path.parent / text
    base = beside if beside.is_file() else find_study(text)
    if base in (path, *seen):
        raise UserError(f"{path}: extends itself, through {base}.")
    before = _read(base, (path, *seen))
    own = {arm.name: arm for arm in data.get("arm", [])}
    arms = [own.pop(arm.name, arm) for arm in before.get("arm", [])]
    return before | data | {
        "overrides": [*before.get("overrides", []), *data.get("overrides", [])], "arm": [*arms, *own.values()],
    }


def _arm(data: Any, path: Path) -> Arm:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise UserError(f"{path}: each [[arm]] needs a name.")
    if unknown := [key for key in data if key not in _ARM_KEYS]:
        raise UserError(f"{path}: {unknown[0]} is not a key of an arm; known: {', '.join(_ARM_KEYS)}.")
    broken = tuple(sorted(_texts(data.get("break_exactness", []), path, "break_exactness")))
    if broken and broken not in ENGINES:
        raise UserError(f"{path}: break_exactness is {list(broken)}; use attention, quantizer or both.")
    overrides = tuple(_texts(data.get("overrides", []), path, "overrides"))
    if not isinstance(label := data.get("label", data["name"]), str):
        raise UserError(f"{path}: label of the arm {data['name']} must be {_TEXT[1]}, got {label!r}.")
    return Arm(data["name"], label, overrides, broken)


def _texts(value: Any, path: Path, key: str) -> list[str]:
    if not isinstance(value, list) or any(not isinstance(text, str) for text in value):
        raise UserError(f'{path}: {key} must be a list of strings, such as ["train.steps=16"], got {value!r}.')
    return value
