"""The supervised loss: transformers' cross entropy of the learned tokens, and the same however answers are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.config.train import TrainConfig
from jetrl.huggingface import read as hf
from jetrl.model.master import masters_of
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.train.batches import PackedBatch
from jetrl.train.bins import bin_pack
from jetrl.train.likelihood import likelihood, mean_loss
from jetrl.train.packing import denominators, packed
from jetrl.train.routing import Routing
from jetrl.types import Author, Segment, Trajectory, token_ids

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
# (author, tokens) of each part of three conversations
PARTS: tuple[tuple[tuple[Author, int], ...], ...] = (
    (("environment", 5), ("policy", 9), ("environment", 4), ("policy", 3)),
    (("environment", 1), ("policy", 2)),
    (("environment", 7), ("environment", 6), ("environment", 2), ("policy", 11)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("likelihood") / "model"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def conversations() -> list[Trajectory]:
    generator, found = torch.Generator().manual_seed(4), []
    for parts in PARTS:
        segments = [
            Segment(author, token_ids(torch.randint(0, 61, (count,), generator=generator).tolist()), "")
            for author, count in parts
        ]
        found.append(Trajectory(tuple(segments), "stop", ""))
    return found


def batch_of(most: int) -> PackedBatch:
    given = conversations()
    return packed(given, [True] * len(given), bin_pack([t.length for t in given], most), "", 0)


def ours(folder: Path, most: int, dtype: torch.dtype, precision: Any = "bf16") -> tuple[float, dict[str, Tensor]]:
    spec = hf.spec_from_folder(folder)
    model = Transformer(spec, build_recipe(precision, spec.num_layers), dtype=dtype)
    model.load_state_dict(hf.load_state(folder, spec))
    model.publish()
    batch, total = batch_of(most), 0.0
    loss_of = likelihood(model, Routing(model, TrainConfig(), denominators(batch, 1)), stats=True)
    for micro in batch.micro_batches:
        loss, stats = loss_of(micro)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(stats["sft/loss"])
    assert mean_loss(model, batch) == pytest.approx(total, rel=1e-12), "an evaluation measures what an update lowers"
    return total, {name: master.param.grad for name, master in masters_of(model).items()}


def theirs(folder: Path) -> tuple[float, Tensor]:
    """transformers in FP32: each conversation alone, labels only where the policy speaks; the embedding's gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for one in conversations():
        tokens = torch.tensor([t for s in one.segments for t in s.tokens.tolist()])
        learned = torch.tensor([s.author == "policy" for s in one.segments for _ in s.tokens])
        labels = torch.where(learned, tokens, -100)[1:]
        logits = model(tokens[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int(learned.sum())
    (total / count).backward()
    return float(total.detach()) / count, model.get_input_embeddings().weight.grad


def test_the_loss_is_cross_entropy_of_the_learned_tokens_in_fp32(folder: Path) -> None:
    (loss, grads), (want, embedding) = ours(folder, 64, torch.float32), theirs(folder)
    assert loss == pytest.approx(want, abs=1e-4)
    found = next(grad for name, grad in grads.items() if "embed" in name)
    assert float((found - embedding).norm() / embedding.norm()) <= 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_packing_changes_neither_the_loss_nor_the_gradient(folder: Path, precision: str) -> None:
    """A sequence's log-probs do not depend on its neighbours: the loss is the same to the order of a sum, and the
    gradient to the order of its sums. FP8 rounds operands of weight gradients by groups of tokens, so there only the
    loss is compared."""
    assert [batch_of(most).num_micro_batches for most in (64, 26)] == [1, 2]
    (one, whole), (two, parts) = (ours(folder, most, torch.bfloat16, precision) for most in (64, 26))
    assert one == pytest.approx(two, rel=1e-12)
    for name, grad in whole.items() if precision == "bf16" else ():
        assert float((parts[name] - grad).norm() / grad.norm()) < 1e-3, name
