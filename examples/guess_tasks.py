"""A taskset and a harness for `verifiers`: the policy guesses a number from 1 to 7 (`examples/agent_verifiers.toml`).

Nothing here knows of jetrl: it is an environment as its authors write them. The harness is a loop in this process; most
are programs (docs/SERVE.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import verifiers.v1 as vf

MOST, TURNS = 7, 3


class GuessData(vf.TaskData):
    """A task: the number that is to be found."""

    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """Pays for the right number."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 for the right number, -0.1 for each guess that is none."""
        guesses = [str(message.content) for message in trace.assistant_messages]
        wrong = sum(not (guess.isascii() and guess.isdigit()) for guess in guesses)
        return float(str(self.data.secret) in guesses) - 0.1 * wrong


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """One task for each number."""

    def load(self) -> Iterable[GuessTask]:
        """The numbers 1 to 7."""
        for secret in range(1, MOST + 1):
            yield GuessTask(GuessData(prompt=f"1:{MOST}?", secret=secret), self.config.task)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Says after each guess whether the number is larger."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: GuessData,
    ) -> vf.ProgramResult:
        """One game."""
        messages: list[dict] = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:
            for _ in range(TURNS):
                asked = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=asked)
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]["content"]
                if said == str(data.secret):
                    break
                known = said.isascii() and said.isdigit()
                reply = "?" if not known else ">" if int(said) < data.secret else "<"
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["GuessHarness", "GuessTaskset"]
