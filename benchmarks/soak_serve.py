"""Clients that leave, time out, try again and send garbage, for as long as you like, to a server that must not mind.

    jetrl serve runs/mine & python benchmarks/soak_serve.py http://127.0.0.1:8000 --minutes 60 --pid $!

It fails if an answer to a request with a seed ever differs, if the tokens of a session's traces are not those that its
client was sent, if a request hangs, if the server still computes for clients that have gone, or if the memory of
`--pid` and its children grows by more than `--most-mib` after the first tenth of the time. Any model will do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

PATIENCE = 120.0  # seconds for an answer
PROMPTS = ["Hello", "1 + 2 =", "a b c d", "\u00e9\u4e16", "The end"]
GARBAGE = (
    b"\x00\xff\xfe", b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": [999999999]}',
    b'{"prompt": "a", "max_tokens": 100000000}', b'{"messages": []}', b'{"prompt": "a", "nobody": 1}',
    b"[" * 5000, b'{"prompt": "a", "n": 0}',
)


class Failed(Exception):
    """What the server should not have done."""


class Client:
    """One of many: draws what to do next, again and again."""

    def __init__(self, url: str, known: dict[str, Any], seed: int) -> None:
        at = urlparse(url)
        self.host, self.port = at.hostname or "127.0.0.1", at.port or 80
        self.known, self.random, self.counts = known, random.Random(seed), Counter[str]()

    @property
    def kinds(self) -> tuple[Callable[[], None], ...]:
        """What a client may do."""
        return (self.asks, self.asks, self.talks, self.leaves, self.leaves_a_stream, self.sends_garbage,
                self.tries_again, self.promises_more)

    def act(self) -> None:
        """One of these."""
        kind = self.random.choice(self.kinds)
        kind()
        self.counts[kind.__name__] += 1

    def call(self, method: str, path: str, body: Any = None, timeout: float = PATIENCE, **headers: str) -> Any:
        """Status and JSON of an answer."""
        line = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            line.request(method, path, data, {"content-type": "application/json", **headers})
            answer = line.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            line.close()

    def asked(self) -> dict[str, Any]:
        """A request whose answer is always the same."""
        prompt = self.random.choice(PROMPTS)
        return {"prompt": prompt, "max_tokens": 1 + self.random.randrange(8), "seed": len(prompt), "logprobs": 1,
                "return_token_ids": True}

    def asks(self) -> None:
        body = self.asked()
        status, answer = self.call("POST", "/v1/completions", body)
        if status == 429:
            return
        self.require(status == 200, f"status {status}: {answer}")
        found = answer["choices"][0]
        got = found["token_ids"], found["logprobs"]["token_logprobs"]
        before = self.known.setdefault(json.dumps(body), got)
        self.require(got == before, f"{body}: {got}, and before {before}")

    def talks(self) -> None:
        """Two turns of a session, a fork, and its traces."""
        at, said, drawn = f"/sessions/{uuid.uuid4().hex}", [{"role": "user", "content": "Hi"}], []
        for turn in range(3):
            body = {"messages": said, "max_tokens": 4, "return_token_ids": True}
            status, answer = self.call("POST", f"{at}/v1/chat/completions", body)
            if status == 429:
                return
            self.require(status == 200, f"status {status}: {answer}")
            drawn.append(answer["choices"][0]["token_ids"])
            if turn == 0:
                said = [*said, answer["choices"][0]["message"]]
            said = [*said[:2], {"role": "user", "content": str(turn)}]  # the third goes on from the first
        status, traces = self.call("DELETE", at)
        trained = [s["tokens"] for row in traces["rows"] for s in row["segments"] if s["trained"]]
        self.require(status == 200 and sorted(trained) == sorted(drawn), f"drew {drawn}, and traces say {trained}")

    def send(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A connection on which a request was sent."""
        data = json.dumps(body).encode()
        line = socket.create_connection((self.host, self.port), timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        line.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return line

    def leaves(self) -> None:
        with self.send({**self.asked(), "max_tokens": 64, "n": 2}):
            time.sleep(self.random.random() * 0.05)

    def leaves_a_stream(self) -> None:
        with self.send({**self.asked(), "max_tokens": 64, "stream": True}) as line:
            line.recv(1 + self.random.randrange(400))

    def sends_garbage(self) -> None:
        path = self.random.choice(["/v1/completions", "/v1/chat/completions", "/sessions", "/tokenize", "/nowhere"])
        status, _ = self.call("POST", path, self.random.choice(GARBAGE))
        self.require(400 <= status < 500, f"garbage to {path} got {status}")

    def tries_again(self) -> None:
        """An attempt that is given up, and another with its key: the second has an answer, and so has the third."""
        key, body = uuid.uuid4().hex, {"prompt": "again", "max_tokens": 6, "return_token_ids": True}
        try:
            self.call("POST", "/v1/completions", body, timeout=0.005, **{"idempotency-key": key})
        except (TimeoutError, OSError):
            pass
        pairs = [self.call("POST", "/v1/completions", body, **{"idempotency-key": key}) for _ in range(2)]
        if any(status == 429 for status, _ in pairs):
            return
        self.require([status for status, _ in pairs] == [200, 200], f"attempts got {pairs}")
        first, second = (answer["choices"][0]["token_ids"] for _, answer in pairs)
        self.require(first == second, f"attempts of one request: {first} and {second}")

    def promises_more(self) -> None:
        """A body that does not come."""
        with socket.create_connection((self.host, self.port), timeout=PATIENCE) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                         b"content-length: 100\r\n\r\n{")

    def require(self, right: bool, why: str) -> None:
        if not right:
            raise Failed(why)


def memory_mib(pid: int) -> float:
    """Of a process and its children."""
    total, left = 0, [pid]
    while left:
        one = left.pop()
        try:
            total += int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text())[0])
            for tasks in Path(f"/proc/{one}/task").iterdir():
                left += map(int, (tasks / "children").read_text().split())
        except (OSError, IndexError):  # it has ended
            continue
    return total / 1024


def gauge(client: Client, name: str) -> int:
    """A number of the page of metrics."""
    line = http.client.HTTPConnection(client.host, client.port, timeout=PATIENCE)
    try:
        line.request("GET", "/metrics")
        text = line.getresponse().read().decode()
    finally:
        line.close()
    return int(re.findall(rf"^{name} (\d+)", text, re.M)[0])


def soak(url: str, seconds: float, clients: int, pid: int | None, most_mib: float, seed: int = 0) -> dict[str, Any]:
    """What was done, and the growth of the server's memory. Failed: what the first client saw that went wrong."""
    known: dict[str, Any] = {}
    many = [Client(url, known, seed + i) for i in range(clients)]
    for kind in many[0].kinds:  # so that all of the server is loaded
        kind()
    end, failures = time.monotonic() + seconds, list[BaseException]()

    def work(client: Client) -> None:
        try:
            while time.monotonic() < end and not failures:
                client.act()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in many]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 10)
    before = None if pid is None else memory_mib(pid)
    for thread in threads:
        thread.join(seconds + 2 * PATIENCE)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise Failed("a client hangs")
    deadline = time.monotonic() + PATIENCE
    while gauge(many[0], "jetrl_requests_in_flight") or gauge(many[0], "jetrl_sequences_running"):
        if time.monotonic() > deadline:
            raise Failed("the server still computes for clients that have gone")
        time.sleep(0.1)
    if many[0].call("GET", "/health")[0] != 200:
        raise Failed("the server is not well")
    grown = None if pid is None or before is None else memory_mib(pid) - before
    if grown is not None and grown > most_mib:
        raise Failed(f"the memory of the server grew by {grown:.1f} MiB")
    return {"done": dict(sum((client.counts for client in many), Counter[str]())), "grown_mib": grown}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pid", type=int, help="of the server: its memory is watched")
    parser.add_argument("--most-mib", type=float, default=64)
    given = parser.parse_args()
    print(json.dumps(soak(given.url, 60 * given.minutes, given.clients, given.pid, given.most_mib), indent=1))


if __name__ == "__main__":
    main()
