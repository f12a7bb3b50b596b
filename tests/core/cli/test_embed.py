"""`headrace embed`: what it passes to the model and what it prints."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.core.cli import embed, exits
from headrace.core.pooling.outputs import EmbeddingOutput
from headrace.core.pooling.params import PoolingParams


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], PoolingParams]]:
    """What a model that embeds a text as (its length, 0.5) was asked for."""
    found: list[tuple[list[str], PoolingParams]] = []

    def run(texts: list[str], params: PoolingParams) -> list[EmbeddingOutput]:
        found.append((texts, params))
        return [
            EmbeddingOutput(prompt_token_ids=[1] * len(t), embedding=np.array([len(t), 0.5], np.float32))
            for t in texts
        ]

    @contextmanager
    def start(config: Any) -> Iterator[Any]:
        yield SimpleNamespace(embed=run, built=SimpleNamespace(model=SimpleNamespace(name=config.model.model)))

    monkeypatch.setattr(embed, "start_llm", start)
    return found


def test_one_array_a_line(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["embed", "org/model", "a", "bcd", "--dimensions", "2", "--truncate"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [[1.0, 0.5], [3.0, 0.5]]
    assert calls == [(["a", "bcd"], PoolingParams(dimensions=2, truncate_prompt_tokens=-1))]


def test_lines_of_stdin_and_json(
    calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\u00e9t\u00e9\n\nlast".encode())))
    assert exits.run(["embed", "org/model", "-", "--json", "--prompt-name", "query"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "org/model" and [e["text"] for e in answer["embeddings"]] == [
        "\u00e9t\u00e9",
        "",
        "last",
    ]
    assert answer["embeddings"][2] == {"text": "last", "num_tokens": 4, "embedding": [4.0, 0.5]}
    assert calls[0][1] == PoolingParams(prompt_name="query")


def test_bad_input(calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exits.run(["embed", "org/model"]) == 2
    assert exits.run(["embed", "org/model", "a", "--dimensions", "0"]) == 2
    assert "dimensions must be at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert exits.run(["embed", "org/model", "-"]) == 2
    assert "stdin is not UTF-8: byte 0xff at offset 0" in capsys.readouterr().err and not calls
