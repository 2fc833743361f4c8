"""The advance from one decode step to the next; the Triton kernel is compared with it in `triton_cases.py`."""

from __future__ import annotations

import torch

from jetrl.kernels.attention.state import DecodeState, advance


def test_a_step_feeds_the_next() -> None:
    state = DecodeState.empty(3, 2, 4, 8, torch.device("cpu"))
    state.integers[:, :2] = torch.tensor([[5, 6], [7, 3], [8 * 4 + 7, 8 * 9 + 3], [11, 12], [20, 21]])
    state.table[:2] = torch.tensor([[4, 1], [9, 2]])
    state.kv_lengths[:2] = torch.tensor([8, 4])
    draws = [(torch.tensor(t), torch.tensor(p), torch.tensor(m)) for t, p, m in (
        ([40, 41, 42], [-0.5, -1.5, -9.0], [2.0, 3.0, 4.0]), ([50, 51, 52], [-0.1, -0.2, -0.3], [5.0, 6.0, 7.0]),
    )]
    for draw in draws:
        advance(state, *draw)
    # two positions on: the first sequence went over to its second page; the third row is padding and stays
    assert state.integers.tolist() == [
        [50, 51, 52], [9, 5, 0], [8 * 1 + 1, 8 * 9 + 5, -1], [11, 12, 0], [22, 23, 0],
    ]
    assert state.kv_lengths.tolist() == [10, 6, 1] and state.count.tolist() == [2]
    for step, (tokens, logprobs, maxima) in enumerate(draws):
        assert torch.equal(state.drawn[0, step], tokens)
        assert torch.equal(state.drawn[1, step].view(torch.float64).float(), logprobs)
        assert torch.equal(state.drawn[2, step].view(torch.float64).float(), maxima)


def test_the_record_begins_again_when_it_is_full() -> None:
    state = DecodeState.empty(1, 1, 2, 8, torch.device("cpu"))
    for token in (1, 2, 3):
        advance(state, torch.tensor([token]), torch.zeros(1), torch.zeros(1))
    assert state.drawn[0, :, 0].tolist() == [3, 2] and state.count.tolist() == [1]
