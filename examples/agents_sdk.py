"""A program that plays with the policy through OpenAI's Agents SDK: one process for all conversations of a run.

`examples/agents_sdk.toml` starts it with `lasting = true`: each line of its standard input is a conversation, with the
policy's address, and each line that it prints is one's end. The game is that of `examples/agent.py`.

All conversations share one HTTP client: to make one takes 30 ms of CPU time, more than all turns of a conversation.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

MOST, TURNS = 7, 3
QUIET = RunConfig(tracing_disabled=True)  # else the SDK sends traces to OpenAI


async def play(asked: dict, shared: AsyncOpenAI) -> float:
    """One conversation; its reward."""
    secret = random.Random(asked["problem"]["seed"]).randint(1, MOST)
    client = shared.with_options(base_url=asked["url"], api_key=asked["key"])  # over the same connections
    agent = Agent("guesser", model=OpenAIChatCompletionsModel(asked["model"], client))
    said: list = [{"role": "user", "content": f"1:{MOST}?"}]
    reward = 0.0
    for _ in range(TURNS):
        result = await Runner.run(agent, said, max_turns=1, run_config=QUIET)
        guess = result.final_output
        if guess == str(secret):
            return reward + 1.0
        known = guess.isascii() and guess.isdigit()
        reward -= 0.0 if known else 0.1
        reply = "?" if not known else ">" if int(guess) < secret else "<"
        said = [*result.to_input_list(), {"role": "user", "content": reply}]
    return reward


async def answer(asked: dict, shared: AsyncOpenAI) -> None:
    """Play one, and tell how it ended."""
    try:
        end = {"reward": await play(asked, shared)}
    except Exception as error:
        end = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"episode": asked["episode"], **end}), flush=True)


async def main() -> None:
    """Conversations as they come, many at once, until the input ends."""
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    shared = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
    running: dict[str, asyncio.Task] = {}
    while line := await lines.readline():
        asked = json.loads(line)
        if "cancel" in asked:  # the run has ended this one
            if asked["cancel"] in running:
                running.pop(asked["cancel"]).cancel()
            continue
        running[asked["episode"]] = task = asyncio.create_task(answer(asked, shared))
        task.add_done_callback(lambda task, name=asked["episode"]: running.pop(name, None))
    await asyncio.gather(*running.values(), return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
