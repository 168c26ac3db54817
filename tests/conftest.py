"""What every test gets: poisoned memory, no override left over, and the options that choose backends."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest
import torch

import sparse_attn
from sparse_attn import registry
from sparse_attn.messages import unknown_backend

# Triton reads this when it is imported: kernels are then run by Python, on a CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _speed_up_interpreter() -> None:
    """Triton's interpreter replaces the language's functions at every call of a helper: do it once, at the kernel's."""
    from triton.language import standard
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def patched_launch(self, *args, **kwargs):
        scope = interpreter._patch_lang(
            standard.sum.fn
        )  # its module sees the language under another name than kernels do
        try:
            return launch(self, *args, **kwargs)
        finally:
            if scope is not None:  # Triton before 3.6 leaves the language as it is then
                scope.restore()

    interpreter.GridExecutor.__call__ = patched_launch
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", help="run the backend tests on exactly this backend")


def _backends(config: pytest.Config) -> list[str]:
    names = list(sparse_attn.backend_specs())
    chosen = config.getoption("--backend")
    if chosen is None:
        return names
    if chosen not in names:
        raise pytest.UsageError(unknown_backend(chosen, f"--backend {chosen}", names))
    return [chosen]


def required_backends() -> set[str]:
    """Backends whose skips are failures, from ``SPARSE_ATTN_TEST_REQUIRE`` (names, separated by commas)."""
    names = {name.strip() for name in os.environ.get("SPARSE_ATTN_TEST_REQUIRE", "").split(",")} - {""}
    for name in names - set(sparse_attn.backend_specs()):
        raise pytest.UsageError(
            unknown_backend(name, f"SPARSE_ATTN_TEST_REQUIRE={name}", list(sparse_attn.backend_specs()))
        )
    return names


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:
        _speed_up_interpreter()
    if "SPARSE_ATTN_TEST_CODE_FOR" in os.environ:
        from bench.older_code import build_for

        build_for(os.environ["SPARSE_ATTN_TEST_CODE_FOR"])
    _backends(config)
    required_backends()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _backends(metafunc.config))


@pytest.fixture
def device() -> torch.device:
    """The device that tests run on: the first accelerator, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if hasattr(torch, "npu") and torch.npu.is_available():
        return torch.device("npu", 0)
    return torch.device("cpu")


def hopper_is_here() -> bool:
    """Whether the first accelerator is a GPU with compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the TileLang backend's kernels run: a Hopper GPU, or the CPU, on which they are emulated."""
    if hopper_is_here():
        return device
    from sparse_attn.backends.tilelang_hopper import adapter, compiled

    from .emulated import emulated, unusable

    if reason := unusable():
        (pytest.fail if "tilelang" in required_backends() else pytest.skip)(f"a Hopper GPU, emulated, {reason}")
    monkeypatch.setattr(compiled, "_compile", lambda kernel, *variant: emulated(kernel, *variant))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # a CPU tensor is on it
    monkeypatch.setattr(adapter, "_multiprocessors", lambda _: 3)  # so few that each takes several tiles
    return torch.device("cpu")


@pytest.fixture
def exact_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TileLang backend's exact kernel wherever it can run."""
    _choose_on(78, monkeypatch)


@pytest.fixture
def ordered_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries dealt into tiles by what they selected, wherever the TileLang backend's union kernel can do so."""
    _choose_on(132, monkeypatch)


def _choose_on(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the TileLang backend chooses on such a GPU for a large problem in which queries have little in common."""
    from sparse_attn.backends.tilelang_hopper import adapter, plan

    def choose(_sms, g, D, Dv, block_size, num_blocks, _windows, _waste):
        return plan.choose(multiprocessors, g, D, Dv, block_size, num_blocks, 10**6, 4.0)

    monkeypatch.setattr(adapter, "choose", choose)
    monkeypatch.setattr(adapter, "_call", adapter._call.__wrapped__)  # keeps what it answered


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the override of the shell it was started from, nor the warnings that another one has used up."""
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    registry._warned.clear()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the package leaves uninitialised: NaN, or the largest integer, shows up where fresh zeros hide."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate):
    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "sparse_attn" and type(tensor) is torch.Tensor:
            if tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return wrapper


@pytest.fixture
def register() -> Iterator[object]:
    """A function that announces a backend (an object and its architectures) for one test."""
    names: list[str] = []

    def announce(name: str, backend: object, *architectures: str, **spec: object) -> sparse_attn.BackendSpec:
        module = type(sys)(f"_fabricated_{name}")
        module.backend = backend
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        announced = sparse_attn.BackendSpec(name, f"{module.__name__}:backend", architectures or ("*",), **spec)
        sparse_attn.register_backend(announced)
        names.append(name)
        return announced

    yield announce
    for name in names:
        sparse_attn.unregister_backend(name)
        del sys.modules[f"_fabricated_{name}"]
