"""Requests per second of a server's HTTP: the same few requests over and over, on connections that stay open.

    python benchmarks/http_load.py http://127.0.0.1:8000 BODIES --path /v1/completions --connections 32 --seconds 8

BODIES is a file with a JSON body in each line. One process, nothing but the standard library. The first answers are
read as JSON and must have `--expect` drawn tokens, which the server gives with `return_token_ids`; of the others status
and length. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from agents_load import Connection, quantile

CHECKED = 20  # answers of each connection


async def one(url: str, path: str, bodies: list[bytes], first: int, end: float, expect: int) -> list[float]:
    """Seconds of each request of one connection until `end`."""
    connection, found = Connection(url), list[float]()
    requests = [connection.request(path, body) for body in bodies]
    at = first
    while time.monotonic() < end:
        start = time.monotonic()
        status, headers = await connection.send(requests[at % len(requests)])
        text = b"".join([piece async for piece in connection.pieces(headers)])
        found.append(time.monotonic() - start)
        if status != 200:
            raise RuntimeError(f"status {status}: {text.decode()[:500]}")
        if len(found) <= CHECKED:
            (choice,) = json.loads(text)["choices"]
            if len(choice["token_ids"]) != expect:
                raise RuntimeError(f"{len(choice['token_ids'])} tokens instead of {expect}")
        at += 1
    connection.close()
    return found


async def all_of(args: argparse.Namespace) -> dict[str, float]:
    bodies = args.bodies.read_bytes().splitlines()
    start = time.monotonic()
    end = start + args.seconds
    found = await asyncio.gather(*(
        one(args.url, args.path, bodies, i * len(bodies) // args.connections, end, args.expect)
        for i in range(args.connections)
    ))
    spent, times = time.monotonic() - start, [seconds for each in found for seconds in each]
    return {
        "requests/s": len(times) / spent, "requests": len(times), "seconds": spent,
        "p50 ms": quantile(times, 50) * 1e3, "p95 ms": quantile(times, 95) * 1e3, "client cpu s": time.process_time(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--path", required=True)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--expect", type=int, required=True, help="drawn tokens of an answer")
    print(json.dumps(asyncio.run(all_of(parser.parse_args()))))


if __name__ == "__main__":
    main()
