"""A generator whose engine, control plane and loader do what the test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.dataplane.frontend.conftest import CHAT, train_byte_level
from tests.dataplane.stage import Stage


@pytest.fixture(scope="session")
def texts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.fixture
async def stage(texts_dir: Path) -> AsyncIterator[Stage]:
    made = Stage(texts_dir)
    yield made
    made.prompts.close()
