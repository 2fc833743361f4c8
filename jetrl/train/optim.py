"""The optimizer, the learning-rate schedule, and the gradient norm.

AdamW all in FP32 is torch's own. With BF16 master weights torch's would keep its two moments in BF16 as well, and
compute in BF16; `MixedAdamW` computes in FP32, keeps the moments as `optimizer_dtype` says, and on the host if
`offload_optimizer` says so. 8-bit moments are torchao's (`optim_8bit.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.kernels.update.adamw import AdamWStep, adamw_step_
from jetrl.kernels.update.squares import ROW, row_squares
from jetrl.model.master import Master
from jetrl.train.offload import HostMemory, Update, stream_updates

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOMENT_BLOCK = 256  # 8-bit moments that share a scale


def eight_bit(elements: int) -> bool:
    """Whether torchao keeps the moments of a parameter of so many elements in 8 bits."""
    return elements >= 4096 and elements % MOMENT_BLOCK == 0


class ScheduleConfig(Protocol):
    """The fields of `[train]` that `lr_at` reads."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


class OptimizerConfig(Protocol):
    """The fields of `[train]` that `build_optimizer` reads."""

    @property
    def lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_betas(self) -> Any: ...
    @property
    def adam_eps(self) -> float: ...
    @property
    def master_dtype(self) -> str: ...
    @property
    def optimizer_dtype(self) -> str: ...
    @property
    def offload_optimizer(self) -> bool: ...


class MixedAdamW(torch.optim.Optimizer):
    """AdamW on BF16 or FP32 parameters with moments in `state_dtype`; one pass a parameter (`kernels.update.adamw`).

    A BF16 parameter is widened, changed, and rounded once, to nearest even. An entry whose change is below half the
    spacing of BF16 at p (|p| / 512 to |p| / 256) does not move at all: with the small rates of RL (1e-6) most entries
    stay where they are, so `master_dtype = "float32"` is the default. BF16 moments lose changes below 1/256 of them;
    with beta2 = 0.95 the second moment still follows.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype = torch.float32,
        offload: bool = False,
    ) -> None:
        self.state_dtype = state_dtype
        self.host = HostMemory() if offload else None  # None: the moments are on the parameters' device
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        """One step with all gradients times `factor`, which are read so and stay as they are."""
        assert closure is None, "closures are not supported"
        if self.host is None:
            for update in self._updates(factor):
                adamw_step_(*update)
            return
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if params:
            largest = max(param.numel() for param in params)
            stream_updates(self._updates(factor), params[0].device, self.state_dtype, largest)

    def _updates(self, factor: float) -> Iterator[Update]:
        """Every parameter that has a gradient, with its moments and its count of steps, raised by one."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, exp_avg=self.moment(param), exp_avg_sq=self.moment(param))
                state["step"] += 1
                betas = tuple(group["betas"])
                numbers = AdamWStep(group["lr"], betas, group["eps"], group["weight_decay"], state["step"], factor)
                yield Update(param, param.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], numbers)

    def moment(self, param: Tensor) -> Tensor:
        """Zeros for one moment of `param`, where this optimizer keeps them."""
        if self.host is not None:
            return self.host.zeros(param, self.state_dtype)
        return torch.zeros_like(param, dtype=self.state_dtype)

    def take(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Go on with this state, by the parameter's number: moments from `moment`, which are kept, and `step`, an int.

        As `load_state_dict`, without a copy.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        for number, slots in state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                held = slots[key]
                assert (held.shape, held.dtype) == (params[number].shape, self.state_dtype), key
            self.state[params[number]] = slots

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which however moves the state to the parameter's device and dtype; so it gets none of it."""
        super().load_state_dict({**state_dict, "state": {}})
        if self.host is not None:
            self.host = HostMemory()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if key == "step":  # a float32 tensor here would change the bits of the bias correction
                    self.state[param][key] = int(value)
                else:
                    assert value.shape == param.shape, f"{key}: {value.shape} for a parameter {param.shape}"
                    self.state[param][key] = self.moment(param).copy_(value)


def build_optimizer(
    masters: Mapping[str, Master], train_config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW over those of `masters`, by name, that are trained. Weight decay on matrices only: no norms, no biases, no
    embedding.

    The learning rate starts at `lr`; the caller sets it before every step with `set_lr`. Each element is updated by
    itself in all of torch's variants, so all are deterministic; `fused` is taken on a GPU, the plain loop on a CPU.
    Raises UserError for a parameter of another dtype than `master_dtype`.
    """
    if train_config.master_dtype not in _DTYPES:
        raise UserError(f'train.master_dtype is "{train_config.master_dtype}"; use float32 or bfloat16')
    dtype = _DTYPES[train_config.master_dtype]
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    trained = {name: master for name, master in masters.items() if master.trained}
    for name, param in ((name, master.param) for name, master in trained.items()):
        if param.dtype != dtype:
            raise UserError(f"{name} is {param.dtype}, but train.master_dtype asks for {dtype}; convert the model")
        (decayed if is_decayed(name, param) else plain).append(param)
    if not decayed and not plain:
        raise ValueError("no parameter is trained")
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, train_config.weight_decay), (plain, 0.0))
        if params
    ]
    beta1, beta2 = train_config.adam_betas
    common: dict[str, Any] = {"lr": train_config.lr, "betas": (beta1, beta2), "eps": train_config.adam_eps}
    offload = train_config.offload_optimizer
    if train_config.optimizer_dtype == "8bit":
        if offload:
            raise UserError('train.offload_optimizer does not work with train.optimizer_dtype = "8bit"')
        from jetrl.train.optim_8bit import EightBitAdamW, check_shards  # here, because torchao is optional

        for name, master in trained.items():
            check_shards(name, master.shard, master.param.shape[-1])
        return EightBitAdamW(groups, **common)
    state_dtype = _DTYPES[train_config.optimizer_dtype]
    if offload or torch.bfloat16 in (dtype, state_dtype):
        return MixedAdamW(groups, **common, state_dtype=state_dtype, offload=offload)
    on_gpu = all(param.is_cuda for param in decayed + plain)
    return torch.optim.AdamW(groups, **common, fused=on_gpu, foreach=False)


def is_decayed(name: str, param: Tensor) -> bool:
    """Whether weight decay applies: matrices, except the embedding (which is also the head when tied)."""
    return param.ndim >= 2 and "embed" not in name.split(".")


def schedule_factor(step: int, *, steps: int, schedule: str, warmup_steps: int, min_lr_ratio: float = 0.0) -> float:
    """Share of the peak learning rate at `step` (0-based) of `steps`.

    Warm-up, step < W:  (step + 1) / (W + 1), so the first step is not lost at rate 0 and step W is the first at peak.
    After it, with x = (step - W) / (steps - W), at most 1, and m = min_lr_ratio:
        constant 1;  linear 1 - (1 - m) x;  cosine m + (1 - m) (1 + cos(pi x)) / 2.
    The end value m belongs to step `steps`, the first that is not run, so the last step is not lost either.
    """
    if step < 0 or steps < 1 or warmup_steps < 0 or not 0 <= min_lr_ratio <= 1:
        raise ValueError(
            f"step = {step}, steps = {steps}, warmup_steps = {warmup_steps}, min_lr_ratio = {min_lr_ratio}: step and "
            "warmup_steps may not be negative, steps must be positive, min_lr_ratio within [0, 1]"
        )
    if schedule not in ("constant", "linear", "cosine"):
        raise UserError(f'lr_schedule is "{schedule}"; use constant, linear or cosine')
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - (1.0 - min_lr_ratio) * progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def lr_at(step: int, config: ScheduleConfig) -> float:
    """The learning rate of `step` (0-based); see `schedule_factor`."""
    return config.lr * schedule_factor(
        step,
        steps=config.steps,
        schedule=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        min_lr_ratio=config.min_lr_ratio,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: a number there would be compiled into the step
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@torch.no_grad()
def global_grad_norm(params: Iterable[nn.Parameter]) -> float:
    """sqrt of the sum of squares of all gradients, in float64 and in one fixed order of addition.

    The sums run over rows of 4096, rows of those sums, and so on, which no thread count changes (torch splits one long
    sum by threads). Parameters without a gradient count as zero. One synchronization with the device, at the end.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        raise ValueError("no parameter has a gradient; call backward first")
    counts = [-(-grad.numel() // ROW) for grad in grads]
    partial = torch.empty(sum(counts), dtype=torch.float64, device=grads[0].device)
    for grad, out in zip(grads, partial.split(counts), strict=True):
        row_squares(grad, out)
    return math.sqrt(float(fixed_order_sum(partial)))


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / norm). Raises ValueError for a norm that is not finite: such gradients are no use."""
    if not math.isfinite(norm):
        raise ValueError(f"the gradient norm is {norm}; the gradients must not be applied")
    if max_norm <= 0:
        raise UserError(f"train.max_grad_norm = {max_norm} must be positive (inf: no clipping)")
    return 1.0 if norm <= max_norm else max_norm / norm


@torch.no_grad()
def clip_gradients_(params: Iterable[nn.Parameter], norm: float, max_norm: float) -> float:
    """Scale all gradients in place by `clip_factor(norm, max_norm)` and return it. `norm` is `global_grad_norm`'s.

    A product of FP32 is rounded to the gradient's type. At a factor of 1 no bit is touched.
    """
    factor = clip_factor(norm, max_norm)
    if factor != 1.0:
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)
    return factor


def clipped_step(optimizer: torch.optim.Optimizer, norm: float, max_norm: float) -> None:
    """`clip_gradients_` on what `optimizer` has, then its step: the same bits in weights and moments.

    `MixedAdamW` multiplies as it reads and leaves `.grad` as it is. Others, which compute in an order of their own that
    a product within would change, find the product in `.grad`.
    """
    if isinstance(optimizer, MixedAdamW):
        optimizer.step(factor=clip_factor(norm, max_norm))
        return
    clip_gradients_((param for group in optimizer.param_groups for param in group["params"]), norm, max_norm)
    optimizer.step()


def fixed_order_sum(values: Tensor) -> Tensor:
    """Sum of a vector by rows of `ROW`, zero-padded, until one number is left."""
    while values.numel() > 1:
        values = nn.functional.pad(values, (0, -values.numel() % ROW)).view(-1, ROW).sum(dim=1)
    return values.reshape(())
