"""Messages between the processes of a server."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe

import numpy as np
import pytest

from jetrl.serve import pipe


def test_messages_arrive_as_they_were_and_floats_keep_their_bits() -> None:
    ours, theirs = Pipe()
    sent = {"add": 2**62, "logprobs": [-0.1, 1e-45, -3.4028234663852886e38], "text": "ä\n", "none": None}
    pipe.send(ours, sent)
    assert pipe.receive(theirs) == sent
    ours.close()
    with pytest.raises(EOFError):
        pipe.receive(theirs)


def test_arrays_arrive_bit_for_bit_and_the_rest_is_plain_json() -> None:
    ours, theirs = Pipe()
    tokens = np.array([0, 151_935, 2**31 - 1], dtype=np.int64)
    logprobs = np.array([-0.1, -0.0, 1e-45, -np.inf], dtype=np.float32)
    pipe.send(ours, {"news": [[7, 0, tokens, logprobs], [8, 1, tokens[:0], logprobs[::2]]], "text": "@"})
    data = theirs.recv_bytes()
    ours.send_bytes(data)
    found = pipe.receive(theirs)
    assert found["text"] == "@" and [one[:2] for one in found["news"]] == [[7, 0], [8, 1]]
    (_, _, ids, values), (_, _, none, other) = found["news"]
    assert ids.dtype == np.int32 and ids.tolist() == tokens.tolist() and none.tolist() == []
    assert values.tobytes() == logprobs.tobytes() and other.tobytes() == logprobs[::2].tobytes()
    assert not values.flags.writeable
    pipe.send(ours, {"tokens": tokens[:0]})
    assert pipe.receive(theirs)["tokens"].tolist() == []


def test_what_the_pipe_has_no_room_for_leaves_when_it_has() -> None:
    """In order and whole, while the loop does other things; and nothing waits for a process that has ended."""
    ours, theirs = Pipe()
    sent = [{"add": i, "tokens": np.full(400_000, i, dtype=np.int32)} for i in range(3)] + [{"cancel": [1]}]

    async def main() -> None:
        outbox = pipe.Outbox(ours)
        for message in sent:
            outbox.send(message)  # 1.6 MB each: far more than a pipe holds
        found = []
        while len(found) < len(sent):
            found.append(await asyncio.to_thread(pipe.receive, theirs))
        assert [one.get("add") for one in found] == [0, 1, 2, None] and found[3] == {"cancel": [1]}
        assert all((one["tokens"] == one["add"]).all() and len(one["tokens"]) == 400_000 for one in found[:3])
        theirs.close()
        for message in sent:
            outbox.send(message)
        outbox.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_sent_in_one_turn_of_the_loop_leaves_at_once() -> None:
    ours, theirs = Pipe()

    async def main() -> None:
        outbox = pipe.Outbox(ours)
        assert not pipe.ready(theirs)
        for i in range(200):
            outbox.send({"add": i})
        assert not pipe.ready(theirs)
        await asyncio.sleep(0)
        assert pipe.ready(theirs) and [pipe.receive(theirs)["add"] for _ in range(200)] == list(range(200))
        assert not pipe.ready(theirs, 0.01)
        outbox.send({"add": 7})
        outbox.close()  # before it left
        await asyncio.sleep(0)
        assert not pipe.ready(theirs)

    asyncio.run(main())
    ours.close()
    assert pipe.ready(theirs)  # the end
    with pytest.raises(EOFError):
        pipe.receive(theirs)


@pytest.mark.parametrize("wrong", [["O", 0, 1], ["i", 0, 9], ["i", -4, 1], ["f", 2, 1]])
def test_no_object_and_nothing_beyond_the_message_is_read(wrong: list[object]) -> None:
    """A process that was broken into can send what it likes: an error, and no Python object."""
    import json

    ours, theirs = Pipe()
    text = json.dumps({"tokens": {"@": wrong}}).encode()
    ours.send_bytes(len(text).to_bytes(4, "big") + text + bytes(4))
    with pytest.raises((KeyError, ValueError)):
        pipe.receive(theirs)
