"""TRL's side of `gsm8k_trl.py`: GRPOTrainer with the settings and the prompts of a jetrl recipe; a row for each step.

    python benchmarks/gsm8k_trl_peer.py --steps 30 --out FOLDER --engine vllm --batch 32 -- RECIPE model.path=DIR ...

Model, problems and their order, chat template, reward, answers a step, learning rate, betas, clipping and lengths are
the recipe's. What differs is what TRL is: BF16 autocast over FP32 weights, vLLM in BF16 in the same process, TRL's own
correction of vLLM's log-probs (off with --uncorrected; without it TRL makes no pass for old log-probs).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import emit, environment

from jetrl.chat.prompts import chat_messages, encode_problem
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.config import Config, load_config
from jetrl.config.shipped import find_recipe
from jetrl.rewards.gsm8k import gsm8k_reward
from jetrl.tasks.task import build_task

CHECKED = 32  # prompts whose tokens are compared
FULL = "oom"  # key of the row that says that the GPU was full


def require(*packages: str) -> None:
    """SystemExit that names what is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise SystemExit(
            f"{' and '.join(missing)}: not installed here. The peer needs `pip install trl==1.16.0 vllm==0.24.0` (or, "
            "without vLLM, --peer-engine transformers); --sides fp8 measures jetrl alone."
        )


def problems_of(config: Config, steps: int) -> list[dict[str, Any]]:
    """The rows of TRL's data set: the problems of the run's first steps, in the run's order.

    SystemExit if TRL would read other tokens than jetrl.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or str(config.model.path))
    task = build_task(config.task, config.seed, tokenizer)
    rows = []
    for index in range(steps * config.rollout.prompts_per_step):
        problem = task.problem(index)
        messages = [dict(message) for message in chat_messages(problem, config.task)]
        if index < CHECKED:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
            if theirs != encode_problem(problem, tokenizer, config.task):
                raise SystemExit(f"{problem.id}: the two sides would read other tokens, so they cannot be compared")
        rows.append({"prompt": messages, "answer": problem.answer})
    return rows


def arguments_of(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """GRPOConfig's arguments for a recipe. SystemExit for settings that TRL would have to emulate."""
    rollout, train, rl = config.rollout, config.train, config.rl
    if (rl.algo, rl.kl_coef, rl.updates_per_step, rl.loss_agg) != ("grpo", 0.0, 1, "token_mean"):
        raise SystemExit("the comparison is of GRPO without KL, one update a step, averaged over tokens")
    if train.lr_schedule != "constant":
        raise SystemExit(f"train.lr_schedule = {train.lr_schedule!r}: the comparison takes constant")
    answers = rollout.prompts_per_step * rollout.group_size
    batch = min(args.batch, answers)
    if answers % batch:
        raise SystemExit(f"--batch {batch} does not divide the {answers} answers of a step")
    on_gpu = config.device != "cpu"
    return {
        "output_dir": str(args.out), "max_steps": args.steps, "seed": config.seed, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": on_gpu, "use_cpu": not on_gpu,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": answers // batch,
        "gradient_checkpointing": args.checkpointing, "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_response_length, "shuffle_dataset": False,
        "temperature": rollout.temperature, "top_p": 1.0, "top_k": 0, "beta": 0.0, "loss_type": "dapo",
        "learning_rate": train.lr, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": train.warmup_steps,
        "adam_beta1": train.adam_betas[0], "adam_beta2": train.adam_betas[1], "adam_epsilon": train.adam_eps,
        "weight_decay": train.weight_decay, "max_grad_norm": train.max_grad_norm, "epsilon": rl.clip_ratio_low,
        "optim": "adamw_torch_fused" if on_gpu else "adamw_torch", "use_vllm": args.engine == "vllm",
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory,
        "vllm_max_model_length": config.task.max_prompt_length + rollout.max_response_length,
        "vllm_importance_sampling_correction": not args.uncorrected,
    }


class Phases:
    """Seconds of a step by phase. TRL's own profiling names `sync_weights` and `vLLM.generate`; what else happens
    before the update (rewards, old log-probs) is `prepare`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = 0.0

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def listen(self) -> None:
        """Have TRL's profiling contexts report here."""
        from trl.extras.profiling import ProfilingContext

        ProfilingContext._log_metrics = lambda context, seconds: self.add(context.name, seconds)

    def step(self, total: float) -> dict[str, float]:
        """`time/*` of the step that took `total`, and none left for the next."""
        found, self.seconds = self.seconds, {}
        rollout = sum(v for k, v in found.items() if k.endswith(".generate") or k == "transformers.generate_batch")
        sync, before = found.get("sync_weights", 0.0), found.get("before the update", 0.0)
        return {
            "time/rollout": rollout, "time/sync": sync, "time/prepare": before - rollout - sync,
            "time/update": total - before, "time/step": total,
        }


def now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer_of(config: Config, args: argparse.Namespace, phases: Phases) -> Any:
    """GRPOTrainer that emits a row for each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = config.device != "cpu"

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begun = now(on_gpu)
            found = super()._generate_and_score_completions(inputs)
            phases.add("before the update", now(on_gpu) - begun)
            return found

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            phases.begun = now(on_gpu)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times = phases.step(now(on_gpu) - phases.begun)

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any] | None = None, **___: Any) -> None:
            if logs and "reward" in logs:
                peak = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None
                emit({"step": state.global_step, **self.times, **of_log(logs), "torch_reserved_gib": peak})

    phases.listen()
    return Timed(
        model=str(config.model.path), reward_funcs=gsm8k_reward, args=GRPOConfig(**arguments_of(config, args)),
        train_dataset=Dataset.from_list(problems_of(config, args.steps)), callbacks=[Steps()],
    )


def of_log(logs: dict[str, Any]) -> dict[str, float]:
    """What TRL reports of a step, by jetrl's names; what it does not report is left out."""
    names = {
        "reward/mean": "reward", "response_length/mean": "completions/mean_length", "policy/grad_norm": "grad_norm",
        "response_length/frac_truncated": "completions/clipped_ratio",
        "parity/logprob_abs_diff_mean": "sampling/sampling_logp_difference/mean",
        "parity/logprob_abs_diff_max": "sampling/sampling_logp_difference/max",
    }
    return {ours: float(logs[theirs]) for ours, theirs in names.items() if theirs in logs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--batch", type=int, default=32, help="answers in a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--uncorrected", action="store_true", help="without TRL's correction of vLLM's log-probs")
    parser.add_argument("--vllm-memory", type=float, default=0.2, help="share of the GPU for vLLM")
    args = parser.parse_args()
    require("trl", "datasets", *(["vllm"] if args.engine == "vllm" else []))
    if args.engine == "vllm" and importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that its memory is counted
    config = load_config(find_recipe(args.recipe), args.overrides, lambda _: None)
    begun = time.perf_counter()
    trainer = trainer_of(config, args, Phases())
    emit({"ready": time.perf_counter() - begun, "environment": environment()})
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        emit({FULL: str(error).splitlines()[0]})
        return
    trainer.save_model(str(args.out))
    load_tokenizer(config.model.tokenizer or str(config.model.path)).save_pretrained(str(args.out))
    emit({"model": str(args.out)})


if __name__ == "__main__":
    main()
