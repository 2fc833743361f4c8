"""Bodies of requests as an `Ask`: which fields there are, what they may hold, and what is refused by name.

A field that would change the sampling and that the engine does not have is refused unless its value is neutral, and so
is a field that nobody knows: nothing that a client asks for is left out silently. Sources: OpenAI's API reference for
chat and completions; vLLM's protocol for `return_token_ids`, `top_k`, `min_p` and `/inference/v1/generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jetrl import arguments
from jetrl.chat.fields import message_of
from jetrl.errors import UserError, shown
from jetrl.serve.refusal import Refused
from jetrl.types import SamplingParams
from jetrl.untrusted import MOST_DEPTH, json_value, no_constant, require_shallow

try:
    import orjson
except ModuleNotFoundError:  # an environment that was made before the extra had it
    orjson = None  # type: ignore[assignment]

_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG = b"0" * 19  # of whole numbers with so many digits, orjson may make floats
_UNREAD = object()
MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_TOP = 128, 16, 256, 128
_SEEDS = 2**64 - 1

# What a client may send and the server need not read: it changes no token.
_HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "session_id", "cache_salt", "request_id", "priority", "verbosity",
}
# Field -> the values with which it changes nothing; with any other it is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "top_logprobs": (0,), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "web_search_options": (), "use_beam_search": (False,),
    "min_tokens": (0,), "prompt_logprobs": (), "skip_special_tokens": (False,), "detokenize": (True,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,), "documents": ([],), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "structured_outputs": (),
    "bad_words": ([],), "logits_processors": ([],), "truncate_prompt_tokens": (),
}
_OF_ANSWERS = ("audio", "refusal", "annotations", "function_call")  # empty in our answers, which clients send back
_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
    "logprobs",
}
_SHARED = _SAMPLING | {"model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids"}
_CHAT = _SHARED | {"messages", "max_completion_tokens", "tools", "chat_template_kwargs"}
_COMPLETION = _SHARED | {"prompt", "prompt_logprobs"}
_OF_RECIPE = (_SAMPLING - {"n", "logprobs"}) | {"max_completion_tokens"}
_TURN = _CHAT - _OF_RECIPE
_GENERATE = {"model", "token_ids", "sampling_params", "stream", "return_token_ids"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants. `prompts`: texts or token ids, of completions; `messages`: of a chat.

    `max_tokens` None: what the context leaves. `seed` None: equal requests get answers of their own, in a fixed order.
    `variables`: keywords for the chat template, its `tools` among them.
    """

    sampling: SamplingParams  # its max_tokens and seed have no meaning
    max_tokens: int | None
    seed: int | None
    n: int = 1
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    stream: bool = False
    usage: bool = False  # in a stream: a last chunk with the counts
    prompt_logprobs: int | None = None  # of the prompt's tokens, with so many of the most probable ones at each place


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object. Refused: what is none, is nested without end, or holds NaN or Infinity, which JSON does not."""
    try:
        data = _quick(body)
        if data is _UNREAD:
            data = json_value(body, parse_constant=no_constant)
    except ValueError as error:
        raise Refused(f"The body is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise Refused(f"The body is {shown(data, 60)}: send a JSON object.")
    return data


def _quick(body: bytes) -> Any:
    """The value by orjson, which reads ids several times as fast; `_UNREAD` where it might differ, or has an error."""
    if orjson is None or _LONG in body.translate(_DIGITS):
        return _UNREAD
    try:
        value = orjson.loads(body)
    except ValueError:
        return _UNREAD
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH:
        require_shallow(value)
    return value


def chat_ask(data: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """The body of `/v1/chat/completions`."""
    _require_known(data, _CHAT, model)
    for key in ("max_tokens", "max_completion_tokens"):
        if data.get("max_tokens") is not None and data.get("max_completion_tokens") not in (None, data["max_tokens"]):
            raise Refused("max_tokens and max_completion_tokens differ: send one of them.", param=key)
    most = data.get("max_completion_tokens")
    ask = _shared(dict(data) | ({"max_tokens": most} if most is not None else {}), vocab_size)
    logprobs = _flag(data, "logprobs")
    return replace(ask, messages=messages_of(data.get("messages")), variables=_variables(data), logprobs=logprobs)


def completion_ask(data: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """The body of `/v1/completions`. With `prompt_logprobs`, `max_tokens` may be 0: then nothing is drawn."""
    _require_known(data, _COMPLETION, model)
    top, drawn = data.get("prompt_logprobs"), data.get("max_tokens")
    nothing = top is not None and drawn == 0 and not isinstance(drawn, bool)
    ask = _shared({**data, "max_tokens": None} if nothing else data, vocab_size)
    most = 0 if nothing else 16 if ask.max_tokens is None else ask.max_tokens  # OpenAI's default
    if top is not None:
        top = _checked("prompt_logprobs", lambda: arguments.whole("prompt_logprobs", top, 0, min(MOST_TOP, vocab_size)))
        if ask.stream or ask.n > 1:
            raise Refused("prompt_logprobs: they do not stream, and n must be 1.", param="prompt_logprobs")
    return replace(
        ask, prompts=_prompts(data.get("prompt"), vocab_size), max_tokens=most, logprobs=_wants_logprobs(data),
        prompt_logprobs=top,
    )


def generate_ask(data: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """The body of `/inference/v1/generate`: token ids in, token ids out."""
    _require_known(data, _GENERATE, model)
    if _flag(data, "stream"):
        raise Refused("stream = true: /inference/v1/generate does not stream. Use /v1/completions.", param="stream")
    sampling = data.get("sampling_params")
    if sampling is None:
        sampling = {}
    if not isinstance(sampling, Mapping):
        raise Refused(f"sampling_params = {shown(sampling, 60)}: send an object.", param="sampling_params")
    _require_known(sampling, _SAMPLING, model)
    ask = _shared(sampling, vocab_size)
    prompt = _ids("token_ids", data.get("token_ids"), vocab_size)
    most = 16 if ask.max_tokens is None else ask.max_tokens
    return replace(
        ask, prompts=(prompt,), max_tokens=most, logprobs=_wants_logprobs(sampling),
        token_ids=_flag(data, "return_token_ids"),
    )


def turn_ask(data: Mapping[str, Any], ignored: Collection[str] = ()) -> Ask:
    """The body of a chat call in training, where the recipe says how the policy is sampled. `ignored`: fields that the
    recipe leaves out of what a program sends."""
    data = {key: value for key, value in data.items() if value is not None and key not in ignored}
    for key in _OF_RECIPE & data.keys():
        raise Refused(
            f"{key} = {shown(data[key], 60)}: in training the recipe says how the policy is sampled. Leave it out, or "
            "name it in environment.params.ignore.", param=key, code="unsupported_parameter",
        )
    if data.get("n", 1) != 1 or isinstance(data.get("n"), bool):
        raise Refused("In training n is 1: each turn of the policy is one.", param="n", code="unsupported_parameter")
    _require_known({key: value for key, value in data.items() if key not in ("n", "model")}, _TURN, "")
    options = data.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused("stream_options: send {\"include_usage\": true}.", param="stream_options")
    return Ask(
        SamplingParams(1), None, None, messages=messages_of(data.get("messages")), variables=_variables(data),
        logprobs=_flag(data, "logprobs"), token_ids=_flag(data, "return_token_ids"),
        stream=_flag(data, "stream"), usage=_flag(options, "include_usage"),
    )


def messages_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages of a chat, with texts as contents. Parts that are no texts are refused: no address is fetched."""
    if not isinstance(value, list) or not value:
        raise Refused(f"messages = {shown(value, 60)}: send a list of at least one message.", param="messages")
    found = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise Refused(f"{where} = {shown(message, 60)}: send an object with role and content.", param=where)
        given = {key: each for key, each in message.items() if each is not None and key not in _OF_ANSWERS}
        if not given.get("tool_calls", True):  # some libraries write an empty list
            del given["tool_calls"]
        if isinstance(given.get("content"), list):
            given["content"] = "".join(_part(where, part) for part in given["content"])
        if given.get("role") == "developer":  # OpenAI's later name of the role
            given["role"] = "system"
        try:
            found.append(message_of(given))
        except ValueError as error:
            raise Refused(f"{where}: {error}.", param=where) from error
    return tuple(found)


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise Refused(f"{where}: a part of type {shown(kind, 40)}: the model reads text only.", param=where)
    return str(part["text"])


def _variables(data: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for the chat template. The template itself is the model's: a client cannot give one."""
    given = data.get("chat_template_kwargs")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise Refused("chat_template_kwargs: send an object.", param="chat_template_kwargs")
    reserved = {
        "messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "tools", "documents",
        "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    }
    if wrong := sorted(given.keys() & reserved):
        raise Refused(f"chat_template_kwargs: {wrong[0]} cannot be set by a client.", param="chat_template_kwargs")
    if any(not isinstance(value, str | int | float | bool | None) for value in given.values()):
        raise Refused("chat_template_kwargs: values are texts, numbers or true and false.",
                      param="chat_template_kwargs")
    tools = data.get("tools")
    if tools is None or tools == []:
        return dict(given)
    named = isinstance(tools, list) and all(
        isinstance(one, dict) and one.get("type") == "function" and isinstance(one.get("function"), dict)
        and isinstance(one["function"].get("name"), str) for one in tools
    )
    if not named:
        raise Refused("tools: send a list of {\"type\": \"function\", \"function\": {\"name\": ...}}.", param="tools")
    return dict(given) if data.get("tool_choice") == "none" else {**given, "tools": tools}


def _prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """One text, one list of ids, or a list of either."""
    ids = isinstance(value, list) and value and isinstance(value[0], int)
    prompts = [value] if isinstance(value, str) or ids else value
    if not isinstance(prompts, list) or not prompts:
        raise Refused(f"prompt = {shown(value, 60)}: send a text, token ids, or a list of them.", param="prompt")
    if len(prompts) > MOST_PROMPTS:
        raise Refused(f"prompt: {len(prompts)} prompts; send at most {MOST_PROMPTS} at once.", param="prompt")
    return tuple(
        one if isinstance(one, str) else _ids("prompt" if ids else f"prompt[{i}]", one, vocab_size)
        for i, one in enumerate(prompts)
    )


def _ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    found: tuple[int, ...] = _checked(name, lambda: arguments.token_ids(name, value, vocab_size))
    return found


def _shared(data: Mapping[str, Any], vocab_size: int) -> Ask:
    """What all endpoints have: sampling, and what the answer is to hold."""
    def given(name: str, default: Any) -> Any:
        return default if data.get(name) is None else data[name]

    def checked(name: str, check: Callable[[Any], Any], default: Any) -> Any:
        return _checked(name, lambda: check(given(name, default)))

    whole, number = arguments.whole, arguments.number
    most = given("max_tokens", None)
    seed = given("seed", None)
    if seed is not None:
        seed = _checked("seed", lambda: whole("seed", seed, -(2**63), _SEEDS)) & _SEEDS
    stops = checked("stop", arguments.stops_of, [])
    if len(stops) > MOST_STOPS:
        raise Refused(f"stop: {len(stops)} strings; send at most {MOST_STOPS}.", param="stop")
    top_k = 0 if given("top_k", 0) == -1 else given("top_k", 0)  # vLLM's word for off
    stop_ids = given("stop_token_ids", [])
    sampling = SamplingParams(
        1,
        checked("temperature", lambda value: arguments.temperature_of(value, greedy=True), 1.0),
        checked("top_p", lambda v: number("top_p", v, lambda p: 0 < p <= 1, "a number above 0 and at most 1"), 1.0),
        _checked("top_k", lambda: whole("top_k", top_k, 0, 2**31 - 1)),
        checked("min_p", lambda v: number("min_p", v, lambda p: 0 <= p < 1, "a number from 0 to below 1"), 0.0),
        stops,
        _ids("stop_token_ids", stop_ids, vocab_size) if stop_ids != [] else (),
        _flag(data, "ignore_eos"),
    )
    options = given("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused("stream_options: send {\"include_usage\": true}.", param="stream_options")
    return Ask(
        sampling, None if most is None else _checked("max_tokens", lambda: whole("max_tokens", most, 1, 2**31 - 1)),
        seed, checked("n", lambda value: whole("n", value, 1, MOST_CHOICES), 1),
        token_ids=_flag(data, "return_token_ids"), tokens_as_ids=_flag(data, "return_tokens_as_token_ids"),
        stream=_flag(data, "stream"), usage=_flag(options, "include_usage"),
    )


def _wants_logprobs(data: Mapping[str, Any]) -> bool:
    """Completions count the alternatives for each token: 0 and 1 give the log-prob of the drawn token, and no other is
    computed."""
    value = data.get("logprobs")
    if value is None or value is False:
        return False
    if value is True:
        return True
    if not isinstance(value, int) or not 0 <= value <= 1:
        raise Refused(
            f"logprobs = {shown(value, 40)}: only the log-prob of the drawn token is computed. Send 0 or 1.",
            param="logprobs",
        )
    return True


def _require_known(data: Mapping[str, Any], known: set[str], model: str) -> None:
    """Refuse another model, and fields that nobody knows or that would change what is drawn."""
    name = data.get("model")
    if name is not None and name != model:
        raise Refused(f"model = {shown(name, 80)}: this server has {model!r}.", 404, "model", "model_not_found")
    for key, value in data.items():
        if key in known or key in _HARMLESS or value is None:
            continue
        if key not in _NEUTRAL:
            raise Refused(f"{key} is no field of this endpoint. Leave it out.", param=key, code="unknown_parameter")
        if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                   for neutral in _NEUTRAL[key]):
            raise Refused(
                f"{key} = {shown(value, 60)} is not supported: it would change the answer. Leave it out.",
                param=key, code="unsupported_parameter",
            )


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} = {shown(value, 60)}: send true or false.", param=name)
    return bool(value)


def _checked(name: str, check: Callable[[], Any]) -> Any:
    try:
        return check()
    except UserError as error:
        raise Refused(str(error), param=name) from error
