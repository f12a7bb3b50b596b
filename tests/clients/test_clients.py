"""Clients that people use, each in an environment of its own (ci/clients), against one server."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from client_env import FOLDER, run_client
from headrace import LLM, SamplingParams
from live_server import LiveServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def random_server(model_folder: Path) -> Iterator[LiveServer]:
    """A server on real arithmetic with random weights: it writes what grammars let."""
    arguments = ["--kv-memory", "64MiB", "--load-format", "dummy", "--threads", "1"]
    with LiveServer(model_folder, *arguments, device="cpu") as running:
        yield running


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("anthropic", "anthropic_client.py"),
        ("langchain", "langchain_client.py"),
        ("litellm", "litellm_client.py"),
        ("llama_index", "llama_index_client.py"),
        ("node", "openai_node.mjs"),
    ],
)
def test_client(random_server: LiveServer, name: str, script: str) -> None:
    assert run_client(name, script, random_server.url).strip().endswith("ok")
    random_server.wait_idle()


def test_lm_eval(server: LiveServer, model_folder: Path) -> None:
    cases = [("The quick brown", " fox jumps"), ("One", " two three"), ("A longer beginning of this", " end")]
    output = run_client("lm_eval", "lm_eval_client.py", server.url, json.dumps(cases))
    found = json.loads(output.splitlines()[-1])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    greedy = SamplingParams(temperature=0, max_tokens=8, stop=["\n"])
    with LLM(str(model_folder), device="null", load_format="dummy", kv_memory="16MiB") as llm:
        for (context, continuation), (score, is_greedy), text in zip(
            cases, found["scores"], found["texts"], strict=True
        ):
            whole = llm.tokenizer.encode(context + continuation)
            start = len(llm.tokenizer.encode(context))
            (output_,) = llm.generate([{"prompt_token_ids": whole}], params)
            entries = output_.prompt_logprobs
            assert entries is not None
            chosen = [(entries[i] or {})[whole[i]] for i in range(start, len(whole))]
            assert score == pytest.approx(sum(entry.logprob for entry in chosen), abs=1e-4)
            assert is_greedy == all(entry.rank == 1 for entry in chosen)
            assert math.isfinite(score) and score < 0
            assert text == llm.generate(context, greedy)[0].outputs[0].text


def test_schemathesis(model_folder: Path) -> None:
    """Requests made of /openapi.json: no answer is a 500, all are as described, none gets in without the key."""
    program = FOLDER / "schemathesis" / "bin" / "schemathesis"
    if not program.exists():
        pytest.skip(f"no {program}: ci/clients schemathesis makes it")
    arguments = ["--kv-memory", "64MiB", "--load-format", "dummy", "--threads", "1", "--api-key", "secret"]
    with LiveServer(model_folder, *arguments, device="cpu") as server:
        command = [str(program), "run", f"{server.url}/openapi.json", "--header", "Authorization: Bearer secret"]
        command += [
            "--max-examples",
            "20",
            "--seed",
            "1",
            "--no-color",
            "--max-time",
            "240",
            "--request-timeout",
            "60",
        ]
        # A stream that feeds the page does not end; what a schema lets may still make no sense, such as no message.
        command += ["--exclude-path", "/debug/steps", "--exclude-checks", "positive_data_acceptance"]
        run = subprocess.run([*command, "--generation-database", "none"], capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout[-20000:]
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert not [line for line in server.lines if "Traceback" in line]
