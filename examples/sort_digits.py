"""Rewards of examples/sort_digits.toml: two functions, added up with the weights that the recipe gives.

jetrl calls a function with all completions of a step, and with each column of the data that it names. It returns a
number per completion; None leaves a completion out of training.
"""


def right(completions, answer, **columns):
    """1 for the digits in order, 0 otherwise."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def ordered(completions, **columns):
    """The share of neighbours that are in order, so that a step in the right direction is worth something."""
    scores = []
    for text in completions:
        pairs = list(zip(text, text[1:], strict=False))
        scores.append(sum(a <= b for a, b in pairs) / len(pairs) if pairs else 0.0)
    return scores
