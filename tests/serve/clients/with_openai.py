"""OpenAI's client: a call of a tool, its result, an answer; then the same by the async client, as a stream."""

import asyncio
import json
import os

import openai

MODEL = os.environ["OPENAI_MODEL"]
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}}]
ASKED = [{"role": "user", "content": "What is 20 + 22?"}]


def added(call):
    return str(sum(json.loads(call.function.arguments).values()))


client = openai.OpenAI()
messages = list(ASKED)
first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
assert first.finish_reason == "tool_calls", first
messages += [first.message] + [
    {"role": "tool", "tool_call_id": call.id, "content": added(call)} for call in first.message.tool_calls
]
said = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, logprobs=True).choices[0]


async def streamed():
    text, calls = "", {}
    async with openai.AsyncOpenAI() as other:
        stream = await other.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    calls[call.index] = calls.get(call.index, "") + call.function.arguments
    return text, list(calls.values())


text, arguments = asyncio.run(streamed())
print(json.dumps({
    "version": openai.__version__, "said": said.message.content, "drawn": len(said.logprobs.content),
    "called": [call.function.arguments for call in first.message.tool_calls], "streamed": [text, arguments],
}))
