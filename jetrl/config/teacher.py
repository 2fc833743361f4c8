"""The section [teacher]: a model that judges each token of the policy's answers (docs/DISTILL.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from jetrl.choices import TeacherPrecision
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Elsewhere, Holds, Kernels, NoBits, NoEffectWhile, PartOf, Since
from jetrl.config.toml import toml_literal

if TYPE_CHECKING:
    from jetrl.config.sections import Config

WITH_COLUMN = NoEffectWhile("teacher.column", (None,))
WITH_PATH = NoEffectWhile("teacher.path", (None,))
SERVER_KEY = "JETRL_TEACHER_KEY"  # environment variable: teachers' servers get it as `Authorization: Bearer KEY`


def is_url(path: str | None) -> bool:
    """Whether a teacher's path is the address of a server."""
    return path is not None and path.startswith(("http://", "https://"))


def _wrong_in(url: str) -> str:
    """What is wrong with an address; empty if nothing is."""
    try:
        parts = urlsplit(url)
        sound = bool(parts.hostname) and (parts.port is None or parts.port > 0) and not (parts.query or parts.fragment)
    except ValueError:
        sound = False
    if not sound:
        return "must be the address of a server, such as http://127.0.0.1:8000"
    return f"must not hold a name or a password; a key is read from {SERVER_KEY}" if "@" in parts.netloc else ""


class TeacherConfig(Section):
    """Distillation: a teacher's log-probs of the policy's own tokens (docs/DISTILL.md)."""

    section: ClassVar[str] = "teacher"
    path: Annotated[
        str | None, Holds("file"), Since("0.3.0", None), Kernels(off=(None,)),
        Elsewhere("TRL: teacher_model_name_or_path teacher_model_server_url"),
    ] = Field(
        default=None, min_length=1, description="The teacher: a Hugging Face folder, a run of jetrl (its newest "
        "checkpoint), a name on the hub, or the address of a server (http://127.0.0.1:8000, of `vllm serve` or `jetrl "
        "serve`). It must have the policy's vocabulary. none: no teacher.")
    revision: Annotated[str | None, WITH_PATH, PartOf("teacher.path"), Since("0.3.0", None)] = Field(
        default=None, min_length=1, description="Branch, tag or commit of a teacher from the hub. none: main.")
    column: Annotated[str | None, WITH_PATH, Since("0.3.0", None)] = Field(
        default=None, min_length=1, description="Column of the data that says which teacher judges a row, where there "
        "are several: teacher.paths by teacher.values. none: teacher.path judges all.")
    values: Annotated[tuple[str, ...], WITH_COLUMN, Since("0.3.0", [])] = Field(
        default=(), description="Values of the column whose rows have a teacher of their own; all other rows have "
        "teacher.path.")
    paths: Annotated[tuple[str, ...], WITH_COLUMN, Holds("file"), Since("0.3.0", [])] = Field(
        default=(), description="For each of teacher.values its teacher: a folder or a run on this machine, in the "
        "same precision as teacher.path, or the address of a server.")
    timeout: Annotated[float, WITH_PATH, NoBits(), Since("0.3.0", 300.0)] = Field(
        default=300.0, gt=0, le=86400, description="Seconds until a request to a teacher's server counts as failed, "
        "with its repeats.")
    precision: Annotated[TeacherPrecision, WITH_PATH, Since("0.3.0", "bf16")] = Field(
        default="bf16", description="The teacher's own flow, whatever the policy's is. fp8 and w8a16 hold its weights "
        "in half the memory.")
    weight: Annotated[float, WITH_PATH, Since("0.3.0", 1.0)] = Field(
        default=1.0, gt=0, le=1e6, description="The advantage of a token has this times (the teacher's log-prob of it "
        "minus the policy's), beside what rl.adv_estimator makes of rewards. With teacher.top_k the loss has this "
        "times the KL.")

    top_k: Annotated[int, WITH_PATH, Since("0.3.0", 0), Elsewhere("TRL: loss_top_k")] = Field(
        default=0, ge=0, le=128, description="0: the KL is that of the drawn token, as advantage. Else it is a term of "
        "the loss, over so many of the teacher's most probable tokens and the rest as one (docs/DISTILL.md). vLLM "
        "gives up to 20, or its --max-logprobs.")

    given_fraction: Annotated[
        float, WITH_PATH, NoEffectWhile("teacher.top_k", (0,)), Since("0.3.0", 0.0),
        Elsewhere("TRL: lmbda", " (1 - it)"),
    ] = Field(
        default=0.0, ge=0, lt=1, description="Share of a step's prompts with the answer that the data gives (a column "
        "solution, or a task's worked solution) in place of the policy's own. Needs teacher.top_k.")

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses among the teachers' paths."""
        return tuple(path for path in (self.path, *self.paths) if path is not None and is_url(path))

    def problems(self) -> Iterator[Problem | str]:
        for key, paths in (("path", (self.path,)), ("paths", self.paths)):
            for path in paths:
                if path is not None and is_url(path) and (wrong := _wrong_in(path)):
                    yield f"teacher.{key}: {wrong}, got {toml_literal(path)}"
        yield from self._problems_of_servers()
        if self.column is None:
            return
        if not self.values:
            yield "teacher.column: needs teacher.values and teacher.paths, which say whose rows are whose"
        if "" in self.values:
            yield 'teacher.values: "" names no rows: all other rows are those of teacher.path'
        if len(set(self.values)) < len(self.values):
            yield f"teacher.values: names a value twice: {toml_literal(self.values)}"
        if len(self.values) != len(self.paths):
            yield (f"teacher.paths: needs one teacher for each of the {len(self.values)} teacher.values, got "
                   f"{len(self.paths)}")

    def _problems_of_servers(self) -> Iterator[Problem]:
        known = self.path is not None
        if known and len(self.servers) == 1 + len(self.paths) and self.precision != "bf16":
            yield Problem(
                "teacher.precision", "has no effect while every teacher is behind an address; the server has its own",
                ("teacher.path",), void=True,
            )
        if is_url(self.path) and self.revision is not None:
            yield Problem(
                "teacher.revision", "has no effect while teacher.path is an address; the server has one model",
                ("teacher.path",), void=True,
            )
        if known and not self.servers and self.timeout != 300.0:
            yield Problem(
                "teacher.timeout", "has no effect while no teacher is behind an address; remove it", ("teacher.path",),
                void=True,
            )


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
    if config.teacher.column is not None and config.task.name != "file":
        yield Problem(
            "teacher.column", f"is a column of data, and task.name = {toml_literal(config.task.name)}; set "
            "task.name=file, or remove this key", ("task.name",),
        )
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
    if config.teacher.given_fraction:
        yield from _problems_with_given(config)
    if config.teacher.servers:
        yield from _problems_with_servers(config)
    elif config.teacher.top_k and config.rollout.truncates and config.rollout.logprobs != "full":
        yield Problem(
            "teacher.top_k", "is a KL of whole distributions; set rollout.logprobs=full, or sample without top_p, "
            "top_k and min_p", ("rollout.logprobs", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
        )


def _problems_with_given(config: Config) -> Iterator[Problem]:
    """Given answers have no log-probs of a sampler, no reward and no environment."""
    share, prompts = config.teacher.given_fraction, config.rollout.prompts_per_step
    if not 0 < config.num_given < prompts:
        yield Problem(
            "teacher.given_fraction", f"{share:g} of rollout.prompts_per_step = {prompts} is {config.num_given} rows; "
            "change one of the two so that there are given answers and the policy's own", ("rollout.prompts_per_step",),
        )
    for key, wrong, cure in (
        ("rollout.overcommit", bool(config.rollout.overcommit), "set rollout.overcommit=0"),
        ("environment.name", config.environment.name is not None, "remove the environment"),
        ("rl.adv_estimator", config.rl.adv_estimator == "gae", "choose an rl.algo without a critic"),
        ("rl.clip", config.rl.clip == "calibrated", "set rl.clip=fixed"),
    ):
        if wrong:
            yield Problem("teacher.given_fraction", f"given answers do not go with {key}; {cure}", (key,))


def _problems_with_servers(config: Config) -> Iterator[Problem]:
    """Servers give log-probs of whole distributions at temperature 1."""
    rollout = config.rollout
    if rollout.temperature != 1.0:
        yield Problem(
            "rollout.temperature", f"a teacher behind an address gives log-probs at temperature 1, and this is "
            f"{rollout.temperature:g}; set rollout.temperature=1.0, or give the teacher's folder or name",
            ("teacher.path",),
        )
    if rollout.truncates and rollout.logprobs != "full":
        yield Problem(
            "rollout.logprobs", "a teacher behind an address gives log-probs of the whole distribution; set "
            "rollout.logprobs=full, or sample without top_p, top_k and min_p", ("teacher.path",),
        )
