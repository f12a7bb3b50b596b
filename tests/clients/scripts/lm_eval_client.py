"""lm-eval's local-completions against a server: lm_eval_client.py URL; prints what it found as JSON.

It sends token ids with echo, logprobs and max_tokens: 0 or 1 for log likelihoods, and prompts for generation. Its
tokenizer is the server's, over /tokenize, as the model has no hub id.
"""

import json
import sys
import urllib.request

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL = sys.argv[1]
CASES = json.loads(sys.argv[2])


def tokenize(text: str) -> list[int]:
    data = json.dumps({"prompt": text}).encode()
    request = urllib.request.Request(f"{URL}/tokenize", data, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]


class Served(LocalCompletionsAPI):
    """The server's own tokenizer instead of one from the hub."""

    def tok_encode(self, string, *args, **kwargs):
        return tokenize(string) if isinstance(string, str) else [tokenize(text) for text in string]


model = Served(
    base_url=f"{URL}/v1/completions", model="tiny", tokenizer_backend=None, tokenized_requests=True, batch_size=2,
    num_concurrent=1, max_length=2048, max_retries=1,
)  # fmt: skip
model.tokenizer_backend, model.tokenized_requests = "served", True
model.tokenizer = object()  # it only asks whether there is one


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=number) for number, each in enumerate(arguments)]


scores = model.loglikelihood(instances("loglikelihood", [tuple(case) for case in CASES]), disable_tqdm=True)
options = {"until": ["\n"], "max_gen_toks": 8}
texts = model.generate_until(
    instances("generate_until", [(context, options) for context, _ in CASES]), disable_tqdm=True
)
print(json.dumps({"scores": scores, "texts": texts}))
