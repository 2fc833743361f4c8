"""Adam's moments in 8 bits: torchao's AdamW8bit with the interface of our other optimizers.

A block of 256 values shares an FP32 scale, and each value is one of 256 entries of a table that is fine near zero
(arXiv 2110.02861). torchao quantizes parameters of at least 4096 values that are a multiple of 256; the moments of the
others (norms, biases) keep the type of the master weights. Computed in FP32; masters are rounded to nearest even.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.model.shards import Shard
from jetrl.requirements import install
from jetrl.train.optim import MOMENT_BLOCK, eight_bit


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """torchao reports on import which of its GPU libraries do not fit this torch; its optimizers use none of them."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


try:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
except ImportError as error:
    raise UserError(
        f"train.optimizer_dtype = \"8bit\" needs torchao ({error}); run: {install('optim8')}"
    ) from error

# it is about compiled code kept between processes: without the hash it is compiled again, which changes no bit
warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")

_PARTS = ("codes", "scale", "qmap")


def check_shards(name: str, cut: Shard | None, width: int) -> None:
    """Refuse a parameter whose moments would be held otherwise in a rank's rows than in the whole matrix."""
    if cut is None or not cut.split:
        return

    def held(rows: int) -> bool:
        return eight_bit(rows * width)

    odd = [rows for rows in cut.rows if rows and held(rows) != held(cut.num_rows)]
    if odd:
        raise UserError(
            f'train.optimizer_dtype = "8bit" on {cut.world.size} ranks: {name} [{cut.num_rows}, {width}] is cut into '
            f"{cut.rows} rows, and blocks of {MOMENT_BLOCK} moments do not fit into {odd[0]} rows of {width}. Set "
            'train.optimizer_dtype = "bfloat16", or use another number of ranks.'
        )


class EightBitAdamW(AdamW8bit):
    """AdamW8bit whose `state_dict` holds plain tensors: `exp_avg.codes`, `exp_avg.scale`, `exp_avg.qmap` and so on.

    torchao's own rounding of BF16 masters at random stays off: it draws from torch's global generator, whose state a
    resumed run does not have.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bf16_stochastic_round=False)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step. torchao compiles it for every shape; on a CPU the same operations run without compilation.

        Compiling takes seconds per shape and a C++ compiler, and pays off where a step is memory-bound: on a GPU.
        """
        assert closure is None, "closures are not supported"
        on_gpu = any(param.is_cuda for group in self.param_groups for param in group["params"])
        with contextlib.nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
            super().step()

    def state_dict(self) -> dict[str, Any]:
        full = super().state_dict()
        return {**full, "state": {number: _plain(state) for number, state in full["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gives. torch's own method would cast the state, so it gets none of it."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = _quantized(state_dict["state"][number], param)


def _plain(state: dict[str, Any]) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, OptimState8bit):
            plain |= {f"{key}.{part}": getattr(value, part) for part in _PARTS}
        else:
            plain[key] = value
    return plain


def _quantized(plain: dict[str, Tensor], param: Tensor) -> dict[str, Any]:
    """The inverse of `_plain`, in new tensors. The step count stays on the host, as torchao has it."""
    state: dict[str, Any] = {"step": torch.as_tensor(plain["step"], dtype=torch.float32).cpu().clone()}
    for key in ("exp_avg", "exp_avg_sq"):
        if key in plain:
            state[key] = plain[key].to(param.device, copy=True)
        else:
            parts = [plain[f"{key}.{part}"].to(param.device, copy=True) for part in _PARTS]
            state[key] = OptimState8bit(*parts, signed=key == "exp_avg", dtype=param.dtype)
    return state
