"""The runner of a model of no family: transformers' forward pass, our attention, caches and sampling."""

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import ModelError
from ..models.spec import ForeignSpec
from ..platform import RunnerConfig
from ..runner.step import StepArrays, sample_and_remember
from ..runner.torch import TorchDevice, TorchRunner, memory_errors
from ..stages import Array, ForwardBatch, PromptLogprobsBatch, StepInput
from ..weights.source import ParamSource
from .attention import NAME, PagedAttention
from .module import ForeignParams, call

_CHECK_TOKENS = 8
_MAX_DIFFERENCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}
"""Of logits, over their standard deviation: on average over all tokens of the check at start."""


class ForeignRunner(TorchRunner):
    """A module of transformers over paged caches. Its logits are computed with its hidden states, in one pass."""

    def __init__(self, config: RunnerConfig, device: TorchDevice) -> None:
        super().__init__(config, device)
        assert config.spec.foreign is not None
        self._foreign: ForeignSpec = config.spec.foreign
        self._attention = PagedAttention(self.ops, tuple(layer.attn for layer in config.spec.layers))
        self._module: torch.nn.Module | None = None
        self._num_blocks: Sequence[int] = ()

    def load(self, params: ParamSource) -> None:
        """Take the module."""
        assert isinstance(params, ForeignParams)
        with memory_errors("weights"):
            self._module = params.module().to(self.device.torch_device)
        self._attention.install(self._module, self._foreign.attention)

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate the caches."""
        super().kv_init(num_blocks)
        self._num_blocks = num_blocks

    def warmup(self) -> None:
        """Compute a few tokens in pieces and by the module's own attention. Raises ModelError if they differ."""
        with memory_errors("a step's activations"), torch.inference_mode():
            self._check()
        super().warmup()

    def run(self, batch: StepInput) -> tuple[StepArrays, list[Array]]:
        """Compute a step on the device."""
        moved = self.move(batch)
        sampling, prompts = moved.sampling, moved.prompt_logprobs
        rows = [] if sampling is None else [moved.forward.logits_indices]
        rows += [] if prompts is None else [prompts.rows]
        wanted = torch.cat(rows) if rows else moved.forward.logits_indices[:0]
        logits = self._forward(moved.forward, wanted)
        num_samples = 0 if sampling is None else len(moved.forward.logits_indices)
        sampled = None
        if sampling is not None:
            sampled, self._last_tokens = sample_and_remember(
                self.ops, logits[:num_samples], self._last_tokens, sampling
            )
        assert self._kv is not None
        arrays = StepArrays(
            hidden_states=None, sampled=sampled, pooled=None, kv=self._kv, last_tokens=self._last_tokens
        )
        return arrays, self._logprobs_of(prompts, logits[num_samples:])

    def close(self) -> None:
        """Drop the module and the caches."""
        self._module = None
        self._attention.layers = []
        super().close()

    def _logprobs_of(self, batch: PromptLogprobsBatch | None, logits: Array) -> list[Array]:
        if batch is None:
            return []
        return list(self.ops.logprobs(logits, batch.targets, num_logprobs=batch.num_logprobs))

    def _forward(self, batch: ForwardBatch, rows: Array) -> Array:
        """Logits of some tokens of a batch, float32 [num_rows, vocab_size]."""
        assert self._module is not None and self._kv is not None, "load and kv_init come before step"
        self._attention.begin(self._kv, batch)
        keeps = {"logits_to_keep": rows.long()} if self._foreign.keeps_logits else {}
        logits = call(self._module, batch.input_ids.long(), batch.positions.long(), **keeps)
        return (logits if keeps else logits[rows.long()]).float()

    # ---- the check at start -----------------------------------------------------------------------------------
    def _check(self) -> None:
        """Two requests in pieces, against each alone by the module's own attention: a state that it keeps, or
        attention that it computes past ours, shows."""
        assert self._module is not None and self._kv is not None
        size = self.config.block_size
        num_blocks = min(self._num_blocks) - 1
        length = min(_CHECK_TOKENS, num_blocks // 2 * size, self.config.max_model_len)
        if length < 2:
            return
        ids = np.random.default_rng(0).integers(0, self.config.spec.vocab_size, (2, length)).astype(np.int32)
        pieces = [self._piece(ids, starts, ends) for starts, ends in _pieces(length)]
        got = [torch.cat([piece[r] for piece in pieces]) for r in range(2)]
        differences = []
        for r in range(2):
            want = self._own_logits(ids[r])
            differences.append(((got[r] - want).abs().mean() / want.std()).item())
        if not max(differences) < _MAX_DIFFERENCE[self.config.dtype]:
            raise ModelError(
                f"{self.config.spec.model_type!r} computes other logits with paged attention than with its own "
                f"(they differ by {max(differences):.2g} of their standard deviation), so it cannot be served",
                remedies=["take a model of a family in docs/models.md"],
            )

    def _piece(self, ids: np.ndarray, starts: Sequence[int], ends: Sequence[int]) -> list[torch.Tensor]:
        """Logits of tokens [start, end) of both requests, which own the first blocks in turn."""
        size, device = self.config.block_size, self.device.torch_device
        spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = np.concatenate(spans)
        rows = np.repeat([0, 1], [len(span) for span in spans])
        table = 1 + np.arange(2 * -(-ids.shape[1] // size)).reshape(-1, 2).T
        slots = table[rows, positions // size] * size + positions % size

        def put(values: np.ndarray | Sequence[int]) -> Array:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

        groups = len(self.config.groups)
        batch = ForwardBatch(
            input_ids=put(ids[rows, positions]),
            positions=put(positions),
            query_start_loc=put(np.cumsum([0, *map(len, spans)])),
            seq_lens=put(ends),
            block_tables=[put(table)] * groups,
            slot_mappings=[put(slots)] * groups,
            logits_indices=put(np.arange(len(positions))),
            max_query_len=max(map(len, spans)),
            max_seq_len=max(ends),
        )
        return list(self._forward(batch, batch.logits_indices).split([len(span) for span in spans]))

    def _own_logits(self, ids: np.ndarray) -> torch.Tensor:
        """Logits of one request by the module's own attention."""
        assert self._module is not None
        module, device = self._module, self.device.torch_device
        module.set_attn_implementation("eager")  # type: ignore[operator]
        try:
            tokens = torch.from_numpy(ids).long().to(device)
            return call(module, tokens, torch.arange(len(tokens), device=device)).float()
        except (RuntimeError, ValueError, TypeError) as error:
            raise ModelError(
                f"{self.config.spec.model_type!r} fails in transformers' own code: {error}",
                remedies=["take a model of a family in docs/models.md"],
            ) from error
        finally:
            module.set_attn_implementation(NAME)  # type: ignore[operator]


def _pieces(length: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(starts, ends) of two steps that compute two requests."""
    cuts = (length // 2 + 1, length // 2)
    return [((0, 0), cuts), (cuts, (length, length))]
