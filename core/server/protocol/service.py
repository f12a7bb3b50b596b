"""Types of the routes about the server: models, tokens, health, version."""

from typing import Annotated, Any, Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    root: str = ""
    """the model's own name, or an adapter's folder"""
    parent: str | None = None
    """of an adapter: the model that it changes"""
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    """An adapter that is to be loaded."""

    lora_name: str
    lora_path: Annotated[str, msgspec.Meta(min_length=1)]
    """folder on the server's machine"""


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """An adapter that is no longer wanted."""

    lora_name: str


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a conversation, whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None: for a prompt yes, for messages no, as their template has them"""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids, how many, and how many the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids whose text is asked for."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = False


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Their text."""

    prompt: str


class Health(msgspec.Struct, kw_only=True):
    """Whether the server can be used, and why not."""

    status: str
    reason: str = ""


class Version(msgspec.Struct, kw_only=True):
    """Of headrace."""

    version: str
