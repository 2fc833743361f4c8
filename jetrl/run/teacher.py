"""The teacher of a run: found, checked against the policy, and built without masters (docs/DISTILL.md).

Each rank holds it whole, as published weights in a flow of its own: it never changes, so it is read once, and no
checkpoint holds it. A checkpoint names the digest of its values, and a run that resumes with others is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import is_adapters
from jetrl.model.adapter import BaseHash
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.run.checkpoint.checkpoint import model_folder
from jetrl.spec import ModelSpec
from jetrl.train.step import truncation_of

KEY = "teacher.path"  # of its digest in a checkpoint, and in messages


@dataclass(frozen=True, slots=True)
class Teacher:
    """Shape and flow of a teacher."""

    spec: ModelSpec
    recipe: Recipe


def teacher_of(config: Config) -> Teacher | None:
    """The teacher of a config; None without one. Reads its config.json once; from the hub no weights."""
    t = config.teacher
    if t.path is None:
        return None
    spec = _spec_of(t.path, t.revision)
    return Teacher(spec, build_recipe(t.precision, spec.num_layers))


@lru_cache(maxsize=8)
def _spec_of(path: str, revision: str | None) -> ModelSpec:
    return hf.spec_from_folder(_folder(path, revision))


def _folder(path: str, revision: str | None, *, weights: bool = False) -> Path:
    """The teacher's Hugging Face folder; with `weights` those of a checkpoint have been compared with their hashes."""
    folder = model_folder(path, revision, verify=weights, weights=weights)
    if is_adapters(folder):
        raise UserError(
            f"{KEY} = {path} holds adapters, and a teacher is a whole model. Add them to their base first: "
            "`jetrl export FOLDER OUT --merge`."
        )
    return folder


def check_teacher(config: Config, tokenizer: Any, spec: ModelSpec) -> None:
    """UserError for a teacher that cannot judge the tokens of this policy: with another vocabulary, or without
    positions for the longest answers. `tokenizer` and `spec` are the policy's."""
    teacher, t = teacher_of(config), config.teacher
    if teacher is None:
        return
    assert t.path is not None
    theirs = hf.load_tokenizer_from(_folder(t.path, t.revision))
    if differs := _first_difference(tokenizer.get_vocab(), theirs.get_vocab()):
        raise UserError(
            f"{KEY} = {t.path} has another vocabulary than the policy: {differs}. Log-probs of tokens can only be "
            "compared in one vocabulary; take a teacher of the policy's own family."
        )
    ours, judged = spec.vocab_size, teacher.spec.vocab_size
    if judged < ours or (judged != ours and truncation_of(config) is not None):
        why = "some of its tokens have none there" if judged < ours else (
            "with rollout.top_p, top_k or min_p both need the same number. Sample from the whole distribution")
        raise UserError(f"{KEY} = {t.path} has logits for {judged} tokens and the policy for {ours}: {why}.")
    if config.longest > teacher.spec.max_position:
        raise UserError(
            f"{KEY} = {t.path} has positions for {teacher.spec.max_position} tokens, and task.max_prompt_length + "
            f"rollout.max_response_length = {config.longest}. Lower one of the two, or take another teacher."
        )


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """In words, the first id that means another token; empty where the vocabularies are one."""
    here, there = ({number: token for token, number in vocabulary.items()} for vocabulary in (ours, theirs))
    for number in sorted({*here, *there}):
        if here.get(number) != there.get(number):
            said = [f"{found[number]!r}" if number in found else "no token" for found in (there, here)]
            return f"id {number} is {said[0]} there and {said[1]} here ({len(theirs)} tokens there, {len(ours)} here)"
    return ""


def build_teacher(config: Config) -> Transformer | None:
    """The published teacher on the run's device, with the digest of its values; None without one."""
    teacher, t = teacher_of(config), config.teacher
    if teacher is None:
        return None
    assert t.path is not None
    values, hashes = hf.parameters_of(_folder(t.path, t.revision, weights=True), teacher.spec), BaseHash()
    model = Transformer(teacher.spec, teacher.recipe, master_dtype=None).to(config.device)
    model.publish_values(hashes.through(values))
    model.base_digest = hashes.digest()
    return model
