"""Messages between the processes of a server."""

from __future__ import annotations

from multiprocessing import Pipe

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
