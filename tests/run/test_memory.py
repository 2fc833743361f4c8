"""The prediction of memory against measured peaks, against a small model counted by hand, and where it must move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.config import Config, load_config
from jetrl.config.shipped import find_recipe
from jetrl.engine.state_pool import row_bytes
from jetrl.kernels.logprob import truncation
from jetrl.kernels.logprob.ops import FORWARD_ELEMENTS, LOGIT_ELEMENTS
from jetrl.model.sharding import fill
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import varlen
from jetrl.precision.blocks import moe
from jetrl.precision.blocks.block import Block, TrainingPass
from jetrl.precision.blocks.mlp import MLP
from jetrl.precision.blocks.moe import expert_rows
from jetrl.precision.lora import GROUPS, Lora
from jetrl.precision.recipe import Recipe, build_recipe, recipe_of
from jetrl.run.fit import activations, memory
from jetrl.run.fit.advice import GPUS, on_gpu
from jetrl.run.fit.memory import GIB, GRAPHS, MARGIN, SPARE, WORKSPACE, Memory, predict
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec, RopeSpec

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = GPUS["h200"]
SMALL = ModelSpec(
    family="qwen3", vocab_size=1024, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(1e6), max_position=4096, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)


def config_of(*overrides: str, recipe: str = "gsm8k_qwen3_8b") -> Config:
    return on_gpu(load_config(find_recipe(recipe), overrides))


def of(spec: ModelSpec, *overrides: str, ranks: int = 1, capacity: int = H200) -> Memory:
    return predict(config_of(*overrides), spec, ranks, capacity)


def of_before(config: Config, spec: ModelSpec) -> tuple[float, float]:
    """GiB in the update and in the rollout, of the code that the stored peaks were measured with.

    It had `lean_backward` off, and kept more: the BF16 values of FP8 linears with FP32 masters, codes of the inputs of
    qkv, gate_up and o, and 2 GB of logits.
    """
    lean = config.model_copy(update={"train": config.train.model_copy(update={"lean_backward": False})})
    now, fp8 = predict(lean, spec, 1, H200), config.precision == "fp8"
    sizes = memory.sizes_of(spec, recipe_of(config, spec))
    copies = 2 * sum(m.size for m in sizes.matrices if all(m.fp8)) if config.train.master_dtype == "float32" else 0
    codes = (2 * spec.hidden_size + spec.num_heads * spec.head_dim) * 33 / 32 * spec.num_layers if fp8 else 0
    if config.train.activation_checkpointing:
        codes /= spec.num_layers
    rows = [n // spec.vocab_size // 128 * 128 for n in (LOGIT_ELEMENTS, FORWARD_ELEMENTS)]
    logits = 4 * spec.vocab_size * (min(now.tokens, rows[0]) - rows[1])
    return (now.update + copies + now.tokens * codes + logits) / GIB, (now.rollout + copies) / GIB


def recipe_rows(several: bool) -> list[dict[str, Any]]:
    """The recipes measured on one GPU, or on several."""
    rows = json.loads((RESULTS / "recipes_on_random.json").read_text())["rows"]
    return [row for row in rows if (row.get("ranks", 1) > 1) == several]


@pytest.mark.parametrize("row", recipe_rows(several=True), ids=lambda row: row["recipe"])
def test_peaks_of_the_recipes_for_several_gpus(row: dict[str, Any]) -> None:
    """Predicted before the run, as now; measured, a few percent less."""
    overrides = [f"rollout.prompts_per_step={row['prompts']}", f"rollout.max_response_length={row['response']}"]
    config = config_of(*overrides, "task.num_eval=16", recipe=row["recipe"])
    predicted = predict(config, SHAPES["qwen3-30b-a3b"], row["ranks"], H200)
    assert predicted.peak / GIB == pytest.approx(row["predicted GiB"], rel=0.01)
    assert predicted.host / GIB == pytest.approx(row["predicted host GiB"], rel=0.01)
    assert 0.95 < row["peak GiB"] / row["predicted GiB"] <= 1.0 and row["host GiB"] / row["predicted host GiB"] < 1.05


@pytest.mark.parametrize("row", recipe_rows(several=False), ids=lambda row: row["recipe"])
def test_peaks_of_the_recipes_within_five_percent(row: dict[str, Any]) -> None:
    name, response = row["recipe"], row["response"]
    overrides = [f"rollout.prompts_per_step={row['prompts']}", f"rollout.max_response_length={response}"]
    overrides += ["task.num_eval=16", "rollout.keep_kv_cache=never"]  # most were measured so: the cache was freed
    overrides += ["rl.overlong_buffer_len=1024"] if name.startswith("dapo") else []
    spec = SHAPES["qwen3-" + name.rpartition("_")[2]]
    assert max(of_before(config_of(*overrides, recipe=name), spec)) == pytest.approx(row["peak GiB"], rel=0.05)


def piece(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "table.json").read_text())["pieces"][name]["rows"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_measured_updates_and_what_is_held_between_them_within_three_percent(precision: str) -> None:
    """`bench_step.py`: BF16 masters and moments on the GPU, FP32 gradients, micro-batches of one sequence."""
    overrides = ["train.master_dtype=bfloat16", "train.offload_optimizer=false", f"precision={precision}"]
    overrides += ["quant.kv_cache=bf16"] if precision == "fp8" else []
    spec = SHAPES["qwen3-8b"]
    update, whole = piece(f"update {precision}"), piece(f"whole {precision}")
    overrides += ["train.lean_backward=false", "rollout.keep_kv_cache=never"]  # as measured
    config = config_of(*overrides, f"train.max_tokens_per_gpu={update['length']}")
    assert of_before(config, spec)[0] == pytest.approx(update["update peak GiB"], rel=0.03)
    now = predict(config, spec, 1, H200)
    held = now.resident + now.gradients
    assert held / GIB == pytest.approx(update["optimizer peak GiB"], rel=0.01)
    sizes = ["train.max_tokens_per_gpu=4608", "rollout.prompts_per_step=8", "rollout.max_response_length=4096",
             "eval.eval_interval=0"]
    in_update, in_rollout = of_before(config_of(*overrides, *sizes), spec)
    assert in_update == pytest.approx(whole["whole update peak GiB"], rel=0.03)
    assert in_rollout == pytest.approx(whole["whole rollout peak GiB"], rel=0.05)


def test_a_small_model_by_hand() -> None:
    """SMALL: per layer qkv [512, 256], o [256, 256], gate_up [1024, 256], down [256, 512]; embedding [1024, 256]."""
    layer = 512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512
    vectors = 2 * (2 * 256 + 2 * 64) + 256
    total = 1024 * 256 + 2 * layer + vectors
    memory = of(SMALL, "train.optimizer_dtype=float32", "train.offload_optimizer=false")
    assert (memory.masters, memory.gradients, memory.moments) == (4 * total, 4 * total, 8 * total)
    blocks = 2 * layer // (128 * 128)
    plain = 1024 * 256 + vectors
    assert memory.published == 2 * plain + 2 * layer + 4 * blocks, "no BF16 of FP8 linears"
    fast = of(SMALL, "train.lean_backward=false")
    assert fast.published == memory.published + 2 * layer + 4 * blocks, "codes with scales in two orders"
    assert fast.activations == memory.activations + 2 * 2 * 512 * 8192, "q, k and v"
    two = of(SMALL, ranks=2)  # all matrices divide evenly into blocks of 128 rows
    own = (1024 * 256 + 2 * layer) // 2 + vectors
    assert (two.masters, two.moments, two.host) == (4 * own, 0, 2 * 2 * own)
    assert two.published == memory.published
    flying = 1024 * 256 + 2 * 1024 * 256 + 512 * 256
    matrices = 1024 * 256 + 2 * layer
    assert (two.gradients, two.in_flight) == (4 * own, 4 * (flying + matrices // 2)), "fast: whole gradients"
    light = of(SMALL, "train.reduction=fixed", ranks=2)
    assert (light.gradients, light.in_flight) == (4 * own, 4 * flying)
    lanes = of(SMALL, "train.reduction=fixed", "train.reduction_lanes=8", ranks=2)
    assert (lanes.gradients, lanes.in_flight) == (4 * own, 4 * (flying + matrices))
    saved = 2 * (4 * 256 + 4 + 2 * 512 + 2 * 256 + 16 + 4 + 4 * 512) + 264 - 4  # the first norm adds nothing
    assert memory.activations == memory.tokens * (saved + 10 * 256) and memory.tokens == 8192
    assert memory.passing == 8192 * (4 * 256 + 10 * 512), "more than 6 bytes for each of 8192 x 1024 logits"
    update = 16 * total + memory.published + memory.tables + memory.activations + memory.passing + WORKSPACE
    assert memory.update == update + memory.cache + GRAPHS, "there is room for the cache, so it is kept"
    assert of(SMALL, "train.optimizer_dtype=float32", "train.offload_optimizer=false",
              "rollout.keep_kv_cache=never").update == update
    assert memory.tables == 2 * 4096 * 32 * 4


def test_w8a16_holds_codes_and_their_values() -> None:
    """3 bytes of a linear's weight and its scales, whatever the masters are; activations are those of BF16."""
    layer = 512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512
    codes = 2 * layer + 4 * (2 * layer // (128 * 128))
    plain, ours = of(SMALL, "precision=bf16"), of(SMALL, "precision=w8a16")
    assert ours.published == plain.published + codes
    assert (ours.activations, ours.passing) == (plain.activations, plain.passing)
    halves = ("train.master_dtype=bfloat16",)
    plain, ours = of(SMALL, "precision=bf16", *halves), of(SMALL, "precision=w8a16", *halves)
    assert plain.published == 0 and ours.published == 2 * 2 * layer + codes, "the masters are not the values"
    assert of(SMALL, "precision=w8a16", "train.lean_backward=false", *halves).published == ours.published
    assert of(SMALL, "precision=w8a16", "quant.kv_cache=fp8").wanted == ours.wanted


def test_what_settings_and_ranks_change() -> None:
    spec = SHAPES["qwen3-8b"]
    base = of(spec)
    chunk = 3456 * 151936  # logits in FP32; of all rows what the backward pass needs of them, in BF16
    assert base.passing == 4 * 768 * 151936 + 2 * 8192 * 151936
    assert of(spec, "train.max_tokens_per_gpu=3072").passing == (4 * 768 + 2 * 3072) * 151936
    assert of(spec, "train.max_tokens_per_gpu=12000").passing == 6 * chunk + (5 << 29) // (2 * 151936) * 2 * 151936
    assert of(spec, "rl.entropy_coef=0.01").passing == 6 * chunk, "logits are made again"
    assert of(spec, "train.activation_checkpointing=true").activations < base.activations / 4.9
    assert of(spec, "train.reduction=fixed").in_flight > base.in_flight == 0
    shared = of(spec, ranks=2)
    assert 2 * shared.masters == pytest.approx(base.masters, rel=1e-3) and shared.published == base.published
    assert of(spec, "rl.kl_coef=0.1").others == pytest.approx(base.masters + base.published, rel=0.3)
    critic = ["rl.algo=ppo", "rl.critic=separate"]
    assert of(spec, *critic).others > base.masters and of(spec, *critic).host > 1.8 * base.host
    eight = of(spec, "train.optimizer_dtype=8bit", "train.offload_optimizer=false")
    assert eight.moments == pytest.approx(base.masters / 2, rel=0.02) and eight.host == 0
    assert of(spec, "train.grad_dtype=bfloat16", "train.master_dtype=bfloat16").passing > base.passing, "FP32 lm_head"
    assert of(spec, "precision=bf16").cache > 1.9 * base.cache


def test_a_cache_is_kept_where_the_update_leaves_room() -> None:
    spec, never, fixed = SHAPES["qwen3-8b"], "rollout.keep_kv_cache=never", "rollout.kv_cache_tokens=100000"
    without = of(spec, fixed, never)
    assert without.kept_cache == 0 and without.cache > 6 * GIB
    margin = int((1 + MARGIN) * without.update) - without.update
    just = without.update + margin + without.cache + GRAPHS + SPARE
    kept, short = of(spec, fixed, capacity=just), of(spec, fixed, capacity=just - 1)
    assert kept.kept_cache == kept.keep == without.cache and kept.update == just - SPARE - margin and kept.fits(just)
    assert short.kept_cache == 0 and short.update == without.update
    tight = just - margin - 1
    always = of(spec, fixed, "rollout.keep_kv_cache=always", capacity=tight)
    assert always.kept_cache == without.cache and not always.fits(tight)


def test_a_cache_takes_what_is_left() -> None:
    memory = of(SHAPES["qwen3-8b"], "train.max_tokens_per_gpu=2048", "train.lean_backward=false", capacity=80 * GIB)
    assert 0 < memory.sequences < memory.wanted == 256
    assert memory.cache < 0.8 * (80 * GIB - memory.resident)
    assert of(SHAPES["qwen3-32b"], capacity=GPUS["h100"]).sequences == 0
    odd = replace(SMALL, hidden_size=200, intermediate_size=300)
    assert of(odd).published > of(SMALL).published / 2, "sizes that end within a block are padded"


def test_a_hybrids_rows_of_a_shared_prompt_are_kept_for_each_answer() -> None:
    """Of Gated DeltaNet, whose answers to a prompt go on from copies of its rows; other layers have them once."""
    sized = ["task.max_prompt_length=1000", "rollout.max_response_length=500", "rollout.group_size=4"]
    alone, shared = (
        config_of(*sized, f"train.share_prompts={on}", recipe="gsm8k_qwen3.5_0.8b") for on in ("false", "true")
    )
    spec = SHAPES["qwen3.5-0.8b"]
    d, recipe = spec.delta, recipe_of(alone, spec)
    assert d is not None
    first, ours = (activations.layers(config, spec, recipe, 3000) for config in (alone, shared))
    assert ours[0].repeated == (1000 + 4 * 1500) / 3000 and first[0].repeated == 1
    rows = 16 * d.value_heads + 2 * d.conv_channels + 2 * d.value_size
    more = ours[0].repeated * (rows + 2 * d.conv_channels) - rows
    places = d.layers[0], next(i for i in range(9) if i not in d.layers)
    kept = [[activations.saved_of_layer(layers[i]) for i in places] for layers in (first, ours)]
    assert kept[1][0] - kept[0][0] == pytest.approx(more) and kept[0][1] == kept[1][1]


def test_experts_by_hand() -> None:
    """A router and two matrices of all experts; each token's rows twice, padded to tiles of 128."""
    experts = ExpertSpec(count=4, per_token=2, intermediate_size=128, normalized=True)
    spec = replace(SMALL, family="qwen3_moe", experts=experts)
    recipe = recipe_of(config_of("precision=fp8"), spec)
    sizes = {m.name: m for m in memory.sizes_of(spec, recipe).matrices}
    assert sizes["layers.0.mlp.gate_up.weight"].size == 4 * 2 * 128 * 256
    assert sizes["layers.0.mlp.router.weight"].fp8 == (False, False)
    assert expert_rows(spec, 1000) == 2432, "2000 choices and 4 x 127, in whole tiles"
    assert expert_rows(spec, 1) == 256 and expert_rows(SMALL, 1000) == 0
    dense, mixed = (activations.saved_of_layer(TrainingPass(s, recipe, 0, 1000)) for s in (SMALL, spec))
    row = 4 * 128 + 2 * 256 + 4  # what both linears read is made again
    of_mlp = 4 + 4 * 512  # SwiGLU's output is made again
    assert mixed - dense == pytest.approx(2 * 256 + 4 * 4 + 20 * 2 + row * 2.432 - of_mlp)
    plain = recipe_of(config_of("precision=bf16"), spec)
    dense, mixed = (activations.saved_of_layer(TrainingPass(s, plain, 0, 1000)) for s in (SMALL, spec))
    row, of_mlp = 512 + 4 * 128 + 256 + 2 * 256 + 4, 512 + 4 * 512 + 1024
    assert mixed - dense == pytest.approx(2 * 256 + 4 * 4 + 20 * 2 + row * 2.432 - of_mlp)
    assert of(spec).passing >= of(replace(spec, experts=None, family="qwen3")).passing


def test_the_recipe_of_the_large_mixture_fits_two_h200() -> None:
    """And its head comment says what is predicted."""
    name = "gsm8k_qwen3_30b_a3b"
    predicted = predict(config_of(recipe=name), SHAPES["qwen3-30b-a3b"], 2, H200)
    assert predicted.fits(H200) and predicted.sequences == predicted.wanted == 512
    peak, host = round(predicted.peak / GIB), round(predicted.host / GIB)
    told = f"Memory: {peak} GiB of each GPU at the peak, and {host} GiB of host memory"
    assert told in find_recipe(name).read_text()
    wider = config_of("train.master_dtype=float32", "train.grad_dtype=float32", recipe=name)
    assert not predict(wider, SHAPES["qwen3-30b-a3b"], 2, H200).fits(H200)
    assert predict(wider, SHAPES["qwen3-30b-a3b"], 4, H200).fits(H200), "as the comment says"


@pytest.mark.parametrize(("name", "shape"), [
    ("gsm8k_qwen3_8b_lora", "qwen3-8b"), ("gsm8k_qwen3_32b_lora", "qwen3-32b"), ("llama3.3_70b_lora", "llama-3.3-70b"),
])
def test_the_recipes_with_adapters_fit_one_gpu(name: str, shape: str) -> None:
    """And their head comments say which, and what is predicted."""
    room = H200 if shape == "llama-3.3-70b" else GPUS["h100"]
    predicted, text = predict(config_of(recipe=name), SHAPES[shape], 1, room), find_recipe(name).read_text()
    assert predicted.fits(room) and predicted.sequences >= 160 and predicted.host == 0
    assert f"Memory: {round(predicted.peak / GIB)} GiB at the peak, predicted" in text
    if shape == "qwen3-8b":
        less = predicted.peak - predict(config_of("precision=fp8", recipe=name), SHAPES[shape], 1, room).peak
        assert f"precision=fp8 takes {round(less / GIB)} GiB less" in text
    elif room == H200:
        assert "on one 141 GB H200" in text and not predicted.fits(GPUS["h100"])
        assert f"takes {round(predicted.published / GIB)} GiB of the GPU" in text
    else:
        more = ("train.activation_checkpointing=false", "train.max_tokens_per_gpu=4096")
        large = predict(config_of(*more, recipe=name), SHAPES[shape], 1, H200)
        assert large.fits(H200) and f"{more[0]} {more[1]} fits too ({round(large.peak / GIB)} GiB)" in text


@pytest.mark.parametrize("size", ["0.8b", "4b", "9b"])
def test_the_recipes_of_hybrids_fit_one_gpu(size: str) -> None:
    """With all their sequences at once, each with its states; and their head comments say what is predicted."""
    name, shape = f"gsm8k_qwen3.5_{size}", SHAPES[f"qwen3.5-{size}"]
    config, text = config_of(recipe=name), find_recipe(name).read_text()
    room = GPUS["h100"] if size == "0.8b" else H200
    predicted = predict(config, shape, 1, room)
    assert predicted.fits(room) and predicted.sequences == predicted.wanted == config.rollout.max_num_seqs
    assert f"Memory: {round(predicted.peak / GIB)} GiB at the peak" in text and config.kernels == "hopper"
    if predicted.host:
        assert f"and {round(predicted.host / GIB)} GiB of host memory" in text
    assert f"jetrl parity {config.model.path}`" in text and "H200" in text
    states = (2 + 2 * config.rollout.max_num_seqs) * row_bytes(shape, torch.bfloat16)
    assert predicted.cache > states > 4 * GIB


def test_a_block_from_outside_counts_by_its_linears_or_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squared(MLP):
        kind = "squared"
        saved_bytes = Block.saved_bytes

    class Sparing(Squared):
        def saved_bytes(self, of: TrainingPass) -> float:
            return 7.0 if of.has_stream else 3.0

        def passing_bytes(self, of: TrainingPass) -> int:
            return 1 << 40

    config, block = config_of("precision=fp8"), [Squared()]
    recipe = recipe_of(config, SMALL)
    monkeypatch.setattr(activations, "blocks_of", lambda spec, layer: tuple(block))
    activations.saved_of_layer.cache_clear()
    try:
        saved = activations.saved_of_layer(TrainingPass(SMALL, recipe, 0, 8192))
        assert saved == 2 * 256 + (264 + 2 * 1024) + (528 + 2 * 256)
        activations.saved_of_layer.cache_clear()
        block[:] = [Sparing()]
        assert activations.activations(config, SMALL, recipe, 100) == 100 * (10 * 256 + 2 * 2 * 256 + 3 + 7)
        assert activations.passing(config, SMALL, recipe, 100) == 1 << 40
    finally:
        activations.saved_of_layer.cache_clear()


def kept_between(spec: ModelSpec, recipe: Recipe, tokens: int, lean: bool) -> float:
    """Bytes a token that autograd keeps of the third layer of a model: three layers', less two layers'."""
    found = []
    for layers in (2, 3):
        model = Transformer(replace(spec, num_layers=layers), replace(recipe, num_layers=layers), lean_backward=lean)
        fill(model, model.random_values(0))
        model.publish()
        weights = [model.cos, model.sin, *model.parameters(), *(m.published for m in model.published_modules())]
        known = {t.untyped_storage().data_ptr() for t in weights}
        kept: dict[int, Tensor] = {}

        def keep(t: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(varlen([torch.arange(tokens) % spec.vocab_size]))
        found.append(sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known))
    return (found[1] - found[0]) / tokens


TINY = replace(
    SMALL, vocab_size=64, hidden_size=128, intermediate_size=256, head_dim=32, num_layers=3, max_position=256
)
KEPT_OF = {
    "dense": TINY, "a bias": replace(TINY, family="qwen2", qkv_bias=True, qk_norm=False),
    "experts": replace(
        TINY, family="qwen3_moe", experts=ExpertSpec(count=4, per_token=2, intermediate_size=128, normalized=True)
    ),
}


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("recipe", [
    build_recipe("bf16", 3), build_recipe("w8a16", 3), build_recipe("fp8", 3), build_recipe("fp8", 3, wgrad="tile"),
    build_recipe("fp8", 3, wgrad="tile", saved_gate_up="fp8"),
    *(build_recipe(name, 3, wgrad="tile", lora=Lora(8, 32.0, targets)) for name in ("fp8", "w8a16", "bf16")
      for targets in (GROUPS["all"], ("k_proj", "up_proj"))),
    *(build_recipe(name, 3, lora=Lora(8, 32.0, ("k_proj", "up_proj"), expert_rank=4)) for name in ("fp8", "bf16")),
], ids=lambda r: f"{r.name}-{r.wgrad}-{r.saved_gate_up}-{len(r.lora.targets) if r.lora else ''}")
@pytest.mark.parametrize("shape", KEPT_OF)
def test_blocks_keep_what_they_say(shape: str, recipe: Recipe, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, but for what only a GPU keeps: attention's log-sums, tiles of experts' rows, places in groups."""
    spec, tokens = KEPT_OF[shape], 256
    monkeypatch.setattr(moe, "expert_rows", lambda spec, tokens: tokens * spec.experts.per_token)
    said = activations.saved_of_layer.__wrapped__(TrainingPass(spec, recipe, 2, tokens, lean))
    elsewhere = 4 * spec.num_heads + (0 if spec.experts is None else 12 * spec.experts.per_token)
    assert kept_between(spec, recipe, tokens, lean) == said - elsewhere


def test_adapters_alone_have_masters_gradients_and_moments() -> None:
    """SMALL, rank 16, all projections; in a layer A has 3 x 256, 256, 2 x 256, 512 values a rank, B 512, 256, 1024,
    256."""
    whole, ours = (of(SMALL, "train.optimizer_dtype=float32", "train.offload_optimizer=false", *more)
                   for more in ((), ("lora.rank=16",)))
    number = 2 * 16 * (3 * 256 + 256 + 2 * 256 + 512 + 512 + 256 + 1024 + 256)
    assert (ours.masters, ours.gradients, ours.moments) == (4 * number, 4 * number, 8 * number)
    assert ours.published == whole.published + 2 * number and ours.tables == whole.tables
    assert ours.copy == 12 * number, "what a checkpoint holds"
    qv = of(SMALL, "lora.rank=16", 'lora.targets=["q_proj", "v_proj"]')
    assert qv.masters == 4 * 2 * 16 * (2 * 256 + 256 + 128)
    assert of(SMALL, "lora.rank=16", "rl.kl_coef=0.1").others == 0 < of(SMALL, "rl.kl_coef=0.1").others
    alone, two = of(SMALL, "lora.rank=16"), of(SMALL, "lora.rank=16", ranks=2)
    assert two.published == alone.published and alone.in_flight == 0 < two.in_flight < 8 * number
    halves = of(SMALL, "lora.rank=16", "train.master_dtype=bfloat16", "precision=bf16")
    assert halves.masters == 2 * number and halves.published > of(SMALL, "precision=bf16").published - 2 * number


def test_frozen_routers_have_no_masters_gradients_or_moments() -> None:
    """27 layers of Moonlight, of which 26 have a router of 64 x 2,048; what is published stays."""
    spec, number = SHAPES["moonlight-16b-a3b"], 26 * 64 * 2048
    settings = ("quant.kv_cache=bf16", "train.optimizer_dtype=float32", "train.offload_optimizer=false")
    whole, ours = (of(spec, *settings, *more, capacity=1 << 40) for more in ((), ("train.freeze_router=true",)))
    assert (whole.masters - ours.masters, whole.gradients - ours.gradients) == (4 * number, 4 * number)
    assert whole.moments - ours.moments == 8 * number and whole.published == ours.published
    assert whole.copy - ours.copy == 12 * number
    half = ("train.master_dtype=bfloat16", "train.grad_dtype=bfloat16")
    whole, ours = (of(spec, *settings, *half, *more, capacity=1 << 40) for more in ((), ("train.freeze_router=true",)))
    assert ours.published - whole.published == 2 * number == whole.masters - ours.masters, "no copy of a master"


def test_the_recipe_of_moonlight_fits_two_gpus_and_one() -> None:
    """And its head comment says what is predicted."""
    name, spec = "grpo_moonlight_16b_a3b", SHAPES["moonlight-16b-a3b"]
    text, narrow = find_recipe(name).read_text().replace("\n# ", " "), "train.master_dtype=bfloat16"
    two = predict(config_of(recipe=name), spec, 2, H200)
    one = predict(config_of(narrow, "train.grad_dtype=bfloat16", recipe=name), spec, 1, H200)
    assert two.fits(H200) and one.fits(H200) and min(two.sequences, one.sequences) >= 128
    peaks, host = ([round(n / GIB) for n in found] for found in ((two.peak, one.peak), (two.host, one.host)))
    assert f"Memory: {peaks[0]} GiB of each GPU at the peak, predicted, and {host[0]} GiB of host memory" in text
    assert f"({peaks[1]} and {host[1]} GiB, predicted)" in text and "neither run nor measured on a GPU yet" in text


def test_a_calibrated_clip_holds_the_policy_in_bf16_and_truncation_some_logits() -> None:
    assert truncation.MAX_ELEMENTS == 1 << 24
    several = "rl.updates_per_step=2"
    fixed, calibrated = (predict(config_of(several, f"rl.clip={c}"), SMALL, 1, H200) for c in ("fixed", "calibrated"))
    matrices = 1024 * 256 + 2 * (512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512)
    vectors, tables = 2 * (2 * 256 + 2 * 64) + 256, 2 * 4 * SMALL.max_position * 32
    assert calibrated.update - fixed.update == 2 * (matrices + vectors) + tables
    whole, cut, full = (predict(config_of(*more), SHAPES["qwen3-8b"], 1, H200).passing for more in (
        (), ("rollout.top_p=0.9",), ("rollout.top_p=0.9", "rollout.logprobs=full")))
    assert cut - whole == activations.TRUNCATING << 24 and full == whole
