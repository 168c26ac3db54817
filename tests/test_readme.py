"""The examples of the README and of docs/migrating.md run as they stand, in order, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sparse_attn

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.filterwarnings("ignore::sparse_attn.FallbackWarning")
def test_examples_run(register: object) -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 64, 256, 128)

    spec, backend = names["spec"], names["backend"]
    assert isinstance(spec, sparse_attn.BackendSpec)
    register("mine", backend, "cpu", "sm90")
    with sparse_attn.use_backend("mine"):
        sparse_attn.sparse_attention(*(names[n] for n in ("q", "k", "v", "index")), 64)


def test_examples_of_migrating_run() -> None:
    names: dict[str, object] = {}
    text = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "migrating.md", "exec"), names)


def test_every_environment_variable_is_documented() -> None:
    root = Path(__file__).parent.parent
    sources = [p.read_text() for folder in ("sparse_attn", "tests", "bench") for p in (root / folder).rglob("*.py")]
    used = set(re.findall(r"\bSPARSE_ATTN_[A-Z_]+\b", "\n".join(sources)))
    assert used == set(re.findall(r"^\| `(SPARSE_ATTN_[A-Z_]+)`", README, re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/performance.md", "docs/migrating.md"])
def test_links_and_paths_exist(page: str) -> None:
    root = Path(__file__).parent.parent
    text = (root / page).read_text()
    linked = [(root / page).parent / target for target in re.findall(r"\]\(([^):#]+)\)", text)]
    named = [root / path for path in re.findall(r"`((?:sparse_attn|tests|bench|docs)/[\w/.]+)`", text)]
    assert [path for path in linked + named if not path.exists()] == []
