"""`jetrl`: reinforcement learning of language models in low precision, with rollout and training bit for bit the same."""

__version__ = "0.1.0"
