"""llama-index's OpenAILike against a server: llama_index_client.py URL."""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

common = {"model": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 9}
chat = OpenAILike(**common, is_chat_model=True, context_window=4096, max_retries=0)
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]

answer = chat.chat(messages)
assert answer.raw.usage.completion_tokens == 9, answer.raw
assert [piece for piece in chat.stream_chat(messages)][-1].message.content == answer.message.content
assert asyncio.run(chat.achat(messages)).message.content == answer.message.content

text = OpenAILike(**common, is_chat_model=False, context_window=4096, max_retries=0)
completed = text.complete("Once upon")
assert [piece for piece in text.stream_complete("Once upon")][-1].text == completed.text
print("ok")
