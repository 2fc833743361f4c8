"""What a Hugging Face folder consists of, and what reading and writing it share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.phrases import some
from jetrl.untrusted import json_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A folder of adapters, as PEFT writes it; and what jetrl adds of the training.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_RECORD = "jetrl_adapter.json"
# Tokenizer and prompt files of a model folder: what an export copies.
TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"
)
# Of these, the files that transformers and jetrl read: an export takes no others.
KNOWN_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the class's names in transformers 4 and 5
AGAIN = "Download or export the folder again."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError with the path for anything else."""
    try:
        value = json_file(path)
    except ValueError as error:  # bad JSON, bad UTF-8, too deep or too large
        raise UserError(f"{path} is not valid JSON: {error}. {AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__} where an object is needed. {AGAIN}")
    return value


def other_kind(path: Path) -> str:
    """What a folder or file that jetrl does not read is, and how to turn it into a model folder; "" if unknown.

    Sentences that begin with a space, to follow the statement of what is wrong.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return _gguf(path.parent, path.name)
        return f" It is a file: give its folder, {path.parent}." if path.suffix == ".safetensors" else ""
    names = sorted(each.name for each in path.iterdir())
    if "adapter_config.json" in names or any(name.startswith("adapter_model.") for name in names):
        base = ""
        if "adapter_config.json" in names:
            named = read_json(path / "adapter_config.json").get("base_model_name_or_path")
            base = f" of {named}" if named else ""
        return (
            f" It holds a LoRA adapter{base}, not a whole model. Merge it into its model first, with peft: "
            f"AutoPeftModelForCausalLM.from_pretrained({str(path)!r}).merge_and_unload().save_pretrained('merged'), "
            "and save the tokenizer there too."
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return _gguf(path, ggufs[0])
    if old := [name for name in names if name.endswith((".bin", ".pth", ".pt")) and name != "training_args.bin"]:
        return (
            f" It has {some(old)}, weights in PyTorch's own format, which jetrl does not read. Save the model again as "
            f"safetensors, with transformers: AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained("
            "'converted'), and save the tokenizer there too."
        )
    if models := sorted(path.glob("checkpoints/step_*/model")):
        return f" It is a run. Name the model of its newest checkpoint: {models[-1]}."
    inside = sorted(each.parent for each in path.glob("*/config.json"))
    return f" Did you mean {inside[0]}?" if inside else ""


def _gguf(folder: Path, name: str) -> str:
    return (
        f" {name} is a GGUF file, with weights that are quantized for llama.cpp. Use the model it was made from, or "
        f"convert it with transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={name!r})"
        ".save_pretrained('converted'), and save the tokenizer there too."
    )
