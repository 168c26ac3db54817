"""The bytes of the traffic model are those of the compiled code."""

from __future__ import annotations

import pytest

from sparse_attn.backends.triton_ascend.plan import Tiles

from .compiler import compile_for
from .lowering import linalg
from .test_compiles import launch_of
from .traffic import bytes_for_pair, count, expected


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", [1, 2, 4])
def test_bytes_in_compiled_code(T: int, D: int) -> None:
    tiles = Tiles(16, T, 64)
    compiled = compile_for(linalg(launch_of(D=D, tiles=tiles), "Ascend910B2"), "Ascend910B2", "1.2.0")
    assert count(compiled.hivm) == expected(tiles, D)


def test_bytes_for_a_pair() -> None:
    """Alike queries share everything; with two that choose alone, what is saved is what both chose."""
    assert bytes_for_pair(Tiles(16, 1, 64), 128, 64, 0.5) == (32768, 28672)
    assert bytes_for_pair(Tiles(16, 4, 64), 128, 64, 1.0) == (8192, 28672)
    assert bytes_for_pair(Tiles(16, 2, 64), 128, 64, 0.5) == (32768 / (1 / 0.75), 28672)
