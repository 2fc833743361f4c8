"""Turns as tokens: only what stands between two turns is encoded, and the policy's own tokens stay what they are."""

import warnings

import pytest
from byte_tokenizer import CHAT, byte_tokenizer

from jetrl.chat.messages import TurnEncoder, check_turn_end, encode_solution
from jetrl.chat.tokenizer import VOCABULARY, arithmetic_tokenizer
from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.addition import AdditionTask, tool_solution
from jetrl.types import Completion, Problem

EOS = 1
# Roles are digits, because the built-in tokenizer has no letters; `|` ends a turn, `_` opens the assistant's.
ROLES = "{%- set names = {'system': '0', 'user': '1', 'assistant': '2', 'tool': '3'} -%}"
TEMPLATE = (
    ROLES + "{% for m in messages %}<{{ names[m.role] }}>{{ m.content }}|\n{% endfor %}"
    "{% if add_generation_prompt %}<2>_{% endif %}"
)
# Takes thinking (all up to the last `?`) out of earlier turns of the assistant, and knows no tools.
STRIPS = (
    ROLES + "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% set text = m.content.split('?')[-1] if m.role == 'assistant' and not loop.last else m.content %}"
    "<{{ names[m.role] }}>{{ text | trim }}|\n{% endfor %}{% if add_generation_prompt %}<2>_{% endif %}"
)


def chat(template=TEMPLATE, **settings):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = template
    return TurnEncoder(tokenizer, TaskConfig(name="addition", **settings))


def plain(**settings):
    return TurnEncoder(arithmetic_tokenizer(), TaskConfig(name="addition", **settings))


def ids(text):
    return tuple(VOCABULARY[c] for c in text)


def user(text):
    return {"role": "user", "content": text}


def turn(*tokens, finish="stop"):
    return Completion(0, tokens, (0.0,) * len(tokens), "text is never read here", finish, 0, "")


PROBLEM = Problem("mine/7", "", "")
OPENING = [user("1+1")]


def test_plain_text_is_what_the_environment_said_and_nothing_else():
    encoder = plain()
    assert encoder.first(PROBLEM, [user("1+"), user("1=")]) == ids("1+1=")
    assert encoder.later(PROBLEM, OPENING, [user("=2."), user("\n")], turn(9, EOS)) == ids("=2.\n")
    assert encoder.text([user("a"), user("b")]) == "ab"


def test_the_first_messages_are_a_prompt_as_any_other():
    encoder = chat(system_prompt="#")
    assert encoder.first(PROBLEM, [user("1+1")]) == ids("<0>#|\n<1>1+1|\n<2>_")
    with pytest.raises(UserError, match="mine/7.*the prompt has 12 tokens, task.max_prompt_length is 11"):
        chat(max_prompt_length=11).first(PROBLEM, [user("1+1")])
    with pytest.raises(UserError, match="mine/7.*cannot encode the prompt"):
        plain().first(PROBLEM, [user("abc")])


END = VOCABULARY["|"]


def test_a_template_writes_what_stands_between_two_turns():
    encoder = chat()
    between = ids("|\n<1>3|\n<2>_")
    # Cut off, or ended by another token than the template's: all of it follows.
    assert encoder.later(PROBLEM, OPENING, [user("3")], turn(9, 9, finish="length")) == between
    assert encoder.later(PROBLEM, OPENING, [user("3")], turn(9, EOS)) == between
    # The policy has drawn the template's end of turn itself.
    assert encoder.later(PROBLEM, OPENING, [user("3")], turn(9, END)) == between[1:]
    # A turn that was cut off at just such a token did not end by it.
    assert encoder.later(PROBLEM, OPENING, [user("3")], turn(9, END, finish="length")) == between
    messages = [{"role": "tool", "content": "4"}, user("5")]
    assert encoder.later(PROBLEM, OPENING, messages, turn(9, END)) == ids("\n<3>4|\n<1>5|\n<2>_")
    assert encoder.text(messages) == "4\n5"


def test_the_text_between_is_that_of_a_whole_conversation_rendered_at_once():
    encoder = chat(TEMPLATE.replace("<2>_", "<2>"))
    whole = encoder.tokenizer.apply_chat_template(
        [
            user("1+1"), {"role": "assistant", "content": "3"}, user("?"),
            {"role": "assistant", "content": "2"}, user("="),
        ],
        add_generation_prompt=True, tokenize=False,
    )
    told = encoder.first(PROBLEM, OPENING)
    for said, answer in (("3", "?"), ("2", "=")):
        told += ids(said + "|")
        told += encoder.later(PROBLEM, OPENING, [user(answer)], turn(*ids(said + "|")))
    assert told == ids(whole)


def test_a_template_that_rewrites_earlier_turns_changes_nothing():
    encoder = chat(STRIPS)
    thinking = turn(*ids("12?2|"))
    assert encoder.later(PROBLEM, OPENING, [user("3")], thinking) == ids("\n<1>3|\n<2>_")
    rendered = encoder.tokenizer.apply_chat_template(
        [*OPENING, {"role": "assistant", "content": "12?2"}, user("3")], tokenize=False
    )
    assert "12" not in rendered  # it does strip, so that the whole conversation rendered again would differ


def test_the_policys_tokens_are_not_encoded_again():
    class Lossy:
        """Writes every text in upper case and splits `AB` otherwise than it reads it."""

        chat_template = None
        eos_token, eos_token_id = "<eos>", EOS

        def encode(self, text, add_special_tokens):
            assert "never read" not in text, "the policy's turn was encoded"
            return [*([0] if add_special_tokens else []), *(ord(c) for c in text.upper())]

    encoder = TurnEncoder(Lossy(), TaskConfig(name="addition"))
    assert encoder.first(PROBLEM, [user("ab")]) == (0, 65, 66)
    # 500 is one token for two letters, which encoding their text would never give.
    assert encoder.later(PROBLEM, [user("ab")], [user("c")], turn(500, 97)) == (67,)


def test_templates_that_cannot_be_used():
    with pytest.raises(UserError, match="mine/7.*chat template fails on messages with roles .*'tool'.*no tools here"):
        chat(STRIPS).later(PROBLEM, OPENING, [{"role": "tool", "content": "4"}], turn(9))
    once = "{{ messages[0].content }}|"
    with pytest.raises(UserError, match="writes an assistant's turn 0 times"):
        chat(once).later(PROBLEM, OPENING, [user("4")], turn(9))
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="writes an assistant's turn 2 times"):
        chat(twice).later(PROBLEM, OPENING, [user("4")], turn(9))


def test_the_stand_in_is_no_text_of_the_conversation():
    encoder = chat("{% for m in messages %}{{ m.content | replace('jetrl:the-policys-turn:', '5') }}|{% endfor %}")
    odd = [user("jetrl:the-policys-turn:")]
    # The mark is then a longer one; this template changes it, so that it is not found.
    with pytest.raises(UserError, match="0 times"):
        encoder.later(PROBLEM, odd, [user("4")], turn(9))
    keeps = chat("{% for m in messages %}{{ m.content }}|{% endfor %}")
    assert keeps.later(PROBLEM, odd, [user("1")], turn(9)) == ids("|1|")


def test_renders_are_kept():
    encoder = chat()
    first = encoder.later(PROBLEM, OPENING, [user("3")], turn(9))
    encoder.tokenizer.chat_template = "broken {{"
    assert encoder.later(PROBLEM, OPENING, [user("3")], turn(9)) == first
    with pytest.raises(UserError, match="chat template fails"):
        encoder.later(PROBLEM, [user("2")], [user("3")], turn(9))


def test_worked_solutions_as_a_rollout_would_hold_them():
    encoder = plain()
    problem = Problem("348+275", "348+275=", "623", tool_solution(348, 275))
    assert encode_solution(problem, encoder, (">",)) == (
        ("policy", ids("<348+275>")), ("environment", ids("=623.")), ("policy", (*ids("#623"), EOS))
    )
    # Without the stop string, the turn has to end with the end of sequence.
    assert encode_solution(problem, encoder)[0] == ("policy", (*ids("<348+275>"), EOS))
    text = Problem("1", "1+1=", "2", "#2")
    assert encode_solution(text, encoder, (">",)) == (("policy", (*ids("#2"), EOS)),)
    assert encode_solution(Problem("1", "1+1=", "2", "2>"), encoder, (">",)) == (("policy", (*ids("2>"), EOS)),)


def test_worked_solutions_through_a_chat_template():
    encoder = chat(TEMPLATE.replace("|", "<eos>"))
    problem = Problem("1+1", "1+1=", "2", (("policy", "3"), ("environment", "?"), ("policy", "2")))
    eos = (EOS,)
    assert encode_solution(problem, encoder) == (
        ("policy", ids("3") + eos), ("environment", ids("\n<1>?") + eos + ids("\n<2>_")), ("policy", ids("2") + eos)
    )


def test_solutions_of_addition_can_all_be_encoded():
    task = AdditionTask({"use_tool": 0.5}, 0, arithmetic_tokenizer())
    encoder = plain()
    kinds = {len(encode_solution(task.problem(i), encoder, (">",))) for i in range(40)}
    assert kinds == {1, 3}


def end_of(template, solution="3", eos_ids=None, eos="<eos>", **settings):
    """The tokens of a worked solution's turns, whose template ends a turn in its own way."""
    encoder = chat(template, **settings)
    encoder.tokenizer.eos_token = eos
    return [tokens for _, tokens in encode_solution(Problem("1", "1+1=", "2", solution), encoder, (">",), eos_ids)]


TALK = (("policy", "3"), ("environment", "?"), ("policy", "2"))


def test_the_warm_start_ends_a_turn_as_the_template_does():
    """`|` is the template's end of turn, <eos> the tokenizer's: the policy must learn to draw `|`, and stops at it."""
    assert end_of(TEMPLATE, eos_ids={EOS, END}) == [ids("3|")]
    assert end_of(TEMPLATE, TALK, {EOS, END}) == [ids("3|"), ids("\n<1>?|\n<2>_"), ids("2|")]
    # what was sampled, turn by turn, is one rendering of the whole conversation
    whole = chat().tokenizer.apply_chat_template(
        [user("1+1="), {"role": "assistant", "content": "3"}, user("?"), {"role": "assistant", "content": "2"}],
        tokenize=False,
    )
    told = chat(TEMPLATE.replace("<2>_", "<2>"))
    parts = encode_solution(Problem("1", "1+1=", "2", TALK), told, (), {END})
    assert ids("<1>1+1=|\n<2>") + sum((tokens for _, tokens in parts), ()) == ids(whole.rstrip("\n"))
    # a turn that ends in a stop string has no end of its own; the template's follows
    called = (("policy", "3>"), ("environment", "?"), ("policy", "2"))
    assert end_of(TEMPLATE, called, {EOS, END})[:2] == [ids("3>"), ids("|\n<1>?|\n<2>_")]


def test_a_turn_whose_template_ends_it_with_no_stop_token_ends_with_the_tokenizers():
    assert end_of(TEMPLATE, eos_ids={EOS}) == [(*ids("3"), EOS)]
    assert end_of(TEMPLATE.replace("|\n{% endfor", "{% endfor"), eos_ids={EOS, END}) == [(*ids("3"), EOS)]
    assert end_of(TEMPLATE, eos_ids={EOS, END}, chat_template=False) == [(*ids("3"), EOS)]


IM_END, OTHER_END = 258, 256
BASE = [  # the tokens at which the run stops, strings, the template's end of a turn; whether the run stops there
    ({OTHER_END}, (), "<|im_end|>\n", False), ({OTHER_END, IM_END}, (), "<|im_end|>\n", True),
    ({OTHER_END}, ("<|im_end|>",), "<|im_end|>\n", True), ({OTHER_END}, (), "<|end|>\n", True),
    ({OTHER_END}, (), " <|im_end|>", False), ({OTHER_END}, (), "\n", True), ({OTHER_END}, (), "", True),
    ({OTHER_END}, (), " <|end|>", True),
]


@pytest.mark.parametrize(("ends", "stop", "end", "stops"), BASE, ids=str)
@pytest.mark.parametrize("solution", ["A1", (("policy", "A1"), ("environment", "OK"), ("policy", "A2"))], ids=len)
def test_a_turn_is_taught_the_templates_end_or_none(solution, ends, stop, end, stops):
    """As base models have it: the tokenizer ends sequences with one token, the template ends turns with another."""
    tokenizer = byte_tokenizer(CHAT.replace("<|im_end|>\n", "END").replace("END", end))
    tokenizer.eos_token = "<|end|>"
    encoder, problem = TurnEncoder(tokenizer, TaskConfig(name="addition")), Problem("1", "1+1=", "2", solution)
    if not stops:
        with pytest.raises(UserError, match=r"The tokenizer's chat template ends a turn with '<\|im_end\|>' \(258\)"
                           r", and the run does not stop there, but at '<\|end\|>' \(256\): the warm start would"):
            encode_solution(problem, encoder, stop, ends)
        with pytest.warns(UserWarning, match="keeps writing after it. Add 258 to eos_token_id in the model's"):
            check_turn_end(encoder, ends, stop, teaches=False)
        return
    taught = [tokens for author, tokens in encode_solution(problem, encoder, stop, ends) if author == "policy"]
    own = IM_END if end.startswith("<|im_end|>") else OTHER_END
    assert {tokens[-1] for tokens in taught} == {own}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_turn_end(encoder, ends, stop, teaches=True)


def test_a_tokenizer_without_an_end_of_sequence_takes_the_runs_or_is_told():
    assert end_of(TEMPLATE, eos_ids={END}, eos=None) == [ids("3|")]
    assert end_of(TEMPLATE, eos_ids={9}, eos=None) == [(*ids("3"), 9)]
    with pytest.raises(UserError, match="needs the token that ends the policy's turn, and there is none.*eos_token"):
        end_of(TEMPLATE, eos_ids=set(), eos=None)
    with pytest.raises(UserError, match=r"and there are several \(8, 9\).*Set eos_token in tokenizer_config.json"):
        end_of(TEMPLATE, eos_ids={9, 8}, eos=None)
    with pytest.raises(UserError, match="there is none"):
        end_of(TEMPLATE, eos=None)


CALLS = (
    ROLES + "{% for m in messages %}<{{ names[m.role] }}>{{ m.reasoning_content ~ '?' if m.reasoning_content else '' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.arguments }}){% endfor %}|\n{% endfor %}"
    "{% if add_generation_prompt %}<2>{% endif %}"
)


def test_a_whole_conversation_with_calls_is_a_worked_solution():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "1+1"}}]}
    solution = (call, {"role": "tool", "content": "2"}, user("?"),
                {"role": "assistant", "content": "#2", "reasoning_content": "1"})
    problem, encoder = Problem("1", "1+1=", "2", solution), chat(CALLS)
    parts = encode_solution(problem, encoder, (), {EOS, END})
    assert parts == (
        ("policy", ids("(1+1)|")), ("environment", ids("\n<3>2|\n<1>?|\n<2>")), ("policy", ids("1?#2|"))
    )
    with pytest.raises(UserError, match="has tool_calls, and no chat template is in use"):
        encode_solution(problem, plain())
    split = "{% for m in messages %}{{ m.tool_calls and '7' or '' }}{{ m.content }}|{% endfor %}{{ '<2>' if "\
        "add_generation_prompt else '' }}"
    with pytest.raises(UserError, match="does not write the assistant's message .* as a continuation of the prompt"):
        encode_solution(problem, chat(split), (), {EOS, END})
