"""One running system for all tests that do not break it."""

from collections.abc import Iterator

import pytest

from tests.integration.system import System, running


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    """SmolLM2 in float32, with a KV pool that holds two full contexts. The budget is fixed, because the profile of a
    machine that runs other tests at the same time says little, and these tests look at no time."""
    with running("--dtype", "float32", "--kv-tokens", "16384", "--token-budget", "256") as started:
        yield started
