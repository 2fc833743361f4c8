"""A whole model by the portable kernels in the interpreter: the certificate, and gradients against the reference's.

`python tests/kernels/triton_portable_model.py [part of a name]`, with TRITON_INTERPRET=1, as in `triton_cases.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_cases as base
import triton_portable_cases as portable  # also makes the interpreter's products those of the definition
from torch import Tensor

from jetrl.kernels.attention import latent_portable, latent_triton
from jetrl.kernels.dispatch import served_by
from jetrl.kernels.gemm import portable as pg
from jetrl.kernels.registry import load
from jetrl.model.transformer import Transformer
from jetrl.parity import drawn
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.formats import kv_head
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, DeltaSpec, LatentSpec, ModelSpec, RopeSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    hidden_size=40, intermediate_size=72, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True,
    qkv_bias=False, family="qwen3", tie_embeddings=True, vocab_size=67, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4),
    max_position=64,
)

HYBRID = replace(  # a layer of Gated DeltaNet, and one of gated attention
    SPEC, family="qwen3_5_text", hidden_size=24, intermediate_size=40, num_layers=2, num_heads=2, num_kv_heads=1,
    vocab_size=37, rotary_dim=8, attention_gate=True, norm_offset=True,
    delta=DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv_width=4, layers=(0,)),
)


LATENT = replace(  # one layer of latent attention, dense
    SHAPES["tiny-mla"], num_layers=1, hidden_size=24, intermediate_size=40, num_heads=4, num_kv_heads=4, vocab_size=37,
    latent=LatentSpec(rank=16, nope=8, rope=16, value=8), head_dim=16, max_position=140,
)


class Latents:
    """The ops of latent attention by a backend of a GPU, all others by the definition."""

    def __getattr__(self, op: str) -> Any:
        return getattr(load("triton" if "latent" in op else "reference"), op)


def model_of(precision: str, spec: ModelSpec = SPEC) -> Transformer:
    recipe = build_recipe(precision.removesuffix(" kv"), spec.num_layers)
    if precision.endswith(" kv"):
        recipe = replace(recipe, kv_cache=kv_head(spec.head_dim))
    return Transformer(spec, recipe).init_random(3).publish()


def gradients_of(precision: str, spec: ModelSpec) -> dict[str, Tensor]:
    model = model_of(precision, spec)
    g = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, spec.vocab_size, (n,), generator=g) for n in (9, 4)]
    hidden = model(varlen(sequences))
    targets = torch.cat(sequences).roll(-1)
    logprobs, entropy = model.token_logprobs(hidden, targets, 0.8)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def model_cases() -> Iterator[tuple[str, base.Case]]:
    backend = load("triton")

    def certificate(precision: str, spec: ModelSpec, work: Workload) -> None:
        portable.on("mma")  # the smallest tiles
        with served_by(CPU, backend):
            result = certify(model_of(precision, spec), work, "tiny", lambda text: None)
        assert result.ok, result
        assert {link.link for link in result.links} >= {"a", "b", "c", "v", "s"}
        assert all(link.rows for link in result.links)

    def learning(precision: str, spec: ModelSpec) -> None:
        portable.on("mma")
        want = gradients_of(precision, spec)
        with served_by(CPU, backend):
            got, again = gradients_of(precision, spec), gradients_of(precision, spec)
        assert got.keys() == want.keys() and len(got) > 5
        for name, x in want.items():
            base.equal(f"{name} again", got[name], again[name])
            error = (got[name] - x).norm() / x.norm()
            assert error < (0.02 if precision == "bf16" else 0.1), f"{name}: relative error {error:.4f}"

    def merged() -> None:
        """Link m: pairs whose first page is read once, in decode graphs that a CPU stands in for."""
        tests = Path(__file__).parents[1]
        sys.path += [str(tests), str(tests / "engine")]
        from enlarged import enlarged
        from pytest import MonkeyPatch
        from test_state_graphs import as_graphs

        model, work, launches = enlarged(LATENT, build_recipe("bf16", 1)), Workload(1, 7, 3, 3), []
        real = latent_triton.begin_chunks
        with served_by(CPU, Latents()), MonkeyPatch.context() as patch, as_graphs(patch), torch.no_grad():
            patch.setattr(drawn, "_SAMPLES", 2)
            patch.setattr(latent_triton, "begin_chunks", lambda *args: launches.append(args[3].tiles) or real(*args))
            assert drawn.merged_link in drawn.graph_links(model, work) and latent_portable.STEPS.shared == 32
            found = drawn.merged_link(model, [], work)
        assert found.ok and found.rows == 24, found
        assert [sorted(t.tolist()) for t in launches] == [[0, 1, 1, 1]] * 2, "a chunk for each long prompt"

    yield "link m of latents", merged
    yield "certificate fp8 kv", partial(certificate, "fp8 kv", SPEC, Workload(2, 7, 4, 3))
    yield "certificate of a hybrid, fp8 kv", partial(certificate, "fp8 kv", HYBRID, Workload(2, 5, 4, 2))
    yield "gradients bf16", partial(learning, "bf16", SPEC)
    yield "gradients of a hybrid, bf16", partial(learning, "bf16", HYBRID)
    yield "gradients of a hybrid, fp8", partial(learning, "fp8", HYBRID)


if __name__ == "__main__":
    assert base.INTERPRET, "run it with TRITON_INTERPRET=1; on a GPU there is tests/gpu/test_portable.py"
    pg.bf16_wgrad = lambda dy, x: dy.float().T @ x.float()  # torch's CPU has no product of BF16 with an FP32 result
    product = torch.mm
    torch.mm = lambda a, b, out_dtype=None, **more: (  # nor this one
        product(a, b, **more) if out_dtype is None else product(a.to(out_dtype), b.to(out_dtype))
    )
    raise SystemExit(base.main(list(model_cases())))
