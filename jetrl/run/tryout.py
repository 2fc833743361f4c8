"""An environment tried without a model: `jetrl env`. The policy's turns are a script, or typed.

Everything else is what a run has: the pool of environments with its checks and time limits, the driver that turns
replies into a trajectory, limits of turns and of length, and the task's reward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetrl.chat.prompts import encode_text
from jetrl.chat.tokenizer import BUILTIN_PREFIX, load_tokenizer
from jetrl.config import Config, load_config, parse_config
from jetrl.config.shipped import find_recipe
from jetrl.config.toml import read_toml, set_override, split_override
from jetrl.environments.conversations import EnvironmentPool, build_pool
from jetrl.environments.environment import BUILTIN, TOOLS
from jetrl.environments.tools import tools_factory
from jetrl.errors import UserError
from jetrl.rewards.calls import WeightedReward, reward_name
from jetrl.rewards.function import RewardFunction
from jetrl.rewards.loading import import_reward, needs_answer
from jetrl.rewards.score import score_parts
from jetrl.rollout.requests import STEP_STRIDE, RolloutRequest
from jetrl.rollout.rollout import roll_out
from jetrl.run.prepare import scoring
from jetrl.tasks.gold import required_reward
from jetrl.tasks.task import build_task, holds_out, sample
from jetrl.types import (
    Completion,
    Engine,
    FinishReason,
    Group,
    Problem,
    Prompt,
    Reply,
    Request,
    SamplingParams,
    StepReport,
    Trajectory,
    log_probs,
    token_ids,
)
from jetrl.untrusted import json_value, text_file
from jetrl.user_code.guard import no_silent_exit

Say = Callable[[str], object]
_UNBOUNDED = 1 << 40  # without a model's tokenizer, no length is one of a run


class Characters:
    """A stand-in for a model's tokenizer: a token for each character, and no chat template."""

    chat_template = None
    eos_token, eos_token_id = "", -1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The code points."""
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of code points."""
        return "".join(map(chr, tokens))

    def get_vocab(self) -> Mapping[str, int]:
        """None that could be listed."""
        return {}


class ScriptOver(Exception):
    """There is no further turn of the policy."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried. `rendered`: the tokenizer is a model's, so that texts and lengths are those of a run."""

    config: Config
    tokenizer: Any
    rendered: bool
    prompt: Prompt
    reward: RewardFunction | None
    pool: EnvironmentPool


def prepare_trial(
    name: str, overrides: Sequence[str] = (), *, data: str = "", problem: int = 0, prompt: str = "", template: str = "",
) -> Trial:
    """`name`: an environment as `environment.name` has it, or a recipe. `data`: a recipe whose task gives the problem,
    number `problem` of its stream, with `prompt` instead of its own. `template`: the model whose tokenizer is used."""
    is_environment = ":" in name or name in BUILTIN or (
        name == TOOLS and any(text.partition("=")[0].strip() == "environment.tools" for text in overrides)
    )
    if not is_environment and data:
        raise UserError(f"--data: {name} is a recipe, and has problems of its own. Leave out --data.")
    config = _config_of(name, overrides, data) if is_environment else load_config(find_recipe(name), overrides)
    if config.environment.name is None:
        raise UserError(f"{name}: this recipe has no environment (environment.name), so there is nothing to try.")
    tokenizer = load_tokenizer(template) if template else _own_tokenizer(config) if data or not is_environment else None
    rendered = tokenizer is not None
    if tokenizer is None:
        tokenizer, config = Characters(), _without_template(config)
    named = import_reward(config.task)
    task = build_task(
        config.task, config.seed, tokenizer, config.environment.name, needs_answer=needs_answer(named),
        hold_out=holds_out(config),
    )
    reward: RewardFunction | None
    if config.environment.name == TOOLS and not rendered:
        reward, factory = required_reward(task, named), tools_factory(config, None)
    else:
        reward, made = scoring(config, task, named, tokenizer)
        assert made is not None
        factory = made
    (asked,) = sample(task, tokenizer, problem, 1, config, conversations=True)
    if prompt:
        asked = replace(asked, problem=replace(asked.problem, prompt=prompt))
    e = config.environment
    pool = build_pool(factory, tokenizer, config.task, timeout=e.timeout, max_concurrent=e.max_concurrent)
    return Trial(config, tokenizer, rendered, asked, reward, pool)


def _config_of(name: str, overrides: Sequence[str], data: str) -> Config:
    """The config of an environment alone, or with the task of a recipe. Built-in ones need a task with a reward."""
    if data:
        given = read_toml(find_recipe(data))
    else:
        task = "environment" if ":" in name else "addition"
        model = {"arch": {"model_type": "qwen3"}, "tokenizer": f"{BUILTIN_PREFIX}arithmetic"}
        given = {"name": "env", "model": model, "task": {"name": task}}
    given["environment"] = {"name": name}
    for key, value in map(split_override, overrides):
        set_override(given, key, value)
    return parse_config(given, "jetrl env")


def _own_tokenizer(config: Config) -> Any:
    """The recipe's tokenizer, if nothing has to be downloaded for it."""
    name = config.model.tokenizer or config.model.path
    here = name is not None and (name.startswith(BUILTIN_PREFIX) or Path(name).expanduser().is_dir())
    return load_tokenizer(name) if here and name is not None else None


def _without_template(config: Config) -> Config:
    """Without what only a chat template reads, and without limits that are counted in tokens."""
    without: dict[str, Any] = {"system_prompt": None, "chat_template_kwargs": {}, "chat_template": "auto"}
    task = config.task.model_copy(update=without | {"max_prompt_length": _UNBOUNDED})
    environment = config.environment.model_copy(update={"max_turn_tokens": None})
    rollout = config.rollout.model_copy(update={"max_response_length": _UNBOUNDED})
    return config.model_copy(update={"task": task, "environment": environment, "rollout": rollout})


def read_script(path: Path) -> list[str]:
    """Turns of a file: a JSON list of strings, or one per line."""
    try:
        text = text_file(path)
    except ValueError as error:  # no UTF-8, or too large
        raise UserError(f"--script {path}: the file cannot be read as text: {error}.") from error
    if not text.lstrip().startswith("["):
        return text.splitlines()
    try:
        turns = json_value(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--script {path}: it begins as a JSON list, but is not valid JSON: {error}.") from error
    if not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"--script {path}: a JSON list of strings is needed, one for each turn of the policy.")
    return list(turns)


def try_out(trial: Trial, turns: Iterator[str], say: Say) -> int:
    """Hold the conversation and tell it. The status: 0, or 2 if the environment failed."""
    config, first = trial.config, STEP_STRIDE
    engine, shown = _Script(trial, turns, say), _Shown(trial, say)
    e, longest = config.environment, config.rollout.max_response_length
    sampling = SamplingParams(longest, stop=tuple(config.rollout.stop))
    asked = RolloutRequest(sampling, 1, first, e.max_turns, e.max_turn_tokens)
    where = "" if trial.rendered else " (no tokenizer: limits in tokens do not apply; give --template)"
    say(f"{trial.pool.factory.name}, problem {printable(trial.prompt.problem.id)}{where}")
    try:
        with no_silent_exit():
            rollout = roll_out(engine, [trial.prompt], asked, shown)
            failed = [t for _, t in rollout.failed]
            if failed:
                say(f"\nfailed by {failed[0].end}: {printable(failed[0].error)}")
                say("In a run, this conversation is left out of training, and counted.")
                return 2
            _tell_end(trial, rollout.groups[0].trajectories[0], say)
    except ScriptOver:
        say("\nThe script is over, and the conversation is not.")
        return 0
    finally:
        trial.pool.shutdown()
    if unused := len(list(turns)) if engine.scripted else 0:
        say(f"{unused} further turn{'s' * (unused != 1)} of the script: not said.")
    return 0


def _tell_end(trial: Trial, trajectory: Trajectory, say: Say) -> None:
    """How it ended, and what it earns."""
    limit = {"turns": " (environment.max_turns)", "length": " (rollout.max_response_length)"}
    turns, count = len(trajectory.turns), trajectory.response_length
    length = f", {count} tokens after the prompt" if trial.rendered else ""
    say(f"\nended by {trajectory.end}{limit.get(trajectory.end, '')} after {turns} turn{'s' * (turns != 1)}{length}")
    if trial.config.environment.at_limit == "zero" and trajectory.truncated:
        say('reward: 0, because of environment.at_limit = "zero"')
        return
    given = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    if trial.reward is None:
        say(f"reward: {sum(given):g}, the sum over the turns" if given else "reward: none was given")
        return
    parts = score_parts([Group(trial.prompt, (trajectory,))], trial.reward, True)
    names = trial.reward.names if isinstance(trial.reward, WeightedReward) else (reward_name(trial.reward),)
    for name, part in zip(names, parts, strict=True):
        (value,) = part.values
        say(f"reward: {'not scored' if value is None else f'{value:g}'} by {printable(name)}")
    if isinstance(trial.reward, WeightedReward):
        (total,) = trial.reward.summed([part.values for part in parts])
        say(f"weighted sum: {'not scored' if total is None else f'{total:g}'}")


class _Script(Engine):
    """The policy: an engine that says the next turn of a script."""

    keeps_bits = False

    def __init__(self, trial: Trial, turns: Iterator[str], say: Say) -> None:
        self.trial, self.turns, self.say = trial, turns, say
        self.scripted = not getattr(turns, "typed", False)
        self.waiting: list[Request] = []
        self.over: list[Completion] = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def load(self, weights: Any) -> None:
        """There is nothing to load."""

    def release(self) -> None:
        """There is nothing to release."""

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.waiting += requests

    def forget(self, ids: Collection[int]) -> None:
        """Drop requests."""
        self.waiting = [r for r in self.waiting if r.id not in ids]

    def collect(self) -> list[Completion]:
        """The turns that were said since the last call."""
        over, self.over = self.over, []
        return over

    def step(self) -> StepReport:
        """Say the next turn; ScriptOver if there is none."""
        request = self.waiting.pop(0)
        text = next(self.turns, None)
        if text is None:
            raise ScriptOver
        self.over.append(said := self._completion(request, text))
        self.steps += 1
        ended = "" if said.finish_reason == "stop" else "  [cut off by the limit of its length]"
        self.say(f"policy{_tokens(self.trial, said.tokens)}: {printable(said.text)}{ended}")
        return StepReport(self.steps, 0, len(self.waiting), self.steps, self.steps)

    def _completion(self, request: Request, text: str) -> Completion:
        """The turn as an engine gives it: it ends behind a stop string, else with the token that ends turns."""
        stops = [at + len(s) for s in request.sampling.stop if (at := text.find(s)) >= 0]
        text = text[: min(stops)] if stops else text
        tokens = encode_text(text, self.trial.tokenizer, "The script", "turn")
        end = [] if stops else self._end_of_turn()
        most = request.sampling.max_tokens
        if len(tokens) + len(end) > most:
            text = self.trial.tokenizer.decode(tokens[:most])
            return _turn(request.id, tokens[:most], text, "length")
        return _turn(request.id, [*tokens, *end], text, "stop")

    def _end_of_turn(self) -> list[int]:
        """The token that the chat template writes behind a turn; of plain text the end of sequence."""
        encoder, eos = self.trial.pool.encoder, self.trial.tokenizer.eos_token_id
        if encoder.chat:
            user = [{"role": "user", "content": "?"}]
            empty = _turn(0, [], "", "length")
            return list(encoder.later(Problem("(a check of the chat template)", "", ""), user, user, empty)[:1])
        return [] if eos is None else [eos]


class _Shown:
    """The pool of environments; tells what they say."""

    def __init__(self, trial: Trial, say: Say) -> None:
        self.trial, self.say, self.turns = trial, say, 0

    def start(self, key: int, problem: Problem) -> None:
        """Begin conversation `key`."""
        self.trial.pool.start(key, problem)

    def act(self, key: int, completion: Completion) -> None:
        """The policy's turn."""
        self.turns += 1
        self.trial.pool.act(key, completion)

    def close(self, key: int) -> None:
        """The conversation is over."""
        self.trial.pool.close(key)

    def poll(self, wait: bool) -> list[Reply]:
        """The replies that are ready, which are printed."""
        replies = self.trial.pool.poll(wait)
        for reply in replies:
            self._tell(reply)
        return replies

    def _tell(self, reply: Reply) -> None:
        for message in reply.messages:
            name = f" {printable(message['name'])}" if "name" in message else ""
            self.say(f"{printable(message['role'])}{name}: {printable(message['content'])}")
        if self.trial.rendered and reply.tokens:
            text = printable(self.trial.tokenizer.decode(list(reply.tokens)))
            self.say(f"  rendered{_tokens(self.trial, reply.tokens)}:")
            self.say("\n".join(f"  | {line}" for line in text.split("\n")))
        if self.turns and not reply.failure:
            reward = "none" if reply.reward is None else f"{reply.reward:g}"
            self.say(f"  reward {reward}, {'done' if reply.done else 'goes on'}")


def _turn(key: int, tokens: list[int], text: str, finish: FinishReason) -> Completion:
    return Completion(key, token_ids(tokens), log_probs([0.0] * len(tokens)), text, finish, 0, "")


def _tokens(trial: Trial, tokens: Sized) -> str:
    return f" ({len(tokens)} token{'s' * (len(tokens) != 1)})" if trial.rendered else ""


def printable(text: str) -> str:
    """The text without characters that a terminal obeys: they are shown by their numbers."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


class Typed:
    """Turns that a person types, a line each, until the end of the input."""

    typed = True

    def __init__(self, read: Callable[[str], str] = input) -> None:
        self.read = read

    def __iter__(self) -> Typed:
        return self

    def __next__(self) -> str:
        try:
            return self.read("your turn> ")
        except EOFError:
            raise StopIteration from None
