"""Prompts as token ids: chat templates, lengths, the training stream by step."""

import pytest

from jetrl.config import TaskConfig, parse_config
from jetrl.errors import UserError
from jetrl.tasks.prompts import encode_problem
from jetrl.tasks.protocol import stable_hash
from jetrl.tasks.task import build_task, eval_prompts, sample
from jetrl.tasks.tokenizer import arithmetic_tokenizer
from jetrl.types import Problem

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}_{% endif %}"
)


def config(**task):
    return parse_config({
        "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition", **task}, "rollout": {"prompts_per_step": 3, "group_size": 2},
    })  # fmt: skip


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
    prompts = [p for step in (1, 2, 3) for p in sample(task, tokenizer, step, conf)]
    assert [p.index for p in prompts] == list(range(9))
    assert [p.problem for p in prompts] == [task.problem(i) for i in range(9)]
    assert all(tokenizer.decode(list(p.tokens)) == p.problem.prompt for p in prompts)
    held_out = eval_prompts(task, tokenizer, conf)
    assert [p.problem for p in held_out] == task.eval_problems(5)


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
