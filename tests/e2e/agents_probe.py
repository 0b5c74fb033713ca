"""Agents of the OpenAI Agents SDK on a server whose model is random: a forced call, its output, an
answer. Run in an environment of theirs; prints JSON.

    python agents_probe.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

URL = f"{sys.argv[1]}/v1"
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = "How warm?"


class Unit(BaseModel):
    """Unit of the answer."""

    model_config = ConfigDict(extra="forbid")
    unit: Literal["C", "F"]


@function_tool
def weather(unit: Literal["C", "F"]) -> str:
    """Of a day."""
    return f"21 {unit}"


async def agents() -> dict[str, Any]:
    told: dict[str, Any] = {}
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 1500, "extra_body": PLAIN}
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, **options)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(
            name="a", instructions="Say.", tools=[weather], model=model, model_settings=settings
        )
        whole = await Runner.run(agent, ASKED)
        streamed = Runner.run_streamed(agent, ASKED)
        events = [event.type async for event in streamed.stream_events()]
        told[kind.__name__] = {
            "items": [type(item).__name__ for item in whole.new_items],
            "streamed": [type(item).__name__ for item in streamed.new_items],
            "outputs": [item.output for item in whole.new_items if hasattr(item, "output")],
            "raw_events": events.count("raw_response_event"),
        }
    return told


def tool_loop() -> list[str]:
    """As openai's own examples have it."""
    client = OpenAI(base_url=URL, api_key="none", max_retries=0)
    function = {"name": "weather", "parameters": Unit.model_json_schema(), "strict": True}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 1500, "extra_body": PLAIN}
    options |= {"parallel_tool_calls": False}
    options |= {"tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = client.chat.completions.create(**options, messages=messages, tool_choice="required")
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        unit = json.loads(call.function.arguments)["unit"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"21 {unit}"})
    second = client.chat.completions.create(**options, messages=messages, tool_choice="none")
    return [choice.finish_reason for choice in (first.choices[0], second.choices[0])]


set_tracing_disabled(True)
print(json.dumps({"loop": tool_loop(), "agents": asyncio.run(agents())}))
