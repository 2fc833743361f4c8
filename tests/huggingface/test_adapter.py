"""Folders of adapters: written, read back, merged; against transformers with weights merged by hand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ARCH, numbers, tiny_config, tiny_run
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.api import evaluate_checkpoint, export_checkpoint, load_model
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import CONFIG, RECORD, WEIGHTS, is_adapters, read_adapters
from jetrl.huggingface.merge import merge_into
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.model_under_test import subject_of
from jetrl.precision.lora import ATTENTION, MLP
from jetrl.run import setup
from jetrl.run.prepare import prepare

RANK: dict[str, Any] = {"lora.rank": 4, "lora.alpha": 12.0, "train.lr": 3e-2, "train.steps": 2}


def run_of(tmp_path: Path, changes: dict[str, Any]) -> tuple[Path, Transformer]:
    """A run with adapters, and the policy that it ended with."""
    sessions, build = [], setup.build

    def kept(*args: Any, **options: Any) -> Any:
        sessions.append(build(*args, **options))
        return sessions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetrl.run.loop.build", kept)
        run_dir = tiny_run(tmp_path, RANK | changes)
    return run_dir, sessions[-1].model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    """A run in BF16, which no test changes."""
    return run_of(tmp_path_factory.mktemp("plain"), {"precision": "bf16", "eval.eval_interval": 0})


@pytest.fixture
def exported(plain: tuple[Path, Transformer], tmp_path: Path) -> Path:
    """Its adapters, to change."""
    return export_checkpoint(plain[0], tmp_path / "adapters", False)


@pytest.mark.parametrize("precision", ["fp8", "w8a16", "bf16"])
def test_what_was_trained_is_loaded_evaluated_and_certified(
    precision: str, tmp_path: Path
) -> None:
    warmed = {"sft.steps": 2} if precision == "fp8" else {}  # the warm start is behind what is evaluated
    run_dir, ended = run_of(tmp_path, {"precision": precision} | warmed)
    trained = checksum(published(ended))
    policy = load_model(run_dir)
    assert checksum(published(policy.model)) == trained and policy.model.recipe.name == precision
    with_masters = load_model(run_dir, masters=True).model
    assert checksum(published(with_masters)) == trained and with_masters.holds_masters
    subject = subject_of(str(run_dir), "", "cpu")
    assert not subject.draws and "adapters of rank 4 beside q_proj" in subject.formats
    model = subject.published()
    assert checksum(published(model)) == trained
    assert certify(model, Workload(3, 12, 8), "trained", lambda text: None).ok
    folder, _, metrics = evaluate_checkpoint(run_dir, None, [])
    last = [row for row in numbers(run_dir) if row["step"] == 2][0]
    assert is_adapters(folder) and metrics and metrics.items() <= last.items()


def test_a_run_goes_on_from_a_folder_of_adapters(tmp_path: Path) -> None:
    run_dir, before = run_of(tmp_path / "a", {"lora.targets": ["q_proj", "up_proj"]})
    folder = run_dir / "checkpoints" / "step_000002" / "model"
    path = {"model.arch": None, "model.tokenizer": None, "model.path": str(folder)}
    with pytest.raises(UserError, match=r"""settings: lora.rank=4 .* 'lora.targets=\["q_proj", "up_proj"\]' lora.r"""):
        prepare(tiny_config(tmp_path / "b", path))
    own = path | {"lora.rank": 4, "lora.alpha": 12.0, "lora.targets": ["q_proj", "up_proj"], "train.lr": 1e-3}
    with pytest.raises(UserError, match="a warm start trains the base"):
        prepare(tiny_config(tmp_path / "b", own | {"sft.steps": 2}))
    first = setup.build(tiny_config(tmp_path / "b", own)).model
    assert checksum(published(first)) == checksum(published(before))
    again, ended = run_of(tmp_path / "b", own)
    assert all(row["parity/logprob_abs_diff_mean"] == 0 for row in numbers(again) if row["step"])
    assert checksum(published(ended)) != checksum(published(first))
    saved = read_adapters(again / "checkpoints" / "step_000002" / "model")
    assert Path(saved.base) == run_dir / "checkpoints" / "base" and saved.digest == before.base_digest
    (run_dir / "checkpoints" / "base").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="holds adapters of .*base, and that is needed too"):
        load_model(again)


def test_an_adapter_of_another_base_is_refused(
    plain: tuple[Path, Transformer], exported: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(plain[0] / "checkpoints" / "base", other)
    config = json.loads((exported / CONFIG).read_text())
    (exported / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    assert checksum(published(load_model(exported).model)) == checksum(published(plain[1]))
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="adapters of another base: they were trained over one with the digest"):
        load_model(exported)


def test_export_writes_the_adapters_and_merges_them(plain: tuple[Path, Transformer], tmp_path: Path) -> None:
    (run_dir, ended), said = plain, list[str]()
    out = export_checkpoint(run_dir, tmp_path / "adapters", False, say=said.append)
    found = read_adapters(out)
    assert not said and found.lora.rank == 4 and Path(found.base) == run_dir / "checkpoints" / "base"
    assert checksum(published(load_model(out).model)) == checksum(published(ended))
    with pytest.raises(UserError, match="exists. Give the path of a new folder"):
        export_checkpoint(run_dir, out, False)
    with pytest.raises(UserError, match="--fp8 has no effect on the adapters .* `jetrl export .*base OUT --fp8`"):
        export_checkpoint(run_dir, tmp_path / "codes", True)

    merged = export_checkpoint(run_dir, tmp_path / "merged", False, say=said.append, merge=True)
    assert "% of what the adapters change was lost by rounding to BF16" in said[0]
    spec = hf.spec_from_folder(merged)
    state, base = hf.load_state(merged, spec), hf.load_state(run_dir / "checkpoints" / "base", spec)
    a, b = (ended.layers[1].attn.qkv.lora.get_submodule(which).published.double() for which in "ab")
    want = base["layers.1.attn.qkv.weight"].double()
    want[:64] += 3.0 * b[:64] @ a[:4]
    want[64:96] += 3.0 * b[64:96] @ a[4:8]
    want[96:] += 3.0 * b[96:] @ a[8:]
    got = state["layers.1.attn.qkv.weight"]
    assert float((got.double() - want).abs().max()) <= 2**-8 * float(want.abs().max())
    assert_bitwise_equal(state["norm.weight"], base["norm.weight"])
    lost, changed = merge_into(dict(base), found, spec)
    assert 0 < lost < changed and f"{(lost / changed) ** 0.5:.1%}" in said[0]
    with pytest.raises(UserError, match="--merge is for adapters"):
        export_checkpoint(merged, tmp_path / "again", False, merge=True)
    with pytest.raises(UserError, match="--fp8 and --merge do not go together"):
        export_checkpoint(run_dir, tmp_path / "codes", True, merge=True)
    weights = load_file(out / WEIGHTS)
    save_file({k: v * (".lora_A." in k) for k, v in weights.items()}, out / WEIGHTS, {"format": "pt"})
    export_checkpoint(out, tmp_path / "same", False, say=said.append, merge=True)
    assert "Merged: the adapters change nothing yet" in said[1]


def test_adapters_of_experts_there_and_back(tmp_path: Path) -> None:
    """A run, its folder by PEFT's names of each expert's projections, a run that goes on, and merged weights."""
    mixture = {
        "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 4, "model.arch.num_experts_per_tok": 2,
        "model.arch.moe_intermediate_size": 72, "precision": "bf16", "lora.expert_rank": 2, "eval.eval_interval": 0,
    }
    run_dir, ended = run_of(tmp_path / "a", mixture)
    assert all(row["parity/logprob_abs_diff_mean"] == 0 for row in numbers(run_dir) if row["step"])
    out = export_checkpoint(run_dir, tmp_path / "adapters", False)
    config, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    (pattern, rank), = config["rank_pattern"].items()
    assert config["r"] == 4 and rank == 2 and config["lora_alpha"] == 12
    assert config["target_modules"] == [*ATTENTION, *MLP]
    stem, linear = "base_model.model.model.layers.1.mlp.experts.3.up_proj.", ended.layers[1].mlp.gate_up
    assert re.search(rf"(.*\.)?({pattern})$", stem[:-1]) and not re.search(rf"({pattern})$", "layers.1.mlp.down_proj")
    assert_bitwise_equal(tensors[f"{stem}lora_A.weight"], linear.lora.a.published[14:16])  # the last of 4 x 2
    assert_bitwise_equal(tensors[f"{stem}lora_B.weight"], linear.lora.b.published[-72:])
    found = read_adapters(out)
    assert found.lora.expert_rank == 2 and found.settings()["expert_rank"] == 2
    assert checksum(published(load_model(out).model)) == checksum(published(ended))

    spec = ended.spec
    merged = hf.load_state(export_checkpoint(run_dir, tmp_path / "merged", False, merge=True), spec)
    base = hf.load_state(run_dir / "checkpoints" / "base", spec)
    for role, rows, in_a, in_b in (("gate_up", slice(72 * 7, 72 * 8), 14, 504), ("down", slice(120, 160), 6, 120)):
        lora, name = ended.layers[1].mlp.get_submodule(role).lora, f"layers.1.mlp.{role}.weight"
        a, b = lora.a.published.double(), lora.b.published.double()
        change = 6.0 * b[in_b : in_b + rows.stop - rows.start] @ a[in_a : in_a + 2]
        want = base[name].double()[rows] + change
        assert float((merged[name].double()[rows] - want).abs().max()) <= 2**-8 * float(want.abs().max())

    path = {"model.path": str(run_dir / "checkpoints" / "step_000002" / "model"), "model.arch": None}
    own = {"lora.rank": 4, "lora.alpha": 12.0, "precision": "bf16", "model.tokenizer": None} | path
    with pytest.raises(UserError, match="lora.expert_rank=2"):
        prepare(tiny_config(tmp_path / "b", own))
    again = setup.build(tiny_config(tmp_path / "b", own | {"lora.expert_rank": 2})).model
    assert checksum(published(again)) == checksum(published(ended))


def test_merging_over_a_quantized_base_is_refused(exported: Path, tmp_path: Path) -> None:
    record = json.loads((exported / RECORD).read_text())
    (exported / RECORD).write_text(json.dumps(record | {"precision": "w8a16"}))
    with pytest.raises(UserError, match='precision = "w8a16", whose weights are FP8 codes'):
        export_checkpoint(exported, tmp_path / "merged", False, merge=True)
    assert not (tmp_path / "merged").exists()


def added(a: Tensor, b: Tensor, scale: float, module: Any, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    return y + scale * (inputs[0] @ a.T @ b.T)


def test_transformers_computes_the_same_with_adapters_by_hand(
    plain: tuple[Path, Transformer], exported: Path
) -> None:
    """peft is not needed: y = W x + s B (A x), by hooks on the modules that our tensors' names lead to."""
    transformers = pytest.importorskip("transformers")
    run_dir, out = plain[0], exported
    config, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config["base_model_name_or_path"], dtype=torch.float32, attn_implementation="eager"
    )
    scale, hooked = config["lora_alpha"] / config["r"], 0
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            b = tensors[name.replace("lora_A", "lora_B")]
            assert name.split(".")[-3] in config["target_modules"]
            module.register_forward_hook(partial(added, a.float(), b.float(), scale))
            hooked += 1
    assert hooked == 2 * 7
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        theirs = theirs[torch.arange(7), torch.tensor(tokens[1:])]
        base = load_model(run_dir / "checkpoints" / "base", "bf16").logprobs(tokens)
    ours = load_model(out).logprobs(tokens)
    apart, moved = float((ours - theirs).abs().max()), float((base - ours).abs().max())
    assert apart < 0.02 and moved > 3 * apart


def test_peft_loads_ours_and_we_load_peft_s(plain: tuple[Path, Transformer], exported: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = json.loads((exported / CONFIG).read_text())["base_model_name_or_path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(model, exported)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    with torch.no_grad():
        logits = adapted(torch.tensor([tokens])).logits[0, :-1]
    theirs = logits.log_softmax(-1)[torch.arange(7), torch.tensor(tokens[1:])]
    assert float((load_model(exported).logprobs(tokens) - theirs).abs().max()) < 0.02
    by_transformers = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():  # it finds the base by its name
        assert float((by_transformers(torch.tensor([tokens])).logits[0, :-1] - logits).abs().max()) < 1e-4
    adapted.save_pretrained(tmp_path / "theirs")
    found, ours = read_adapters(tmp_path / "theirs"), read_adapters(exported)
    assert found.lora == ours.lora and found.digest is None
    for (name, value), (same, again) in zip(ours.values(plain[1].spec), found.values(plain[1].spec), strict=True):
        assert name == same
        assert_bitwise_equal(again.bfloat16(), value)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "dora": (lambda c: c.update(use_dora=True), "use_dora = True: jetrl reads plain LoRA adapters alone"),
    "pissa": (lambda c: c.update(init_lora_weights="pissa_niter_4"), "belong to a base that their start has changed"),
    "activated": (lambda c: c.update(alora_invocation_tokens=[1]), r"alora_invocation_tokens = \[1\]: jetrl"),
    "another kind": (lambda c: c.update(peft_type="IA3"), "peft_type = 'IA3'"),
    "bias": (lambda c: c.update(bias="all"), "bias = 'all'"),
    "ranks": (lambda c: c.update(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "no rank": (lambda c: c.pop("r"), "it has r = None"),
    "a wrong rank": (lambda c: c.update(r=8), "has shape"),
    "no base": (lambda c: c.update(base_model_name_or_path=None), "needs r .* base_model_name_or_path"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_other_kinds_and_damaged_folders_are_told(
    name: str, plain: tuple[Path, Transformer], exported: Path
) -> None:
    out = exported
    change, told = DAMAGES[name]
    config = json.loads((out / CONFIG).read_text())
    change(config)
    (out / CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=told):
        list(read_adapters(out).values(plain[1].spec))


def test_missing_and_strange_tensors_are_told(plain: tuple[Path, Transformer], exported: Path) -> None:
    out = exported
    tensors = load_file(out / WEIGHTS)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for wrong, told in (
        ({k: v for k, v in tensors.items() if k != first}, "does not hold the adapters of .* in every layer"),
        (tensors | {first.replace("q_proj", "lm_head"): tensors[first].clone()}, "holds adapters of lm_head; jetrl"),
        (tensors | {first: tensors[first].to(torch.int32)}, "is stored as torch.int32"),
        (tensors | {first: tensors[first] * float("nan")}, "not finite"),
    ):
        save_file(wrong, out / WEIGHTS)
        with pytest.raises(UserError, match=told):
            list(read_adapters(out).values(plain[1].spec))
    (out / WEIGHTS).write_bytes(b"")
    with pytest.raises(UserError, match="not a complete safetensors file"):
        read_adapters(out)


def test_without_our_record_the_base_is_taken_as_it_is(exported: Path) -> None:
    """A folder of peft's own: no digest, no precision; FP8 then, as for any model folder."""
    (exported / RECORD).unlink()
    policy = load_model(exported)
    assert policy.model.recipe.name == "fp8" and policy.model.recipe.lora is not None
    assert ARCH["num_hidden_layers"] == policy.model.spec.num_layers
