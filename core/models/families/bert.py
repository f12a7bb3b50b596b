"""BERT (Devlin et al. 2018), and what is saved as it: MiniLM, BGE, E5 and many more."""

from ..bert_like import bert_like, bert_names, two_layer_head
from ..config import HFConfig
from ..spec import ModelSpec

WEIGHTS = bert_names("bert.", {"pooler": "bert.pooler.dense", "classifier": "classifier"})


def to_spec(config: HFConfig) -> ModelSpec:
    """A classifier reads the first token through BERT's pooler, a dense layer with tanh."""
    config = config.with_defaults(vocab_size=30522, hidden_size=768)
    return bert_like(config, pooler=two_layer_head(config, ("pooler", "classifier"), "tanh"))
