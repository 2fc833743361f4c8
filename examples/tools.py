"""Two tools of examples/tools.toml, and its reward: type hints and docstrings become what the policy reads."""


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


class Memory:
    """A tool with state: each conversation has one of its own. Its public methods with a docstring are tools."""

    def __init__(self):
        self.kept = []

    def keep(self, note: str) -> int:
        """Keep a note.

        Args:
            note: The note.
        """
        self.kept.append(note)
        return len(self.kept)


def right(completions, answer, **columns):
    """1 for a last turn that ends with the answer, and a tenth for a call that worked on the way."""
    scores = []
    for talk, gold in zip(completions, answer, strict=True):
        results = [message["content"] for message in talk if message["role"] == "tool"]
        worked = any(not text.startswith("Error: ") for text in results)
        scores.append(float(talk[-1]["content"].endswith(gold)) + 0.1 * worked)
    return scores
