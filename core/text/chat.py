"""Chat messages to a prompt, by the model's own template, which is untrusted code from the internet."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, RequestError
from ..suggest import did_you_mean
from .inputs import describe
from .template_env import LimitExceeded, Refused, limit_loops, limits, make_environment

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes

_CONTINUE = "<<continue the final message>> "
"""Stands at the end of a final message that is to be continued; its last space shows whether a template trims."""


class ChatTemplate:
    """The chat templates of one model. Rendering is sandboxed, sees plain data only, and changes nothing.

    source: a template, or name -> template. special_tokens: "bos_token" and the like, as templates name them.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, tuple[jinja2.Template, bool]] = {}
        self._knows_developers = self.mentions("developer")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates there are."""
        return tuple(self._sources)

    def mentions(self, name: str) -> bool:
        """Whether a name stands in any of them."""
        return any(name in text for text in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: str = "",
        image_placeholder: str = "",
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages; encode it without adding special tokens.

        messages: {"role": str, "content": str or [{"type": "text", "text": str}], ...}. image_placeholder: of a model
        that reads images: what a part {"type": "image"} becomes where the template takes texts alone. tools: JSON
        schemas of functions. add_generation_prompt: begin the assistant's turn; None does so unless
        continue_final_message, which leaves the last message open instead. template: a name; "" takes "tool_use" if
        there are tools and such a template, else "default". Further keywords reach the template. Raises RequestError
        for messages that are wrong or that the template refuses, ModelError if the template is missing or damaged.
        """
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if flag is not None and not isinstance(flag, bool):
                raise RequestError(f"{name} must be true or false, got {describe(flag)}", code="invalid_messages")
        for name, given in (("tools", tools), ("documents", documents)):
            _check_objects(name, given)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other")
        compiled, takes_parts = self._compile(self._choose(template, bool(tools)))
        chat = [
            _check_message(index, message, takes_parts, image_placeholder)
            for index, message in enumerate(_as_list(messages))
        ]
        if not self._knows_developers:
            # OpenAI's newer name of a role that most models learnt as "system".
            for message in chat:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if not chat:
            raise RequestError("messages: a chat needs at least one", code="invalid_messages")
        final = _mark_final(chat[-1]) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": chat,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(compiled, variables, chat)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _choose(self, name: str, has_tools: bool) -> str:
        if not name:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = f"it has {', '.join(self._sources)}" if self._sources else "it has none"
            raise ModelError(
                f"the model has no chat template {name!r}: {known}{did_you_mean(name, self._sources)}",
                remedies=("set chat_template to a file with one", "complete a plain prompt instead"),
            )
        return name

    def _compile(self, name: str) -> "tuple[jinja2.Template, bool]":
        if name not in self._compiled:
            import jinja2

            environment = make_environment()
            try:
                tree = environment.parse(self._sources[name])
                takes_parts = _takes_parts(tree)
                compiled = environment.from_string(limit_loops(tree))
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"the chat template {name!r} is damaged, line {error.lineno}: {error.message}",
                    remedies=("set chat_template to a file with a working one",),
                ) from error
            self._compiled[name] = compiled, takes_parts
        return self._compiled[name]


def read_template(path: str) -> str:
    """The text of a file with a chat template. Raises ModelError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the chat template {path} cannot be read: {reason}", remedies=["--chat-template FILE"]
        ) from error


def _check_objects(name: str, given: Any) -> None:
    """Raise RequestError for tools or documents that are no list of objects."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if given is not None and not (is_list and all(isinstance(item, Mapping) for item in given)):
        wrong = given if not is_list else next(item for item in given if not isinstance(item, Mapping))
        raise RequestError(f"{name} must be a list of objects, got {describe(wrong)}", code="invalid_messages")


def _render(compiled: "jinja2.Template", variables: Mapping[str, Any], chat: Sequence[dict[str, Any]]) -> str:
    """Messages without content stay so where a template tells calls by that; most read content without a look."""
    try:
        return _run(compiled, variables)
    except RequestError:
        bare = [message for message in chat if "content" not in message]
        if not bare:
            raise
        for message in bare:
            message["content"] = ""
        return _run(compiled, variables)


def _run(compiled: "jinja2.Template", variables: Mapping[str, Any]) -> str:
    from jinja2.exceptions import SecurityError

    try:
        with limits():
            return compiled.render(variables)
    except Refused as error:
        raise RequestError(f"the chat template refuses the messages: {error}", code="invalid_messages") from error
    except LimitExceeded as error:
        raise ModelError(
            f"the chat template {error}", remedies=("set chat_template to a file with another one",)
        ) from error
    except SecurityError as error:
        raise ModelError(f"the chat template does what a template must not: {error}") from error
    except Exception as error:  # a template is a program: it may fail in any way, and takes one request with it
        raise RequestError(
            f"the chat template cannot render these messages: {type(error).__name__}: {error}",
            code="invalid_messages",
        ) from error


def _takes_parts(tree: "jinja2.nodes.Template") -> bool:
    """True if the template loops over a message's content, that is, expects a list of parts."""
    import jinja2.nodes as nodes

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node)
    }
    return any(
        is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _as_list(messages: object) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of objects with role and content, got {type(messages).__name__}",
            code="invalid_messages",
        )
    return messages


def _check_message(index: int, message: object, takes_parts: bool, image_placeholder: str) -> dict[str, Any]:
    """A plain copy of a message without the keys that are None."""
    where = f"messages[{index}]"

    def wrong(reason: str) -> RequestError:
        return RequestError(f"{where} {reason}", code="invalid_messages")

    if not isinstance(message, Mapping):
        raise wrong(f"must be an object with role and content, got {type(message).__name__}")
    plain: dict[str, Any] = _plain({k: v for k, v in message.items() if v is not None}, where)
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise wrong(f"needs a role such as user, got {plain.get('role')!r}")
    _check_tool_calls(plain.get("tool_calls"), wrong)
    content = plain.get("content")
    if content is None:
        if not any(plain.get(name) for name in ("tool_calls", "reasoning", "reasoning_content", "refusal")):
            raise wrong("needs content")
        if plain.get("refusal"):
            plain["content"] = str(plain["refusal"])
    elif isinstance(content, list):
        is_image = [bool(image_placeholder) and part == {"type": "image"} for part in content]
        reads = "text and images" if image_placeholder else "text"
        texts = [
            image_placeholder if image else _text_of_part(part, wrong, reads)
            for part, image in zip(content, is_image, strict=True)
        ]
        if not takes_parts:
            plain["content"] = "\n".join(texts)
        else:
            plain["content"] = [
                {"type": "image"} if image else {"type": "text", "text": text}
                for text, image in zip(texts, is_image, strict=True)
            ]
    elif not isinstance(content, str):
        raise wrong(f"must have text or a list of parts as content, got {type(content).__name__}")
    return plain


def _check_tool_calls(calls: Any, wrong: Callable[[str], RequestError]) -> None:
    """Raise what `wrong` makes for calls of an earlier turn that are none. {"name", "arguments"} alone is one."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise wrong(f"must have a list as tool_calls, got {describe(calls)}")
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"has tool_calls[{place}] without a function's name")
        if not isinstance(function.get("arguments", ""), str | dict | None):
            raise wrong(f"has tool_calls[{place}] whose arguments are neither text nor an object")


def _text_of_part(part: Any, wrong: Any, reads: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in ("text", "refusal"):
        raise wrong(f"has a part of type {kind!r}; this model reads {reads} only")
    if not isinstance(part.get(kind), str):
        raise wrong(f"has a part of type {kind!r} whose {kind} is no text")
    return str(part[kind])


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, where) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}, which is no JSON value", code="invalid_messages")


def _mark_final(message: dict[str, Any]) -> str:
    """Put the mark behind a final message's text; returns the text."""
    content = message.get("content")
    if isinstance(content, list) and content and "text" in content[-1]:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _CONTINUE
        return text
    if not isinstance(content, str):
        raise RequestError("the final message has no text to continue", code="invalid_messages")
    message["content"] = content + _CONTINUE
    return content


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "the chat template drops the final message, so it cannot be continued", code="invalid_messages"
        )
    kept = text[:at]
    # A template that trims messages would also have trimmed the end of this one.
    return kept if text.startswith(_CONTINUE, at) else kept.rstrip()
