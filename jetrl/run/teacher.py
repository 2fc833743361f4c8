"""The teacher of a run: found, checked against the policy, and built without masters (docs/DISTILL.md); or the server
that has it.

Each rank holds it whole, as published weights in a flow of its own: it never changes, so it is read once, and no
checkpoint holds it. A checkpoint names the digest of its values, and a run that resumes with others is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jetrl.chat.prompts import decoded
from jetrl.config import Config
from jetrl.config.teacher import is_url
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import is_adapters
from jetrl.huggingface.fp8 import Again
from jetrl.model.adapter import BaseHash
from jetrl.model.transformer import Transformer
from jetrl.model.weights import coded_weights
from jetrl.phrases import some
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.run.checkpoint.checkpoint import model_folder
from jetrl.spec import ModelSpec
from jetrl.train.step import truncation_of
from jetrl.train.teacher_server import TeacherServer
from jetrl.train.teachers import REST, Teachers
from jetrl.types import Problem

PROBED = 256  # tokens whose texts a server is asked for, beside as many special ones
KEY = "teacher.path"  # of its digest in a checkpoint, and in messages


@dataclass(frozen=True, slots=True)
class Teacher:
    """Shape and flow of a teacher."""

    spec: ModelSpec
    recipe: Recipe


def teacher_of(config: Config) -> Teacher | None:
    """The teacher of a config, of several that of all other rows; None without one."""
    return teachers_of(config).get(REST)


def teachers_of(config: Config) -> dict[str, Teacher]:
    """The teachers of a config by name that are computed here, not by a server. Reads each config.json once; from the
    hub no weights."""
    found = {}
    for name, path in paths_of(config).items():
        if is_url(path):
            continue
        try:
            spec = _spec_of(path, config.teacher.revision if name == REST else None)
        except UserError as error:
            raise UserError(f"{key_of(name)}: {error}") from None
        found[name] = Teacher(spec, build_recipe(config.teacher.precision, spec.num_layers))
    return found


def paths_of(config: Config) -> dict[str, str]:
    """Where each teacher is, by name."""
    t = config.teacher
    return {} if t.path is None else {REST: t.path, **dict(zip(t.values, t.paths, strict=True))}


def servers_of(config: Config) -> dict[str, TeacherServer]:
    """The teachers of a config by name that a server has. Nothing is asked yet."""
    found = {name: path for name, path in paths_of(config).items() if is_url(path)}
    return {name: TeacherServer(path, config.teacher.timeout, key_of(name)) for name, path in found.items()}


def key_of(name: str) -> str:
    """The setting that names a teacher, for messages."""
    return KEY if name == REST else f"teacher.paths (for {name!r})"


@lru_cache(maxsize=8)
def _spec_of(path: str, revision: str | None) -> ModelSpec:
    return hf.spec_from_folder(_folder(path, revision))


def _folder(path: str, revision: str | None, *, weights: bool = False) -> Path:
    """The teacher's Hugging Face folder; with `weights` those of a checkpoint have been compared with their hashes."""
    folder = model_folder(path, revision, verify=weights, weights=weights)
    if is_adapters(folder):
        raise UserError(
            f"{path} holds adapters, and a teacher is a whole model. Add them to their base first: "
            "`jetrl export FOLDER OUT --merge`."
        )
    return folder


def check_teacher(config: Config, tokenizer: Any, spec: ModelSpec) -> None:
    """UserError for a teacher that cannot judge the tokens of this policy: with another vocabulary, or without
    positions for the longest answers. `tokenizer` and `spec` are the policy's."""
    for name, path in paths_of(config).items():
        if name != REST and not is_url(path) and not Path(path).is_dir():
            raise UserError(
                f"{key_of(name)} = {path}: there is no such folder. Further teachers are folders or runs on this "
                "machine, or addresses of servers; fetch one from the hub first."
            )
    if config.teacher.top_k > spec.vocab_size:
        raise UserError(
            f"teacher.top_k = {config.teacher.top_k}, and the policy has {spec.vocab_size} tokens. Lower it."
        )
    for name, teacher in teachers_of(config).items():
        _check(config, name, paths_of(config)[name], teacher, tokenizer, spec)
    for server in servers_of(config).values():
        _check_server(config, server, tokenizer, spec)


def _check(config: Config, name: str, path: str, teacher: Teacher, tokenizer: Any, spec: ModelSpec) -> None:
    where = f"{key_of(name)} = {path}"
    theirs = hf.load_tokenizer_from(_folder(path, config.teacher.revision if name == REST else None))
    if differs := _first_difference(tokenizer.get_vocab(), theirs.get_vocab()):
        raise UserError(
            f"{where} has another vocabulary than the policy: {differs}. Log-probs of tokens can only be "
            "compared in one vocabulary; take a teacher of the policy's own family."
        )
    ours, judged = spec.vocab_size, teacher.spec.vocab_size
    if judged < ours or (judged != ours and truncation_of(config) is not None):
        why = "some of its tokens have none there" if judged < ours else (
            "with rollout.top_p, top_k or min_p both need the same number. Sample from the whole distribution")
        raise UserError(f"{where} has logits for {judged} tokens and the policy for {ours}: {why}.")
    if config.longest > teacher.spec.max_position:
        raise UserError(
            f"{where} has positions for {teacher.spec.max_position} tokens, and task.max_prompt_length + "
            f"rollout.max_response_length = {config.longest}. Lower one of the two, or take another teacher."
        )


def _check_server(config: Config, server: TeacherServer, tokenizer: Any, spec: ModelSpec) -> None:
    """The same by asking: what the server says that some hundred tokens are, all special ones and the model's last one
    among them, and how many it takes."""
    where, about = f"{server.key} = {server.url}", server.about
    known = {number: token for token, number in tokenizer.get_vocab().items() if number < spec.vocab_size}
    special = sorted(number for number in tokenizer.get_added_vocab().values() if number in known)[:PROBED]
    spread = sorted(known)[:: max(1, len(known) // PROBED)]
    probed = list(dict.fromkeys([*special, *spread, max(known)]))
    for number, theirs in zip(probed, server.texts(probed), strict=True):
        ours = (decoded(tokenizer, [number]), str(known[number]).replace("\u0120", " ").replace("\u2581", " "))
        if theirs is None:
            raise UserError(
                f"{where}: the server ({about.name}) does not say what its tokens are as text, so its vocabulary can"
                "not be compared with the policy's. Start it with its tokenizer."
            )
        if "\ufffd" not in theirs + ours[0] and theirs.strip() not in (ours[0].strip(), ours[1].strip()):
            raise UserError(
                f"{where} has another vocabulary than the policy: id {number} is {theirs!r} there ({about.name}) and "
                f"{ours[0]!r} here. Log-probs of tokens can only be compared in one vocabulary; serve a teacher of the "
                "policy's own family."
            )
    server.texts([spec.vocab_size - 1])  # refused where the teacher has fewer logits
    longest = config.longest + (not about.draws_nothing)
    if about.most_tokens is not None and longest > about.most_tokens:
        raise UserError(
            f"{where} takes {about.most_tokens} tokens (max_model_len), and task.max_prompt_length + "
            f"rollout.max_response_length = {config.longest}"
            f"{'' if about.draws_nothing else ', and one that it draws'}. Lower one of the two, or serve the teacher "
            "with more."
        )


def check_rows(config: Config, problems: Iterable[Problem]) -> None:
    """UserError where no row has one of `teacher.values`: a word is misspelt, or the column is another one."""
    column, values = config.teacher.column, config.teacher.values
    if column is None:
        return
    found = dict.fromkeys(str(p.extra[column]) for p in problems if column in p.extra)
    if not found:
        raise UserError(f"teacher.column = {column!r}: no row of the training data has this column.")
    if missing := [value for value in values if value not in found]:
        raise UserError(
            f"teacher.values: no row of the training data has {some(missing)} in its column {column!r}, which has "
            f"{some([*found])}."
        )


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """In words, the first id that means another token; empty where the vocabularies are one."""
    here, there = ({number: token for token, number in vocabulary.items()} for vocabulary in (ours, theirs))
    for number in sorted({*here, *there}):
        if here.get(number) != there.get(number):
            said = [f"{found[number]!r}" if number in found else "no token" for found in (there, here)]
            return f"id {number} is {said[0]} there and {said[1]} here ({len(theirs)} tokens there, {len(ours)} here)"
    return ""


def build_teachers(config: Config) -> Teachers | None:
    """The published teachers on the run's device, each with the digest of its values, and those of servers; None
    without one."""
    found: dict[str, Transformer | TeacherServer] = {**servers_of(config)}
    for name, teacher in teachers_of(config).items():
        path, revision = paths_of(config)[name], config.teacher.revision if name == REST else None
        folder, hashes = _folder(path, revision, weights=True), BaseHash()
        coded = hf.stored_parameters(folder, teacher.spec, coded=coded_weights(teacher.spec, teacher.recipe))
        values = Again(teacher.recipe.pow2_weights, masters=False).through(coded, folder)
        model = Transformer(teacher.spec, teacher.recipe, master_dtype=None).to(config.device)
        model.publish_values(hashes.through(values))
        model.base_digest = hashes.digest()
        found[name] = model
    return Teachers(found, config.teacher.column) if found else None
