"""Latent attention on a GPU: the kernels' cases, gradients, and certificates of models with it, in CUDA graphs too."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latent_arch import LATENT
from tiny import long_prompts, numbers, tiny_config, tiny_run, weights_hash
from torch import Tensor, nn

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.errors import UserError
from jetrl.huggingface.fp8 import joined
from jetrl.kernels import dispatch
from jetrl.kernels.attention import latent, latent_triton
from jetrl.kernels.attention.latent import LatentSizes, Up
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.quantize.ops import quantize_act, quantize_weight
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.master import masters_of
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import NoText, varlen
from jetrl.precision.recipe import Recipe
from jetrl.run.prepare import prepare
from jetrl.spec import SHAPES
from jetrl.types import Completion, Request, SamplingParams, VarlenPlan, WeightSet

pytestmark = pytest.mark.gpu
CUDA, PARITY = "cuda", "parity/logprob_abs_diff_max"
# The tiny run's model with heads as Moonlight's: what the kernels of the backward pass take.
RUN: dict[str, Any] = LATENT | {
    "device": CUDA, "model.arch.hidden_size": 72, "model.arch.kv_lora_rank": 512, "model.arch.qk_nope_head_dim": 128,
    "model.arch.qk_rope_head_dim": 64, "model.arch.v_head_dim": 128,
}
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
MOONLIGHT = replace(SHAPES["moonlight-16b-a3b"], num_layers=2, vocab_size=8000)
SPECS = {
    "mini-v3": SHAPES["mini-v3"], "moonlight": MOONLIGHT,
    "v2-lite": replace(SHAPES["deepseek-v2-lite"], num_layers=2, vocab_size=8000, max_position=8192),
}


@pytest.mark.parametrize("changes", [
    {"precision": "fp8"}, {"precision": "bf16"}, {"precision": "w8a16"},
    {"train.activation_checkpointing": True, "train.max_tokens_per_gpu": 60},
    {"train.share_prompts": True, "rl.kl_coef": 0.1, "train.freeze_router": True},
    {"rollout.top_p": 0.9, "rl.updates_per_step": 2},
    {"train.master_dtype": "bfloat16", "train.optimizer_dtype": "bfloat16"},
    {"model.arch.q_lora_rank": None, "model.arch.n_group": 1},
], ids=str)  # fmt: skip
def test_a_run_is_exact_and_repeats(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Training steps: parity 0 in each, and the same bits once more."""
    wanted = {key: value for key, value in RUN.items() if changes.get(key, "") is not None}
    wanted |= {key: value for key, value in changes.items() if value is not None}
    first, second = (tiny_run(tmp_path / name, wanted) for name in ("a", "b"))
    rows = numbers(first)
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert rows == numbers(second) and weights_hash(first, 4) == weights_hash(second, 4)


def test_a_resumed_run_and_long_prompts(tmp_path: Path) -> None:
    """Prompts of more than a page; a run that goes on ends with the same bits, those of frozen routers and bias too."""
    long = RUN | long_prompts(tmp_path) | {"train.freeze_router": True, "model.arch.max_position_embeddings": 512}
    straight = tiny_run(tmp_path / "straight", long)
    tiny_run(tmp_path / "again", long | {"train.steps": 2})
    again = tiny_run(tmp_path / "again", long | {"checkpoint.resume": "auto"})
    assert [row[PARITY] for row in numbers(straight)[1:]] == [0.0] * 4
    assert numbers(again)[-1] == numbers(straight)[-1] and weights_hash(again, 4) == weights_hash(straight, 4)


def test_codes_of_a_folder_are_laid_out_for_the_kernels() -> None:
    """Rows of 72 values, which end in zeros up to a block: as quantizing the weight on the GPU lays them out."""
    value = torch.randn(200, 72, generator=torch.Generator().manual_seed(1))
    q = quantize_weight(value, (130, 70))
    there, made = joined([q]).to(torch.device(CUDA)), quantize_weight(value.to(CUDA), (130, 70))
    assert there.codes.stride() == made.codes.stride() and torch.equal(there.scale, made.scale)
    assert torch.equal(there.codes.view(torch.uint8), made.codes.view(torch.uint8))
    whole = there.codes.as_strided((200, 128), (128, 1)).view(torch.uint8)
    assert not whole[:, 72:].any()
    x = quantize_act(torch.randn(5, 72).to(CUDA, torch.bfloat16))
    outputs = [gemm.fp8_gemm(x, gemm.prepare_fp8(w), torch.bfloat16) for w in (there, made)]
    assert torch.equal(*outputs)


def test_sizes_that_do_not_fit_are_refused_before_a_run(tmp_path: Path) -> None:
    for changes, message in (({"rollout.page_size": 32}, "rollout.page_size = 32: latent attention on a GPU"),
                             ({"model.arch.kv_lora_rank": 24}, "kv_lora_rank = 24, 4 heads")):
        with pytest.raises(UserError, match=message):
            prepare(tiny_config(tmp_path, RUN | changes))


def names_of_cases() -> list[str]:
    import triton_latent_cases

    return [name for name, _ in triton_latent_cases.all_cases()]


@pytest.mark.parametrize("number", range(15))
def test_kernel_equals_its_definition(number: int) -> None:
    import triton_latent_cases

    cases = triton_latent_cases.all_cases()
    assert len(cases) == 67
    for name, case in cases[number::15]:
        print(name)
        case()


def build(name: str, precision: str) -> Transformer:
    spec = SPECS[name]
    with torch.device(CUDA):
        model = Transformer(spec, Recipe(precision, spec.num_layers))
    model = model.to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(3)
    with torch.no_grad():
        for parameter, master in masters_of(model).items():
            if master.frozen:
                bias = torch.empty(master.param.shape, device=CUDA).normal_(0, 0.1, generator=generator)
                model.publish_frozen([(parameter, bias)])
                continue
            p = master.param
            p.normal_(0, 0.04, generator=generator) if p.ndim == 2 else p.normal_(1, 0.1, generator=generator)
    return model.publish()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
@pytest.mark.parametrize("name", list(SPECS))
def test_certificate(name: str, precision: str) -> None:
    """All links, decoding in CUDA graphs, drafts and sequences of several chunks included: 0 rows differ."""
    for work in (
        Workload(24, max_prompt=240, new_tokens=12, chunk=64, page_size=128, step_tokens=2048),
        Workload(4, max_prompt=2600, new_tokens=12, chunk=700, page_size=128, step_tokens=2048),
    ):
        told = certify(build(name, precision), work, name, lambda text: None).to_json()
        assert told["bit_equal"], told["links"]


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_merged_prefixes_change_no_token(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several prompts, of which some end early: decode graphs read shared pages once, tokens and log-probs
    are those without, and in the certificate those of training."""
    if backend == "triton":
        dispatch.select(backend)
    model, g = build("moonlight", "bf16"), np.random.default_rng(1)
    prompts = [tuple(g.integers(1, model.spec.vocab_size, n).tolist()) for n in (300, 2500, 1152, 90)]
    asked = [Request(i, prompts[i // 12], SamplingParams(20 + 7 * (i % 5), ignore_eos=True)) for i in range(48)]
    merged: list[int] = []
    begin = latent_triton.begin_chunks
    monkeypatch.setattr(latent_triton, "begin_chunks", lambda *args: (merged.append(1), begin(*args)))

    def generated(mode: str) -> tuple[list[Completion], int]:
        engine = PagedEngine(model, NoText(), "flow", EngineSettings(page_size=128, merge_prefix=mode))
        engine.load(WeightSet(1, "flow", {}))
        return list(engine.generate(asked)), engine.runner.merged_calls

    (apart, none), (together, some) = generated("off"), generated("on")
    told = certify(model, Workload(4, 200, 12, chunk=64, page_size=128), "moonlight", lambda text: None)
    assert merged and some and not none, "no step merged anything"
    for a, b in zip(apart, together, strict=True):
        assert a == b, f"request {a.request_id}"
    assert told.ok and "m" in [link.link for link in told.links], told


def test_gradients_repeat_and_are_those_of_float64() -> None:
    """Of q, row and kv_b: within 1e-2 of the expanded form in float64."""
    s, lengths, scale = LatentSizes(16, 128, 64, 512, 128), (1, 300, 1500), 192**-0.5
    g = torch.Generator().manual_seed(1)
    q = torch.randn(sum(lengths), 16, 192, generator=g).to(CUDA, torch.bfloat16)
    row = torch.randn(sum(lengths), 576, generator=g).to(CUDA, torch.bfloat16)
    w = (torch.randn(16 * 256, 512, generator=g) * 0.04).to(CUDA, torch.bfloat16)
    grad = torch.randn(sum(lengths), 16 * 128, generator=g).to(CUDA, torch.bfloat16)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)

    def once() -> list[Tensor]:
        up = Up(Gradient(nn.Parameter(w.float())), w, latent.prepare(w, s))
        leaves = [t.clone().requires_grad_() for t in (q, row)]
        latent.latent_attention(*leaves, up, VarlenPlan(ends, lengths), scale, s).backward(grad)
        return [*(t.grad for t in leaves), up.gradient.param.grad]  # type: ignore[list-item]

    first, again = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    wide = [t.double().requires_grad_() for t in (q, row, w)]
    out, kv = [], (wide[1][:, :512] @ wide[2].T).view(-1, 16, 256)
    k = torch.cat((kv[..., :128], wide[1][:, None, 512:].expand(-1, 16, -1)), -1)
    for a, b, c in zip(wide[0].split(lengths), k.split(lengths), kv[..., 128:].split(lengths), strict=True):
        scores = torch.einsum("tnh,knh->ntk", a, b) * scale
        mask = torch.ones(len(a), len(a), dtype=torch.bool, device=CUDA).triu(1)
        out.append(torch.einsum("ntk,knv->tnv", torch.softmax(scores.masked_fill(mask, float("-inf")), -1), c))
    want = torch.autograd.grad(torch.cat(out).flatten(1), wide, grad.double())
    for got, exact in zip(first, want, strict=True):
        assert (got.double() - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_training_and_sampling_have_one_hidden_state(precision: str) -> None:
    """With gradients, without, and op by op under a tap."""
    model = build("moonlight", precision)
    tokens = torch.randint(8000, (300,), generator=torch.Generator().manual_seed(2)).to(CUDA)
    batch = varlen([tokens[:200], tokens[200:]])
    trained = model(batch)
    with torch.no_grad():
        assert torch.equal(model(batch), trained)
        assert torch.equal(model(batch, tap=lambda name, value: None), trained)
    trained.float().square().sum().backward()
    without = [name for name, m in masters_of(model).items() if not m.frozen and m.param.grad is None]
    assert without == ["lm_head.weight"]
