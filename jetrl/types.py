"""The values that cross the borders between rooms. Frozen, and without torch at run time.

Shape letters: T packed tokens, B sequences, M blocks of a sequence, N and K rows and columns of a weight.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from jetrl.arrays import NO_TOKENS, NOTHING, check_spans
from jetrl.arrays import Spans as Spans
from jetrl.arrays import log_probs as log_probs
from jetrl.arrays import token_ids as token_ids
from jetrl.branches import Branch, packed_length

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["train", "rollout"]
Author = Literal["policy", "environment"]
FinishReason = Literal["stop", "length"]
EndReason = Literal["stop", "length", "turns", "error", "timeout"]


class _Sampled:
    """Tokens and log-probs as read-only arrays; whatever has such a form may be given.

    Equal are values whose arrays have the same bits: NaN equals itself, and -0.0 is not 0.0. What is unpickled or
    copied has gone through the constructor, and its checks, again.
    """

    __slots__ = ()
    tokens: np.ndarray
    logprobs: np.ndarray
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids(self.tokens))
        object.__setattr__(self, "logprobs", log_probs(self.logprobs))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, entry.name) for entry in fields(self))  # type: ignore[arg-type]

    def _compared(self) -> tuple[Any, ...]:
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in self._values())

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.text, self.tokens.tobytes(), self.logprobs.tobytes()))  # messages have no hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()


@dataclass(frozen=True, slots=True)
class Problem:
    """One item of a task: what is asked, the gold answer, and (for `jetrl sft`) a worked solution.

    A solution is the policy's answer, or a conversation with the environment: (author, text) of each turn, or chat
    messages, the policy's with the role assistant.
    """

    id: str
    prompt: str | tuple[Mapping[str, Any], ...]  # plain text, or chat messages with role, content and further keys
    answer: str
    solution: str | tuple[tuple[Author, str], ...] | tuple[Mapping[str, Any], ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # further columns; given to reward functions

    @property
    def prompt_text(self) -> str:
        """The prompt for people to read: the text, or a line for each chat message with what it holds."""
        if isinstance(self.prompt, str):
            return self.prompt
        lines = []
        for message in self.prompt:
            further = {k: v for k, v in message.items() if k not in ("role", "content")}
            parts = [message["content"], *([json.dumps(further, ensure_ascii=False)] if further else [])]
            lines.append(f"{message['role']}: {' '.join(part for part in parts if part)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem as token ids. `index` is its place in the task's endless training stream (or in the held-out set).

    `opened` is what the chat template has written of the policy's turn, such as `<think>`; None: it cannot be told.
    """

    index: int
    problem: Problem
    tokens: tuple[int, ...]
    opened: str | None = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. `temperature=0` is greedy. Filters off: `top_p=1, top_k=0, min_p=0`.

    `logprobs`: of the truncated distribution, that tokens are drawn from ("sampled"), or of the whole one ("full").
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: Literal["sampled", "full"] = "full"


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `id` with `sampling.seed` names its random stream: equal ids give equal tokens.

    `max_conversation` is for a turn of a conversation: the most tokens that all its turns may reach together. The
    engine then keeps what it computed for this turn until `forget`, and a later request with the same id, whose tokens
    begin with this turn's, goes on from there. None: a single answer.
    """

    id: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    max_conversation: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_Sampled):
    """What an engine returns for one request. `tokens` [n] int32 and `logprobs` [n] float32 are read-only arrays; an
    engine may give lists, tuples or other arrays of such numbers.

    `logprobs[i]` is the log-probability of `tokens[i]` at the sampling temperature (FP32): of the whole distribution
    or, where the request's `sampling.logprobs` is "sampled", of what top-p, top-k and min-p leave. A stop token that
    ended the sequence is the last entry of `tokens`, and is not part of `text`. `spans`, as in `Segment`, of a request
    that was suspended and went on under other weights; empty: those of `weight_version`, the last, drew all tokens.
    """

    request_id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: FinishReason
    weight_version: int
    flow_digest: str
    spans: Spans = ()

    def __post_init__(self) -> None:
        _Sampled.__post_init__(self)
        check_spans(self.spans, len(self.tokens))
        if self.spans and self.spans[-1][1] != self.weight_version:
            raise ValueError(f"spans {self.spans} that do not end with weight_version {self.weight_version}")


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished(_Sampled):
    """A request that an engine gave back under way: what goes on from here, in any engine, with any weights.

    `tokens` [n] int32 are those drawn so far, which may be none, `logprobs` [n] float32 theirs, and `spans` say which
    weights drew them (see `Segment`). It needs no state of a random stream: a token is drawn by seed, id and position.
    """

    request: Request
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    logprobs: np.ndarray = field(default_factory=lambda: NOTHING)
    spans: Spans = ()

    def __post_init__(self) -> None:
        _Sampled.__post_init__(self)
        check_spans(self.spans, len(self.tokens))
        count, most = len(self.tokens), self.request.sampling.max_tokens
        if len(self.logprobs) != count or bool(self.spans) != bool(count) or count >= most:
            raise ValueError(
                f"request {self.request.id}: {count} tokens, {len(self.logprobs)} log-probs and spans {self.spans}; "
                f"need equal numbers below max_tokens = {most}, and who drew them"
            )

    def __hash__(self) -> int:
        return hash((self.request.id, self.tokens.tobytes(), self.logprobs.tobytes()))

    def first(self, count: int) -> Unfinished:
        """As it was when it had `count` tokens."""
        spans = tuple(span for span in self.spans if span[0] < count)
        return Unfinished(self.request, self.tokens[:count], self.logprobs[:count], spans)


@dataclass(frozen=True, slots=True)
class StepReport:
    """How far an engine is after a step: requests that run, wait and have finished, and tokens drawn, since it was
    last idle."""

    step: int
    running: int
    waiting: int
    finished: int
    generated_tokens: int


class Engine(ABC):
    """What a rollout asks of an engine; `engine.engine.PagedEngine` is ours. An engine of yours may be a subclass, or
    any class with these methods; those with a body are optional.

    Requests may be added while others run. `keeps_bits`: whether the log-probs of its completions are, bit for bit,
    those that the learner's forward computes with the same weights; if not, the learner makes its own pass.
    `suspends`: whether it has `suspend`, `resume` and `drawn`.
    """

    keeps_bits: bool
    suspends: bool = False

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether requests are running or waiting."""

    @abstractmethod
    def load(self, weights: WeightSet) -> None:
        """Use these weights from now on. Called while the engine has no work."""

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none: UserError if one of them can never run."""

    @abstractmethod
    def step(self) -> StepReport:
        """Compute for a while (one forward pass, or a few). Called while `has_work`."""

    @abstractmethod
    def collect(self) -> list[Completion]:
        """What has finished since the last call, in the order in which it finished."""

    @abstractmethod
    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended: nothing needs to be kept for a further turn, and what still runs of them is
        dropped. Unknown ids are ignored."""

    @abstractmethod
    def release(self) -> None:
        """Give memory back to training until the next `add`. Called while the engine has no work."""

    def cancel(self, ids: Collection[int]) -> None:
        """Drop requests that wait or run, without completions; their conversations may go on from before them."""
        self.forget(ids)

    def suspend(self, ids: Collection[int] | None = None) -> list[Unfinished]:
        """Take back the requests with these ids that wait or run, in the order in which they were added; None: all, and
        nothing is kept for further turns of conversations. Only where `suspends`."""
        raise NotImplementedError(f"{type(self).__name__} cannot suspend requests")

    def resume(self, unfinished: Sequence[Unfinished]) -> None:
        """`add` for requests that `suspend` gave back: they go on with the weights that are loaded now."""
        raise NotImplementedError(f"{type(self).__name__} cannot resume requests")

    def drawn(self) -> dict[int, int]:
        """How many tokens each request that waits or runs has, those before it was resumed included. Only where
        `suspends`."""
        raise NotImplementedError(f"{type(self).__name__} does not tell how far its requests are")

    def expect(self, tokens: Sequence[int]) -> None:
        """Requests that may reach so many tokens each are to come. Until the next call."""
        return

    @property
    def about(self) -> str:
        """A text for the start of a run."""
        return ""

    def take_metrics(self) -> dict[str, float]:
        """Numbers since the last call, for a step's row: asked after `load` and after evaluations."""
        return {}

    def close(self) -> None:
        """The run has ended."""
        return


@dataclass(frozen=True, slots=True, eq=False)
class Segment(_Sampled):
    """Neighbouring tokens of a trajectory by one author: `tokens` [n] int32 and `logprobs` [n] float32, read-only.

    The policy's tokens are those that were drawn, with the log-prob of each; `text` is only for people and reward
    functions. The environment's tokens have no log-probs; its `messages` are what the text was made of, with the roles
    that it gave (none where no environment spoke). `reward` is what the environment gave for this turn of the policy;
    None: nothing, which is not a reward of 0. `spans`: which weights drew the tokens, as (first token, weight version),
    from token 0 on; the tokens up to the next span's first one are of that version. Empty: nobody drew them. `branch`:
    what it goes on from, if that is not the segment before it (`jetrl.branches`).
    """

    author: Author
    tokens: np.ndarray
    text: str
    logprobs: np.ndarray = field(default_factory=lambda: NOTHING)
    reward: float | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    opened: str | None = ""  # of a prompt: `Prompt.opened`
    spans: Spans = ()
    branch: Branch | None = None

    def __post_init__(self) -> None:
        _Sampled.__post_init__(self)
        check_spans(self.spans, len(self.tokens))

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights that drew each token [n] int64; -1 where nobody did."""
        found = np.full(len(self.tokens), -1, dtype=np.int64)
        for start, version in self.spans:
            found[start:] = version
        return found


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer or one conversation, as a single sequence of tokens: `segments` in order, the prompt first.

    A plain answer is the prompt (by the environment) and one segment by the policy. `end`: "stop" (the policy or the
    environment ended it), "length" (`rollout.max_response_length`), "turns" (`environment.max_turns`), and for those
    that are left out of training "error" or "timeout" of the environment, described by `error`.
    """

    segments: tuple[Segment, ...]
    end: EndReason
    flow_digest: str
    error: str = ""
    request_id: int | None = field(default=None, compare=False)  # that named its random stream

    @property
    def weight_version(self) -> int | None:
        """That of its last span: the weights that drew its last token. None: nobody drew any."""
        return next((s.spans[-1][1] for s in reversed(self.segments) if s.spans), None)

    def num_older(self, version: int) -> int:
        """Tokens that other weights than those of `version` drew: weights from before them, as `pack` checks."""
        mixed = [s for s in self.turns if any(drew != version for _, drew in s.spans)]
        return sum(int(np.count_nonzero(s.versions != version)) for s in mixed)

    @property
    def turns(self) -> tuple[Segment, ...]:
        """The policy's segments."""
        return tuple(s for s in self.segments if s.author == "policy")

    @property
    def length(self) -> int:
        """Tokens that the learner computes, the prompt's included: of all segments, in every row that has them."""
        return packed_length(self.segments)

    @property
    def num_policy_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.turns)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, the environment's included: what `rollout.max_response_length` bounds."""
        return self.length - len(self.segments[0].tokens)

    @property
    def failed(self) -> bool:
        """Whether its environment failed and its rewards mean nothing: `roll_out` keeps it apart from the groups."""
        return self.end in ("error", "timeout")

    @property
    def truncated(self) -> bool:
        """Whether it ran into a limit of length or turns."""
        return self.end in ("length", "turns")

    @property
    def given(self) -> tuple[float, ...]:
        """The rewards that the environment gave, turn by turn; empty: it gave none, so this is not scored."""
        return tuple(s.reward for s in self.turns if s.reward is not None)


Advantage = float | tuple[float, ...]
"""One number for all policy tokens of a trajectory, or one for each of them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt, with a reward and an advantage each once these stages have run.

    An advantage is None where there is none: the trajectory, or its group, is not learned from.
    `rewards` are what is learned from: the weighted sum and the overlong penalty. `signals`, one for each trajectory,
    are the numbers that `rl.signal` names: dynamic sampling, `reward/frac_zero_std` and evaluations look at them
    (empty: at the rewards). `sizes` and `signal_sizes`: of each such number the sum of the absolute values of the terms
    that it was summed from, to which its rounding is relative (empty: its own absolute value). `scores` are those of
    each reward function by name, without weights (None: it did not score that one); empty where there is one function,
    or only an environment.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...] = ()
    advantages: tuple[Advantage | None, ...] = ()
    scores: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    signals: tuple[float, ...] = ()
    extra: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # columns that reward functions have logged
    sizes: tuple[float, ...] = ()
    signal_sizes: tuple[float, ...] = ()

    def first(self, count: int) -> Group:
        """Only its first trajectories, with what belongs to them."""
        def cut(columns: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
            return {key: values[:count] for key, values in columns.items()}

        return Group(
            self.prompt, self.trajectories[:count], self.rewards[:count], self.advantages[:count], cut(self.scores),
            self.signals[:count], cut(self.extra), self.sizes[:count], self.signal_sizes[:count],
        )

    @property
    def deciding(self) -> tuple[float, ...]:
        """The numbers that say whether its trajectories differ, and which of them are right."""
        return self.signals or self.rewards

    @property
    def reward_sizes(self) -> tuple[float, ...]:
        """Of each reward the sum of its terms' absolute values."""
        return self.sizes or tuple(map(abs, self.rewards))

    @property
    def deciding_sizes(self) -> tuple[float, ...]:
        """The same of `deciding`."""
        if self.signals:
            return self.signal_sizes or tuple(map(abs, self.signals))
        return self.reward_sizes


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to the policy, as tokens: what `Conversations.poll` returns.

    `key` is the conversation's. `tokens` are to be appended and prefilled (empty where `done`); `text` is for people,
    `messages` are what it was made of, with their roles. `reward` belongs to the policy's turn before (None: nothing
    was given for it). `failure` is "" or why the environment gave no answer.
    """

    key: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    reward: float | None = None
    done: bool = False
    failure: Literal["", "error", "timeout"] = ""
    error: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    opened: str | None = ""  # of a prompt: `Prompt.opened`
    after: int | None = None  # the turn of the policy that it follows, -1: a prompt anew; None: the last one


class Conversations(Protocol):
    """The environment's side of many conversations; `environments.conversations.EnvironmentPool` is one.

    Calls return at once; the environments work in the background and `poll` gives what is ready.
    """

    def start(self, key: int, problem: Problem) -> None:
        """Begin conversation `key`; its first `Reply` is the prompt."""

    def act(self, key: int, completion: Completion) -> None:
        """The policy's turn."""

    def poll(self, wait: bool) -> list[Reply]:
        """The replies that are ready; with `wait`, at least one (if any conversation owes one)."""

    def close(self, key: int) -> None:
        """The conversation is over, whoever ended it."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages of the KV cache.

    `keys`, `values` [pages, page, G, H]: BF16, or E4M3 codes with `scales` [pages, G, page, 2] in BF16, the powers of
    two of a token's key head and value head. In that order a decode kernel reads both scales of a key as one 32-bit
    word, and those of a page's keys side by side.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None


class Cache(Protocol):
    """What sequences keep of all layers between two passes; `engine.state_pool.StatePool` is ours."""

    @property
    def page_size(self) -> int: ...

    def layer(self, index: int) -> LayerCache:
        """The keys and values of a layer with attention."""
        ...

    def state(self, layer: int, name: str) -> Tensor:
        """What a block of the layer declares by this name: [pages, page, *shape] for each token, or [rows, *shape] for
        each sequence."""
        ...


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which row of the states that are one for a sequence each sequence reads, and which it leaves its own in.

    They differ where others read the same row: no sequence writes a row that another reads. A sequence that begins
    reads row 0, which is zeros; padding writes row 1, which nobody reads.
    """

    read: Tensor  # [B] int64
    write: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The keys that each part of a packed batch sees, where parts share a stem (the rows of their prompt).

    Part i sees `cu_seqlens[i]:cu_seqlens[i+1]` of K copied rows of `k` and `v`: its stem's, if it has one, then its
    own. Entry n of `later`: rows [S] of all stems with an n-th part, and their places [S] among that part's keys.
    """

    rows: Tensor  # [K] int64, the row of k and v that each key is
    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]
    own: Tensor  # [T] int64, the place of each row among the keys of its own part
    later: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Causal attention over packed parts: token rows `cu_seqlens[i]:cu_seqlens[i+1]` are part i, a whole sequence or,
    with `keys`, perhaps the end of one. `kernels.attention.ops.varlen_plan` makes both."""

    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]
    keys: SharedKeys | None = None


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Attention of new tokens over a paged cache; decode is the case of one query a sequence.

    Sequence i owns query rows `cu_seqlens[i]:cu_seqlens[i+1]`, which are its last positions; after the write it has
    `kv_lengths[i]` keys, found at `block_table[i]`. Row t writes its key and value to cache slot
    `slots[t] = page * page_size + offset`; a slot of -1 is a padding row and writes nothing.

    `kv_pages[i]` is at least the number of pages that hold keys of sequence i: `ceil(kv_lengths[i] / page_size)`, or
    where only the device knows the lengths, the width of the table. It bounds what a backend takes to dequantize the
    pages of an FP8 cache, without waiting for the device.
    """

    cache: Cache
    cu_seqlens: Tensor  # [B+1] int32
    query_lengths: tuple[int, ...]
    kv_lengths: Tensor  # [B] int32
    kv_pages: tuple[int, ...]
    block_table: Tensor  # [B, M] int32
    slots: Tensor  # [T] int64
    shared: Any = None  # kernels.attention.state.SharedPages, perhaps, where every sequence has one query
    rows: StateRows | None = None  # where a layer keeps one state for a sequence


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The only input of `Transformer.forward`; trainer and engine differ in the plan alone."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0-based within the sequence
    plan: VarlenPlan | PagedPlan
    side: Side  # whose precision flow applies


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One published tensor [N, K] (or [N]): BF16 values, or E4M3 codes with the scale of each 128x128 block.

    `value = code * scale`; blocks restart at this tensor's first row, and the last ones are smaller where a size is no
    multiple of 128.
    """

    values: Tensor
    scales: Tensor | None = None  # [ceil(N / 128), ceil(K / 128)] float32


@dataclass(frozen=True, slots=True)
class WeightSet:
    """What publishing gives an engine: every tensor of the model by its Hugging Face name, as the forward reads it.

    Here they are views of the trainer's memory, which the next publishing overwrites. `weights.checksum` names them.
    """

    version: int
    flow_digest: str
    tensors: Mapping[str, WeightTensor]
