"""A load of agents for any server of OpenAI's completions: each goes on with its own history, in token ids.

    python benchmarks/agents_load.py http://127.0.0.1:8000 MODEL --agents 32 --turns 8 --prompt 256 --new 256

An agent's turn sends all tokens of its conversation so far and `--prompt` new ones, reads a stream of `--new` drawn
tokens, and goes on from these. Nothing is waited for between two turns. The prompts are random ids, the same for every
server with one `--seed`. Agents are dealt to `--processes`, which import nothing but the standard library, so that the
client is not what is measured. `run` is the same as a function; it raises RuntimeError if an answer is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Load:
    """What the agents do. Of `vocab` ids the first `skip` are not in prompts (they may be special)."""

    agents: int
    turns: int
    prompt: int
    new: int
    vocab: int
    seed: int = 0
    logprobs: bool = False
    skip: int = 300

    @property
    def tokens(self) -> int:
        """Drawn by all agents together."""
        return self.agents * self.turns * self.new

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.turns * (self.prompt + self.new)

    def said(self, agent: int, turn: int) -> list[int]:
        """The new tokens of a turn's prompt."""
        draw = random.Random(f"{self.seed} {agent} {turn}")
        return draw.choices(range(self.skip, self.vocab), k=self.prompt)


@dataclass(frozen=True)
class Times:
    """Seconds of each turn: until its first token, and until its last; and from the first request to the last token."""

    first: list[float]
    whole: list[float]
    seconds: float

    def row(self, load: Load) -> dict[str, Any]:
        """The figures of a table."""
        return {
            "agents": load.agents, "turns": load.turns, "prompt": load.prompt, "new": load.new,
            "logprobs": load.logprobs, "tokens/s": load.tokens / self.seconds, "seconds": self.seconds,
            "first p50 ms": quantile(self.first, 50) * 1e3, "first p95 ms": quantile(self.first, 95) * 1e3,
            "turn p50 s": quantile(self.whole, 50), "turn p95 s": quantile(self.whole, 95),
        }


def quantile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# ---- one client -----------------------------------------------------------------------------------------------------


class Connection:
    """HTTP/1.1 that is kept alive."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self.host, self.port = at.hostname, at.port
        self.path = at.path.rstrip("/")
        self.reader: asyncio.StreamReader | None = None

    def request(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST."""
        return (
            f"POST {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def send(self, request: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Send a request; status and headers of its answer."""
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        pairs = (line.split(b":", 1) for line in lines)
        return int(first.split(b" ", 2)[1]), {name.strip().lower(): value.strip() for name, value in pairs}

    async def pieces(self, headers: dict[bytes, bytes]) -> Any:
        """The body, as it comes."""
        assert self.reader is not None
        if headers.get(b"transfer-encoding") != b"chunked":
            yield await self.reader.readexactly(int(headers[b"content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    def close(self) -> None:
        if self.reader is not None:
            self.writer.close()


async def events(pieces: Any) -> Any:
    """The JSON of server-sent events."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:])


async def agent(url: str, model: str, load: Load, number: int) -> list[tuple[float, float, float]]:
    """An agent's whole conversation: start, first token and end of each turn."""
    connection, tokens, found = Connection(url), list[int](), []
    for turn in range(load.turns):
        tokens += load.said(number, turn)
        asked = {
            "model": model, "prompt": tokens, "max_tokens": load.new, "ignore_eos": True, "temperature": 1.0,
            "stream": True, "return_token_ids": True,
        } | ({"logprobs": 0} if load.logprobs else {})
        start, first, drawn = time.monotonic(), 0.0, list[int]()
        request = connection.request("/v1/completions", json.dumps(asked).encode())
        status, headers = await connection.send(request)
        if status != 200:
            text = b"".join([piece async for piece in connection.pieces(headers)])
            raise RuntimeError(f"agent {number}, turn {turn}: status {status}: {text.decode()[:500]}")
        async for event in events(connection.pieces(headers)):
            if "error" in event:
                raise RuntimeError(f"agent {number}, turn {turn}: {event['error']}")
            for choice in event.get("choices", ()):
                drawn += choice.get("token_ids") or []
            if drawn and not first:
                first = time.monotonic()
        found.append((start, first, time.monotonic()))
        if len(drawn) != load.new:
            raise RuntimeError(f"agent {number}, turn {turn}: {len(drawn)} tokens instead of {load.new}")
        tokens += drawn
    connection.close()
    return found


# ---- all of them ----------------------------------------------------------------------------------------------------


def run(url: str, model: str, load: Load, processes: int = 8, limit: float = 600.0) -> Times:
    """All agents, dealt to processes that begin together; at most `limit` seconds."""
    processes = min(processes, load.agents)
    command = [
        sys.executable, __file__, url, model,
        *(f"--{name}={getattr(load, name)}" for name in ("agents", "turns", "prompt", "new", "vocab", "seed", "skip")),
        *(["--logprobs"] if load.logprobs else []), f"--processes={processes}",
    ]
    children = [
        subprocess.Popen([*command, f"--part={i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    turns: list[tuple[float, float, float]] = []
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it is ready
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        end = time.monotonic() + limit
        for child in children:
            text, _ = child.communicate(timeout=max(1.0, end - time.monotonic()))
            if child.returncode:
                raise RuntimeError(f"a process of the load ended with status {child.returncode}; see above")
            turns += json.loads(text)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return times_of(turns)


def times_of(turns: list[tuple[float, float, float]]) -> Times:
    seconds = max(end for _, _, end in turns) - min(start for start, _, _ in turns)
    return Times([first - start for start, first, _ in turns], [end - start for start, _, end in turns], seconds)


async def _part(args: argparse.Namespace, load: Load) -> list[tuple[float, float, float]]:
    mine = range(args.part, load.agents, args.processes)
    done = await asyncio.gather(*(agent(args.url, args.model, load, number) for number in mine))
    return [turn for turns in done for turn in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    for name, value in (("agents", 32), ("turns", 8), ("prompt", 256), ("new", 256), ("vocab", 151_936), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--skip", type=int, default=300, help="ids that are not in prompts")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    load = Load(
        args.agents, args.turns, args.prompt, args.new, args.vocab, args.seed, args.logprobs, args.skip
    )
    if args.part < 0:
        print(json.dumps(run(args.url, args.model, load, args.processes).row(load), indent=1))
        return
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_part(args, load))))


if __name__ == "__main__":
    main()
