"""This project's streams SDK and the published one fingerprint chains alike, so either goes on where the other was."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

from tests.acceptance.client_environment import clean_environ, client_python
from tests.acceptance.stream_chains import hash_of, random_chain

_ROOT = Path(__file__).parents[2]
_CHAINS = 500


def test_the_fingerprint_of_a_chain_is_that_of_the_published_client() -> None:
    chance = random.Random(0)
    chains = [random_chain(chance) for _ in range(_CHAINS)]
    done = subprocess.run(
        [str(client_python(_ROOT / ".venv-client")), "-m", "tests.acceptance.stream_chains"],
        cwd=_ROOT,
        env=clean_environ(),
        input=json.dumps(chains),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    published = json.loads(done.stdout)
    assert len(set(published)) > _CHAINS // 2
    for chain, theirs in zip(chains, published, strict=True):
        assert hash_of(chain) == theirs, chain
