"""An engine over the tiny model, and one store of compiled programs for all parity tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bluejay.build import Built, Programs
from bluejay.config import CompileSpec, RunConfig
from bluejay.generate import Engine
from bluejay.models import GPTJ

MakeEngine = Callable[..., Engine]


class BytesTokenizer:
    """Ids are bytes: enough for an engine, which only needs ids to text."""

    special_ids: frozenset[int] = frozenset()
    eos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token + 32])


@pytest.fixture(scope="session")
def engine_of() -> MakeEngine:
    """An engine over a model, eager unless the run says otherwise; its cache starts as NaN."""

    def make(model: GPTJ, **run: Any) -> Engine:
        settings = RunConfig(
            model="tiny",
            **{"max_rows": 4, "prefill_buckets": (4, 8), "compile": CompileSpec(backend="eager"), **run},
        )
        tokenizer: Any = BytesTokenizer()
        context = settings.context or model.config.n_positions
        device = torch.device("cpu")
        engine = Engine(Built(settings, model, tokenizer, Programs(settings), device, torch.float32, context, ()))
        for tensor in (*engine._cache.keys, *engine._cache.values):
            tensor.fill_(torch.nan)
        return engine

    return make


@pytest.fixture
def make_engine(tiny_model: GPTJ, engine_of: MakeEngine) -> MakeEngine:
    """An engine over the tiny model; `eos` names its end-of-text ids, and its window may be another."""

    def make(eos: tuple[int, ...] = (), window: int = 32, **run: Any) -> Engine:
        tiny_model.config = replace(tiny_model.config, eos_token_ids=eos, n_positions=window)
        return engine_of(tiny_model, **run)

    return make


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of compiled programs that lives as long as the tests."""
    return str(tmp_path_factory.mktemp("programs"))
