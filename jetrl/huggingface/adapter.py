"""Folders of adapters in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`, without the base.

Names are PEFT's (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`), values BF16: what was published.
What PEFT has no place for stands in a file of ours beside them, `jetrl_adapter.json`: the precision of the training,
and a digest of the base that the adapters were trained over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import hub
from jetrl.huggingface.files import ADAPTER_CONFIG, ADAPTER_RECORD, ADAPTER_WEIGHTS, AGAIN, read_json
from jetrl.huggingface.provenance import record
from jetrl.huggingface.write import sync
from jetrl.model.block import Piece
from jetrl.model.names import adapted_projections, adapter_table
from jetrl.phrases import some
from jetrl.precision.lora import GROUPS, Lora, expanded
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.untrusted import inside

CONFIG, WEIGHTS, RECORD = ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_RECORD
PREFIX = "base_model.model."  # of PEFT, before the base's own names
EXPERTS = r"experts\.\d+\.\w+"  # the projections of experts, in PEFT's `rank_pattern`
NOT_OURS = ("config.json",)  # of a model's small files: it is the base's
# Of PEFT's keys: those that are read, and those that change nothing in what trained adapters compute. Any other one
# that is set stands for another function of the same tensors.
_READ = {"peft_type", "bias", "r", "lora_alpha", "rank_pattern", "base_model_name_or_path", "revision", "use_rslora",
         "init_lora_weights"}
_HARMLESS = {"task_type", "auto_mapping", "peft_version", "inference_mode", "target_modules", "exclude_modules",
             "lora_dropout", "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config",
             "corda_config", "lora_ga_config", "velora_config", "runtime_config", "qalora_group_size",
             "ensure_weight_tying"}
_OVER_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # `init_lora_weights` that leave the base alone


def adapter_config(lora: Lora, spec: ModelSpec, base: str, revision: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`; `base` is the folder or the name on the hub of what it was trained over."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision,
        "r": lora.rank, "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": adapted_projections(spec, lora), "use_rslora": lora.rslora,
        "lora_dropout": 0.0, "bias": "none", "use_dora": False, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "modules_to_save": None,
    } | ({} if lora.expert_rank is None else {"rank_pattern": {EXPERTS: lora.expert_rank}})


def write_adapters(
    folder: Path, spec: ModelSpec, recipe: Recipe, whole: Callable[[str], Tensor], small: Mapping[str, bytes],
    base: tuple[str, str | None], digest: str | None,
) -> list[Path]:
    """Fill the existing `folder`; its files of tensors. `whole(our name)` gives a parameter with the rows of all ranks,
    `small` are the files of a model (`write.small_files`), and `base` names it, with its revision. All is synced."""
    assert recipe.lora is not None
    held: dict[str, Tensor] = {}
    for ours, pieces in adapter_table(spec, recipe.lora).items():
        parts = whole(ours).split([piece.shape[0] for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            held[PREFIX + piece.name] = part.to("cpu", torch.bfloat16, copy=True).contiguous()
    files = {name: content for name, content in small.items() if name not in NOT_OURS}
    files[CONFIG] = _json(adapter_config(recipe.lora, spec, *base))
    files[RECORD] = _json(record(recipe) | {"base": digest})
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        sync(folder / name)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner reads
    sync(folder / WEIGHTS)
    return [folder / WEIGHTS]


@dataclass(frozen=True, slots=True)
class Adapters:
    """A folder of adapters. `base`, `revision`: what it calls the model that it was trained over. Where jetrl wrote it,
    `trained` is the record of that (`provenance.record`), and `digest` that of the base (`model.adapter.BaseHash`)."""

    folder: Path
    lora: Lora
    base: str
    revision: str | None
    trained: Mapping[str, Any] | None = None
    digest: str | None = None

    def local_base(self) -> Path | None:
        """The folder of the base on this disk, beside the checkpoint that this is of or where `base` leads; None for a
        name on the hub. UserError if it is neither."""
        beside = self.folder.absolute().parents[1] / "base"
        if self.folder.name == "model" and beside.is_dir():
            return beside
        with self._needs_base():
            return hub.on_disk(self.base)

    def base_folder(self, weights: bool = True) -> Path:
        """The folder of the base, from the hub where it is a name there (`weights` as in `hub.model_folder`)."""
        local = self.local_base()
        if local is not None:
            return local
        with self._needs_base():
            found = hub.model_folder(self.base, self.revision, weights=weights)
            if is_adapters(found):
                raise UserError(f"{self.base} holds adapters as well, and no model.")
        return found

    @contextmanager
    def _needs_base(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.folder} holds adapters of {self.base}, and that is needed too. {error}") from None

    def check_base(self, digest: str) -> None:
        """UserError for a base with another digest than that of the base that these were trained over."""
        if self.digest not in (None, digest):
            raise UserError(
                f"{self.folder} holds adapters of another base: they were trained over one with the digest "
                f"{self.digest}, and {self.base} has {digest}. Give back the weights of then."
            )

    def values(self, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        """Each parameter under our name, on the CPU, as it is stored (float16 as float32)."""
        path, table = self.folder / WEIGHTS, adapter_table(spec, self.lora)
        with _opened(path) as file:
            stored = {name.removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118
            wanted = {piece.name for pieces in table.values() for piece in pieces}
            if odd := sorted(wanted ^ stored.keys()):
                raise UserError(
                    f"{path} does not hold the adapters of {', '.join(self.lora.targets)} in every layer of its base, "
                    f"and these alone: see {some(odd)}. Only such adapters are read."
                )
            for ours, pieces in table.items():
                yield ours, torch.cat([_piece(path, file, stored[piece.name], piece) for piece in pieces])

    def settings(self) -> dict[str, Any]:
        """The table [lora] of a config that has these adapters."""
        lora = self.lora
        plain = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets), "rslora": lora.rslora}
        return plain | ({} if lora.expert_rank is None else {"expert_rank": lora.expert_rank})


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete safetensors file: {error}. {AGAIN}") from error


def _piece(path: Path, file: Any, name: str, piece: Piece) -> Tensor:
    value: Tensor = file.get_tensor(name)
    if tuple(value.shape) != piece.shape:
        raise UserError(f"{path}: {name} has shape {list(value.shape)}, and {list(piece.shape)} belongs there. {AGAIN}")
    if value.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise UserError(f"{path}: {name} is stored as {value.dtype}; jetrl reads bfloat16, float32 and float16.")
    if not bool(torch.isfinite(value).all()):
        raise UserError(f"{path}: {name} holds values that are not finite. {AGAIN}")
    return value.float() if value.dtype == torch.float16 else value


def is_adapters(folder: str | Path) -> bool:
    """Whether a folder holds adapters instead of a model."""
    folder = Path(folder).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapters(folder: str | Path) -> Adapters:
    """What a folder of adapters says. UserError for kinds that jetrl does not compute."""
    folder = Path(folder).expanduser()
    path = inside(folder, CONFIG)
    config, said = read_json(path), {}
    if (folder / RECORD).is_file():
        said = read_json(inside(folder, RECORD))
    plain = {"peft_type": "LORA", "bias": "none"}
    wrong = [key for key, value in plain.items() if config.get(key, value) != value]
    if wrong := wrong + sorted(key for key, value in config.items() if value and key not in _READ | _HARMLESS):
        raise UserError(
            f"{path}: {wrong[0]} = {config.get(wrong[0])!r}: jetrl reads plain LoRA adapters alone, of one rank and "
            "without biases or whole modules."
        )
    if (init := config.get("init_lora_weights", True)) not in _OVER_THE_BASE:
        raise UserError(
            f"{path}: init_lora_weights = {init!r}: such adapters belong to a base that their start has changed. Save "
            "them again with PEFT's path_initial_model_for_weight_conversion, over the base as it was."
        )
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict) or pattern.keys() - {EXPERTS} or any(type(n) is not int for n in pattern.values()):
        raise UserError(
            f"{path}: rank_pattern = {pattern!r}: jetrl reads adapters of one rank, and of another in experts "
            f"({EXPERTS})."
        )
    rank, alpha, base = config.get("r"), config.get("lora_alpha"), config.get("base_model_name_or_path")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not (base and isinstance(base, str)):
        raise UserError(
            f"{path} needs r (a number from 1 on), lora_alpha and base_model_name_or_path; it has r = {rank!r}, "
            f"lora_alpha = {alpha!r}, base_model_name_or_path = {base!r}."
        )
    revision, digest = config.get("revision"), said.get("base")
    targets, experts = _targets(folder)
    expert_rank = pattern.get(EXPERTS, rank) if experts else None
    return Adapters(
        folder, Lora(rank, float(alpha), targets, bool(config.get("use_rslora", False)), expert_rank), base,
        revision if isinstance(revision, str) else None, said or None, digest if isinstance(digest, str) else None,
    )


def _targets(folder: Path) -> tuple[tuple[str, ...], bool]:
    """The projections that have adapters: those of the tensors, as a config may name them by a pattern; and whether
    experts have some."""
    path = inside(folder, WEIGHTS)
    with _opened(path) as file:
        names = list(file.keys())
        found = {name.split(".")[-3] for name in names if name.count(".") > 3}
    if odd := sorted(found - set(GROUPS["all"])) or ([] if found else ["none"]):
        raise UserError(f"{path} holds adapters of {some(odd)}; jetrl has them beside {', '.join(GROUPS['all'])}.")
    return expanded(found), any(".experts." in name for name in names)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
