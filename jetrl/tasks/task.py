"""What every task offers, the choice of one from the config, and prompts as token ids.

A task's training stream is a pure function of (seed, index), so that a resumed run needs no state of it. Its held-out
problems never appear in that stream.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from jetrl.config import Config, TaskConfig
from jetrl.errors import UserError
from jetrl.types import Problem, Prompt

RewardFunction = Callable[..., Sequence[float | None]]
"""`f(prompts, completions, **columns)`: one number per completion, None where it could not be scored."""


class Task(Protocol):
    """A source of problems with known answers."""

    name: str
    gold_template: str | None  # how a perfect completion is made of `{answer}`; None: the solution, else the answer
    check_gold: bool  # whether gold answers must earn a reward before step 1

    @property
    def reward(self) -> RewardFunction | None:
        """The task's own; None: `task.reward` of the config must name one."""
        ...

    def problem(self, index: int) -> Problem:
        """Number `index` (from 0, without end) of the training stream."""
        ...

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems (all of them, where a file has fewer): the same for every seed of a run."""
        ...

    def describe(self) -> str:
        """One line on what is trained on and how the held-out problems were chosen."""
        ...


def build_task(config: TaskConfig, seed: int, tokenizer: Any) -> Task:
    """The task that the config names. The tokenizer decides what addition's `style = "auto"` means; the prompts of a
    file are all encoded once, so that a bad one stops the run before it begins."""
    # Imported here, because each task module imports this one.
    if config.name == "addition":
        from jetrl.tasks.addition import AdditionTask

        return AdditionTask(config.params, seed, tokenizer)
    if config.name == "file":
        from jetrl.tasks.files import FileTask

        task = FileTask(config, seed)
        for problem in task.all_problems():
            encode_problem(problem, tokenizer, config)
        return task
    from jetrl.tasks.gym import GymTask

    return GymTask(config.params, seed, config.num_eval)


def sample(task: Task, tokenizer: Any, step: int, config: Config) -> list[Prompt]:
    """The prompts of training step `step`, counted from 1: the next `prompts_per_step` of the stream."""
    assert step >= 1, f"steps count from 1, got {step}"
    count = config.rollout.prompts_per_step
    indices = range((step - 1) * count, step * count)
    return [_prompt(i, task.problem(i), tokenizer, config.task) for i in indices]


def eval_prompts(task: Task, tokenizer: Any, config: Config) -> list[Prompt]:
    """The held-out prompts of an evaluation: `task.num_eval`, or all where a file has fewer."""
    problems = task.eval_problems(config.task.num_eval)
    return [_prompt(i, problem, tokenizer, config.task) for i, problem in enumerate(problems)]


def _prompt(index: int, problem: Problem, tokenizer: Any, config: TaskConfig) -> Prompt:
    return Prompt(index, problem, tuple(encode_problem(problem, tokenizer, config)))


def encode_problem(problem: Problem, tokenizer: Any, config: TaskConfig) -> list[int]:
    """The prompt as token ids: by the chat template with the assistant's turn opened, or as plain text."""
    chat = uses_chat_template(config.chat_template, tokenizer)
    text = _chat_text(problem, tokenizer, config) if chat else _plain_text(problem, config)
    try:
        # A template writes its own special tokens; adding them again would give two of the beginning of sequence.
        tokens = list(tokenizer.encode(text, add_special_tokens=not chat))
    except Exception as error:  # the tokenizers library raises bare Exception, e.g. for a character without a token
        raise UserError(
            f"Problem {problem.id}: the tokenizer cannot encode the prompt {shorten(text)!r}: {error}. Use a tokenizer "
            "that knows these characters, or change the prompt."
        ) from error
    if not tokens:
        raise UserError(f"Problem {problem.id}: the prompt {text!r} has no tokens. Remove it or write a prompt.")
    if not chat and tokens[-1] == tokenizer.eos_token_id:
        raise UserError(
            f"Problem {problem.id}: the prompt ends in the end-of-sequence token {tokenizer.eos_token!r}, so there is "
            "nothing to complete. Use a tokenizer that does not append it, or take it out of the prompt."
        )
    if len(tokens) > config.max_prompt_length:
        raise UserError(
            f"Problem {problem.id}: the prompt has {len(tokens)} tokens, task.max_prompt_length is "
            f"{config.max_prompt_length}. Raise it or leave this problem out; prompts are never cut. "
            f"The prompt begins: {shorten(text)!r}"
        )
    return tokens


def uses_chat_template(setting: bool | str, tokenizer: Any) -> bool:
    """What `task.chat_template` means for this tokenizer: "auto" is true where it has a template."""
    present = getattr(tokenizer, "chat_template", None) is not None
    if setting is True and not present:
        raise UserError(
            "task.chat_template = true, but the tokenizer has no chat template. Use a chat model's tokenizer, or set "
            "task.chat_template = false for plain text."
        )
    return present if setting == "auto" else bool(setting)


def _chat_text(problem: Problem, tokenizer: Any, config: TaskConfig) -> str:
    prompt = problem.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise UserError(
                f"Problem {problem.id}: it has a system message of its own, and task.system_prompt is set too. "
                "Remove one of the two."
            )
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja's errors: templates raise their own for roles that they do not know
        roles = [m["role"] for m in messages]
        raise UserError(
            f"Problem {problem.id}: the tokenizer's chat template fails on messages with roles {roles}: {error}"
        ) from error


def _plain_text(problem: Problem, config: TaskConfig) -> str:
    if config.system_prompt is not None:
        raise UserError(
            "task.system_prompt has no effect on plain-text prompts, and no chat template is in use. Remove it, or use "
            "a tokenizer with a chat template."
        )
    if not isinstance(problem.prompt, str):
        raise UserError(
            f"Problem {problem.id}: the prompt is a list of chat messages, but no chat template is in use. Use a "
            "tokenizer with a chat template (and task.chat_template not false), or make the prompt a text."
        )
    return problem.prompt


def stable_hash(*key: object) -> int:
    """A 64-bit number from the key's text, the same in every process, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def shorten(text: str, limit: int = 120) -> str:
    """The text for a message: its beginning, and dots where it goes on."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_params(task: str, params: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise for a key of `task.params` that the task does not have, with the nearest one that it has."""
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}."
            raise UserError(f"task.params.{key}: task {task!r} has no such parameter; {hint}")


def gold_params(params: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The two parameters of every task that say what text must earn a reward, and whether that is checked."""
    template, check = params.get("gold_template"), params.get("check_gold", True)
    if template is not None and not (isinstance(template, str) and "{answer}" in template):
        raise UserError(f"task.params.gold_template: must be a text that contains {{answer}}, got {template!r}.")
    if not isinstance(check, bool):
        raise UserError(f"task.params.check_gold: must be true or false, got {check!r}.")
    return template, check
