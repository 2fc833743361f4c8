"""The process in which episodes of `verifiers` run, that `environments/verifiers.py` starts.

JSON by lines. In: first the environment, then episodes with the policy's address, and cancels. Out: how many tasks
there are, or why it cannot be; then each episode's reward or error. It ends with its input, after the last episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from typing import IO, Any

_PREFIX = "JETRL_VERIFIERS_API_KEY_"  # verifiers takes keys from variables, and keeps those with API_KEY from programs
_SHOWN = 1500


class Worker:
    """Episodes under way, by id."""

    def __init__(self, vf: Any, env: Any, tasks: list[Any], out: IO[str]) -> None:
        self.vf, self.env, self.tasks, self.out = vf, env, tasks, out
        self.running: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Take messages until the input ends, and then wait for what runs."""
        lines = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with self.env.serving():
            tell(self.out, {"num_tasks": len(self.tasks)})
            while line := await lines.readline():
                message = json.loads(line)
                if "cancel" in message:
                    if (task := self.running.pop(message["cancel"], None)) is not None:
                        task.cancel()
                else:
                    self.running[message["episode"]] = asyncio.create_task(self._run(message))
            await asyncio.gather(*self.running.values(), return_exceptions=True)

    async def _run(self, asked: dict[str, Any]) -> None:
        id = asked["episode"]
        name = _PREFIX + id.upper()
        os.environ[name] = asked["key"]
        try:
            found = await self._episode(asked, name)
        except Exception as error:
            found = {"error": told(error)}
        finally:
            del os.environ[name]
            self.running.pop(id, None)
        tell(self.out, {"episode": id, **found})

    async def _episode(self, asked: dict[str, Any], name: str) -> dict[str, Any]:
        client = self.vf.EvalClientConfig(base_url=asked["url"], api_key_var=name)
        context = self.vf.ModelContext(model=asked["model"], client=client, sampling=self.vf.SamplingConfig())
        (slot,) = self.env.slots(self.tasks[asked["task"]])
        episode = await self.env.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            return {"error": f"{errors[-1].type}: {errors[-1].message}"[:_SHOWN]}
        if len(episode.traces) != 1:
            return {"error": f"the episode has traces of {len(episode.traces)} agents, and one can be trained"}
        trace = episode.traces[0]
        return {"reward": trace.reward if any(r is not None for r in trace.rewards.values()) else None}


def tell(out: IO[str], message: dict[str, Any]) -> None:
    """One line."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def told(error: Exception) -> str:
    """An error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]


def load(given: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The environment, and its tasks; ValueError where it is endless and not bounded."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(given["env"]))
    most = given["most_tasks"]
    if most is None and not env.taskset.bounded:
        raise ValueError("the taskset is endless: set environment.params.most_tasks")
    return env, list(env.taskset if most is None else islice(env.taskset, most))


def main() -> None:
    """Serve the run that has started this process."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a taskset prints is no message
    with open(0, "rb", buffering=0, closefd=False) as lines:  # the rest is the loop's to read
        given = json.loads(lines.readline())
    if given["folder"] is not None:
        sys.path.insert(0, given["folder"])
    try:
        import verifiers.v1 as vf

        env, tasks = load(given)
        if not tasks:
            raise ValueError("the taskset has no tasks")
    except Exception as error:
        tell(out, {"refused": told(error)})
        return
    asyncio.run(Worker(vf, env, tasks, out).serve())


if __name__ == "__main__":
    main()
