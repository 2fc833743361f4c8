"""Where modules of earlier versions are now, for recipes and code of users that name them."""

from __future__ import annotations

from typing import Any

# Functions and classes that recipes name. A config holds the new name; its digest is that of the first one.
BUILT_IN = {
    "jetrl.tasks.rewards:exact_match": "jetrl.rewards.text:exact_match",
    "jetrl.tasks.rewards:last_integer": "jetrl.rewards.text:last_integer",
    "jetrl.tasks.gsm8k:gsm8k_reward": "jetrl.rewards.gsm8k:gsm8k_reward",
    "jetrl.tasks.math_reward:math_reward": "jetrl.rewards.mathematics:math_reward",
    "jetrl.study.perturb:OtherBits": "jetrl_study.perturb:OtherBits",
    "jetrl.study.perturb:OtherAttention": "jetrl_study.perturb:OtherAttention",
    "jetrl.study.perturb:OtherQuantizer": "jetrl_study.perturb:OtherQuantizer",
}
_FIRST = {new: old for old, new in BUILT_IN.items()}
_ROOMS = (  # (old room, new room, modules that kept their name)
    ("kernels", "kernels.experts", "groups"),
    ("kernels", "kernels.update", "adamw gradient squares sums"),
    ("kernels.backends", "kernels.attention", "flash"),
    ("kernels.backends", "kernels.compiling", "recorded"),
    ("kernels.backends", "kernels.gemm", "deepgemm operands scaled_mm"),
    ("environments", "chat", "tool_calls"),
    ("model", "huggingface", "export fetch hub"),
    ("parallel", "rollout", "queue"),
    ("precision", "precision.blocks", "attention block mlp moe"),
    ("precision", "precision.picture", "draw svg table"),
    ("rollout", "engine", "engine limits pages plan runner sampler scheduler sharing slots stopper turns"),
    ("rollout", "engine.graphs", "capture"),
    ("rollout", "engine.speculation", "depth"),
    ("study", "jetrl_study",
     "added collect command conduct figures jobs pace page perturb plan rules state statistics "
     "svg timing"),
    ("tasks", "chat", "messages prompts template template_child template_trial tokenizer tool_calls"),
    ("tasks", "environments", "calculator conversations environment retry tool_schemas tools"),
    ("tasks", "rewards", "group_scores gsm8k"),
    ("tasks", "user_code", "calls from_python importing neighbours time_limit"),
    ("train", "run", "checked_engine engines evaluation gather own_parts pin prepare preview setup sft stopping"),
    ("train", "run.checkpoint", "checkpoint optim_state resume state store"),
    ("train", "run.fit", "activations memory"),
)
_RENAMED = {
    "compare": "run.compare", "config.data": "config.task", "ending": "process_exit",
    "engine.kv_cache": "engine.state_pool", "entry": "run.start",
    "engine.beginnings": "engine.pages", "rl.moments": "rounding",
    "kernels.attention": "kernels.attention.ops", "kernels.backends": "kernels.dispatch",
    "kernels.backends.hopper": "kernels.dispatch", "kernels.backends.hopper_scaled_mm": "kernels.dispatch",
    "kernels.backends.reference": "kernels.dispatch", "kernels.backends.deepgemm_grouped": "kernels.experts.deepgemm",
    "kernels.backends.few_rows_choice": "kernels.gemm.choice", "kernels.backends.gemm_layouts": "kernels.gemm.layouts",
    "kernels.backends.gluon_attention": "kernels.attention.decode",
    "kernels.backends.gluon_draft": "kernels.attention.decode_drafts",
    "kernels.backends.gluon_few_rows": "kernels.gemm.few_rows",
    "kernels.backends.triton_cache": "kernels.attention.cache",
    "kernels.backends.triton_decode": "kernels.attention.advance",
    "kernels.backends.triton_decode_chain": "kernels.attention.decode_chain",
    "kernels.backends.triton_decode_choice": "kernels.attention.choice",
    "kernels.backends.triton_decode_shared": "kernels.attention.decode_shared",
    "kernels.backends.triton_decode_split": "kernels.attention.decode_split",
    "kernels.backends.triton_keys": "kernels.compiling.keys", "kernels.backends.triton_launch": "kernels.launch",
    "kernels.backends.triton_logprob": "kernels.logprob.triton", "kernels.backends.triton_moe": "kernels.experts.rows",
    "kernels.backends.triton_moe_decode": "kernels.experts.few_tokens",
    "kernels.backends.triton_moe_quant": "kernels.experts.quantize",
    "kernels.backends.triton_normed": "kernels.pointwise.normed",
    "kernels.backends.triton_optim": "kernels.update.triton",
    "kernels.backends.triton_pointwise": "kernels.pointwise.triton",
    "kernels.backends.triton_qkv": "kernels.attention.heads",
    "kernels.backends.triton_quant": "kernels.quantize.triton",
    "kernels.backends.triton_route": "kernels.experts.route",
    "kernels.backends.triton_swiglu": "kernels.pointwise.swiglu",
    "kernels.backends.triton_transpose": "kernels.quantize.transpose", "kernels.compiling": "kernels.compiling.pool",
    "kernels.decode": "kernels.attention.state", "kernels.gemm": "kernels.gemm.ops",
    "kernels.logprob": "kernels.logprob.ops", "kernels.moe": "kernels.experts.ops",
    "kernels.pointwise": "kernels.pointwise.ops", "kernels.quantize": "kernels.quantize.ops",
    "kernels.reference_attention": "kernels.attention.reference", "kernels.reference_moe": "kernels.experts.reference",
    "loop": "run.loop", "model.hf": "huggingface.read", "model.hf_config": "huggingface.config",
    "model.hf_files": "huggingface.files", "model.hf_tokenizer": "huggingface.tokenizer",
    "model.hf_write": "huggingface.write", "model.trained": "huggingface.provenance",
    "parallel.calls": "parallel.progress", "parallel.together": "parallel.agreement", "parity": "parity.certificate",
    "parity_drawn": "parity.drawn", "parity_ranks": "parity.ranks", "parity_rows": "parity.rows",
    "precision.blocks": "precision.blocks.layouts", "precision.pen": "precision.picture.draw",
    "report.certificate": "parity.show",
    "rollout.exchange": "types",
    "report.compiling": "run.compiling.display", "rollout.draft": "engine.speculation.drafts",
    "rollout.draft_graphs": "engine.graphs.drafts", "rollout.drafted": "engine.speculation.verify",
    "rollout.graphs": "engine.graphs.decode", "rollout.kv_cache": "engine.state_pool",
    "rollout.mixed_graphs": "engine.graphs.mixed",
    "rollout.prompts": "engine.prefixes", "rollout.speculate": "engine.speculation.speculator",
    "rollout.texts": "engine.speculation.sources", "rollout.vllm_engine": "vllm.engine",
    "rollout.vllm_scales": "vllm.scales", "rollout.vllm_start": "vllm.start", "rollout.vllm_weights": "vllm.weights",
    "rollout.vllm_worker": "vllm.worker", "subject": "parity.model_under_test", "tasks.chat": "chat.fields",
    "tasks.math_reward": "rewards.mathematics", "tasks.reward_calls": "rewards.calls",
    "tasks.reward_loading": "rewards.loading", "tasks.reward_results": "rewards.results",
    "tasks.rewards": "rewards.score", "tasks.user_code": "user_code.guard",
    "train.compile_ahead": "run.compiling.ahead", "train.fitting": "run.fit.advice",
    "train.kernels_needed": "run.compiling.needed", "tryout": "run.tryout",
}


def current(value: Any) -> Any:
    """A name, or names, of BUILT_IN as they are now; any other value as it is."""
    return _replaced(value, BUILT_IN)


def first(value: Any) -> Any:
    """The names of earlier versions for those of BUILT_IN: what a digest is made of."""
    return _replaced(value, _FIRST)


def _replaced(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, names) for one in value)
    return names.get(value, value) if isinstance(value, str) else value


def now_at(module: str) -> str | None:
    """The full name of the module that `module`, of an earlier version, has become; None if it is none of them."""
    old = module.removeprefix("jetrl.")
    room, _, name = old.rpartition(".")
    kept = (f"{after}.{name}" for before, after, names in _ROOMS if before == room and name in names.split())
    new = _RENAMED.get(old) or next(kept, None)
    return None if new is None or old == module else new if new.startswith("jetrl_study") else f"jetrl.{new}"
