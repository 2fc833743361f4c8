"""The answers that are under way between two steps, in a checkpoint: a table in state.json, and tokens and log-probs in
`under_way.safetensors`, to the bit. Prompts are not there: they are those of the task's stream, by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from jetrl.arrays import log_probs, token_ids
from jetrl.errors import UserError
from jetrl.hashing import sha256_of_file
from jetrl.huggingface.write import sync
from jetrl.rollout.carry import UnderWay, answered
from jetrl.rollout.requests import train_asked
from jetrl.run.checkpoint import checkpoint
from jetrl.run.setup import Session
from jetrl.tasks.task import sample
from jetrl.types import Request, Segment, Trajectory, Unfinished

FILE = "under_way.safetensors"
Table = list[dict[str, Any]]


def packed(groups: Sequence[UnderWay]) -> tuple[Table, bytes]:
    """The table, and the content of the file."""
    columns: list[tuple[np.ndarray, np.ndarray]] = []

    def row(answer: Unfinished | Trajectory) -> dict[str, Any]:
        one = answer if isinstance(answer, Unfinished) else answer.segments[-1]
        columns.append((one.tokens, one.logprobs))
        id = answer.request.id if isinstance(answer, Unfinished) else answer.request_id
        found: dict[str, Any] = {"id": id, "tokens": len(one.tokens), "spans": [list(span) for span in one.spans]}
        if isinstance(answer, Unfinished):
            return found
        return found | {"end": answer.end, "text": answer.segments[-1].text, "flow": answer.flow_digest}

    table = [{"prompt": group.prompt.index, "answers": [row(answer) for answer in group.answers]} for group in groups]
    tokens, logprobs = (
        np.concatenate([np.zeros(0, dtype), *(pair[i] for pair in columns)], dtype=dtype)
        for i, dtype in enumerate((np.int32, np.float32))
    )
    return table, save({"tokens": tokens, "logprobs": logprobs})


def write_beside(write_model: checkpoint.WriteModel, content: bytes, folder: Path, *args: Any) -> list[Path]:
    """`write_model`, and the file next to the model's `folder` in a checkpoint that is being written."""
    path = folder.parent / FILE
    path.write_bytes(content)
    sync(path)
    return [*write_model(folder, *args), path]


def unpacked(folder: Path, table: Table, hashes: Mapping[str, str], session: Session) -> tuple[UnderWay, ...]:
    """What `packed` was given. UserError for a file that is not the one that was written."""
    path = folder / FILE
    try:
        if sha256_of_file(path) != hashes.get(FILE):
            raise ValueError("it does not have the hash that was written into state.json")
        columns = load_file(path)
        return _groups(table, columns["tokens"], columns["logprobs"], session)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. It holds the answers that were under way. Resume from another step of "
            "the run (checkpoint.resume = PATH)."
        ) from error


def _groups(table: Table, tokens: np.ndarray, logprobs: np.ndarray, session: Session) -> tuple[UnderWay, ...]:
    config, at = session.config, 0
    sampling = train_asked(config, 1).sampling
    groups = []
    for entry in table:
        (prompt,) = sample(session.task, session.tokenizer, entry["prompt"], 1, config)
        answers: list[Unfinished | Trajectory] = []
        for row in entry["answers"]:
            end = at + row["tokens"]
            own, at = (token_ids(tokens[at:end].copy()), log_probs(logprobs[at:end].copy())), end
            spans = tuple((first, version) for first, version in row["spans"])
            if "end" not in row:
                answers.append(Unfinished(Request(row["id"], prompt.tokens, sampling), *own, spans))
            else:
                answer = Segment("policy", own[0], row["text"], own[1], spans=spans)
                answers.append(answered(prompt, answer, row["end"], row["flow"], row["id"]))
        groups.append(UnderWay(prompt, tuple(answers)))
    if at != len(tokens) or at != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probs, and the table has {at}")
    return tuple(groups)
