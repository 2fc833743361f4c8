"""litellm: whole and as a stream, with a tool."""

import json
import os
from importlib.metadata import version

import litellm

TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}}]
asked = {"model": f"openai/{os.environ['OPENAI_MODEL']}", "tools": TOOLS, "temperature": 1.0}
messages = [{"role": "user", "content": "What is 20 + 22?"}]
first = litellm.completion(messages=messages, **asked).choices[0].message
(call,) = first.tool_calls
result = sum(json.loads(call.function.arguments).values())
messages += [
    first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": str(result)},
]
pieces = list(litellm.completion(messages=messages, stream=True, **asked))
said = litellm.stream_chunk_builder(pieces, messages=messages).choices[0].message.content
print(json.dumps({"version": version("litellm"), "said": said, "called": [call.function.arguments]}))
