"""What `jetrl train --dry-run` shows of the data: row counts, and one prompt as the policy will read it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jetrl.chat.prompts import added_bos, decoded, uses_chat_template
from jetrl.config import Config
from jetrl.run.given import GivenAnswers
from jetrl.run.prepare import Prepared, epochs_told
from jetrl.run.replay.keeping import told
from jetrl.tasks.files import FileTask
from jetrl.tasks.task import prompt_of

MAX_TOKENS, MAX_CHARACTERS = 64, 4000  # of the prompt that is shown


def preview(config: Config, plan: Prepared) -> Iterator[str]:
    """The lines, without control characters: data, epochs, the prompt as text and as tokens, BOS and EOS. The config is
    one in steps (`prepare.in_steps`).

    Nothing of the user's runs: where an environment makes the prompts, the data's prompt is shown, or none.
    """
    yield f"Data: {_visible(plan.task.describe())}."
    if isinstance(plan.task, FileTask):
        yield _epochs(config, plan.task)
    if plan.given_answers is not None:
        yield from _given(plan, plan.given_answers)
        return
    yield told(config, plan.spec)
    yield from _prompt(config, plan)


def _epochs(config: Config, task: FileTask) -> str:
    """Rows that were read and are trained on, and the steps of one pass over them, for a config in steps."""
    rows, (step, key), steps = task.num_rows, config.per_step, config.train.steps
    refills = " (more where dynamic sampling refills)" if config.rl.dynamic_sampling == "refill" else ""
    run = epochs_told(config, task) or f"train.steps = {steps} are {_number(steps * step / rows)} epochs{refills}"
    return (
        f"{task.num_rows_read} rows read from the training data, {rows} trained on. One epoch: {_number(rows / step)} "
        f"steps of {step} {'answers' if config.supervised else 'prompts'} ({key}). {run}."
    )


def _given(plan: Prepared, given: GivenAnswers) -> Iterator[str]:
    """The first conversation, with what is learned between double brackets."""
    problem = plan.task.problem(0)
    found = given.trajectory(problem)
    yield (
        f"The first conversation of the run (problem {_visible(problem.id)}), {found.length} tokens, of which the "
        f"{found.num_policy_tokens} between [[ and ]] are learned:"
    )
    texts = [(segment.author, decoded(plan.tokenizer, segment.tokens.tolist())) for segment in found.segments]
    text = "".join(f"[[{own}]]" if author == "policy" else own for author, own in texts)
    yield from (f"  | {_visible(line)}" for line in text[:MAX_CHARACTERS].split("\n"))
    if len(text) > MAX_CHARACTERS:
        yield f"  ... {len(text) - MAX_CHARACTERS} more characters"


def _prompt(config: Config, plan: Prepared) -> Iterator[str]:
    problem = plan.task.problem(0)
    made_by = "" if plan.environment is None else plan.environment.name
    if made_by and not problem.prompt:
        yield f"The first prompt is what {made_by}.reset returns; a dry run does not call it."
        return
    task = config.task if plan.environment is None else plan.environment.task(config.task)
    prompt = prompt_of(0, problem, plan.tokenizer, task)
    tokens, tokenizer = prompt.tokens, plan.tokenizer
    chat = uses_chat_template(config.task.chat_template, tokenizer)
    kind = "by the chat template" if chat else "plain text"
    otherwise = plan.environment is not None and plan.environment.makes_prompts
    note = f"; {made_by}.reset may begin otherwise" if otherwise else ""
    yield f"The first prompt of the run (problem {_visible(problem.id)}), {kind}, {len(tokens)} tokens{note}:"
    text = decoded(tokenizer, tokens)
    yield from (f"  | {_visible(line)}" for line in text[:MAX_CHARACTERS].split("\n"))
    if len(text) > MAX_CHARACTERS:
        yield f"  ... {len(text) - MAX_CHARACTERS} more characters"
    yield f"Its tokens: {_tokens(plan, tokens)}"
    yield _ends(plan, tokens)
    if prompt.opened:
        yield (f"The template has opened the policy's turn with {_quoted(prompt.opened)}: it is in no completion "
               "(rewards get it as the column prefilled).")


def _tokens(plan: Prepared, tokens: tuple[int, ...]) -> str:
    """Ids with their texts; of a long prompt the first and the last ones."""
    half = MAX_TOKENS // 2
    if len(tokens) <= MAX_TOKENS:
        return _pairs(plan, tokens)
    return f"{_pairs(plan, tokens[:half])} ... {len(tokens) - MAX_TOKENS} more ... {_pairs(plan, tokens[-half:])}"


def _pairs(plan: Prepared, tokens: tuple[int, ...]) -> str:
    return " ".join(f"{token}:{_quoted(decoded(plan.tokenizer, [token]))}" for token in tokens)


def _ends(plan: Prepared, tokens: tuple[int, ...]) -> str:
    """What is to be known about the beginning and the end of sequences."""
    tokenizer, bos = plan.tokenizer, getattr(plan.tokenizer, "bos_token_id", None)
    begins = sum(token == bos for token in tokens) if bos is not None else 0
    adds = "adds it" if added_bos(tokenizer) is not None else "does not add it"
    first = "The tokenizer has no BOS token" if bos is None else (
        f"BOS {bos}:{_quoted(tokenizer.bos_token)} stands {begins} times in the prompt (to plain text the tokenizer "
        f"{adds})"
    )
    stops = _pairs(plan, tuple(sorted(plan.eos_ids))) or "none: only rollout.stop and the limit of length end one"
    return f"{first}. Tokens that end a completion: {stops}."


def _quoted(text: str) -> str:
    return _visible(json.dumps(text, ensure_ascii=False))


def _visible(text: str) -> str:
    """The text with what no reader would see, or what would act on a terminal, written out: controls, odd spaces."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"
