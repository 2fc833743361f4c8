"""Prompts as token ids: chat templates, lengths, the training stream by step."""

import json

import pytest

from jetrl.chat.prompts import encode_problem
from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import TaskConfig, parse_config
from jetrl.errors import UserError
from jetrl.hashing import stable_hash
from jetrl.tasks.environment_task import problem_seed
from jetrl.tasks.task import TASKS, build_task, eval_prompts, holds_out, sample
from jetrl.types import Problem

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}_{% endif %}"
)


def config(**task):
    return parse_config({
        "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition", **task}, "rollout": {"prompts_per_step": 3, "group_size": 2},
    })


def digits_only(prompt, **task):
    """A problem in characters of the built-in tokenizer; roles are digits because it has no letters."""
    return Problem(id="file.jsonl:7", prompt=prompt, answer="3"), TaskConfig(name="addition", **task)


@pytest.fixture
def chat_tokenizer():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("m.role", "{'system': 0, 'user': 1, 'assistant': 2}[m.role]")
    return tokenizer


def test_plain_text_is_encoded_as_it_is():
    tokenizer = arithmetic_tokenizer()
    problem, task = digits_only("12+3=")
    assert tokenizer.decode(encode_problem(problem, tokenizer, task)) == "12+3="


def test_chat_template_opens_the_assistants_turn(chat_tokenizer):
    problem, task = digits_only("1+2")
    assert chat_tokenizer.decode(encode_problem(problem, chat_tokenizer, task)) == "<1>1+2\n_"
    task = TaskConfig(name="addition", system_prompt="#")
    assert chat_tokenizer.decode(encode_problem(problem, chat_tokenizer, task)) == "<0>#\n<1>1+2\n_"
    messages, task = digits_only(({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}))
    assert chat_tokenizer.decode(encode_problem(messages, chat_tokenizer, task)) == "<1>1\n<2>2\n_"


def test_template_can_be_switched_off(chat_tokenizer):
    problem, task = digits_only("1+2", chat_template=False)
    assert chat_tokenizer.decode(encode_problem(problem, chat_tokenizer, task)) == "1+2"


def test_chat_prompts_have_one_beginning_of_sequence(chat_tokenizer):
    from tokenizers import processors

    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="^ $A", special_tokens=[("^", chat_tokenizer.convert_tokens_to_ids("^"))]
    )
    chat_tokenizer.chat_template = "^" + chat_tokenizer.chat_template
    problem, task = digits_only("1+2")
    assert chat_tokenizer.decode(encode_problem(problem, chat_tokenizer, task)) == "^<1>1+2\n_"
    plain, task = digits_only("1+2", chat_template=False)
    assert chat_tokenizer.decode(encode_problem(plain, chat_tokenizer, task)) == "^1+2"


@pytest.mark.parametrize(
    ("prompt", "task", "message"),
    [
        ("1+2=", {"max_prompt_length": 3}, "file.jsonl:7.*4 tokens.*max_prompt_length is 3"),
        ("1+b=", {}, "file.jsonl:7.*cannot encode.*1\\+b="),
        ("1+2", {"chat_template": True}, "no chat template"),
        ("1+2", {"system_prompt": "0"}, "system_prompt has no effect"),
        (({"role": "user", "content": "1"},), {}, "list of chat messages"),
        ("1+2<eos>", {}, "ends in the end-of-sequence token"),
    ],
)
def test_bad_prompts_are_refused(prompt, task, message):
    with pytest.raises(UserError, match=message):
        encode_problem(*_swap(digits_only(prompt, **task)))


def _swap(pair):
    return pair[0], arithmetic_tokenizer(), pair[1]


def test_two_system_messages_are_refused(chat_tokenizer):
    problem, task = digits_only(({"role": "system", "content": "0"},), system_prompt="1")
    with pytest.raises(UserError, match="system message of its own"):
        encode_problem(problem, chat_tokenizer, task)


def test_steps_walk_through_the_stream_without_gaps():
    tokenizer, conf = arithmetic_tokenizer(), config(num_eval=5)
    task = build_task(conf.task, 0, tokenizer)
    prompts = [p for first in (0, 3, 6) for p in sample(task, tokenizer, first, 3, conf)]
    assert [p.index for p in prompts] == list(range(9))
    assert [p.problem for p in prompts] == [task.problem(i) for i in range(9)]
    assert all(tokenizer.decode(list(p.tokens)) == p.problem.prompt for p in prompts)
    held_out = eval_prompts(task, tokenizer, conf)
    assert [p.problem for p in held_out] == task.eval_problems(5)


def test_every_task_is_in_the_table():
    tokenizer = arithmetic_tokenizer()
    assert set(TASKS) == {"addition", "file", "gym", "environment", "chain", "sorting", "tracking", "recurrence"}
    built = build_task(TaskConfig(name="environment"), 3, tokenizer, "GuessNumber")
    assert built.problem(2).id == "GuessNumber/3/2"
    assert built.reward is None and not built.check_gold and "GuessNumber" in built.describe()


def test_problems_for_an_environment_have_a_seed_and_no_tokens():
    tokenizer, conf = arithmetic_tokenizer(), config(num_eval=5)
    task = build_task(conf.task, conf.seed, tokenizer, "calculator")
    prompts = sample(task, tokenizer, 3, 3, conf, conversations=True)
    assert [p.index for p in prompts] == [3, 4, 5] and all(p.tokens == () for p in prompts)
    for prompt in prompts:
        plain = task.problem(prompt.index)
        assert (prompt.problem.id, prompt.problem.prompt) == (plain.id, plain.prompt)
        assert prompt.problem.extra == {"index": prompt.index, "seed": problem_seed(conf.seed, prompt.index)}
    held_out = eval_prompts(task, tokenizer, conf, conversations=True)
    assert [p.problem.extra for p in held_out] == [{"index": i, "seed": problem_seed(None, i)} for i in range(5)]


def test_columns_of_the_data_go_before_ours(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"p{i}", "answer": "a", "seed": 100 + i} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conf = config(name="file", train_file=str(file), num_eval=2)
    # The tokenizer has no letters: prompts that an environment may change are not encoded before it has.
    task = build_task(conf.task, 0, arithmetic_tokenizer(), "retry")
    for prompt in sample(task, arithmetic_tokenizer(), 0, 8, conf, conversations=True):
        assert prompt.problem.extra == {"index": prompt.index, "seed": 100 + int(prompt.problem.prompt[1:])}
    with pytest.raises(UserError, match="cannot encode the prompt"):
        build_task(conf.task, 0, arithmetic_tokenizer())


def test_the_template_is_told_what_the_config_says(chat_tokenizer):
    chat_tokenizer.chat_template += "{% if think is defined and not think %}##{% endif %}"
    problem, task = digits_only("1+2", chat_template_kwargs={"think": False})
    assert chat_tokenizer.decode(encode_problem(problem, chat_tokenizer, task)) == "<1>1+2\n_##"
    assert chat_tokenizer.decode(encode_problem(*_with(chat_tokenizer, digits_only("1+2")))) == "<1>1+2\n_"
    with pytest.raises(UserError, match="task.chat_template_kwargs has no effect on plain-text prompts"):
        encode_problem(problem, arithmetic_tokenizer(), task)
    with pytest.raises(UserError, match="task.chat_template_kwargs.tokenize: is set by jetrl"):
        config(chat_template_kwargs={"tokenize": True})
    with pytest.raises(UserError, match="task.chat_template_kwargs: has no effect while task.chat_template = false"):
        config(chat_template=False, chat_template_kwargs={"think": False})


def _with(tokenizer, pair):
    return pair[0], tokenizer, pair[1]


def file_config(tmp_path, prompts, **task):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return config(name="file", train_file=str(file), **task).task


def test_one_long_prompt_stops_a_run_or_is_left_out(tmp_path):
    prompts = [f"{i}+1=" for i in range(8)] + ["1111+1="]
    build = {"seed": 0, "tokenizer": arithmetic_tokenizer(), "hold_out": False}
    with pytest.raises(UserError, match=r'7 tokens, task.max_prompt_length is 4.*task.overlong_prompts = "drop"'):
        build_task(file_config(tmp_path, prompts, max_prompt_length=4), **build)
    settings = file_config(tmp_path, prompts, max_prompt_length=4, overlong_prompts="drop")
    task = build_task(settings, **build)
    assert {task.problem(i).prompt for i in range(8)} == set(prompts[:8]) and "1 row of" in task.describe()
    with pytest.raises(UserError, match="all 9 prompts are longer"):
        build_task(file_config(tmp_path, prompts, max_prompt_length=2, overlong_prompts="drop"), **build)
    with pytest.raises(UserError, match="cannot encode the prompt"):  # another mistake is still one
        build_task(file_config(tmp_path, ["1+a="], overlong_prompts="drop"), **build)
    with pytest.raises(UserError, match="overlong_prompts: has no effect with an environment"):
        parse_config({
            "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
            "task": {"name": "addition"} | settings.model_dump(include={"name", "train_file", "overlong_prompts"}),
            "environment": {"name": "retry"},
        })


@pytest.mark.parametrize(
    ("task", "interval", "held"),
    [({}, 0, False), ({}, 5, True), ({"eval_file": "e.jsonl"}, 0, True), ({"name": "addition"}, 0, True)],
)
def test_when_rows_are_held_out(task, interval, held):
    data = {"name": "file", "train_file": "t.jsonl"} | task
    if data["name"] == "addition":
        del data["train_file"]
    assert holds_out(parse_config({
        "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"}, "task": data,
        "eval": {"eval_interval": interval},
    })) is held


def test_stable_hash_is_fixed():
    # Held-out splits and streams hang on this number: changing it changes every run.
    assert stable_hash("held out", 12, 345) == int.from_bytes(
        __import__("hashlib").blake2b(b"('held out', 12, 345)", digest_size=8).digest(), "big"
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"digit": [2]}, "did you mean 'digits'"),
        ({"gold_template": "#### answer"}, "gold_template"),
        ({"check_gold": "no"}, "check_gold"),
    ],
)
def test_bad_params_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        build_task(TaskConfig(name="addition", params=params), 0, arithmetic_tokenizer())
