"""Arguments of the Python API (`arguments.py`): each mistake is one UserError with the argument's name and a cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import ARCH

from jetrl import UserError, arguments, load_model
from jetrl.api import Policy
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer("builtin:arithmetic")
    spec = hf.spec_from_hf(ARCH | {"vocab_size": len(tokenizer), "num_hidden_layers": 1})
    state = Transformer(spec, build_recipe("bf16", 1)).init_random(4).state_dict()
    path = tmp_path_factory.mktemp("model") / "m"
    hf.save_model(path, spec, state, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_model(folder)


def test_a_single_text_is_one_prompt(policy: Policy) -> None:
    assert policy.generate("12+34=", max_tokens=4) == policy.generate(["12+34="], max_tokens=4)
    assert len(policy.generate("12+34=", max_tokens=2)) == 1
    assert policy.generate([]) == []


def test_ids_may_be_numpys_or_torchs_and_a_stop_may_be_one_text(policy: Policy) -> None:
    ids = [3, 4, 5]
    expected = policy.generate([ids], max_tokens=4)
    for same in ([np.array(ids)], np.array([ids]), torch.tensor([ids]), [tuple(ids)], [[np.int32(i) for i in ids]]):
        assert policy.generate(same, max_tokens=4) == expected
    assert torch.equal(policy.logprobs(torch.tensor(ids)), policy.logprobs(ids))
    assert policy.logprobs([3]).shape == (0,), "the first token has no log-prob"
    assert policy.generate("1+1=", max_tokens=40, stop="12") == policy.generate("1+1=", max_tokens=40, stop=["12"])
    assert policy.generate("1+1=", max_tokens=40, stop="12") != policy.generate("1+1=", max_tokens=40, stop=["1", "2"])


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"prompts": [["a"]]}, r"prompts\[0\]\[0\] = 'a': a token id is a whole number"),
    ("generate", {"prompts": [3, 4]}, r"prompts\[0\] = 3: .*\[\[1, 2, 3\]\]"),
    ("generate", {"prompts": 7}, "prompts = 7: give a string"),
    ("generate", {"prompts": None}, "prompts = None: give a string"),
    ("generate", {"prompts": ["1+1=", ""]}, r"prompts\[1\]: the prompt '' has no tokens"),
    ("generate", {"prompts": [[]]}, r"prompts\[0\] is empty"),
    ("generate", {"prompts": [None]}, r"prompts\[0\] = None"),
    ("generate", {"prompts": [[3, 10**6]]}, r"prompts\[0\]\[1\] = 1000000: the model knows ids from 0 to 31"),
    ("generate", {"prompts": [[-1]]}, r"prompts\[0\]\[0\] = -1: the model knows"),
    ("generate", {"prompts": [[True]]}, r"prompts\[0\]\[0\] = True: a token id"),
    ("generate", {"prompts": [[1.0]]}, r"prompts\[0\]\[0\] = 1.0: a token id"),
    ("generate", {"prompts": [["1", 2]]}, "a token id is a whole number"),
    ("generate", {"prompts": ["\ud800"]}, "not valid Unicode"),
    ("generate", {"prompts": "1", "max_tokens": 0}, "max_tokens = 0: must be a whole number from 1 to 64"),
    ("generate", {"prompts": "1", "max_tokens": 2.5}, "max_tokens = 2.5"),
    ("generate", {"prompts": "1", "max_tokens": True}, "max_tokens = True"),
    ("generate", {"prompts": "1", "max_tokens": None}, "max_tokens = None"),
    ("generate", {"prompts": "1+1=", "max_tokens": 64}, r"prompts\[0\] has 4 tokens; .*64 positions. Shorten"),
    ("generate", {"prompts": "1", "temperature": -0.5}, "temperature = -0.5: must be 0"),
    ("generate", {"prompts": "1", "temperature": float("nan")}, "temperature = nan"),
    ("generate", {"prompts": "1", "temperature": 1e-300}, "temperature = 1e-300: .*at least 1e-06"),
    ("generate", {"prompts": "1", "temperature": "hot"}, "temperature = 'hot'"),
    ("generate", {"prompts": "1", "top_p": 0}, "top_p = 0: .*1 is off"),
    ("generate", {"prompts": "1", "top_k": -1}, "top_k = -1: .*0 is off"),
    ("generate", {"prompts": "1", "min_p": 1.5}, "min_p = 1.5"),
    ("generate", {"prompts": "1", "stop": [""]}, "stop = .*none of them empty"),
    ("generate", {"prompts": "1", "stop": 3}, "stop = 3"),
    ("generate", {"prompts": "1", "seed": -1}, "seed = -1"),
    ("logprobs", {"tokens": []}, "tokens is empty"),
    ("logprobs", {"tokens": "1+1="}, "tokens = '1[+]1=': give token ids; policy.tokenizer.encode"),
    ("logprobs", {"tokens": [1, 999]}, r"tokens\[1\] = 999: the model knows ids from 0 to 31"),
    ("logprobs", {"tokens": [[1, 2]]}, r"tokens\[0\] = \[1, 2\]: a token id"),
    ("logprobs", {"tokens": torch.tensor([1.5])}, "a token id is a whole number"),
    ("logprobs", {"tokens": torch.tensor(1)}, "give a list"),
    ("logprobs", {"tokens": [1] * 65}, "tokens has 65 ids; the model has 64 positions"),
    ("logprobs", {"tokens": [1, 2], "temperature": 0}, "temperature = 0: must be a number of at least"),
]


@pytest.mark.parametrize(("call", "given_", "message"), MISTAKES)
def test_each_mistake_is_named(policy: Policy, call: str, given_: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        getattr(policy, call)(**given_)


def test_mistakes_of_load_model(folder: Path) -> None:
    for given_, message in (
        ({"path": ""}, "path = ''"), ({"path": None}, "path = None"), ({"path": 3}, "path = 3"),
        ({"path": folder, "precision": None}, "precision = None"), ({"path": folder, "device": 0}, "device = 0"),
        ({"path": folder, "kv_cache": True}, "kv_cache = True"),
        ({"path": folder, "kv_cache": "int4"}, "quant.kv_cache"), ({"path": folder, "device": "tpu"}, "device"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(**given_)  # type: ignore[arg-type]


ODD = [np.float32(1.5), np.int64(3), np.zeros(0), np.ones((2, 2)), torch.tensor(1), object(), {}, set()]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=3)
    | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=1),
    max_leaves=5,
)
SMALL = {"max_tokens": st.integers(-1, 2)}
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    key: ANYTHING for key in ("temperature", "top_p", "top_k", "min_p", "stop", "seed")
}


def only_user_errors(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UserError as error:
        assert len(str(error)) > 20
        return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(prompts="@", options={"max_tokens": 1})
@given(prompts=ANYTHING, options=st.fixed_dictionaries(SMALL, optional=OPTIONS))
def test_generate_raises_user_errors_only(policy: Policy, prompts: Any, options: dict[str, Any]) -> None:
    done = only_user_errors(lambda: policy.generate(prompts, **options))
    assert done is None or all(len(c.tokens) == len(c.logprobs) >= 1 for c in done)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=ANYTHING | st.lists(st.integers(-2, 40), max_size=70), temperature=ANYTHING | st.floats(1e-7, 1e30))
def test_logprobs_raises_user_errors_only(policy: Policy, tokens: Any, temperature: Any) -> None:
    done = only_user_errors(lambda: policy.logprobs(tokens, temperature))
    assert done is None or bool(torch.isfinite(done).all())


def test_values_in_messages_are_cut() -> None:
    assert len(arguments.shown("x" * 1000)) == 80
    assert arguments.shown(10**10000) == "a number of 33220 bits"


def test_texts_and_messages_become_tokens_as_in_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama base model is trained with BOS in front: a text without it would be another prompt than a run's."""
    from tokenizers.processors import TemplateProcessing

    policy = load_model(folder)
    policy.tokenizer.add_special_tokens({"bos_token": "<pad>"})
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $A", None, [("<pad>", 0)])
    policy.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '#' if add_generation_prompt }}"
    )
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        type(policy.engine), "generate", lambda self, given: asked.extend(r.tokens for r in given) or []
    )
    plain = tuple(policy.tokenizer("12=").input_ids)
    rendered = (0, *policy.tokenizer.encode("12=#", add_special_tokens=False))
    talk = [{"role": "user", "content": "12="}]
    for prompts in ("12=", ["12=", talk, list(plain[1:])], talk):
        policy.generate(prompts, max_tokens=4)
    assert asked == [plain, plain, rendered, plain[1:], rendered] and plain[0] == 0
    for wrong, message in (
        ([[{"role": "user"}]], r"prompts\[0\]: a chat message needs the strings 'role' and 'content'.*Write {'role'"),
        ([talk, [talk[0], 3]], r"prompts\[1\]\[0\] = .*a token id is a whole number"),
    ):
        with pytest.raises(UserError, match=message):
            policy.generate(wrong)
    policy.tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"prompts\[0\]: is a list of chat messages, and the tokenizer has no"):
        policy.generate(talk)
