"""litellm against a server: litellm_client.py URL."""

import asyncio
import sys

import litellm

litellm.telemetry = False
common = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
messages = [{"role": "user", "content": "Hello"}]
fixed = {**common, "model": "openai/tiny", "messages": messages, "temperature": 0, "max_tokens": 9}

whole = litellm.completion(**fixed)
assert whole.usage.completion_tokens == 9 and whole.choices[0].finish_reason == "length", whole
text = ""
for piece in litellm.completion(**fixed, stream=True, stream_options={"include_usage": True}):
    text += (piece.choices[0].delta.content or "") if piece.choices else ""
assert text == whole.choices[0].message.content, (text, whole)
assert asyncio.run(litellm.acompletion(**fixed)).choices[0].message.content == text

found = litellm.text_completion(
    **common, model="text-completion-openai/tiny", prompt="Once", max_tokens=4, temperature=0
)
assert found.usage.completion_tokens == 4, found
for wrong, error in (
    ({"model": "openai/other"}, litellm.NotFoundError),
    ({"temperature": -1}, litellm.BadRequestError),
    ({"messages": [{"role": "user", "content": "x " * 9000}]}, litellm.ContextWindowExceededError),
):
    try:
        litellm.completion(**{**fixed, **wrong})
    except error:
        continue
    except litellm.BadRequestError as other:
        assert "max_model_len" in str(other), other
        continue
    raise AssertionError(f"no {error.__name__}")
print("ok")
