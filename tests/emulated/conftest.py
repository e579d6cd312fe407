"""The emulated device is built before its first test; without a compiler its tests are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import accelerator


@pytest.fixture(scope="session", autouse=True)
def _built() -> Path:
    try:
        return accelerator.build()
    except accelerator.CannotBuild as error:
        pytest.skip(str(error))
