"""Text of tokens as they come: pieces that never have to be taken back.

A token may hold part of a character, and the end of a piece may be the beginning of a stop string. Both are held back
until it is known what they are. The pieces of an answer together are its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl.chat.prompts import decoded


def visible(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string, as OpenAI's API gives it. The tokens go on to its end."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """Pieces of one answer's text. From one of `marks` on nothing is said before the end."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], marks: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, (*stops, *marks)
        self.sent = ""
        self._text = ""  # of tokens[: _read]
        self._start = self._read = 0  # a window is decoded, as a token's text may depend on the one before it

    def more(self, tokens: Sequence[int]) -> str:
        """What can be said after these tokens, all of the answer so far."""
        before = self._decode(tokens[self._start : self._read])
        now = self._decode(tokens[self._start :])
        if len(now) > len(before) and now.startswith(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._start, self._read = self._read, len(tokens)
        safe = visible(self._text, self.stops)
        if safe == self._text:
            safe = self._text[: len(self._text) - self._held(self._text)]
        return self._say(safe)

    def rest(self, text: str) -> str:
        """What is left to say, once it is known what the whole is."""
        return self._say(text)

    def _say(self, upto: str) -> str:
        if not upto.startswith(self.sent):  # a tokenizer whose earlier text changes with later tokens
            return ""
        piece = upto[len(self.sent) :]
        self.sent = upto
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return decoded(self.tokenizer, tokens) if len(tokens) else ""
