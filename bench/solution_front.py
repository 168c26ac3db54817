"""Block top-k sparse attention in one file: ``sparse_attention(q, k, v, index, block_size, sm_scale)``.

Generated from the package sparse_attn by ``python -m bench.make_solution``: change the package, not this file. The
first part is bench/solution_front.py; behind it come modules of the package, as they are there. Apache-2.0.

It needs torch 2.5 and Python 3.10, or newer, and uses what else it finds:

    NVIDIA Hopper (H20, H100, H200)       TileLang with nvcc, or Triton
    other NVIDIA GPUs, from sm80 (A100)   Triton
    Ascend 910B                           triton-ascend
    everything else                       torch alone: right, and not fast
"""

from __future__ import annotations

import importlib
import linecache
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["backend_for", "sparse_attention"]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int | None = None,
    sm_scale: float | None = None,
    *,
    bs: int | None = None,
    q_offset: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block top-k sparse attention: each query attends to the key blocks that ``index`` names for it.

    Query ``i`` of head ``h`` sees key ``j`` iff ``j <= i + q_offset`` and ``j // block_size`` is in the set
    ``index[b, h // g, i, :]``, with ``g = Hq / Hk``. The order of ids is free and duplicates count once; ``-1`` and
    every other id outside ``[0, ceil(M / block_size))`` means nothing. A query that sees no key gets 0 (lse: -inf).

    Args:
        q: ``[B, Hq, N, D]``, float16, bfloat16 or, on backends that can, float32.
        k: ``[B, Hk, M, D]``, q's dtype and device; ``Hk`` divides ``Hq``.
        v: ``[B, Hk, M, Dv]``, q's dtype and device.
        index: ``[B, Hk, N, topk]``, int32 or int64, q's device: ids of key blocks. Never read on the host.
        block_size: keys in a block; ``bs`` is another name for it.
        sm_scale: factor on the scores; default ``1 / sqrt(D)``.
        q_offset: position of query 0 among the keys.
        return_lse: also return the natural logarithm of the softmax denominators.

    Returns:
        ``out`` ``[B, Hq, N, Dv]`` in q's dtype; with ``return_lse`` a pair ``(out, lse)``, lse ``[B, Hq, N]`` in
        float32. They have no gradient, whatever q, k and v require.

    Raises:
        TypeError: an argument is of the wrong type or dtype; or block_size is missing, or there under both names.
        ValueError: an argument's shape, device or value does not fit the others; SPARSE_ATTN_BACKEND names no backend.
        RuntimeError: the backend that SPARSE_ATTN_BACKEND names cannot run this call.
    """
    if bs is not None or block_size is None:
        block_size = _one_of(block_size, bs)
    block_size, scale, q_offset = checks.check_arguments(q, k, v, index, block_size, sm_scale, q_offset)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        with torch.no_grad():
            out, lse = _run(q, k, v, index, block_size, scale, q_offset, return_lse)
    else:
        out, lse = _run(q, k, v, index, block_size, scale, q_offset, return_lse)
    return (out, lse) if return_lse else out


def backend_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int | None = None,
    sm_scale: float | None = None,
    *,
    bs: int | None = None,
    q_offset: int = 0,
    return_lse: bool = False,
) -> str:
    """Name the backend that would run ``sparse_attention`` with these arguments. Raises what that call would raise."""
    size, _, q_offset = checks.check_arguments(q, k, v, index, _one_of(block_size, bs), sm_scale, q_offset)
    problem = ops.problem_of_call(q, k, v, index, size, q_offset, return_lse, False)
    return _choose(problem, registry.current_override()).name


def _one_of(block_size: int | None, bs: int | None) -> int:
    if (block_size is None) == (bs is None):
        got = "neither" if bs is None else "both"
        raise TypeError(f"sparse_attention needs block_size, or bs, which is another name for it, got {got}")
    return bs if block_size is None else block_size  # type: ignore[return-value]


# --- the choice of a backend -----------------------------------------------------------------------------------------
# By the package's rules, which are in sections: preference has the order on each architecture, backends has what each
# needs to be installed, and each backend's adapter what it can run (unsupported) and what others run faster (slow_for).


class _Choice(NamedTuple):
    """The backend that runs a problem; ``skipped`` has those tried before, with the reasons against them."""

    name: str
    backend: Any
    skipped: dict[str, tuple[str, ...]]
    warning: str | None


# Why a backend that should have been able to run a problem did not, by the problem's kind.
_failures: dict[tuple[str, Any], str] = {}
_warned: set[Any] = set()


@lru_cache(maxsize=4096)
def _choose(problem: Any, override: Any) -> _Choice:
    if override is not None:
        if override.name not in registry._specs:
            raise errors.UnknownBackendError(
                messages.unknown_backend(override.name, override.source, list(registry._specs))
            )
        reasons = registry.reasons_against(override.name, problem)
        if reasons:
            raise errors.BackendUnavailableError(messages.forced_unavailable(override.name, override.source, reasons))
        return _Choice(override.name, registry._loaded(override.name), {}, None)

    skipped: dict[str, tuple[str, ...]] = {}
    reluctant = None
    for name in registry.candidates(problem.device):
        if name == registry.FALLBACK and reluctant is not None:  # slow, but made for the device
            del skipped[reluctant]
            return _chosen(reluctant, problem, skipped)
        if not registry._specs[name].automatic:  # not even imported: nobody has asked for it
            skipped[name] = (messages.not_automatic(name),)
            continue
        reasons = registry.reasons_against(name, problem)
        if not reasons and (name, _kind(problem)) in _failures:
            reasons = (_failures[name, _kind(problem)],)
        if not reasons:
            reasons = registry.reluctance(name, problem)
            if not reasons:
                return _chosen(name, problem, skipped)
            reluctant = reluctant or name
        skipped[name] = reasons
    raise errors.BackendUnavailableError(messages.none_available(problem.device, skipped))


def _kind(problem: Any) -> Any:
    """What kernels are compiled for: a compiler that refuses one is not asked again at every length."""
    return problem._replace(B=0, N=0, M=0, topk=0)


def _chosen(name: str, problem: Any, skipped: dict[str, tuple[str, ...]]) -> _Choice:
    warning = registry._warning(name, problem.device, skipped)
    return _Choice(name, registry._loaded(name), skipped, warning)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float,
    q_offset: int,
    return_lse: bool,
) -> tuple[Tensor, Any]:
    problem = ops.problem_of_call(q, k, v, index, block_size, q_offset, return_lse, False)
    override = registry.current_override()
    while True:
        choice = _choose(problem, override)
        try:
            out, lse = choice.backend(q, k, v, index, block_size, sm_scale, q_offset, return_lse)
        except Exception as error:
            # A compiler that refuses a kernel, of a release that nobody has tried, must not leave a call without a
            # result: the next in the order runs. Not where one was asked for, where none is left, or memory ran out.
            last = choice.name == registry.FALLBACK
            if override is not None or last or isinstance(error, torch.OutOfMemoryError):
                raise
            failed = f"failed: {type(error).__name__}: {error}"
            _failures[choice.name, _kind(problem)] = failed
            _choose.cache_clear()
            said = f"sparse_attention leaves out the backend {choice.name}, which {failed}"
            warnings.warn(said, errors.FallbackWarning, stacklevel=3)
            continue
        if choice.warning is not None:
            key = choice.name, problem.device, tuple(choice.skipped)
            if key not in _warned:
                _warned.add(key)
                warnings.warn(choice.warning, errors.FallbackWarning, stacklevel=3)
        return out, lse


# --- the sections ----------------------------------------------------------------------------------------------------
# Each is a module of the package, under a condition that never holds: it does not run with this file. When a section is
# imported, as the import statements of other sections do, its lines are compiled as a module with names of its own.
# So no package is imported before a backend that needs it is chosen, and names need not differ between sections.
# Triton and TileLang read the source of their kernels, by file and line: these are the lines in this file.

SECTION = None


class _Sections:
    """Finds and loads sections for Python's import system, as modules of a package that is in no other file."""

    def __init__(self, package: str, file: str) -> None:
        self.package, self.file = package, file
        with open(file, encoding="utf-8") as source:
            self.lines = source.readlines()
        # For those who look for the kernels' source later: the file may be gone by then, or be another.
        linecache.cache[file] = sum(map(len, self.lines)), None, self.lines, file
        # Of each section, by its name: the number of its first line, from 0, and whether annotations are evaluated.
        self.first: dict[str, tuple[int, bool]] = {}
        for number, line in enumerate(self.lines):
            found = re.fullmatch(r'if SECTION == "([\w.]+)":(  # annotations are values)?\n', line)
            if found:
                self.first[found[1]] = number, found[2] is not None

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != self.package or (name and name not in self.first):
            return None
        is_package = any(other.startswith(f"{name}." if name else "") for other in self.first)
        return ModuleSpec(fullname, self, origin=self.file, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        if not name:
            return
        first, annotations_are_values = self.first[name]
        stop = min((n for n, _ in self.first.values() if n > first), default=len(self.lines))
        # As many lines in front as there are in the file, so that numbers of lines are the file's.
        source = "\n" * first + "if True:\n" + "".join(self.lines[first + 1 : stop])
        flags = 0 if annotations_are_values else annotations.compiler_flag
        module.__file__ = self.file
        exec(compile(source, self.file, "exec", flags, dont_inherit=True), module.__dict__)


_package = "solution_sections"
while _package in sys.modules:  # of another copy of this file
    _package += "_"
_file = os.path.abspath(sparse_attention.__code__.co_filename)
if not os.path.isfile(_file):
    raise ImportError(
        f"needs its own source, in a file: its kernels are compiled from it; got {_file!r}. Import it, or run "
        "exec(compile(source, path, 'exec'), names) with the path of the file"
    )
sys.meta_path.append(_Sections(_package, _file))


def _section(name: str) -> Any:
    return importlib.import_module(f"{_package}.{name}")


checks = _section("checks")
errors = _section("errors")
messages = _section("messages")
ops = _section("ops")
registry = _section("registry")
# The rows name modules of the package, which are sections here.
registry._specs = {
    name: replace(spec, target=f"{_package}.{spec.target.partition('.')[2]}") for name, spec in registry._specs.items()
}
