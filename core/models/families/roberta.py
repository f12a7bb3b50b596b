"""RoBERTa (Liu et al. 2019), and CamemBERT and XLM-RoBERTa: BERT whose positions begin behind padding's id."""

from ...errors import ModelError
from ..bert_like import bert_like, bert_names, two_layer_head
from ..config import HFConfig
from ..spec import ModelSpec

SKIPPED = 2
WEIGHTS = bert_names(
    "roberta.", {"dense": "classifier.dense", "out_proj": "classifier.out_proj"}, skip_positions=SKIPPED
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Position 0 has the row pad_token_id + 1, so that there are as many positions less."""
    config = config.with_defaults(vocab_size=50265, hidden_size=768, pad_token_id=1)
    if config.integer("pad_token_id") + 1 != SKIPPED:
        raise ModelError(f"pad_token_id in {config.file} is {config['pad_token_id']}, but positions begin behind 1")
    head = two_layer_head(config, ("dense", "out_proj"), "tanh")
    return bert_like(config, skip_positions=SKIPPED, pooler=head)
