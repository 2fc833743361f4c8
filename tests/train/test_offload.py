"""Moments on the host: the same bits as without, whatever the order in which the streams come to run."""

from __future__ import annotations

import errno
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run, weights_hash
from torch import nn

from jetrl.config import parse_config
from jetrl.errors import UserError
from jetrl.train import offload
from jetrl.train.optim import MixedAdamW, set_lr

KINDS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
SHAPES = [(1,), (37, 113), (5,), (64, 64), (4096,), (3, 5, 7), (2,)]


def pair(master: str, moments: str) -> list[tuple[list[nn.Parameter], MixedAdamW]]:
    """The same parameters twice: one optimizer without offload, one with."""
    made = []
    for on_host in (False, True):
        g = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=g).to(getattr(torch, master))) for shape in SHAPES]
        groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:], "weight_decay": 0.0}]
        made.append((params, MixedAdamW(groups, 0.01, state_dtype=getattr(torch, moments), offload=on_host)))
    return made


def step(made: list[tuple[list[nn.Parameter], MixedAdamW]], t: int) -> None:
    """One step of each with the same gradients and rate; the third parameter has a gradient in odd steps only."""
    for params, optimizer in made:
        g = torch.Generator().manual_seed(t)
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=g).to(param.dtype)
            param.grad = grad if i != 2 or t % 2 else None
        set_lr(optimizer, 0.01 / t)
        optimizer.step()


def assert_equal_states(made: list[tuple[list[nn.Parameter], MixedAdamW]]) -> None:
    (params, plain), (others, host) = made
    for i, (one, two) in enumerate(zip(params, others, strict=True)):
        assert torch.equal(one, two), f"parameter {i}"
        assert plain.state[one].keys() == host.state[two].keys()
        for key, value in plain.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(host.state[two][key])), (i, key)


@pytest.mark.parametrize(("master", "moments"), KINDS)
@pytest.mark.parametrize("piece", [64, 1000, 1 << 25])
def test_offload_changes_no_bit(master: str, moments: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE", piece)
    made = pair(master, moments)
    start = made[0][0][1].detach().clone()
    for t in range(1, 5):
        step(made, t)
        assert_equal_states(made)
    assert not torch.equal(made[1][0][1], start)
    assert made[1][1].state[made[1][0][1]]["exp_avg"].dtype == getattr(torch, moments)


class Deferred(offload.Lane):
    """A lane that only queues, as a CUDA stream may; `finish` runs all lanes in any order that the events allow."""

    queues: list[list[tuple[Callable[[], Any], Any, list[bool]]]] = []
    choose: Callable[[list[int]], int] = min

    def __init__(self, number: int) -> None:
        super().__init__(None)
        object.__setattr__(self, "number", number)

    def run(self, action: Callable[[], Any], after: Any = None) -> Any:
        event = [False]
        self.queues[self.number].append((action, after, event))
        return event

    def finish(self) -> None:
        while ready := [i for i, q in enumerate(self.queues) if q and (q[0][1] is None or q[0][1][0])]:
            action, _, event = self.queues[Deferred.choose(ready)].pop(0)
            action()
            event[0] = True
        assert not any(self.queues), "a lane waits for what never comes"


@pytest.mark.parametrize("order", ["fetch first", "store last", "store first", 1, 2, 3])
def test_streams_may_run_in_any_order_that_their_events_allow(
    order: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE", 512)
    monkeypatch.setattr(offload, "lanes", lambda device: tuple(Deferred(i) for i in range(3)))
    monkeypatch.setattr(Deferred, "queues", [[], [], []])
    ranks = {"fetch first": [0, 1, 2], "store last": [1, 0, 2], "store first": [2, 1, 0]}
    rng = random.Random(order)
    choose = rng.choice if isinstance(order, int) else lambda ready: min(ready, key=ranks[order].index)
    monkeypatch.setattr(Deferred, "choose", staticmethod(choose))
    made = pair("bfloat16", "float32")
    for t in (1, 2, 3):
        step(made, t)
        assert_equal_states(made)


def test_device_memory_is_three_pieces_however_large_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE", 100)
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: sizes.append(size) or empty(size, **options))
    made = pair("float32", "float32")
    step(made[1:], 1)
    assert sizes == [100] * 6


@pytest.mark.parametrize(("master", "moments"), KINDS)
def test_states_go_from_one_to_the_other(master: str, moments: str) -> None:
    """What either saves, the other loads, and both go on with the same bits."""
    made, fresh = pair(master, moments), pair(master, moments)
    for t in (1, 2):
        step(made, t)
    for (params, optimizer), (others, again) in zip(made, reversed(fresh), strict=True):
        state = {i: {k: torch.as_tensor(v) for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
        again.load_state_dict({"state": state, "param_groups": again.state_dict()["param_groups"]})
        for param, other in zip(params, others, strict=True):
            other.data.copy_(param.data)
    for t in (3, 4):
        step(made, t)
        step(fresh, t)
    assert_equal_states([made[0], fresh[1]])
    assert_equal_states([fresh[0], made[1]])


def test_a_loaded_state_is_a_copy() -> None:
    made = pair("float32", "float32")
    step(made, 1)
    state = made[1][1].state_dict()["state"]
    made[1][1].load_state_dict(made[1][1].state_dict())
    assert made[1][1].state[made[1][0][0]]["exp_avg"].data_ptr() != state[0]["exp_avg"].data_ptr()


def test_no_gradients_no_step() -> None:
    (_, (params, optimizer)) = pair("float32", "float32")
    optimizer.step()
    assert not optimizer.state


def test_too_little_host_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(UserError, match=r"no 4 MiB of locked host memory.*Cannot allocate.*bfloat16"):
        offload.HostMemory().zeros(torch.empty(1024, 1024), torch.float32)


class FakeRuntime:
    """The two calls of the CUDA runtime that lock and unlock host memory."""

    def __init__(self, status: int) -> None:
        self.status, self.locked = status, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.status:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_locked_memory_has_pages_of_its_own_and_is_unlocked_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = offload.HostMemory()
    likes = [SimpleNamespace(shape=shape, numel=lambda n=n: n, is_cuda=True) for shape, n in (((3, 5), 15), ((2,), 2))]
    tensors = [host.zeros(like, torch.bfloat16) for like in likes]
    assert runtime.locked == {tensors[0].data_ptr(): 30, tensors[1].data_ptr(): 4}  # no rounding up
    for tensor, like in zip(tensors, likes, strict=True):
        assert tensor.data_ptr() % mmap.PAGESIZE == 0 and tensor.shape == like.shape
        assert tensor.dtype == torch.bfloat16 and not tensor.any()
    del host
    assert runtime.locked == {}
    tensors[0].fill_(1.0)  # still there, as ordinary memory


def test_a_refused_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    like = SimpleNamespace(shape=(1 << 20,), numel=lambda: 1 << 20, is_cuda=True)
    with pytest.raises(UserError, match=r"no 4 MiB of locked host memory beyond 0.0 GiB \(cudaHostRegister: error 2\)"):
        offload.HostMemory().zeros(like, torch.float32)


def test_not_with_8_bit_moments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='train.offload_optimizer: does not work with train.optimizer_dtype = "8bit"'):
        tiny_config(tmp_path, {"train.offload_optimizer": True, "train.optimizer_dtype": "8bit"})
    with pytest.raises(UserError, match="verl's name; here it is train.offload_optimizer"):
        parse_config({"train": {"optimizer_offload": True}})


BF16 = {"train.master_dtype": "bfloat16", "train.grad_dtype": "bfloat16"}


def test_a_run_with_offload_equals_one_without_and_resumes_as_either(tmp_path: Path) -> None:
    on, half = {"train.offload_optimizer": True}, {"train.steps": 2}
    plain = tiny_run(tmp_path / "plain", BF16)
    assert numbers(plain)[-1]["policy/grad_norm"] > 0
    for name, first, second in (("on", on, on), ("on, off", on, {}), ("off, on", {}, on)):
        tiny_run(tmp_path / name, BF16 | first | half)
        run_dir = tiny_run(tmp_path / name, BF16 | second | {"checkpoint.resume": "auto"})
        assert weights_hash(run_dir, 4) == weights_hash(plain, 4) and numbers(run_dir) == numbers(plain), name


def test_all_in_fp32_is_another_optimizer_with_offload(tmp_path: Path) -> None:
    """Without offload that is torch's AdamW, whose rounding differs: a run resumes with its own setting only."""
    on = {"train.offload_optimizer": True}
    straight = tiny_run(tmp_path / "straight", on)
    tiny_run(tmp_path / "stopped", on | {"train.steps": 2})
    with pytest.raises(UserError, match="written by a run with other settings"):
        tiny_run(tmp_path / "stopped", {"checkpoint.resume": "auto"})
    run_dir = tiny_run(tmp_path / "stopped", on | {"checkpoint.resume": "auto"})
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4) and numbers(run_dir) == numbers(straight)
