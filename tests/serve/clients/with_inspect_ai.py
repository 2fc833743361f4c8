"""inspect-ai: a task with a tool, by its own loop and scorer."""

import json
import os
import tempfile

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

called = []


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        called.append([a, b])
        return a + b

    return execute


model = get_model(
    f"openai-api/jetrl/{os.environ['OPENAI_MODEL']}", base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
task = inspect_ai.Task(
    dataset=[Sample(input="What is 20 + 22?", target="42")], solver=[use_tools(add()), generate()], scorer=includes(),
)
with tempfile.TemporaryDirectory() as folder:
    (log,) = inspect_ai.eval(task, model=model, log_dir=folder, display="none")
    assert log.status == "success", log.error
    (sample,) = log.samples  # read from the folder
print(json.dumps({
    "version": inspect_ai.__version__, "said": sample.output.completion, "called": called,
    "score": log.results.scores[0].metrics["accuracy"].value,
}))
