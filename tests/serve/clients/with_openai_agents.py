"""openai-agents: an agent with a tool, run by its own loop, whole and as a stream."""

import asyncio
import json
import os
from importlib.metadata import version

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

called = []


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append([a, b])
    return a + b


async def main():
    model = OpenAIChatCompletionsModel(model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])
    said = (await Runner.run(agent, "What is 20 + 22?")).final_output
    streamed = Runner.run_streamed(agent, "What is 20 + 22, please?")
    async for _ in streamed.stream_events():
        pass
    return said, streamed.final_output


said, again = asyncio.run(main())
print(json.dumps({"version": version("openai-agents"), "said": said, "again": again, "called": called}))
