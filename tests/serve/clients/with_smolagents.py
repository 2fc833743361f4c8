"""smolagents: an agent that calls tools as JSON, by its own loop."""

import json
import os
from importlib.metadata import version

from smolagents import OpenAIModel, ToolCallingAgent, tool

called = []


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    called.append([a, b])
    return a + b


model = OpenAIModel(
    os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
    tool_choice="auto",
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
agent.prompt_templates["system_prompt"] = "Use the tools."  # its own is long for a tiny model on a CPU
print(json.dumps({"version": version("smolagents"), "said": agent.run("What is 20 + 22?"), "called": called}))
