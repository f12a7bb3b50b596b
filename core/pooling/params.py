"""How one vector is asked for."""

from dataclasses import dataclass

from ..errors import RequestError
from ..other_names import known_names


@known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of one request for a vector; validated when made. Raises RequestError."""

    dimensions: int | None = None
    """keep so many values at the front of an embedding (Matryoshka) and normalise anew; None keeps all"""
    normalize: bool | None = None
    """divide an embedding by its length; None: as the checkpoint says"""
    use_activation: bool = True
    """turn logits of labels into scores as the checkpoint says, else give the logits"""
    truncate_prompt_tokens: int | None = None
    """cut texts to so many tokens; -1: to what the model takes; None: a longer text is an error"""
    prompt_name: str | None = None
    """which of the checkpoint's prompts stands before a text; None: its default, "": none"""

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise RequestError(f"{name} must be a whole number, got {value!r}", code="invalid_pooling_params")
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError(f"dimensions must be at least 1, got {self.dimensions}", code="invalid_pooling_params")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or at least 1, got {cut}", code="invalid_pooling_params"
            )
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "normalize" and value is None):
                raise RequestError(f"{name} must be true or false, got {value!r}", code="invalid_pooling_params")
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise RequestError(f"prompt_name must be text, got {self.prompt_name!r}", code="invalid_pooling_params")
