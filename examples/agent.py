"""A program that plays with the policy: jetrl starts it once for each conversation of `examples/agent.toml`.

It uses OpenAI's client, as any agent would: the client finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY. The
policy guesses a number from 1 to 7, and hears whether it is larger. The last line is the reward.
"""

from __future__ import annotations

import json
import os
import random
import sys

from openai import OpenAI

MOST, TURNS = 7, 3


def main() -> None:
    """One conversation."""
    problem = json.load(sys.stdin)  # the task's problem: seed, prompt, answer and further columns
    secret = random.Random(problem["seed"]).randint(1, MOST)
    client = OpenAI(max_retries=2)
    messages: list = [{"role": "user", "content": f"1:{MOST}?"}]
    reward = 0.0
    for _ in range(TURNS):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        said = answer.choices[0].message
        guess = int(said.content) if said.content.isascii() and said.content.isdigit() else None
        if guess == secret:
            reward += 1.0
            break
        reward -= 0.1 if guess is None else 0.0
        reply = "?" if guess is None else ">" if guess < secret else "<"
        messages += [said, {"role": "user", "content": reply}]
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
