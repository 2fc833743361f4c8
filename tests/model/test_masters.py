"""Models without masters (`model/published.py`): the bits of training's publishing, and no more memory than these."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ARCH
from tolerances import assert_bitwise_equal
from torch import Tensor, nn

from jetrl import UserError, load_model
from jetrl.api import random_model
from jetrl.huggingface import read as hf
from jetrl.model.linear import FlowLinear
from jetrl.model.master import masters_of
from jetrl.model.sharding import shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parallel.world import World
from jetrl.parity.rows import learners_forward, varlen
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.run import setup
from jetrl.spec import SHAPES, ModelSpec

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
BIASED = {"model_type": "qwen2", "tie_word_embeddings": False, "num_attention_heads": 4}  # Q, K, V with a bias
RECIPES = [
    build_recipe("bf16", 2), build_recipe("fp8", 2), build_recipe("fp8_rollout", 2),
    build_recipe("fp8", 2, "pow2", num_first_layers_in_bf16=1, kv_cache="fp8", head_dim=16),
    build_recipe("w8a16", 2),
]


def spec_of(**changes: object) -> ModelSpec:
    return hf.spec_from_hf(ARCH | {"vocab_size": 50} | changes)


def folder_of(spec: ModelSpec, path: Path, dtype: torch.dtype) -> Path:
    model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    hf.save_model(path, spec, model.state_dict(), dtype=dtype)
    return path


def trained_twin(spec: ModelSpec, recipe: Recipe, folder: Path, master: torch.dtype) -> Transformer:
    """As a training run builds it."""
    model = Transformer(spec, recipe, master_dtype=master)
    setup.load_weights(model, folder)
    return model.publish()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}")
@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_published_bits_are_those_of_training(recipe: Recipe, arch: dict[str, object], tmp_path: Path) -> None:
    spec = spec_of(**arch)
    folder = folder_of(spec, tmp_path / "m", torch.float32)
    bare = Transformer(spec, recipe, master_dtype=None).publish_values(hf.parameters_of(folder, spec))
    for master in (torch.float32, torch.bfloat16):
        twin = trained_twin(spec, recipe, folder, master)
        assert checksum(published(bare)) == checksum(published(twin))
    batch = varlen([torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([9, 8, 7])])
    with torch.no_grad():
        assert_bitwise_equal(bare(batch), twin(batch))
        assert_bitwise_equal(bare.publish()(batch), twin(batch), "publish() without masters changes nothing")
    assert_bitwise_equal(learners_forward(bare, batch), learners_forward(twin, batch))
    changed = dict(hf.load_state(folder, spec))
    changed["layers.1.mlp.down.weight"] = -changed["layers.1.mlp.down.weight"]
    other = Transformer(spec, recipe, master_dtype=None).publish_values(changed.items())
    assert checksum(published(other)) != checksum(published(bare))


def test_random_weights_have_the_same_bits() -> None:
    spec, recipe = spec_of(), build_recipe("fp8", 2)
    whole = checksum(published(Transformer(spec, recipe).init_random(3)))
    assert checksum(published(Transformer(spec, recipe, master_dtype=None).init_random(3))) == whole
    assert checksum(published(Transformer(spec, recipe, master_dtype=None).init_random(4))) != whole
    pair = [random_model("smollm2-135m", "fp8", "cpu", 1, masters=masters) for masters in (True, False)]
    assert checksum(published(pair[0])) == checksum(published(pair[1]))


def storages(objects: list[object]) -> dict[int, int]:
    """Bytes of each storage that a tensor among `objects` lies in, by address. The meta device has none."""
    tensors = [o for o in objects if isinstance(o, Tensor) and o.device.type != "meta"]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def bytes_of(model: Transformer) -> int:
    """All that a model keeps alive, but for its rotary tables."""
    seen: dict[int, object] = {}
    queue: list[object] = [model]
    while queue:
        held = queue.pop()
        if id(held) not in seen:
            seen[id(held)] = held
            walk = isinstance(held, nn.Module | dict | list | tuple | set) or is_dataclass(held)
            queue += gc.get_referents(held) if walk and not isinstance(held, type) else []
    tables = storages([model.cos, model.sin])
    return sum(n for at, n in storages(list(seen.values())).items() if at not in tables)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}")
@pytest.mark.parametrize("arch", [{}, BIASED, {"hidden_size": 128, "intermediate_size": 384}], ids=["a", "b", "c"])
def test_memory_is_codes_scales_and_bf16_parts(recipe: Recipe, arch: dict[str, object], tmp_path: Path) -> None:
    spec = spec_of(**arch)
    folder = folder_of(spec, tmp_path / "m", torch.bfloat16)
    bare = Transformer(spec, recipe, master_dtype=None).publish_values(hf.parameters_of(folder, spec))
    by_hand = 0
    for p in bare.parameters():  # BF16 everywhere
        by_hand += 2 * p.numel()
    for linear in (m for m in bare.modules() if isinstance(m, FlowLinear)):
        if any(linear.recipes.values()) or recipe.name == "w8a16":
            n, k = linear.weight.shape
            blocks = sum(-(-rows // 128) for rows in linear.sections) * -(-k // 128)
            by_hand += n * k + 4 * blocks  # the codes, and an FP32 scale for each block
            by_hand -= 2 * n * k if all(linear.recipes.values()) else 0
    assert bytes_of(bare) == by_hand == published_bytes(spec, recipe)
    with torch.no_grad():
        bare(varlen([torch.tensor([1, 2, 3])]))
        bare.token_logprobs(torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16), torch.tensor([1]), 1.0)
    assert bytes_of(bare) == by_hand, "a forward pass leaves something behind"
    assert bytes_of(trained_twin(spec, recipe, folder, torch.float32)) > 2 * by_hand


def test_qwen3_8b_takes_9_gib() -> None:
    spec = SHAPES["qwen3-8b"]
    linears = 36 * (4096 * 6144 + 4096 * 4096 + 4096 * 24576 + 12288 * 4096)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    rest = 2 * 151936 * 4096 + norms
    assert published_bytes(spec, build_recipe("fp8", 36)) == linears + linears // 128**2 * 4 + 2 * rest
    assert published_bytes(spec, build_recipe("bf16", 36)) == 2 * (linears + rest)
    assert published_bytes(spec, build_recipe("fp8", 36)) / 2**30 == pytest.approx(8.79, abs=0.01)


def test_values_are_dropped_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a folder is read, one parameter's value is alive at a time: not the masters of the whole model."""
    spec = spec_of(vocab_size=32, num_hidden_layers=6)
    folder = folder_of(spec, tmp_path / "m", torch.float32)
    read, alive, most = hf.stored_parameters, [], 0

    def watched(*arguments: object, **named: object) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, value in read(*arguments, **named):  # type: ignore[arg-type]
            alive.append(weakref.ref(value))
            most = max(most, sum(one() is not None for one in alive))
            yield name, value
            del value

    monkeypatch.setattr(hf, "stored_parameters", watched)
    from jetrl.chat.tokenizer import load_tokenizer

    load_tokenizer("builtin:arithmetic").save_pretrained(folder)
    policy = load_model(folder, "fp8")
    assert len(alive) == len(list(policy.model.parameters())) and most <= 2, most
    assert sum(one() is not None for one in alive) == 0
    alive.clear()
    with torch.device("meta"):
        trained = Transformer(spec, build_recipe("fp8", 6))
    setup.load_weights(trained, folder, torch.device("cpu"))
    assert len(alive) == len(list(trained.parameters())) and most <= 2, most
    assert all(torch.equal(p, dict(hf.load_state(folder, spec))[name]) for name, p in trained.named_parameters())


@pytest.mark.parametrize("arch", [{}, BIASED, {"hidden_size": 256, "intermediate_size": 384}], ids=["a", "b", "c"])
def test_a_rank_reads_its_rows_only(arch: dict[str, object], tmp_path: Path) -> None:
    """Of fused matrices too, whose projections the file holds apart. Damage in others' rows is theirs to find."""
    spec = spec_of(**arch, vocab_size=300)
    folder = folder_of(spec, tmp_path / "m", torch.bfloat16)
    whole = hf.load_state(folder, spec)
    for size in (1, 2, 3, 7):
        for rank in range(size):
            with torch.device("meta"):
                model = Transformer(spec, build_recipe("fp8", 2))
            shard_model(model, World(rank, size))
            setup.load_weights(model, folder, torch.device("cpu"))
            for name, master in masters_of(model).items():
                p, cut = master.param, master.shard
                assert_bitwise_equal(p, (whole[name] if cut is None else cut.own(whole[name])).float(), name)
    weights = load_file(folder / hf.SINGLE)
    weights["model.embed_tokens.weight"][299, 1] = float("inf")  # of the second rank's third block
    save_file(weights, folder / hf.SINGLE, metadata={"format": "pt"})
    for rank in range(2):
        with torch.device("meta"):
            model = Transformer(spec, build_recipe("fp8", 2))
        shard_model(model, World(rank, 2))
        with pytest.raises(UserError, match="embed_tokens.* not finite") if rank else nullcontext():
            setup.load_weights(model, folder, torch.device("cpu"))


def test_gradients_and_weights_are_refused_with_the_cure() -> None:
    model = Transformer(spec_of(), build_recipe("fp8", 2), master_dtype=None).init_random(0)
    batch = varlen([torch.tensor([1, 2, 3])])
    hidden = model(batch)
    loss = model.token_logprobs(hidden, torch.tensor([2, 3, 4]), 1.0)[0].sum()
    for asked in (
        loss.backward, model.requires_grad_, model.state_dict, lambda: model.load_state_dict({}),
    ):
        with pytest.raises(UserError, match=r"no master weights.*masters=True"):
            asked()
    assert not any(p.requires_grad for p in model.parameters())
    for move in (lambda: model.to(torch.float64), lambda: model.to("meta"), model.half):
        with pytest.raises(UserError, match="cannot move"):
            move()
    model.to("cpu").requires_grad_(False)
    with torch.no_grad():
        assert_bitwise_equal(model(batch), hidden.detach())


def test_every_parameter_needs_a_value_once() -> None:
    model = Transformer(spec_of(), build_recipe("fp8", 2), master_dtype=None)
    values = dict(Transformer(spec_of(), build_recipe("fp8", 2)).named_parameters())
    with pytest.raises(AssertionError, match="no value for.*norm.weight"):
        model.publish_values((k, v) for k, v in values.items() if k != "norm.weight")
    with pytest.raises(KeyError):
        model.publish_values([*values.items(), *values.items()])
    with pytest.raises(AssertionError, match="a value"):
        model.publish_values((k, v[:-1]) for k, v in values.items())


def test_a_published_value_is_no_part_of_the_file(tmp_path: Path) -> None:
    """A BF16 tensor of a file comes mapped; the model must not change with the file."""
    spec = replace(spec_of(), tie_embeddings=False)
    folder = folder_of(spec, tmp_path / "m", torch.bfloat16)
    model = Transformer(spec, build_recipe("fp8", 2), master_dtype=None)
    model.publish_values(hf.parameters_of(folder, spec))
    before = checksum(published(model))
    file = folder / hf.SINGLE
    with open(file, "r+b") as handle:
        handle.seek(-200, 2)
        handle.write(b"\x00" * 200)
    assert checksum(published(model)) == before
