"""mini-swe-agent: its default agent runs what the policy calls in a shell, until the policy submits."""

import json
import os
import tempfile

import minisweagent
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        LitellmModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", cost_tracking="ignore_errors"),
        LocalEnvironment(cwd=folder), system_template="You can use a shell.", instance_template="Task: {{task}}",
        step_limit=4,
    )
    ended = agent.run("Write 42 into a file.")
    with open(f"{folder}/answer") as file:
        written = file.read()
print(json.dumps({
    "version": minisweagent.__version__, "said": ended["exit_status"], "called": [written.strip()],
}))
