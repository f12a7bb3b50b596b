"""anthropic's client against a server: anthropic_client.py URL."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
fixed = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
fixed["extra_body"] = {"temperature": 0}  # newer clients do not know it, servers still take it

whole = client.messages.create(**fixed, system="Be brief.")
assert whole.role == "assistant" and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12, whole
with client.messages.stream(**fixed, system="Be brief.") as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text == final.content[0].text, (text, whole)
assert final.usage.output_tokens == 12 and final.stop_reason == "max_tokens", final
counted = client.messages.count_tokens(model="tiny", messages=fixed["messages"], system="Be brief.")
assert counted.input_tokens == whole.usage.input_tokens, (counted, whole.usage)

schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": schema}]
called = client.messages.create(
    **{**fixed, "max_tokens": 300}, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}
)
(use,) = [block for block in called.content if block.type == "tool_use"]
assert called.stop_reason == "tool_use" and use.name == "weather" and use.input["city"] in ("Paris", "Rome"), called
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
client.messages.create(
    **{**fixed, "messages": [*fixed["messages"], {"role": "assistant", "content": [use.model_dump()]},
                             {"role": "user", "content": [result]}]},
    tools=tools,
)  # fmt: skip
cases = [({"model": "other"}, anthropic.NotFoundError)]
cases += [({"extra_body": {"temperature": -1}}, anthropic.BadRequestError)]
for wrong, error in cases:
    try:
        client.messages.create(**{**fixed, **wrong})
    except error:
        continue
    raise AssertionError(f"no {error.__name__}")
print("ok")
