"""Prompts as token ids: chat templates, lengths, the training stream by step."""

import json

import pytest

from jetrl.config import TaskConfig, parse_config
from jetrl.errors import UserError
from jetrl.tasks.environment_task import problem_seed
from jetrl.tasks.prompts import encode_problem
from jetrl.tasks.protocol import stable_hash
from jetrl.tasks.task import TASKS, build_task, eval_prompts, sample
from jetrl.tasks.tokenizer import arithmetic_tokenizer
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
    assert set(TASKS) == {"addition", "file", "gym", "environment"}
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
