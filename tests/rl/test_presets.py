"""The table of algorithms: it names real choices, only differences, and no combination that it forbids itself."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from jetrl import choices
from jetrl.config import RLConfig
from jetrl.config.keys import keys
from jetrl.config.markers import Needs, NoEffectWhile
from jetrl.presets import OWN, PRESETS
from jetrl.rl.advantage import BY_GROUP, BY_TOKEN
from jetrl.rl.surrogate import RATIOS, SURROGATES

# The defaults of the config's fields, as far as presets and rules speak of them.
DEFAULTS: dict[str, Any] = RLConfig().model_dump()
IN_RL = [key for key in keys().values() if key.section == "rl"]
NEEDS = [(key.name, need, need.other.removeprefix("rl.")) for key in IN_RL for need in key.all(Needs)]
# The rules by which the choice of a part leaves another part without effect, with their switch.
IGNORED = [
    (key.name, rule, rule.switch.removeprefix("rl.")) for key in IN_RL for rule in key.all(NoEffectWhile)
    if rule.switch.startswith("rl.")  # others are no part of an algorithm: presets leave them alone
]
LITERALS = {
    "adv_estimator": choices.AdvEstimator, "ratio": choices.Ratio, "surrogate": choices.Surrogate,
    "loss_agg": choices.LossAgg, "kl_estimator": choices.KLEstimator, "kl_in": choices.KLIn,
    "dynamic_sampling": choices.DynamicSampling, "clip": choices.Clip,
}


def test_the_tables_hold_exactly_the_choices():
    assert tuple(PRESETS) == get_args(choices.Algo)
    assert {*BY_GROUP, *BY_TOKEN} == set(get_args(choices.AdvEstimator))
    assert tuple(RATIOS) == get_args(choices.Ratio) and tuple(SURROGATES) == get_args(choices.Surrogate)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_differences_and_says_why(name: str):
    preset = PRESETS[name]
    assert preset.name == name and preset.description.endswith(".") and len(preset.paper) == 10
    assert set(preset.why) == set(preset.values)
    for key, value in preset.values.items():
        assert value != DEFAULTS[key], f"{key} is the default already"
        assert key not in LITERALS or value in get_args(LITERALS[key])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_keeps_the_rules(name: str):
    values = DEFAULTS | PRESETS[name].values
    for key, need, other in NEEDS:
        assert values[key] not in need.values or values[other] in need.allowed, need.why
    for key, rule, switch in IGNORED:
        # a preset prepares the KL for who turns it on, and clips for who takes several updates
        if switch not in ("kl_coef", "updates_per_step") and values[switch] in rule.off:
            assert key not in PRESETS[name].values, rule


def test_rules_speak_of_known_keys_and_values():
    assert len(NEEDS) >= 3 and len(IGNORED) >= 20
    for key, need, other in NEEDS:
        assert set(need.values) < set(get_args(LITERALS[key]))
        assert {v for v in need.allowed if v is not OWN} < set(get_args(LITERALS[other]))
    for key, rule, switch in IGNORED:
        assert {key, switch} <= set(DEFAULTS)
        known = {value for value in rule.off if value is not OWN}
        assert switch not in LITERALS or known < set(get_args(LITERALS[switch]))


def test_presets_of_the_papers():
    """What makes each algorithm, stated once more from the papers."""
    assert PRESETS["grpo"].values == {}
    assert PRESETS["dr_grpo"].values == {"norm_adv_by_std": False, "loss_agg": "seq_mean_token_sum_norm"}
    assert PRESETS["dapo"].values == {"clip_ratio_high": 0.28, "dynamic_sampling": "refill"}
    gspo = PRESETS["gspo"].values
    assert (gspo["clip_ratio_low"], gspo["clip_ratio_high"]) == (3e-4, 4e-4)
    cispo = PRESETS["cispo"].values
    assert 1 - cispo["clip_ratio_low"] == 0 and 1 + cispo["clip_ratio_high"] == 5
    assert PRESETS["distill"].values == {"adv_estimator": "teacher"}
    for name in ("rloo", "reinforce_pp", "ppo"):
        assert (PRESETS[name].values["kl_in"], PRESETS[name].values["kl_estimator"]) == ("reward", "k1")
