"""The built-in tokenizer: one token a character, both ways, also from disk."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.chat.tokenizer import CHARACTERS, VOCABULARY, arithmetic_tokenizer, is_arithmetic, load_tokenizer
from jetrl.errors import UserError

TOKENIZER = arithmetic_tokenizer()


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_survives_the_round_trip(text):
    tokens = TOKENIZER.encode(text)
    assert tokens == [VOCABULARY[c] for c in text]
    assert TOKENIZER.decode(tokens) == text


def test_special_tokens():
    assert (len(TOKENIZER), TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (32, 0, 1)
    assert TOKENIZER.encode("1<eos>") == [VOCABULARY["1"], 1]
    assert TOKENIZER.chat_template is None


def test_unknown_characters_raise():
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER.encode("1+x")


def test_saved_tokenizer_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = " 12 +3=\n#15;,?"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 1
    assert is_arithmetic(loaded)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="only built-in tokenizer is 'builtin:arithmetic'"):
        load_tokenizer("builtin:arithmetics")
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
