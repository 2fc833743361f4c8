"""The answers that are under way between two steps, in a checkpoint: a table in state.json, and tokens and log-probs in
`under_way.safetensors`, to the bit. Prompts are not there: they are those of the task's stream, by place. Nor is what
environments have in memory: they are begun again, and hear the same turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from jetrl.arrays import log_probs, token_ids
from jetrl.errors import UserError
from jetrl.hashing import sha256_of_file
from jetrl.huggingface.write import sync
from jetrl.rollout.carry import Answer, Conversation, UnderWay, answered
from jetrl.rollout.requests import RolloutRequest, train_asked
from jetrl.run.checkpoint import checkpoint
from jetrl.run.setup import Session
from jetrl.tasks.task import sample
from jetrl.types import Request, Segment, Spans, Trajectory, Unfinished

FILE = "under_way.safetensors"
Table = list[dict[str, Any]]


class _Columns:
    """Tokens and log-probs, one after the other; in a checkpoint's file, or on their way there."""

    def __init__(self, tokens: Sequence[np.ndarray] = (), logprobs: Sequence[np.ndarray] = ()) -> None:
        self.tokens, self.logprobs = [*tokens], [*logprobs]
        self.at = [0, 0]

    def put(self, one: Unfinished | Segment) -> dict[str, Any]:
        """Append what was drawn or said; how many tokens there are, and who drew them."""
        self.tokens.append(one.tokens)
        self.logprobs.append(one.logprobs)
        return {"tokens": len(one.tokens), "spans": [list(span) for span in one.spans]}

    def take(self, row: Mapping[str, Any], drawn: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens, and their log-probs if they were drawn."""
        ends = self.at[0] + row["tokens"], self.at[1] + row["tokens"] * drawn
        own = self.tokens[0][self.at[0] : ends[0]], self.logprobs[0][self.at[1] : ends[1]]
        self.at = [*ends]
        return token_ids(own[0].copy()), log_probs(own[1].copy())

    def check(self, table: Table) -> None:
        """ValueError where the table has not read all."""
        sizes = [len(self.tokens[0]), len(self.logprobs[0])]
        if self.at != sizes:
            raise ValueError(f"{sizes[0]} tokens and {sizes[1]} log-probs, and the table has {self.at[0]}")

    def content(self) -> bytes:
        columns = (("tokens", self.tokens, np.int32), ("logprobs", self.logprobs, np.float32))
        return save({name: np.concatenate([np.zeros(0, kind), *own], dtype=kind) for name, own, kind in columns})


def packed(groups: Sequence[UnderWay]) -> tuple[Table, bytes]:
    """The table, and the content of the file."""
    columns = _Columns()

    def row(answer: Answer | Trajectory) -> dict[str, Any]:
        if isinstance(answer, Conversation) or (isinstance(answer, Trajectory) and group.in_turns):
            return _conversation_row(answer, columns)
        if isinstance(answer, Unfinished):
            return {"id": answer.request.id} | columns.put(answer)
        found = {"id": answer.request_id} | columns.put(answer.segments[-1])
        return found | {"end": answer.end, "text": answer.segments[-1].text, "flow": answer.flow_digest}

    table = []
    for group in groups:
        table.append({"prompt": group.prompt.index, "answers": [row(answer) for answer in group.answers]})
    return table, columns.content()


def _conversation_row(one: Conversation | Trajectory, columns: _Columns) -> dict[str, Any]:
    segments = [
        columns.put(s) | {"policy": s.author == "policy", "text": s.text, "reward": s.reward, "opened": s.opened,
                          "messages": [dict(m) for m in s.messages]}
        for s in one.segments
    ]
    found: dict[str, Any] = {"segments": segments, "flow": one.flow_digest}
    if isinstance(one, Trajectory):
        return found | {"id": one.request_id, "end": one.end, "error": one.error}
    turn = None if one.turn is None else columns.put(one.turn) | {"most": one.turn.request.sampling.max_tokens}
    return found | {"id": one.id, "turn": turn, "finish": one.finish}


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
        found = load_file(path)
        return _groups(table, _Columns([found["tokens"]], [found["logprobs"]]), session)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. It holds the answers that were under way. Resume from another step of "
            "the run (checkpoint.resume = PATH)."
        ) from error


def _groups(table: Table, columns: _Columns, session: Session) -> tuple[UnderWay, ...]:
    config, in_turns = session.config, session.conversations is not None
    asked = train_asked(config, 1)
    groups = []
    for entry in table:
        (prompt,) = sample(session.task, session.tokenizer, entry["prompt"], 1, config, in_turns)
        answers: list[Answer | Trajectory] = []
        for row in entry["answers"]:
            if "segments" in row:
                answers.append(_conversation(row, columns, asked))
                continue
            own, spans = columns.take(row), _spans(row)
            if "end" not in row:
                answers.append(Unfinished(Request(row["id"], prompt.tokens, asked.sampling), *own, spans))
            else:
                answer = Segment("policy", own[0], row["text"], own[1], spans=spans)
                answers.append(answered(prompt, answer, row["end"], row["flow"], row["id"]))
        groups.append(UnderWay(prompt, tuple(answers)))
    columns.check(table)
    return tuple(groups)


def _conversation(row: Mapping[str, Any], columns: _Columns, asked: RolloutRequest) -> Conversation | Trajectory:
    segments = []
    for one in row["segments"]:
        tokens, logprobs = columns.take(one, one["policy"])
        segments.append(Segment(
            "policy" if one["policy"] else "environment", tokens, one["text"], logprobs, one["reward"],
            tuple(one["messages"]), one["opened"], _spans(one),
        ))
    if "end" in row:
        return Trajectory(tuple(segments), row["end"], row["flow"], row["error"], row["id"])
    turn = None
    if row["turn"] is not None:
        own = columns.take(row["turn"])
        before = tuple(np.concatenate([s.tokens for s in segments]).tolist())
        sampling = replace(asked.sampling, max_tokens=row["turn"]["most"])
        request = Request(row["id"], before, sampling, len(segments[0].tokens) + asked.sampling.max_tokens)
        turn = Unfinished(request, *own, _spans(row["turn"]))
    return Conversation(row["id"], tuple(segments), turn, row["finish"], row["flow"])


def _spans(row: Mapping[str, Any]) -> Spans:
    return tuple((first, version) for first, version in row["spans"])
