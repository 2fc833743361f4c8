"""Adapters on their way out: copied as they are, or merged into a copy of their base, and what that loses.

    W' = rounded(W + s B A)        to BF16, once; the product and the sum are in FP32

Nothing computes the trained policy from W': the sums of `y0 + s B A x` are others, and what an update has changed by
less than a BF16 unit of a weight is rounded away. Over a base of FP8 codes the difference is as large as the codes'
rounding, so that is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import CONFIG, RECORD, WEIGHTS, Adapters, adapter_config
from jetrl.huggingface.carried import completed
from jetrl.huggingface.export import refuse_checkpoints
from jetrl.huggingface.write import name_tokenizer_class
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.lora import adapted_rows
from jetrl.spec import ModelSpec


def export_adapters(found: Adapters, out: Path) -> Path:
    """Copy a folder of adapters to `out`, whole or not at all, with its tokenizer. The base is named by where it is."""
    _require_new(found, out)
    base = found.base_folder(weights=False)
    spec = hf.spec_from_folder(base)
    local = Path(found.base).expanduser().is_dir() or base.name == "base"
    named = (str(base.absolute()), None) if local else (found.base, found.revision)
    temporary = out.absolute().with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name in (WEIGHTS, RECORD, *hf.KNOWN_FILES):
            if (found.folder / name).is_file():
                shutil.copyfile(found.folder / name, temporary / name)
        text = json.dumps(adapter_config(found.lora, spec, *named), indent=2, ensure_ascii=False)
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        name_tokenizer_class(temporary)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def export_merged(found: Adapters, out: Path) -> float | None:
    """Write the base with the adapters added to its weights as a BF16 model folder; returns the share of the adapters'
    change that rounding took away: the root of the sum of squares of what was lost, over that of the change. None if
    they change nothing."""
    _require_new(found, out)
    precision = (found.trained or {}).get("precision", "bf16")
    if precision != "bf16":
        raise UserError(
            f'{found.folder} was trained over a base in precision = "{precision}", whose weights are FP8 codes: merged '
            "weights would have the trained policy neither in BF16 nor in FP8. Export the adapters as they are "
            "(without --merge), and serve them over their base."
        )
    folder = found.base_folder()
    spec = hf.spec_from_folder(folder)
    hf.require_own(folder)
    state = hf.load_state(folder, spec)
    lost, changed = merge_into(state, found, spec)
    types = hf.stored_types(spec, torch.bfloat16)
    tensors = {name: (tensor, types[name]) for name, tensor in hf.to_hf(spec, state).items()}

    def copy(target: Path) -> None:
        for name in hf.KNOWN_FILES:
            source = found.folder if (found.folder / name).is_file() else folder
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        name_tokenizer_class(target)

    config, whole = completed((folder,), hf.hf_config(spec, hf.read_config(folder)), tensors)
    hf.write_folder(out, config, whole, copy)
    return (lost / changed) ** 0.5 if changed else None


def merge_into(state: dict[str, Tensor], found: Adapters, spec: ModelSpec) -> tuple[float, float]:
    """Add adapters to weights by our names, rounded to BF16; sums of squares of what was lost, and of the change."""
    values, lost, changed = dict(found.values(spec)), 0.0, 0.0
    for layer in range(spec.num_layers):
        for (block, role), linear in linears_of(spec, layer).items():
            at = f"layers.{layer}.{block}.{role}"
            if f"{at}.lora.a.weight" not in values:
                continue
            a, b = (values[f"{at}.lora.{which}.weight"].bfloat16().float() for which in "ab")
            weight = state[f"{at}.weight"].bfloat16().float()
            own = found.lora.of(linear.experts)
            assert own is not None
            rows = adapted_rows(own, linear.sections, linear.projections, linear.experts)
            for (start, stop), in_a, in_b in rows:
                change = b[in_b : in_b + stop - start] @ a[in_a : in_a + own.rank] * own.scale
                whole = weight[start:stop] + change
                weight[start:stop] = whole.bfloat16().float()
                lost += float((weight[start:stop] - whole).double().square().sum())
                changed += float(change.double().square().sum())
            state[f"{at}.weight"] = weight.bfloat16()
    return lost, changed


def _require_new(found: Adapters, out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists. Give the path of a new folder for what {found.folder} holds.")
    refuse_checkpoints(out)
