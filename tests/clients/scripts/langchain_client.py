"""langchain-openai against a server: langchain_client.py URL."""

import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL = f"{sys.argv[1]}/v1"
common = {"base_url": URL, "api_key": "none", "model": "tiny", "max_retries": 0}
chat = ChatOpenAI(**common, temperature=0, max_tokens=12)
messages = [SystemMessage("Be brief."), HumanMessage("Hello")]

answer = chat.invoke(messages)
assert answer.usage_metadata["output_tokens"] == 12, answer
assert answer.response_metadata["finish_reason"] == "length", answer

pieces = list(chat.stream(messages, stream_usage=True))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert whole.content == answer.content, (whole.content, answer.content)
assert whole.usage_metadata["output_tokens"] == 12, whole.usage_metadata
assert [a.content for a in chat.batch([messages, messages])] == [answer.content] * 2

scored = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
assert len(scored.response_metadata["logprobs"]["content"]) == 12

assert OpenAI(**common, temperature=0, max_tokens=5).invoke("Once upon") is not None


class Weather(BaseModel):
    """The weather of a city."""

    # Random weights make use of all that a schema lets; without this, further properties without end.
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


long = ChatOpenAI(**common, temperature=0, max_tokens=900)
for method in ("json_schema", "function_calling"):
    found = long.with_structured_output(Weather, method=method).invoke("What is the weather in Paris?")
    assert isinstance(found, Weather), found


@tool(args_schema=Weather)
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days} days"


called = long.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Paris?")
(call,) = called.tool_calls
assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome"), called
result = weather.invoke(call)
assert isinstance(result, ToolMessage)
after = chat.invoke([HumanMessage("What is the weather in Paris?"), called, result])
assert isinstance(after, AIMessage), after
streamed = None
for piece in long.bind_tools([weather], tool_choice="weather").stream("What is the weather in Paris?"):
    streamed = piece if streamed is None else streamed + piece
assert streamed.tool_calls[0]["args"] == call["args"], streamed.tool_calls

responses = ChatOpenAI(**common, temperature=0, max_tokens=12, use_responses_api=True)
found = responses.invoke(messages)
assert found.text == answer.content, (found.text, answer.content)
assert "".join(piece.text for piece in responses.stream(messages)) == answer.content
print("ok")
