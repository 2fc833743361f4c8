"""A taskset and a harness for `verifiers`: the policy guesses a number from 1 to 9 (`examples/agent_verifiers.toml`).

Nothing here knows of jetrl: it is an environment as its authors write them. The harness is a loop in this process; most
are programs (docs/SERVE.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import verifiers.v1 as vf

TURNS = 4


class GuessData(vf.TaskData):
    """A task: the number that is to be found."""

    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """Pays for the right number, and more if it comes early."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 for the first guess, less for each later one; where none is right, a little for digits."""
        guesses = [str(message.content) for message in trace.assistant_messages]
        right = [turn for turn, guess in enumerate(guesses) if guess == str(self.data.secret)]
        digits = sum(guess.isascii() and guess.isdigit() for guess in guesses)
        return 1.0 - right[0] / (2 * TURNS) if right else 0.1 * digits / TURNS


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """One task for each number."""

    def load(self) -> Iterable[GuessTask]:
        """The numbers 1 to 9."""
        for secret in range(1, 10):
            yield GuessTask(GuessData(prompt="1:9?", secret=secret), self.config.task)


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
