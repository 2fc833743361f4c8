"""One backend serves a type of device, the one that the run's config names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jetrl.config import parse_config, resolve
from jetrl.errors import UserError
from jetrl.kernels import dispatch


@pytest.fixture(autouse=True)
def selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_serving", dict(dispatch._serving))
    yield


def test_a_selected_backend_serves_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.DEVICE_OF, "second", "cpu")
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "load_backend", lambda name: asked.append(name))
    dispatch.select("second")
    dispatch.backend_of(torch.zeros(1))
    assert asked == ["second", "second"]
    dispatch.select("reference")
    dispatch.backend_of(torch.zeros(1))
    assert asked[2:] == ["reference", "reference"]


def test_unknown_backends_and_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend 'fast'; known: reference, hopper, hopper_scaled_mm"):
        dispatch.select("fast")
    with pytest.raises(ValueError, match="no kernels for device meta; supported: cpu, cuda"):
        dispatch.backend_of(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("kernels", "device", "fits"),
    [("auto", "cuda", True), ("hopper", "cuda", True), ("hopper_scaled_mm", "cuda", True), ("reference", "cuda", False),
     ("hopper_scaled_mm", "cpu", False), ("hopper", "cpu", False), ("reference", "cpu", True)],
)
def test_kernels_go_with_their_device(kernels: str, device: str, fits: bool) -> None:
    config = parse_config(
        {"name": "t", "kernels": kernels, "device": device, "model": {"path": "m"}, "task": {"name": "addition"}}
    )
    if fits:
        assert dispatch.DEVICE_OF[resolve(config, cuda_available=True).kernels] == device
    else:
        with pytest.raises(UserError, match=f'kernels = "{kernels}" with device = "{device}"'):
            resolve(config, cuda_available=True)
