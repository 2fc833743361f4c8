"""The section [teacher]: a model that judges each token of the policy's answers (docs/DISTILL.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from jetrl.choices import TeacherPrecision
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Holds, Kernels, NoEffectWhile, PartOf, Since
from jetrl.config.toml import toml_literal

if TYPE_CHECKING:
    from jetrl.config.sections import Config

WITH_PATH = NoEffectWhile("teacher.path", (None,))


class TeacherConfig(Section):
    """Distillation: a teacher's log-probs of the policy's own tokens (docs/DISTILL.md)."""

    section: ClassVar[str] = "teacher"
    path: Annotated[str | None, Holds("file"), Since("0.3.0", None), Kernels(off=(None,))] = Field(
        default=None, min_length=1, description="The teacher: a Hugging Face folder, a run of jetrl (its newest "
        "checkpoint), or a name on the hub. It must have the policy's vocabulary. none: no teacher.")
    revision: Annotated[str | None, WITH_PATH, PartOf("teacher.path"), Since("0.3.0", None)] = Field(
        default=None, min_length=1, description="Branch, tag or commit of a teacher from the hub. none: main.")
    precision: Annotated[TeacherPrecision, WITH_PATH, Since("0.3.0", "bf16")] = Field(
        default="bf16", description="The teacher's own flow, whatever the policy's is. fp8 and w8a16 hold its weights "
        "in half the memory.")
    weight: Annotated[float, WITH_PATH, Since("0.3.0", 1.0)] = Field(
        default=1.0, gt=0, le=1e6, description="The advantage of a token has this times (the teacher's log-prob of it "
        "minus the policy's), beside what rl.adv_estimator makes of rewards.")


def teacher_problems(config: Config) -> Iterator[Problem | str]:
    """What does not go with a teacher, or without one."""
    rl = config.rl
    if config.teacher.path is None:
        if rl.adv_estimator == "teacher":
            yield Problem(
                "teacher.path", 'is needed with rl.algo = "distill" (rl.adv_estimator = "teacher"); set the folder or '
                "name of the model to learn from", ("rl.algo", "rl.adv_estimator"),
            )
        return
    if rl.ratio != "token":
        yield Problem(
            "teacher.path", f"the teacher gives every token an advantage of its own, and rl.ratio = "
            f"{toml_literal(rl.ratio)} needs one for the whole answer; set rl.ratio=token, or another rl.algo",
            ("rl.ratio", "rl.algo"),
        )
    if rl.dynamic_sampling != "off":
        yield Problem(
            "teacher.path", f"every answer has something to learn from a teacher, and rl.dynamic_sampling = "
            f"{toml_literal(rl.dynamic_sampling)} leaves out groups by their rewards; set rl.dynamic_sampling=off",
            ("rl.dynamic_sampling", "rl.algo"),
        )
