"""Block top-k sparse attention in one file: ``sparse_attention(q, k, v, index, block_size, sm_scale)``.

Generated from the package sparse_attn by ``python -m bench.make_solution``: change the package, not this file. The
first part is bench/solution_front.py; behind it come modules of the package, as they are there. Apache-2.0.

It needs torch 2.5 and Python 3.10, or newer, and uses what else it finds:

    NVIDIA Hopper (H20, H100, H200)       TileLang with nvcc, or Triton
    other NVIDIA GPUs, from sm80 (A100)   Triton
    Ascend 910B                           triton-ascend
    everything else                       torch alone: right, and not fast
"""

# Behind the first part, in this order: checks, errors, messages, contract, ops, device, registry, backends, preference,
# backends.reference, backends.triton_cuda, backends.triton_cuda.adapter, backends.triton_cuda.call,
# backends.triton_cuda.block_lists, backends.triton_cuda.launch, backends.triton_cuda.plan, backends.triton_cuda.gather,
# backends.triton_cuda.tiles, backends.triton_cuda.union, backends.tilelang_hopper, backends.tilelang_hopper.adapter,
# backends.tilelang_hopper.compiled, backends.tilelang_hopper.block_lists, backends.tilelang_hopper.order,
# backends.tilelang_hopper.plan, backends.tilelang_hopper.exact, backends.tilelang_hopper.parts,
# backends.tilelang_hopper.union, backends.triton_ascend, backends.triton_ascend.adapter,
# backends.triton_ascend.attention, backends.triton_ascend.block_lists, backends.triton_ascend.plan, backends.torch_npu,
# backends.torch_npu.adapter, backends.torch_npu.mapping, backends.torch_npu.fused_op.

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


# === sparse_attn/checks.py ===========================================================================================

if SECTION == "checks":
    """Checks of the arguments of ``sparse_attention``, by the names that its callers know.

    They are on the path of every call: plain comparisons, in order, and everything else only once one has failed.
    """

    import operator
    from typing import Any, NoReturn

    import torch
    from torch import Tensor

    _FLOATS = (torch.float16, torch.bfloat16, torch.float32)
    _INTEGERS = (torch.int32, torch.int64)
    _INT32_MAX = 2**31 - 1


    def check_arguments(
        q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float | None, q_offset: int
    ) -> tuple[int, float, int]:
        """Check the arguments and return the scalars as plain numbers."""
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(index, Tensor)):
            _refuse_non_tensor(q=q, k=k, v=v, index=index)
        try:
            B, Hq, N, D = q.shape
            Bk, Hk, M, Dk = k.shape
            Bv, Hv, Mv, Dv = v.shape
            Bi, Hi, Ni, _ = index.shape
        except ValueError:
            _refuse_rank(q=q, k=k, v=v, index=index)
        dtype = q.dtype
        if dtype not in _FLOATS:
            raise TypeError(f"q must be float16, bfloat16 or float32, got {dtype}")
        if k.dtype != dtype:
            raise TypeError(f"k must have q's dtype {dtype}, got {k.dtype}")
        if v.dtype != dtype:
            raise TypeError(f"v must have q's dtype {dtype}, got {v.dtype}")
        if index.dtype not in _INTEGERS:
            raise TypeError(f"index must be int32 or int64, got {index.dtype}")
        device = q.device
        if k.device != device:
            raise ValueError(f"k must be on q's device {device}, got {k.device}")
        if v.device != device:
            raise ValueError(f"v must be on q's device {device}, got {v.device}")
        if index.device != device:
            raise ValueError(f"index must be on q's device {device}, got {index.device}")

        if Bk != B or Dk != D:
            raise ValueError(f"k must be [B, Hk, M, D] with q's B={B} and D={D}, got shape {_shape(k)}")
        if Bv != B or Hv != Hk or Mv != M:
            raise ValueError(f"v must be [B, Hk, M, Dv] with k's B={B}, Hk={Hk} and M={M}, got shape {_shape(v)}")
        if Hk < 1 or Hq < 1 or Hq % Hk:
            raise ValueError(f"q must have a multiple of k's heads, got Hq={Hq} and Hk={Hk}")
        if Bi != B or Hi != Hk or Ni != N:
            raise ValueError(
                f"index must be [B, Hk, N, topk] with B={B}, Hk={Hk} (the heads of k, not of q) and N={N}, "
                f"got shape {_shape(index)}"
            )
        if D < 1 or Dv < 1:
            raise ValueError(f"q and v must have at least one feature, got D={D} and Dv={Dv}")

        if type(block_size) is not int:
            block_size = _integer("block_size", block_size)
        if not 1 <= block_size <= _INT32_MAX:
            raise ValueError(f"block_size must be at least 1 and below 2**31, got {block_size}")
        if type(q_offset) is not int:
            q_offset = _integer("q_offset", q_offset)
        if not -_INT32_MAX <= q_offset <= _INT32_MAX - N:
            raise ValueError(f"q_offset must keep positions within 31 bits, got {q_offset} with N={N}")
        if sm_scale is None:
            sm_scale = D**-0.5
        elif type(sm_scale) is not float:
            sm_scale = _number("sm_scale", sm_scale)
        return block_size, sm_scale, q_offset


    _DIMENSIONS = {"q": "[B, Hq, N, D]", "k": "[B, Hk, M, D]", "v": "[B, Hk, M, Dv]", "index": "[B, Hk, N, topk]"}


    def _refuse_non_tensor(**arguments: Any) -> NoReturn:
        name, value = next((n, x) for n, x in arguments.items() if not isinstance(x, Tensor))
        raise TypeError(f"{name} must be a torch.Tensor {_DIMENSIONS[name]}, got {type(value).__name__}")


    def _refuse_rank(**arguments: Tensor) -> NoReturn:
        name, value = next((n, x) for n, x in arguments.items() if x.dim() != 4)
        raise ValueError(f"{name} must have 4 dimensions {_DIMENSIONS[name]}, got shape {_shape(value)}") from None


    def _integer(name: str, value: Any) -> int:
        if isinstance(value, torch.SymInt):
            return value  # type: ignore[return-value]
        if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):  # a Tensor's value may be on the device
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        return operator.index(value)


    def _number(name: str, value: Any) -> float:
        if isinstance(value, torch.SymFloat):
            return value  # type: ignore[return-value]
        if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a float or None, got {type(value).__name__}")
        return float(value)


    def _shape(tensor: Tensor) -> list[int]:
        return list(tensor.shape)


# === sparse_attn/errors.py ===========================================================================================

if SECTION == "errors":  # annotations are values
    """The errors and warnings of the package, so that callers can catch them by type.

    Bad arguments raise plain ``ValueError`` and ``TypeError``: these types are for the choice of a backend.
    """


    class UnknownBackendError(ValueError):
        """A backend was named that does not exist."""


    class BackendUnavailableError(RuntimeError):
        """A backend was forced, and cannot run this call; or no backend can."""


    class SparseAttnWarning(UserWarning):
        """Base of the package's warnings."""


    class FallbackWarning(SparseAttnWarning):
        """The automatic choice landed on something slower than this device deserves."""


    class PluginWarning(SparseAttnWarning):
        """A third party's backend could not be announced, and is left out."""


# === sparse_attn/messages.py =========================================================================================

if SECTION == "messages":
    """Every sentence that a user reads when a backend is refused, chosen against their wish, or unknown.

    A reason says what is needed, then what was got, then what to do where something can be done.
    """

    from collections.abc import Iterable, Mapping, Sequence
    from types import MappingProxyType
    from typing import NamedTuple

    from .contract import BackendSpec, Device, Requirement


    def wrong_architecture(spec: BackendSpec, device: Device) -> str:
        return f"needs a device of architecture {' or '.join(spec.architectures)}, got {device}"


    def not_in_this_release(spec: BackendSpec) -> str:
        return f"is not there: this release of sparse_attn has no module {spec.module}"


    def package_missing(spec: BackendSpec, requirement: Requirement) -> str:
        return f"needs the package {requirement}, which is not installed{_install(spec)}"


    def package_too_old(spec: BackendSpec, requirement: Requirement, version: str) -> str:
        return f"needs the package {requirement}, got version {version}{_install(spec)}"


    def import_failed(spec: BackendSpec, error: BaseException) -> str:
        return f"could not be imported from {spec.target}: {type(error).__name__}: {error}"


    def not_a_backend(spec: BackendSpec, got: object) -> str:
        kind = f"the class {got.__name__}, not an instance" if isinstance(got, type) else type(got).__name__
        return f"needs {spec.target} to be callable and to have the method 'unsupported', got {kind}"


    def question_failed(name: str, method: str, error: BaseException) -> str:
        return f"the backend {name} failed when asked {method}(): {type(error).__name__}: {error}"


    def answer_is_no_list(name: str, method: str, got: object) -> str:
        return f"the backend {name}'s {method}() must return a sequence of reasons, got {got!r}"


    def lse_missing(name: str) -> str:
        return f"the backend {name} was called with return_lse=True and returned None for lse"


    def no_backward() -> str:
        return (
            "has no backward pass, and q, k or v requires gradients here (call it under torch.no_grad() if none are needed)"
        )


    def not_automatic(name: str) -> str:
        return f"is not chosen by itself: use_backend({name!r}) or SPARSE_ATTN_BACKEND={name} asks for it"


    def unknown_backend(name: str, source: str, valid: Sequence[str]) -> str:
        import difflib

        near = difflib.get_close_matches(name.lower(), valid, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{source} names no backend: {hint}Valid names are {', '.join(valid)}, and auto"


    def forced_unavailable(name: str, source: str, reasons: Iterable[str]) -> str:
        return (
            f"{source} asks for the backend {name}, which cannot run this call: {name} {'; '.join(reasons)}. "
            f"A forced backend is never replaced by another; set it to auto to let the package choose"
        )


    def none_available(device: Device, skipped: Mapping[str, Sequence[str]]) -> str:
        return f"no backend can run this call on {device}:\n{refusals(skipped)}"


    def slow_fallback(device: Device, skipped: Mapping[str, Sequence[str]]) -> str:
        return (
            f"sparse_attention runs on the reference backend on {device}: right, but far slower than this device can be, "
            f"because no other backend can be chosen for this call:\n{refusals(skipped)}"
        )


    def broken_install(chosen: str, device: Device, broken: Mapping[str, Sequence[str]]) -> str:
        return (
            f"sparse_attention runs on the backend {chosen} on {device}, because one that is preferred there is broken:\n"
            f"{refusals(broken)}"
        )


    def plugin_ignored(entry_point: str, problem: object) -> str:
        return f"the entry point {entry_point!r} in group sparse_attn.backends is left out: {problem}"


    def refusals(skipped: Mapping[str, Sequence[str]]) -> str:
        """One line a backend: its name, then its reasons."""
        return "\n".join(f"  {name} {'; '.join(reasons)}" for name, reasons in skipped.items())


    class Explanation(NamedTuple):
        """What would run one call, and why not the others. Print it to read it.

        ``chosen`` is None when a forced backend cannot run the call. ``reasons`` has every known backend in the order in
        which it would be tried, with its reasons against: an empty tuple means that it could run the call. ``on_request``
        names those that run only where they are asked for; ``slow`` has why some leave it to another.
        """

        chosen: str | None
        how: str
        device: Device
        reasons: dict[str, tuple[str, ...]]
        on_request: frozenset[str] = frozenset()
        slow: Mapping[str, tuple[str, ...]] = MappingProxyType({})

        def says(self, name: str) -> str:
            """What speaks against the backend ``name``; empty if nothing does."""
            if name in self.on_request and name != self.chosen and not self.reasons[name]:
                return not_automatic(name)
            return "; ".join(self.reasons[name] or self.slow.get(name, ()))

        def __str__(self) -> str:
            head = f"{self.chosen or 'nothing'} would run this call on {self.device} ({self.how})"
            width = max(map(len, self.reasons), default=0)
            lines = [f"  {name:<{width}}  {self._answer(name)}" for name in self.reasons]
            return "\n".join([head, *lines])

        def _answer(self, name: str) -> str:
            can = () if self.reasons[name] else ("can run it",)
            return "; ".join(filter(None, (*can, self.says(name))))


    def _install(spec: BackendSpec) -> str:
        return f": {spec.install}" if spec.install else ""


# === sparse_attn/contract.py =========================================================================================

if SECTION == "contract":
    """What a backend is told, what it promises, and how it is announced.

    Everything here is plain data or a protocol: no tensors, no registry, no backend. A backend imports this module and its
    own folder, nothing else of the package.
    """

    import re
    from collections.abc import Sequence
    from dataclasses import dataclass
    from typing import NamedTuple, Protocol, runtime_checkable

    import torch


    class Device(NamedTuple):
        """What a choice of backend may depend on, as a value: tests make up devices that are not at hand.

        ``type`` is torch's device type (``"cuda"``, ``"npu"``, ``"cpu"``); ``arch`` names the instruction set a kernel is
        built for (``"sm90"``, ``"ascend910b"``, ``"cpu"``); ``name`` is what its vendor calls it (``"NVIDIA H20"``).
        """

        type: str
        arch: str
        name: str

        def __str__(self) -> str:
            return self.name if self.name == self.arch else f"{self.name} ({self.arch})"


    class Problem(NamedTuple):
        """One call of ``sparse_attention`` without its tensors: all that may decide which backend runs it.

        A named tuple, because it is also the key under which the choice is cached, once per call: it hashes at C speed.
        Strides are left out on purpose (every backend takes any strides), and of ``q_offset`` only whether it is zero
        (it changes at every decoding step).
        """

        device: Device
        dtype: torch.dtype
        index_dtype: torch.dtype
        B: int
        Hq: int
        Hk: int
        N: int
        M: int
        D: int
        Dv: int
        topk: int
        block_size: int
        has_q_offset: bool = False
        return_lse: bool = False
        needs_grad: bool = False

        @property
        def group(self) -> int:
            """Query heads that share one key/value head, ``Hq / Hk``."""
            return self.Hq // self.Hk

        @property
        def num_blocks(self) -> int:
            """Key blocks, ``ceil(M / block_size)``; the last one may be partial."""
            return -(-self.M // self.block_size)


    @runtime_checkable
    class Backend(Protocol):
        """An implementation of the operator.

        It may also have a method ``slow_for(problem) -> Sequence[str]``, asked where it can run the problem: why another
        backend made for the device should rather do so, if there is one, which is then chosen. Usually none.

        And it may have a method ``backward(grad_out, grad_lse, out, lse, q, k, v, index, block_size, sm_scale, q_offset)
        -> (dq, dk, dv)``, with ``grad_lse`` a tensor or None; without one, the registry refuses calls that need gradients
        on its behalf.
        """

        def unsupported(self, problem: Problem) -> Sequence[str]:
            """Say why this backend cannot run ``problem``: empty means that it can.

            Called once per distinct problem, on a device of the announced architectures. Each reason says what is needed,
            then what was got: ``"needs D in {64, 128}, got D=96"``. An exception raised here is a bug and propagates.
            """
            ...

        def __call__(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            index: torch.Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Compute ``out`` ``[B, Hq, N, Dv]`` in q's dtype and, with ``return_lse``, ``lse`` ``[B, Hq, N]`` in fp32.

            Arguments are those of ``sparse_attn.sparse_attention``, already checked, with any strides. Both results are
            new, contiguous tensors. ``index`` must not be read on the host. The current device need not be q's: a backend
            that launches kernels by itself sets it.
            """
            ...


    class Requirement(NamedTuple):
        """A package that a backend imports: the module's name, and the oldest version that was tested, if that matters.

        ``distribution`` is the name under which the package is installed, where it differs from the module's.
        """

        module: str
        minimum: str | None = None
        distribution: str | None = None

        def __str__(self) -> str:
            name = self.distribution or self.module
            return f"{name} >= {self.minimum}" if self.minimum else name


    @dataclass(frozen=True)
    class BackendSpec:
        """The announcement of a backend: data, readable without importing it.

        Args:
            name: what users write, ``[a-z][a-z0-9_]*``.
            target: ``"package.module:attribute"`` of an object that follows :class:`Backend`; imported on first use.
            architectures: shell patterns over ``Device.arch``, e.g. ``("sm80", "sm9*")``; any sequence of strings.
            requires: packages that ``target`` imports beside torch; any sequence of :class:`Requirement`.
            install: what to type when one of them is missing.
            automatic: whether the automatic choice may take it. If not, it runs only where it is asked for by name.

        Raises:
            TypeError, ValueError: if a field is malformed.
        """

        name: str
        target: str
        architectures: tuple[str, ...]
        requires: tuple[Requirement, ...] = ()
        install: str | None = None
        automatic: bool = True

        def __post_init__(self) -> None:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name) or self.name == "auto":
                raise ValueError(f"BackendSpec.name must match [a-z][a-z0-9_]* and not be 'auto', got {self.name!r}")
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.target):
                raise ValueError(f"BackendSpec.target must look like 'package.module:attribute', got {self.target!r}")
            for field, kind in (("architectures", str), ("requires", Requirement)):
                value = getattr(self, field)
                if isinstance(value, (str, Requirement)) or not all(isinstance(x, kind) for x in value):
                    raise TypeError(f"BackendSpec.{field} must be a tuple of {kind.__name__}, got {value!r}")
                object.__setattr__(self, field, tuple(value))  # a list would not hash
            if not isinstance(self.automatic, bool):
                raise TypeError(f"BackendSpec.automatic must be a bool, got {self.automatic!r}")
            if not self.architectures:
                raise ValueError("BackendSpec.architectures must name at least one pattern, got none")

        @property
        def module(self) -> str:
            """The module part of ``target``."""
            return self.target.partition(":")[0]


# === sparse_attn/ops.py, in part =====================================================================================

if SECTION == "ops":
    from torch import Tensor

    from .contract import Problem
    from .device import describe


    def problem_of_call(
        q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, q_offset: int, return_lse: bool, needs_grad: bool
    ) -> Problem:
        """Describe a call whose arguments were checked."""
        B, Hq, N, D = q.shape
        _, Hk, M, Dv = v.shape
        fields = (
            describe(q.device), q.dtype, index.dtype, B, Hq, Hk, N, M, D, Dv, index.shape[3], block_size,
            q_offset != 0, return_lse or needs_grad, needs_grad,
        )  # fmt: skip
        return tuple.__new__(Problem, fields)  # Problem(...) without its Python frame, 0.15 us


# === sparse_attn/device.py ===========================================================================================

if SECTION == "device":
    """From a ``torch.device`` to the facts a choice of backend depends on.

    Only torch is asked, and only about the device in hand: a machine may hold GPUs of several architectures, so nothing is
    remembered for "the current device".
    """

    import re
    from functools import cache

    import torch

    from .contract import Device

    # Names that torch.npu.get_device_name reports, to the architecture that a kernel is built for.
    # 910_93xx is the two-die package sold as 910C; its dies run 910B code.
    _ASCEND_ARCHITECTURES = (
        (r"Ascend910B\d?C?(-\d+)?", "ascend910b"),
        (r"Ascend910_93\w*", "ascend910b"),
        (r"Ascend910(A|Pro[AB]?|[A-Z])?", "ascend910a"),
        (r"Ascend310P\d*", "ascend310p"),
    )


    def ascend_architecture(name: str) -> str:
        """Normalise an Ascend device name: ``"Ascend910B4-1"`` -> ``"ascend910b"``; others are lower-cased as they are."""
        for pattern, arch in _ASCEND_ARCHITECTURES:
            if re.fullmatch(pattern, name):
                return arch
        return name.lower()


    @cache
    def describe(device: torch.device) -> Device:
        """Describe ``device``. Reads properties once per device; a CUDA tensor exists, so its context does too."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            if torch.version.hip:
                return Device("cuda", properties.gcnArchName.partition(":")[0], properties.name)
            return Device("cuda", f"sm{properties.major}{properties.minor}", properties.name)
        if device.type == "npu":
            # torch_npu is what made the device type exist: it is loaded already, and torch.npu is there.
            name = torch.npu.get_device_name(device)  # type: ignore[attr-defined]
            return Device("npu", ascend_architecture(name), name)
        return Device(device.type, device.type, device.type)


    def present_devices() -> list[torch.device]:
        """Every accelerator that torch sees here, and the CPU last."""
        found = []
        for kind in ("cuda", "npu", "xpu", "mps"):
            module = getattr(torch, kind, None)
            if module is not None and module.is_available():
                found += [torch.device(kind, i) for i in range(module.device_count())]
        return [*found, torch.device("cpu")]


# === sparse_attn/registry.py, in part ================================================================================

if SECTION == "registry":
    import importlib
    import importlib.util
    import os
    import re
    from collections.abc import Iterable
    from contextvars import ContextVar
    from fnmatch import fnmatchcase
    from functools import cache, lru_cache
    from typing import Any, NamedTuple

    from . import messages
    from .backends import BUILTIN
    from .contract import Backend, BackendSpec, Device, Problem
    from .preference import FALLBACK, PREFERENCE

    ENVIRONMENT_VARIABLE = "SPARSE_ATTN_BACKEND"
    _AUTO = "auto"


    class Override(NamedTuple):
        """A backend that somebody asked for by name, and the words in which they did, for messages."""

        name: str
        source: str


    _BUILTIN_NAMES = frozenset(spec.name for spec in BUILTIN)
    # Replaced, never changed: a thread that reads it needs no lock.
    _specs: dict[str, BackendSpec] = {spec.name: spec for spec in BUILTIN}


    def reasons_against(name: str, problem: Problem) -> tuple[str, ...]:
        """Say why the backend ``name`` cannot run ``problem``; empty means that it can.

        Asked in order, up to the first level that fails: architecture, packages, import, inputs.
        """
        unavailable = unavailable_on(name, problem.device)
        if unavailable is not None:
            return (unavailable,)
        backend = _loaded(name)
        reasons = _asked(name, "unsupported", problem)
        if problem.needs_grad and not hasattr(backend, "backward"):
            reasons += (messages.no_backward(),)
        return reasons


    def reluctance(name: str, problem: Problem) -> tuple[str, ...]:
        """Say why the backend ``name``, which can run ``problem``, leaves it to another one made for the device; or ()."""
        return _asked(name, "slow_for", problem) if hasattr(_loaded(name), "slow_for") else ()


    def _asked(name: str, method: str, problem: Problem) -> tuple[str, ...]:
        try:
            said = getattr(_loaded(name), method)(problem)
        except Exception as error:  # a bug, not a "no": it must not pass for one
            raise RuntimeError(messages.question_failed(name, method, error)) from error
        if isinstance(said, str) or not isinstance(said, Iterable):
            raise TypeError(messages.answer_is_no_list(name, method, said))
        return tuple(said)


    def unavailable_on(name: str, device: Device) -> str | None:
        """Say why the backend ``name`` can run nothing on ``device``: architecture, then packages, then import; or None."""
        spec = _specs[name]
        missing = _missing(spec, device)
        if missing is not None:
            return missing
        loaded = _load(spec)
        return loaded if isinstance(loaded, str) else None


    @cache
    def _missing(spec: BackendSpec, device: Device) -> str | None:
        if not any(fnmatchcase(device.arch, pattern) for pattern in spec.architectures):
            return messages.wrong_architecture(spec, device)
        if not _module_exists(spec.module):
            return messages.not_in_this_release(spec)
        for requirement in spec.requires:
            if not _module_exists(requirement.module):
                return messages.package_missing(spec, requirement)
            version = _installed_version(requirement.distribution or requirement.module)
            if requirement.minimum and version and _release(version) < _release(requirement.minimum):
                return messages.package_too_old(spec, requirement, version)
        return None


    @cache
    def _load(spec: BackendSpec) -> Backend | str:
        try:
            backend = getattr(importlib.import_module(spec.module), spec.target.partition(":")[2])
        except Exception as error:  # a broken install raises anything (OSError for a library, RuntimeError for a driver)
            return messages.import_failed(spec, error)
        if isinstance(backend, type) or not isinstance(backend, Backend):
            return messages.not_a_backend(spec, backend)
        return backend


    def _module_exists(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):  # a parent that is absent or broken; a module without __spec__
            return False


    def _installed_version(distribution: str) -> str | None:
        from importlib import metadata

        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:  # e.g. a nightly under another name: let the import decide
            return None


    def _release(version: str) -> tuple[int, ...]:
        """The leading numbers of a version: ``"3.6.0+git1"`` -> ``(3, 6, 0)``."""
        match = re.match(r"\d+(\.\d+)*", version)
        return tuple(map(int, match.group().split("."))) if match else ()


    _override: ContextVar[Override | None] = ContextVar("sparse_attn_override", default=None)


    def current_override() -> Override | None:
        """What the caller asked for: ``use_backend``, else the environment variable; None for the automatic choice."""
        override = _override.get()
        if override is None:
            if _ENVIRONMENT_KEY not in _environment:
                return None
            override = _environment_override(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        return None if override.name == _AUTO else override


    # Looking up a variable that is not set costs os.environ an exception, 0.6 us of every call. The dictionary that it
    # wraps is asked first, where there is one.
    _environment: Any = getattr(os.environ, "_data", os.environ)
    _ENVIRONMENT_KEY: Any = getattr(os.environ, "encodekey", str)(ENVIRONMENT_VARIABLE)


    @lru_cache(maxsize=16)
    def _environment_override(value: str) -> Override:
        return Override(value.strip() or _AUTO, f"{ENVIRONMENT_VARIABLE}={value.strip()}")


    def candidates(device: Device) -> tuple[str, ...]:
        """Names of the backends for ``device`` in order of preference, those that run only on request included."""
        row = next(names for pattern, names in PREFERENCE if fnmatchcase(device.arch, pattern))
        plugins = [
            name
            for name, spec in _specs.items()
            if name not in _BUILTIN_NAMES and any(fnmatchcase(device.arch, pattern) for pattern in spec.architectures)
        ]
        return (*(name for name in row if name != FALLBACK), *plugins, FALLBACK)


    def _warning(name: str, device: Device, skipped: dict[str, tuple[str, ...]]) -> str | None:
        if name == FALLBACK and device.type != "cpu":
            return messages.slow_fallback(device, skipped)
        # Everything they need is installed, and yet they cannot be imported: worth a word, unlike a package that is absent.
        broken = {
            other: why
            for other, why in skipped.items()
            if _specs[other].automatic and not _missing(_specs[other], device) and unavailable_on(other, device)
        }
        return messages.broken_install(name, device, broken) if broken else None


    def _loaded(name: str) -> Backend:
        backend = _load(_specs[name])
        assert not isinstance(backend, str)  # no reasons were found against it
        return backend


# === sparse_attn/backends/__init__.py ================================================================================

if SECTION == "backends":
    """The backends that ship with the package: one row each. Rows are data; no backend is imported by reading them."""

    import os

    from ..contract import BackendSpec, Requirement

    # Triton's interpreter, on if this variable is set as Triton reads it, runs kernels on a CPU: for tests and debugging.
    _INTERPRETED = ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()

    BUILTIN: tuple[BackendSpec, ...] = (
        BackendSpec(
            name="reference",
            target="sparse_attn.backends.reference:backend",
            architectures=("*",),
        ),
        BackendSpec(
            name="triton",
            target="sparse_attn.backends.triton_cuda:backend",
            architectures=("sm*", *_INTERPRETED),
            requires=(Requirement("triton", minimum="3.2"),),
            install="pip install triton",
        ),
        BackendSpec(
            name="tilelang",
            target="sparse_attn.backends.tilelang_hopper:backend",
            architectures=("sm90",),
            requires=(Requirement("tilelang", minimum="0.1.15"),),
            install="pip install tilelang",
        ),
        BackendSpec(
            name="triton_ascend",
            target="sparse_attn.backends.triton_ascend:backend",
            architectures=("ascend910b",),
            # Its part of triton, by which it is told from the package that it replaces.
            requires=(
                Requirement("triton.backends.ascend", minimum="3.2", distribution="triton-ascend"),
                Requirement("torch_npu"),
            ),
            install=(
                "pip install triton-ascend in an environment without the package triton, and the torch-npu for its torch"
            ),
        ),
        BackendSpec(
            name="torch_npu",
            target="sparse_attn.backends.torch_npu:backend",
            architectures=("ascend910b",),
            requires=(Requirement("torch_npu"),),
            install="pip install torch-npu, in the release that matches torch and CANN",
            automatic=False,  # until a device has confirmed it
        ),
    )


# === sparse_attn/preference.py =======================================================================================

if SECTION == "preference":  # annotations are values
    """Which backend is tried first on which architecture: a table, nothing else.

    The first row whose pattern matches ``Device.arch`` counts. The order within a row is the order of measured speed on
    that architecture (docs/performance.md). Backends that a row does not name, as plugins, come after those it does and
    before the fallback, which is always last: on a CPU, for one, a plugin made for CPUs comes first.
    """

    # What is left when nothing made for the device can run a call; never the better choice on an accelerator.
    FALLBACK = "reference"

    PREFERENCE: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("sm80", ("triton", FALLBACK)),
        ("sm90", ("tilelang", "triton", FALLBACK)),
        ("sm*", ("triton", FALLBACK)),
        # The order of these two is by argument until a 910B has run them: a kernel made for the operator reads each block
        # once for several queries, the fused operator once per query. Until then torch_npu runs only where it is asked for
        # (BackendSpec.automatic): this is its place afterwards.
        ("ascend910b", ("triton_ascend", "torch_npu", FALLBACK)),
        ("*", (FALLBACK,)),
    )


# === sparse_attn/backends/reference.py ===============================================================================

if SECTION == "backends.reference":
    """The reference: what the operator means, in plain torch, fp32 inside, on any device.

    Every other backend is validated against it, so it has to be obviously right first, and then fast and small enough to
    validate at real sizes. Of the two obvious forms it takes the dense one, in tiles: all scores of a few queries against
    every key up to the last of them, with the unselected ones masked out. Gathering the selected keys of each query instead
    copies ``topk * block_size`` rows of k and of v for each (275 GB in fp32 for 2 x 4 heads, 8192 queries and 64 blocks
    of 64), where the dense form reads k and v once per tile and leaves the work to a matrix product. It does more
    arithmetic than a sparse selection needs; docs/performance.md has the times of both.
    """

    import threading
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack, contextmanager, nullcontext
    from typing import Any, NamedTuple

    import torch
    from torch import Tensor

    from ..contract import Problem

    # On x86 CPUs torch's exp and log are MKL's, and if the first call in a process is a parallel one, some of its threads
    # may get results that are off by 1e-4 (seen with torch 2.13 on a busy machine, in one process of seven).
    # Not the second call's.
    torch.ones(1).exp().log()

    # fp32 scores held at a time. The softmax needs about three buffers of that size: under 1 GiB in all.
    _TILE_BYTES = 256 * 2**20


    class Reference:
        """Supports every valid problem, with a backward pass."""

        def unsupported(self, problem: Problem) -> Sequence[str]:
            return ()

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            B, Hq, N, _ = q.shape
            out = q.new_zeros(B, Hq, N, v.shape[3])
            lse = q.new_full((B, Hq, N), -torch.inf, dtype=torch.float32)
            with _exact_products(q.device.type):
                for tile in _tiles(q, k, v, index, block_size, sm_scale, q_offset):
                    m_i, l_i = _exponentiate(tile.scores)
                    o = (tile.scores @ tile.v / l_i).masked_fill_(tile.empty, 0)
                    out[tile.b, :, tile.rows] = tile.ungroup(o).to(out.dtype)
                    lse[tile.b, :, tile.rows] = tile.ungroup(m_i + l_i.log()).squeeze(-1)
            return out, lse if return_lse else None

        def backward(
            self,
            grad_out: Tensor,
            grad_lse: Tensor | None,
            out: Tensor,
            lse: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Gradients as in FlashAttention-2 (Dao 2023, section 3.1), with the lse's own gradient added to the scores'.

            Weights and their sums are computed again in fp32: taken from ``out`` and ``lse`` they would inherit the
            rounding of one and, for scores in the thousands, of the other.
            """
            dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
            dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
            with _exact_products(q.device.type):
                for tile in _tiles(q, k, v, index, block_size, sm_scale, q_offset):
                    b, rows, keys = tile.b, tile.rows, tile.keys
                    _, l_i = _exponentiate(tile.scores)
                    p = tile.scores.div_(l_i)
                    do = tile.group(grad_out[b, :, rows].float()).masked_fill(tile.empty, 0)
                    dv[b, :, keys] += p.mT @ do
                    dp = do @ tile.v.mT
                    ds = dp - (dp * p).sum(-1, keepdim=True)
                    if grad_lse is not None:
                        ds += tile.group(grad_lse[b, :, rows])[..., None].masked_fill(tile.empty, 0)
                    ds *= p
                    dq[b, :, rows] = tile.ungroup(ds @ tile.k * sm_scale).to(dq.dtype)
                    dk[b, :, keys] += ds.mT @ tile.q
            return dq, dk.to(k.dtype), dv.to(v.dtype)


    backend = Reference()


    class _Tile(NamedTuple):
        """A run of queries of one batch entry against every key up to the last of them, all heads, in fp32.

        The ``g`` heads of a group and the ``n`` queries share one axis of ``g * n`` rows: q ``[Hk, g*n, D]`` (scaled), k
        ``[Hk, m, D]``, v ``[Hk, m, Dv]``, scores ``[Hk, g*n, m]`` with -inf where a key is not seen. ``empty``
        ``[Hk, g*n, 1]`` marks the rows that see nothing.
        """

        b: int
        rows: slice
        keys: slice
        q: Tensor
        k: Tensor
        v: Tensor
        scores: Tensor
        empty: Tensor

        def group(self, x: Tensor) -> Tensor:
            """``[Hq, n, ...]`` -> ``[Hk, g*n, ...]``."""
            return x.reshape(self.k.shape[0], -1, *x.shape[2:])

        def ungroup(self, x: Tensor) -> Tensor:
            """``[Hk, g*n, ...]`` -> ``[Hq, n, ...]``."""
            return x.reshape(-1, self.rows.stop - self.rows.start, *x.shape[2:])


    def _tiles(
        q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int
    ) -> Iterator[_Tile]:
        """Cut the problem into tiles. Queries that stand before the first key are in none: they see nothing."""
        B, Hq, N, _ = q.shape
        Hk, M = k.shape[1:3]
        step = max(1, _TILE_BYTES // (4 * Hq * max(M, 1)))
        for b in range(B):
            for start in range(0, N, step):
                rows = slice(start, min(start + step, N))
                keys = slice(0, max(0, min(M, rows.stop + q_offset)))
                if keys.stop == 0:
                    continue
                seen = _seen(index[b, :, rows], block_size, rows, keys, M, q_offset)
                # What is not used may hold NaN, and 0 * NaN is NaN: keys that no query sees, and queries that see no key,
                # must not reach a product.
                unseen = ~seen.any(1)[..., None]
                empty = ~seen.any(2)[:, None].expand(Hk, Hq // Hk, -1).reshape(Hk, -1, 1)
                tile_k = k[b, :, keys].float().masked_fill(unseen, 0)
                tile_v = v[b, :, keys].float().masked_fill(unseen, 0)
                tile_q = (q[b, :, rows].float() * sm_scale).reshape(Hk, -1, q.shape[3]).masked_fill(empty, 0)
                scores = tile_q @ tile_k.mT
                scores.unflatten(1, (Hq // Hk, -1)).masked_fill_(~seen[:, None], -torch.inf)
                yield _Tile(b, rows, keys, tile_q, tile_k, tile_v, scores, empty)


    def _seen(index: Tensor, block_size: int, rows: slice, keys: slice, M: int, q_offset: int) -> Tensor:
        """The definition of the operator: does query i (a row) see key j? ``index`` ``[Hk, n, topk]`` -> ``[Hk, n, m]``."""
        Hk, n, _ = index.shape
        num_blocks = -(-M // block_size)
        valid = (index >= 0) & (index < num_blocks)
        # A set of blocks for each query; ids that mean nothing go to one more column, cut off below.
        selected = torch.zeros(Hk, n, num_blocks + 1, dtype=torch.bool, device=index.device)
        selected.scatter_(2, torch.where(valid, index, num_blocks).long(), True)
        j = torch.arange(keys.start, keys.stop, device=index.device)
        i = torch.arange(rows.start, rows.stop, device=index.device)
        return selected[..., j // block_size] & (j <= i[:, None] + q_offset)


    def _exponentiate(scores: Tensor) -> tuple[Tensor, Tensor]:
        """Turn scores into ``exp(scores - m_i)`` in place; return the rows' maxima m_i and sums l_i, ``[Hk, g*n, 1]``.

        A row that sees nothing gets weights of 0, m_i = -inf (so that its lse is -inf)
        and l_i = 1 (so that its output is 0).
        """
        m_i = scores.amax(-1, keepdim=True)
        empty = m_i == -torch.inf
        scores.sub_(m_i.masked_fill(empty, 0)).exp_()
        return m_i, scores.sum(-1, keepdim=True).masked_fill_(empty, 1)


    # --- fp32 that is fp32, whatever the process has asked for -----------------------------------------------------------


    class _PlainFp32:
        """Switch TF32 and its like off while at least one call is inside. The switches belong to the process."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.inside = 0
            self.undo = ExitStack()

        def __enter__(self) -> None:
            with self.lock:
                self.inside += 1
                if self.inside == 1:
                    self._switch_off()

        def __exit__(self, *_: object) -> None:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    self.undo.close()

        def _switch_off(self) -> None:
            if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9
                self.undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest")
                return
            # The functions above raise once a process has used these switches, which see to both.
            for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
                before = switch.fp32_precision
                if before != "none":  # what "none" stands for is IEEE
                    switch.fp32_precision = "ieee"
                    self.undo.callback(_put_back, switch, before)


    def _put_back(switch: Any, before: str) -> None:
        switch.fp32_precision = "none"  # inherited from torch.backends.fp32_precision, if it reads as before now
        if switch.fp32_precision != before:
            switch.fp32_precision = before


    _plain_fp32 = _PlainFp32()


    @contextmanager
    def _exact_products(device_type: str) -> Iterator[None]:
        """Matrix products of fp32 in fp32, whatever autocast and the process have asked for."""
        autocast_off: Any = nullcontext()
        if torch.amp.is_autocast_available(device_type):
            autocast_off = torch.autocast(device_type, enabled=False)
        with autocast_off, _plain_fp32:
            yield


# === sparse_attn/backends/triton_cuda/__init__.py ====================================================================

if SECTION == "backends.triton_cuda":  # annotations are values
    """The Triton backend for CUDA GPUs from compute capability 8.0 on.

    ``adapter`` says what it can run, and runs it; ``plan`` chooses kernels and tile sizes by shape and device; ``call``
    turns a call into launches, which ``launch`` makes cheap. Of the kernels, ``block_lists`` turns index into lists for
    tiles of queries, ``union`` walks such a list with a tile, ``gather`` walks the blocks of one query, and ``tiles`` is
    what these two share.
    """

    from .adapter import backend

    __all__ = ["backend"]


# === sparse_attn/backends/triton_cuda/adapter.py =====================================================================

if SECTION == "backends.triton_cuda.adapter":
    """The backend's object: what it can run, and the way from the operator's arguments to launches."""

    import math
    import os
    import re
    from collections.abc import Sequence
    from functools import cache

    import torch
    from torch import Tensor

    from ...contract import Problem
    from .call import Call
    from .plan import Gpu, Shape, plan

    MAX_FEATURES = 256
    LEAST_CAPABILITY = 80
    # Grids have at most so many blocks along y.
    _MAX_GRID_Y = 65535
    # Positions are 32-bit numbers, also those of a tile's or a block's end.
    _MAX_LENGTH = 2**31 - 2**16


    class TritonBackend:
        """Forward pass of every problem in fp16, bf16 and fp32 with up to 256 features."""

        def unsupported(self, problem: Problem) -> Sequence[str]:
            reasons = []
            match = re.fullmatch(r"sm(\d+)", problem.device.arch)
            if match and int(match.group(1)) < LEAST_CAPABILITY:
                reasons.append(f"needs compute capability 8.0 or newer, got {problem.device}")
            reasons.extend(
                f"needs {name} <= {MAX_FEATURES}, got {name}={getattr(problem, name)}"
                for name in ("D", "Dv")
                if getattr(problem, name) > MAX_FEATURES
            )
            if problem.device.type == "cpu" and problem.dtype == torch.bfloat16:
                reasons.append(
                    "needs fp16 or fp32 in Triton's interpreter, which multiplies bf16 matrices wrongly, got bf16"
                )
            reach = problem.M + min(problem.block_size, problem.M)
            if max(problem.N, reach) > _MAX_LENGTH:
                reasons.append(f"needs N and M + block_size of at most 2**31 - 2**16, got N={problem.N} and {reach}")
            programs = problem.B * problem.Hk * -(-problem.group // 16)
            if programs > _MAX_GRID_Y:
                reasons.append(f"needs B * Hk * ceil(Hq / Hk / 16) <= {_MAX_GRID_Y}, got {programs}")
            return reasons

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            B, Hq, N, D = q.shape
            _, Hk, M, Dv = v.shape
            topk = index.shape[3]
            if 0 in (B, N, M, topk, Dv):
                out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
                lse = torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
                return out, lse
            block_size = min(block_size, M)
            q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
            shape = Shape(q.dtype, B * Hk, Hq // Hk, N, M, D, Dv, topk, block_size, q_offset)
            call = Call(q, k, v, index, block_size, sm_scale, q_offset, return_lse)
            launches = call.launches(plan(shape, gpu(q.device)))
            if q.device.type != "cuda" or torch.cuda.current_device() == q.device.index:
                for launch in launches:
                    launch.run(call.like)
            else:
                with torch.cuda.device(q.device):  # Triton launches on the current device
                    for launch in launches:
                        launch.run(call.like)
            return call.out, call.lse


    @cache
    def gpu(device: torch.device) -> Gpu:
        """The facts of a device that a plan depends on. Interpreted on a CPU, kernels are an A100's, one program at a time.

        Triton's own variable for building another GPU's code counts: then that GPU's tiles are the right ones.
        """
        if device.type != "cuda":
            return Gpu(80, 1)
        properties = torch.cuda.get_device_properties(device)
        capability = properties.major * 10 + properties.minor
        override = re.fullmatch(r"sm(\d+)a?", os.environ.get("TRITON_OVERRIDE_ARCH", ""))
        return Gpu(int(override.group(1)) if override else capability, properties.multi_processor_count)


    backend = TritonBackend()


# === sparse_attn/backends/triton_cuda/call.py ========================================================================

if SECTION == "backends.triton_cuda.call":
    """One call in the form in which the kernels take it: its launches, its results, and what its strides allow."""

    from collections.abc import Sequence
    from functools import lru_cache
    from typing import Any, NamedTuple

    import torch
    from torch import Tensor

    from .block_lists import BlockLists, block_lists
    from .gather import gather_kernel, merge_kernel
    from .launch import Launch
    from .plan import Gather, Plan, Union, padded
    from .union import halved_union_kernel, union_kernel

    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # Triton < 3.4: no TMA, pointers instead
        TensorDescriptor = None

    # Row strides up to here are constants in a kernel: more rows than a tile has, times this, is below 2**31.
    _MAX_CONSTANT_STRIDE = 2**20
    # Tiles in a block up to here are constants, too: a block longer than that may be as long as the keys.
    _MAX_CONSTANT_SUBTILES = 16
    _LOG2E = 1.4426950408889634


    class Call:
        """The arguments of one call in the form in which the kernels take them, and its results."""

        def __init__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> None:
            self.q, self.k, self.v, self.index = q, k, v, index
            self.block_size, self.q_offset, self.return_lse = block_size, q_offset, return_lse
            self.B, self.Hq, self.N, self.D = q.shape
            _, self.Hk, self.M, self.Dv = v.shape
            self.g = self.Hq // self.Hk
            self.negative = sm_scale < 0
            self.c = max(abs(sm_scale) * _LOG2E, 1e-37)  # above 0: it is a factor of -inf
            self.layout = layout_of(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.element_size())
            self.strides = (*q.stride(), *k.stride(), *v.stride(), block_size)
            self.aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr() | index.data_ptr()) & 15
            # What else a kernel may be compiled for, see Launch.run.
            short = max(index.stride()) < 2**31
            self.like = (q.device, q.dtype, index.dtype) if self.aligned and short else None
            self.out = torch.empty((self.B, self.Hq, self.N, self.Dv), dtype=q.dtype, device=q.device)
            self.lse = None
            if return_lse:
                self.lse = torch.empty((self.B, self.Hq, self.N), dtype=torch.float32, device=q.device)

        def launches(self, chosen: Plan) -> list[Launch]:
            """What has to run, in this order, for ``out`` and ``lse`` to be filled."""
            launches, lists = [], None
            if chosen.union is not None:
                tiles = chosen.union
                lists, fill = block_lists(
                    self.index, self.M, self.block_size, self.q_offset, tiles.T, tiles.halved, chosen.sharing
                )
                launches += [fill, self._union(tiles, lists, routed=chosen.gather is not None)]
            if chosen.gather is not None:
                launches += self._gather(chosen.gather, lists)
            return launches

        def _union(self, tiles: Union, lists: BlockLists, routed: bool) -> Launch:
            heads = 2 * tiles.R // tiles.T if tiles.halved else tiles.R // tiles.T
            tma = self._tma(tiles)
            descriptors = [_descriptor(x, tiles.BN) if tma else x for x in (self.k, self.v)]
            if not tiles.halved:
                descriptors.insert(0, _descriptor(self.q, tiles.T, heads) if tma else self.q)
            return Launch(
                halved_union_kernel if tiles.halved else union_kernel,
                (lists.tiles, self.B * self.Hk * -(-self.g // heads), 1),
                tiles.warps,
                (
                    self.q, self.k, self.v, *descriptors, self.out, self.out if self.lse is None else self.lse,
                    lists.entries, lists.fields, self.c,
                ),
                self.strides,
                (self.Hk, self.g, self.N, self.M, self.q_offset, lists.capacity),
                (
                    *_union_constants(tiles, self.layout.rows, self.D, self.Dv, self.block_size),
                    tma, self.negative, self.return_lse, routed, tiles.stages,
                ),
            )  # fmt: skip

        def _gather(self, tiles: Gather, lists: BlockLists | None) -> list[Launch]:
            splits, topk = tiles.splits, self.index.shape[3]
            out, lse = self.out, self.lse
            if splits > 1:
                out = torch.empty((splits, *self.out.shape), dtype=torch.float32, device=out.device)
                lse = torch.empty((splits, *self.out.shape[:3]), dtype=torch.float32, device=out.device)
            tma = self._tma(tiles)
            T, list_tiles, fields = (1, 0, self.index) if lists is None else (lists.T, lists.tiles, lists.fields)
            launch = Launch(
                gather_kernel,
                (self.N * splits, self.B * self.Hk * -(-self.g // tiles.R), 1),
                tiles.warps,
                (
                    self.q, self.k, self.v, *(_descriptor(x, tiles.BN) if tma else x for x in (self.k, self.v)),
                    self.index, out, out if lse is None else lse, fields, self.c,
                ),
                self.strides,
                (*self.index.stride(), self.Hk, self.g, self.N, self.M, topk, self.q_offset, list_tiles),
                (
                    *_gather_constants(tiles, self.layout.rows, self.D, self.Dv, self.block_size, min(64, padded(topk)), T),
                    tma, self.negative, lse is not None, lists is not None, tiles.pairs, tiles.stages,
                ),
            )  # fmt: skip
            if splits == 1:
                return [launch]
            rows, block = self.B * self.Hq * self.N, 4
            merge = Launch(
                merge_kernel,
                (-(-rows // block), 1, 1),
                4,
                (out, lse, self.out, self.out if self.lse is None else self.lse),
                (),
                (rows,),
                (self.Dv, padded(self.Dv), splits, block, self.return_lse),
            )
            return [launch, merge]

        def _tma(self, tiles: Union | Gather) -> bool:
            """Whether TMA copies tiles: asked for, no block ends inside one, nothing to negate, tensors that it takes."""
            even = self.block_size % tiles.BN == 0
            return tiles.tma and even and not self.negative and self.aligned and self.layout.describable


    class Layout(NamedTuple):
        """What the strides of q, k and v allow.

        ``rows`` are the row strides of k and v where kernels may be made for them, else 0; ``describable`` says whether TMA
        takes all three.
        """

        rows: tuple[int, int]
        describable: bool


    @lru_cache(maxsize=1024)
    def layout_of(q_shape: Any, q: Any, k_shape: Any, k: Any, v_shape: Any, v: Any, size: int) -> Layout:
        """Of shapes and strides, and the bytes of an element: worked out once for all calls on tensors of one layout."""
        sizes = ((q_shape, q), (k_shape, k), (v_shape, v))
        describable = TensorDescriptor is not None and all(_describable(*x, size) for x in sizes)
        return Layout((_constant_row(k), _constant_row(v)), describable)


    def _describable(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
        """What TMA asks of a tensor: features adjacent, everything else at multiples of 16 bytes (CUDA driver API)."""
        used = [stride for length, stride in zip(shape[:3], strides, strict=False) if length > 1]
        return strides[3] == 1 and all(0 < stride * size < 2**40 and stride * size % 16 == 0 for stride in used)


    def _descriptor(x: Tensor, rows: int, heads: int = 1) -> Any:
        """A TMA descriptor for tiles of so many rows, of so many heads."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(_described(x.shape, x.stride(), x.dtype, rows, heads), base=x)
        return descriptor


    @lru_cache(maxsize=1024)
    def _described(shape: Any, strides: Any, dtype: torch.dtype, rows: int, heads: int) -> dict[str, Any]:
        """What a TMA descriptor has beside its tensor. Triton checks it at each one made by its constructor: 4 us."""
        # The stride of a dimension of length 1 may be anything, and is not used: it has to be one that TMA takes.
        strides = [stride if length > 1 else 16 for length, stride in zip(shape[:3], strides, strict=False)]
        block = [1, heads, rows, padded(shape[3])]
        fields = vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*strides, 1], block))
        return {name: value for name, value in fields.items() if name != "base"}


    @lru_cache(maxsize=1024)
    def _union_constants(tiles: Union, rows: tuple[int, int], D: int, Dv: int, block_size: int) -> tuple[Any, ...]:
        widths = D, Dv, padded(D), padded(Dv) // tiles.parts, tiles.parts
        return *widths, tiles.R, tiles.T, *_key_tiles(tiles, block_size), *rows


    @lru_cache(maxsize=1024)
    def _gather_constants(
        tiles: Gather, rows: tuple[int, int], D: int, Dv: int, block_size: int, ids: int, T: int
    ) -> tuple[Any, ...]:
        widths = D, Dv, padded(D), padded(Dv)
        return *widths, tiles.R, *_key_tiles(tiles, block_size), ids, T, tiles.splits, *rows


    def _key_tiles(tiles: Union | Gather, block_size: int) -> tuple[int, int, int, bool]:
        """BN, BN where keys are masked, tiles in a block (0: as many as there are), and whether they end with it."""
        n = -(-block_size // tiles.BN)
        return tiles.BN, tiles.BN_masked, n if n <= _MAX_CONSTANT_SUBTILES else 0, block_size % tiles.BN == 0


    def _constant_row(strides: Sequence[int]) -> int:
        """The row stride of k or v, if a kernel may be made for it: features adjacent, and not a length in disguise."""
        return strides[2] if strides[3] == 1 and 0 < strides[2] <= _MAX_CONSTANT_STRIDE else 0


# === sparse_attn/backends/triton_cuda/block_lists.py =================================================================

if SECTION == "backends.triton_cuda.block_lists":
    """Block lists: which key blocks a tile of queries has to walk, and which of its queries selected each.

    This is where the set semantics of ``index`` are settled, once: a list names every block once, however often and in
    whatever order the rows of the tile named it, and leaves out ids that mean nothing and blocks that causality empties.
    """

    from typing import NamedTuple

    import torch
    import triton
    import triton.language as tl
    from torch import Tensor

    from .launch import Launch
    from .plan import padded

    # Key blocks looked at together, at most: bits of 32-bit words, one row of words for each query.
    _MAX_BLOCKS = 1024
    # Numbers kept for each tile: the ends of its four segments; whether its queries are better off one by one; a 0 whose
    # value the compiler does not know, since places that are worked out with it once more need no registers in between; and
    # the mask of the queries that see any key.
    _FIELDS = 7
    FIELDS = tl.constexpr(_FIELDS)


    class BlockLists(NamedTuple):
        """Lists of all tiles, made on the device.

        Attributes:
            entries: int64 ``[B * Hk * tiles, capacity]``: ``block << 32 | mask``,
                bit t of the mask for query t of the tile.
            fields: int32 ``[B * Hk * tiles, 7]``: where the segments of a list end (below), the route, 0, and a mask of the
                queries that see anything.
            capacity: length of a list, ``min(num_blocks, T * topk)`` or 1.
            tiles: tiles of one head, ``ceil(N / T)``.
            T: queries in a tile.

        Segments: blocks that both halves of the tile need; that only its first half needs; only its second half; and blocks
        in which some key is hidden from some query (behind the diagonal, or past the end of the keys), which need a mask
        over scores. Lists that do not tell halves apart leave the second and third empty. The route is 1 where the tile's
        queries share so few blocks that walking their union costs more than walking each query's own.
        """

        entries: Tensor
        fields: Tensor
        capacity: int
        tiles: int
        T: int


    def block_lists(
        index: Tensor, M: int, block_size: int, q_offset: int, T: int, halves: bool, sharing: float
    ) -> tuple[BlockLists, Launch]:
        """Lists for tiles of ``T`` queries (a power of two, at most 32), and the launch that fills them.

        Nothing is read on the host.

        Args:
            index: ``[B, Hk, N, topk]``, any strides.
            halves: tell apart blocks that only one half of a tile needs.
            sharing: a tile whose blocks are needed by fewer queries than this, on average, gets route 1; 0 for none.
        """
        B, Hk, N, topk = index.shape
        tiles, num_blocks = -(-N // T), -(-M // block_size)
        capacity = max(1, min(num_blocks, T * topk))
        entries = torch.empty(B * Hk * tiles, capacity, dtype=torch.int64, device=index.device)
        fields = torch.empty(B * Hk * tiles, _FIELDS, dtype=torch.int32, device=index.device)
        blocks = min(_MAX_BLOCKS, padded(num_blocks, least=64))
        fill = Launch(
            build_block_lists,
            (tiles, B * Hk, 1),
            1 if blocks <= 128 else 4,
            (index, entries, fields, sharing),
            (),
            (*index.stride(), Hk, N, M, topk, block_size, q_offset, capacity),
            (T, halves, blocks, num_blocks <= blocks, sharing > 0, min(8, padded(topk, least=1))),
        )
        return BlockLists(entries, fields, capacity, tiles, T), fill


    @triton.jit(
        do_not_specialize=[
            "stride_b", "stride_h", "stride_n", "stride_t", "Hk", "N", "M", "topk", "block_size", "q_offset", "capacity",
            "sharing",
        ]
    )  # fmt: skip
    def build_block_lists(
        index, entries, fields, sharing,
        stride_b, stride_h, stride_n, stride_t,
        Hk, N, M, topk, block_size, q_offset, capacity,
        T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr, ALL_AT_ONCE: tl.constexpr, ROUTE: tl.constexpr,
        UNROLL: tl.constexpr,
    ):  # fmt: skip
        """One program for each tile. Segments are counted first and then filled, BLOCKS blocks at a time."""
        tile = tl.program_id(0)
        bh = tl.program_id(1).to(tl.int64)
        index += bh // Hk * stride_b + bh % Hk * stride_h
        row = bh * tl.num_programs(0) + tile
        entries += row * capacity
        fields += row * FIELDS
        first_query = tile * T
        last_position = tl.minimum(first_query + T, N) - 1 + q_offset
        # No query of the tile sees a key of a block from `stop` on; every one sees all keys of the blocks before `edge`.
        stop = tl.where(last_position < 0, 0, tl.minimum(tl.cdiv(M, block_size), last_position // block_size + 1))
        edge = tl.minimum(tl.maximum(first_query + q_offset + 1, 0), M) // block_size

        if ALL_AT_ONCE:
            mask, seen = _masks(
                index, stride_n, stride_t, 0, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
            )
            both, first, second, masked, pairs = _count(mask, 0, edge, T, HALVES, BLOCKS, ROUTE)
        else:
            both, first, second, masked, pairs, seen = 0, 0, 0, 0, 0, 0
            for start in range(0, stop, BLOCKS):
                mask, seen_here = _masks(
                    index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
                )
                seen |= seen_here
                n0, n1, n2, n3, n = _count(mask, start, edge, T, HALVES, BLOCKS, ROUTE)
                both, first, second, masked, pairs = both + n0, first + n1, second + n2, masked + n3, pairs + n
        first += both
        second += first
        masked += second
        tl.store(fields, both)
        tl.store(fields + 1, first)
        tl.store(fields + 2, second)
        tl.store(fields + 3, masked)
        tl.store(fields + 5, 0)
        tl.store(fields + 6, seen)
        tl.store(fields + 4, (pairs < masked * sharing).to(tl.int32))

        masked, second, first, both = second, first, both, 0
        if ALL_AT_ONCE:
            _fill(entries, mask, 0, edge, both, first, second, masked, T, HALVES, BLOCKS)
        else:
            for start in range(0, stop, BLOCKS):
                mask, _ = _masks(
                    index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
                )
                both, first, second, masked = _fill(
                    entries, mask, start, edge, both, first, second, masked, T, HALVES, BLOCKS
                )


    @triton.jit
    def _masks(
        index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset,
        T: tl.constexpr, BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
    ):  # fmt: skip
        """For each of the BLOCKS blocks from ``start`` on: bit t is set iff query t of the tile selected it and sees a key.

        And, second, one mask of the queries of which that is so for any of these blocks.
        """
        WORDS: tl.constexpr = BLOCKS // 32
        t = tl.arange(0, T)
        i = first_query + t
        num_blocks = tl.cdiv(M, block_size)
        rows = index + i.to(tl.int64) * stride_n
        words = tl.zeros([T, WORDS], tl.int32)
        for first_slot in range(0, topk, UNROLL):
            for slot in tl.static_range(UNROLL):  # one id of every row at a time: an OR over them needs no reduction
                ids = tl.load(rows, (i < N) & (first_slot + slot < topk), other=-1)
                rows += stride_t
                counts = (ids >= 0) & (ids < num_blocks)
                ids = tl.where(counts, ids, 0).to(tl.int32)
                local = ids - start
                counts &= (ids * block_size <= i + q_offset) & (local >= 0) & (local < BLOCKS)
                bit = tl.where(counts, 1 << (local & 31), 0)
                words |= tl.where((local >> 5)[:, None] == tl.arange(0, WORDS)[None, :], bit[:, None], 0)
        bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        seen = tl.sum(tl.max((words != 0).to(tl.int32), 1) << t, 0)
        return tl.reshape(tl.sum(bits << t[:, None, None], 0), [BLOCKS]), seen


    @triton.jit
    def _segments(mask, start, edge, T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr):
        """Which blocks belong to the segment of both halves, the first, the second half, and those that need a mask."""
        inner = (mask != 0) & (start + tl.arange(0, BLOCKS) < edge)
        if HALVES:
            FIRST: tl.constexpr = (1 << (T // 2)) - 1
            first = inner & ((mask & ~FIRST) == 0)
            second = inner & ((mask & FIRST) == 0)
        else:
            first = inner & (mask == 0)  # none
            second = first
        return inner & ~first & ~second, first, second, (mask != 0) & ~inner


    @triton.jit
    def _count(mask, start, edge, T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr):
        both, first, second, masked = _segments(mask, start, edge, T, HALVES, BLOCKS)
        pairs = tl.zeros([BLOCKS], tl.int32)
        if PAIRS:
            for t in tl.static_range(T):
                pairs += (mask >> t) & 1
        return (
            tl.sum(both.to(tl.int32)),
            tl.sum(first.to(tl.int32)),
            tl.sum(second.to(tl.int32)),
            tl.sum(masked.to(tl.int32)),
            tl.sum(pairs),
        )


    @triton.jit
    def _fill(
        entries, mask, start, edge, both_end, first_end, second_end, masked_end,
        T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr,
    ):  # fmt: skip
        both, first, second, masked = _segments(mask, start, edge, T, HALVES, BLOCKS)
        block = start + tl.arange(0, BLOCKS)
        entry = (block.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)
        both_end = _append(entries, entry, both, both_end)
        if HALVES:
            first_end = _append(entries, entry, first, first_end)
            second_end = _append(entries, entry, second, second_end)
        return both_end, first_end, second_end, _append(entries, entry, masked, masked_end)


    @triton.jit
    def _append(entries, entry, chosen, end):
        place = end + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(entries + place, entry, chosen)
        return end + tl.sum(chosen.to(tl.int32))


# === sparse_attn/backends/triton_cuda/launch.py ======================================================================

if SECTION == "backends.triton_cuda.launch":
    """A launch as a value: tests compile for GPUs that are not at hand exactly what a call would run."""

    from typing import Any, NamedTuple

    import triton

    # Compiled kernels by all that they were compiled for. Triton looks them up by describing every argument anew at each
    # launch, 19 us for 47 arguments on a busy 2-core x86 box; here the caller says what counts. From the release on with
    # which this was tested.
    _compiled: dict[tuple[Any, ...], Any] = {}
    _MAX_COMPILED = 4096
    _CAN_REUSE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


    class Launch(NamedTuple):
        """A kernel with everything it is launched with, in the order of its parameters.

        Attributes:
            kernel, grid, warps: what, how often, how wide.
            tensors: tensors and TMA descriptors, then the softmax scale if the kernel has one.
            strides: numbers that a kernel is specialised on: whether they are 1, or multiples of 16.
            sizes: numbers that it is not specialised on: lengths and the like.
            constants: what the kernel is compiled for.
        """

        kernel: Any
        grid: tuple[int, int, int]
        warps: int
        tensors: tuple[Any, ...]
        strides: tuple[int, ...]
        sizes: tuple[int, ...]
        constants: tuple[Any, ...]

        @property
        def args(self) -> tuple[Any, ...]:
            """All arguments."""
            return self.tensors + self.strides + self.sizes + self.constants

        def run(self, like: tuple[Any, ...] | None = None) -> None:
            """Launch on the current device and stream.

            Args:
                like: equal for calls on the same device whose tensors agree in dtype, all of them aligned to 16 bytes, and
                    whose sizes all fit into 32 bits; None for calls of which that is not known.
            """
            if like is None or not _CAN_REUSE:
                self.kernel[self.grid](*self.args, num_warps=self.warps)
                return
            key = (self.kernel.fn, self.warps, self.strides, self.constants, like)
            compiled = _compiled.get(key)
            if compiled is not None:
                compiled[self.grid](*self.args)
                return
            compiled = self.kernel[self.grid](*self.args, num_warps=self.warps)
            if compiled is not None:  # None: interpreted
                if len(_compiled) >= _MAX_COMPILED:  # strides of ever other lengths
                    _compiled.clear()
                _compiled[key] = compiled


# === sparse_attn/backends/triton_cuda/plan.py ========================================================================

if SECTION == "backends.triton_cuda.plan":
    """Which kernel runs a problem, with which tile sizes: by shape and device, from tables, without a look at ``index``.

    Nothing here touches a device or Triton, so that the choice for any GPU is tested on any machine. The measurements
    behind the numbers are in docs/performance.md, "The Triton backend".
    """

    from functools import lru_cache
    from typing import NamedTuple, TypeVar

    import torch

    # Bytes of shared memory that one block may have, by compute capability (CUDA C++ programming guide, technical
    # specifications per compute capability).
    _SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
    _LEAST_SHARED_KIB = 99
    # What a kernel needs beside its tiles: barriers, exchange of reductions and of layouts.
    _RESERVED_BYTES = 4 * 1024

    # Bytes of keys and values that are read for one query, up to which few programs are over before the host would have
    # made TMA descriptors. At the contest's small points (32 and 64 KiB), on an H200: 6.3 and 7.2 us without TMA and pairs
    # of tiles, 6.7 and 8.0 with them, and 10 to 40 us less on the host.
    _FEW_BYTES = 2**16

    # Queries of one tile: each has a bit in a 32-bit mask.
    MAX_QUERIES = 32


    class Gpu(NamedTuple):
        """What a choice depends on: compute capability as a number (80, 90, ...) and streaming multiprocessors."""

        capability: int
        sms: int

        @property
        def shared_bytes(self) -> int:
            """Shared memory of one block."""
            return _SHARED_KIB.get(self.capability, _LEAST_SHARED_KIB) * 1024

        @property
        def is_hopper(self) -> bool:
            """Whether matrix products are wgmma, and tiles can be copied by TMA."""
            return self.capability == 90


    class Shape(NamedTuple):
        """The part of a problem that a choice depends on; ``heads`` is ``B * Hk`` and ``g`` is ``Hq / Hk``."""

        dtype: torch.dtype
        heads: int
        g: int
        N: int
        M: int
        D: int
        Dv: int
        topk: int
        block_size: int
        q_offset: int


    class Union(NamedTuple):
        """Tiles of the union kernels.

        Attributes:
            halved: the kernel of two halves, of ``R`` rows and ``T // 2`` queries each; else one tile of R rows, T queries.
            BN: keys at a time; ``BN_masked`` where single keys are masked, whose tiles go through registers.
            parts: of v's features, see ``union_kernel``.
            tma: copy whole tiles by TMA, where strides allow.
        """

        halved: bool
        R: int
        T: int
        BN: int
        BN_masked: int
        parts: int
        warps: int
        stages: int
        tma: bool = False


    class Gather(NamedTuple):
        """Tiles of the gather kernel.

        Attributes:
            R: rows, heads of one query.
            BN, BN_masked, tma: as for :class:`Union`.
            pairs: two tiles of keys in one step.
            splits: programs that share the blocks of one query.
        """

        R: int
        BN: int
        BN_masked: int
        warps: int
        stages: int
        tma: bool = False
        pairs: bool = False
        splits: int = 1


    class Plan(NamedTuple):
        """One kernel, or both: then each tile of queries takes the one that its own list makes cheaper.

        ``sharing`` is how many of a tile's queries must share a block, on average, for the union to be; 0 with one kernel.
        """

        union: Union | None
        gather: Gather | None
        sharing: float = 0.0


    @lru_cache(maxsize=4096)  # bounded: M grows with every decoding step
    def plan(shape: Shape, gpu: Gpu) -> Plan:
        """Choose kernels and tiles."""
        union = union_tiles(shape, gpu)
        few = shape.N * shape.heads < union.T * gpu.sms  # too few tiles to fill the device, but perhaps not too few queries
        if few or union.T == 1:
            return Plan(None, gather_tiles(shape, gpu))
        share, needed = selected_share(shape), break_even(union, shape.g)
        expected = union.T * share / (1 - (1 - share) ** union.T)  # sharing, if queries choose independently
        if expected > 1.25 * needed:
            return Plan(union, None)
        return Plan(union, gather_tiles(shape, gpu), needed)


    def break_even(union: Union, g: int) -> float:
        """Queries that share a block, on average, from which on the union is as fast as the gather.

        Both take a time for each block of keys that hardly depends on what is masked. On an H200, at the statement's
        large-2: 7.4 ns for the halved tile of 128 rows, 6.9 ns for one tile of 64 rows (sm_80 code), against 3.0 and 3.5 ns
        for the gather's 16 rows; times of all SMs together, divided by the number of blocks walked.
        """
        ratio = 2.5 if union.halved else 2.0
        return max(1.25, ratio * 16 / padded(g))


    def selected_share(shape: Shape) -> float:
        """Share of the blocks in reach of the middle query that it selects, if it selects as many as it may."""
        middle = shape.q_offset + shape.N // 2
        reach = min(max(middle, 0), max(shape.M - 1, 0)) // shape.block_size + 1
        return min(1.0, shape.topk / reach)


    def union_tiles(shape: Shape, gpu: Gpu) -> Union:
        """Tiles of the union kernel for a shape."""
        width, value_width = padded(shape.D), padded(shape.Dv)
        wide = max(width, value_width) > 128
        block = padded(shape.block_size)
        if shape.dtype == torch.float32:
            # Exact fp32 products have no tensor cores, and everything passes through registers: small tiles.
            R, BN, parts, warps, stages = 32, 16, 1, 4, 1
        elif gpu.is_hopper and not wide and 4 <= shape.g <= 32:
            # 64 rows are what one wgmma takes. Two resident blocks of 128 threads with 255 registers fill an SM.
            half = min(_power_of_two_below(64 // shape.g), MAX_QUERIES // 2)
            return _fit(Union(True, 64, 2 * half, min(64, block), 32, 1, 4, 2, tma=True), shape, gpu)
        elif gpu.is_hopper:
            R, BN, parts, warps, stages = 64, 64 if not wide else 32, 1, 4, 2
        else:
            # Warps of 32 rows use every fragment of k and v twice; 32 keys at a time is what registers then leave room for.
            R, BN, warps, stages = 64, 32, 2 if not wide else 4, 2
            parts = 2 if value_width > R else 1
        heads = min(padded(shape.g, least=1), R)
        T = min(R // heads, MAX_QUERIES)
        tiles = Union(
            False,
            heads * T,
            T,
            min(BN, block),
            16,
            parts,
            warps,
            stages,
            tma=gpu.is_hopper and shape.dtype != torch.float32,
        )
        return _fit(tiles, shape, gpu)


    def gather_tiles(shape: Shape, gpu: Gpu) -> Gather:
        """Tiles of the gather kernel for a shape."""
        wide = max(padded(shape.D), padded(shape.Dv)) > 128
        block = padded(shape.block_size)
        R = min(padded(shape.g), 64 if shape.dtype != torch.float32 else 32)
        programs = shape.heads * -(-shape.g // R) * shape.N
        if shape.dtype == torch.float32:
            tiles = Gather(R, 16, 16, 4, 1)
        elif programs < 4 * gpu.sms and R == 16 and not wide:
            # Few programs: each must keep as many bytes under way as its SM's share of the bandwidth asks for, if it has
            # many to read. Of sm_80, 64 keys of 128 features spill where blocks are not split.
            read = shape.topk * shape.block_size * (shape.D + shape.Dv) * torch.finfo(shape.dtype).bits // 8
            tma = gpu.is_hopper and read > _FEW_BYTES
            tiles = Gather(R, 64, 16, 4, 3, tma, pairs=tma) if gpu.is_hopper else Gather(R, 32, 16, 4, 4)
        elif gpu.is_hopper:
            tiles = Gather(R, 32, 16, max(1, R // 16) * (2 if wide else 1), 3, tma=True)
        else:
            tiles = Gather(R, 16, 16, max(1, R // 16) * (2 if wide else 1), 4)
        # A part of less than two blocks would cost more to merge than it saves.
        while programs * tiles.splits * 2 <= gpu.sms and tiles.splits * 4 <= shape.topk:
            tiles = tiles._replace(splits=2 * tiles.splits)
        return _fit(tiles._replace(BN=min(tiles.BN, block)), shape, gpu)


    _Tiles = TypeVar("_Tiles", Union, Gather)


    def _fit(tiles: _Tiles, shape: Shape, gpu: Gpu) -> _Tiles:
        """Take stages off, then keys, then rows, until the tiles fit into shared memory."""
        while shared_bytes(tiles, shape) > gpu.shared_bytes:
            if tiles.stages > 1:
                tiles = tiles._replace(stages=tiles.stages - 1)
            elif tiles.BN > 16:
                tiles = tiles._replace(BN=tiles.BN // 2)
            elif tiles.R > 16:
                tiles = tiles._replace(R=tiles.R // 2)
                if isinstance(tiles, Union):
                    tiles = tiles._replace(T=max(1, tiles.T // 2))
            else:
                raise ValueError(f"no tile of {shape} fits into {gpu.shared_bytes} bytes of shared memory")
        return tiles._replace(BN_masked=min(tiles.BN_masked, tiles.BN))


    def shared_bytes(tiles: Union | Gather, shape: Shape) -> int:
        """Shared memory a kernel needs, from above: queries (or results on their way out), stages of k and v, and p."""
        size = torch.finfo(shape.dtype).bits // 8
        width, value_width = padded(shape.D), padded(shape.Dv)
        halved = isinstance(tiles, Union) and tiles.halved
        paired = isinstance(tiles, Gather) and tiles.pairs
        queries = (2 if halved else 1) * tiles.R * max(width, value_width)
        # TMA copies into two buffers at least; otherwise one stage is the one at work, in registers or on its way there.
        buffers = max(2, tiles.stages - 1) if tiles.tma else max(1, tiles.stages - 1)
        keys = (2 if paired else 1) * buffers * tiles.BN * (width + value_width)
        return size * (queries + keys + tiles.R * tiles.BN) + _RESERVED_BYTES


    def padded(n: int, least: int = 16) -> int:
        """The power of two, at least ``least``, that holds n."""
        return max(least, 1 << max(0, n - 1).bit_length())


    def _power_of_two_below(n: int) -> int:
        return 1 << (n.bit_length() - 1)


# === sparse_attn/backends/triton_cuda/gather.py ======================================================================

if SECTION == "backends.triton_cuda.gather":  # annotations are values
    """The gather kernel: every query walks its own blocks, alone or cut into parts that are merged afterwards.

    Right where neighbouring queries share few blocks, so that a union would be much larger than one selection, and where
    there are few queries at all: decoding, with the blocks of one query spread over several programs to fill the device. It
    needs no lists (with both kernels in a plan, it reads there which queries are its own): a program reads the ids of its
    query, and counts each once.
    """

    import triton
    import triton.language as tl

    from .block_lists import FIELDS
    from .tiles import finish, load_queries, load_tile, load_whole_tile, natural_lse, softmax_step


    @triton.jit
    def _chosen(ids_of_row, start, i_position, num_blocks, block_size, topk, stride_t, IDS: tl.constexpr):
        """Ids ``start`` to ``start + IDS`` of a row, and which of them count: real blocks with a seen key, once each."""
        slots = start + tl.arange(0, IDS)
        ids = tl.load(ids_of_row + slots.to(tl.int64) * stride_t, slots < topk, other=-1)
        counts = (ids >= 0) & (ids < num_blocks)
        ids = tl.where(counts, ids, 0).to(tl.int32)
        counts &= ids * block_size <= i_position
        ids = tl.where(counts, ids, -1)
        earlier = tl.arange(0, IDS)[None, :] < tl.arange(0, IDS)[:, None]
        counts &= tl.sum(((ids[:, None] == ids[None, :]) & earlier).to(tl.int32), 1) == 0
        for before in range(0, start, IDS):
            slots = before + tl.arange(0, IDS)
            others = tl.load(ids_of_row + slots.to(tl.int64) * stride_t)
            counts &= tl.sum((ids[:, None] == others[None, :]).to(tl.int32), 1) == 0
        return ids, counts


    @triton.jit
    def _id_at(ids, counts, place, n):
        """The n-th of the ids that count, by their places."""
        return tl.sum(tl.where(counts & (place == n), ids, 0))


    @triton.jit(do_not_specialize=["i_b", "i_h", "i_n", "i_t", "Hk", "g", "N", "M", "topk", "q_offset", "tiles"])
    def gather_kernel(
        q, k, v, k_tma, v_tma, index, out, lse, fields, c,
        q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
        i_b, i_h, i_n, i_t, Hk, g, N, M, topk, q_offset, tiles,
        D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, R: tl.constexpr,
        BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr, EVEN: tl.constexpr, IDS: tl.constexpr,
        T: tl.constexpr, SPLITS: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr,
        NEGATIVE: tl.constexpr, LSE: tl.constexpr, ROUTED: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """One program for each (query and part of its blocks; b, hk, R heads).

        With SPLITS > 1, ``out`` is fp32 ``[SPLITS, B, Hq, N, Dv]`` and ``lse`` ``[SPLITS, B, Hq, N]``: one result for
        each part, for ``merge_kernel``. With ROUTED, only queries of tiles (of T) with route 1 run.
        """
        i = N - 1 - tl.program_id(0) // SPLITS  # the longest first
        split = tl.program_id(0) % SPLITS
        chunks = tl.cdiv(g, R)
        bh = (tl.program_id(1) // chunks).to(tl.int64)
        chunk = tl.program_id(1) % chunks
        b, hk = bh // Hk, bh % Hk
        if ROUTED:
            if tl.load(fields + (bh * tiles + i // T) * FIELDS + 4) == 0:
                return
        head = chunk * R + tl.arange(0, R)
        there = head < g
        head = hk * g + head
        features = tl.arange(0, D_PADDED)
        part = tl.arange(0, DV_PADDED)
        keys = tl.arange(0, BN)
        i_64 = i.to(tl.int64)
        q_tile = load_queries(q, b * q_b + head * q_h + i_64 * q_n, features, q_d, there, D, NEGATIVE)
        k += b * k_b + hk * k_h
        v += b * v_b + hk * v_h
        index += b * i_b + hk * i_h + i_64 * i_n

        position = i + q_offset
        end = tl.minimum(position + 1, M)  # the first key that is not seen
        num_blocks = tl.cdiv(M, block_size)
        per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
        few = tl.arange(0, BN_MASKED)
        per_masked = tl.cdiv(block_size, BN_MASKED)
        m_i = tl.full([R], float("-inf"), tl.float32)
        l_i = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, DV_PADDED], tl.float32)
        for start in tl.range(0, topk, IDS, num_stages=1):
            ids, counts = _chosen(index, start, position, num_blocks, block_size, topk, i_t, IDS)
            # Whole blocks first, without masks; then those that end behind the last key seen.
            whole = counts & (ids < end // block_size)
            n_whole = tl.sum(whole.to(tl.int32))
            rest = counts & ~whole
            n_all = n_whole + tl.sum(rest.to(tl.int32))
            place = tl.where(whole, tl.cumsum(whole.to(tl.int32), 0), n_whole + tl.cumsum(rest.to(tl.int32), 0)) - 1
            # The part of this program: whole blocks by tiles, the others, one or two, to the last part.
            n_tiles = n_whole * per_block
            lo = n_tiles * split // SPLITS
            hi = n_tiles * (split + 1) // SPLITS
            if PAIRS:
                # Two tiles at a time: half the reductions, one after the other, that a program of few queries waits for.
                for n in tl.range(lo, hi, 2, num_stages=STAGES):
                    block = _id_at(ids, counts, place, n // per_block)
                    first = block * block_size + n % per_block * BN
                    stop = (block + 1) * block_size
                    k0 = load_whole_tile(
                        k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
                    )  # fmt: skip
                    v0 = load_whole_tile(
                        v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PADDED > DV, TMA,
                    )  # fmt: skip
                    next_n = tl.minimum(n + 1, hi - 1)
                    next_block = _id_at(ids, counts, place, next_n // per_block)
                    next_first = next_block * block_size + next_n % per_block * BN
                    next_stop = (next_block + 1) * block_size
                    k1 = load_whole_tile(
                        k_tma, b, hk, k, next_first, keys, features, k_n, k_d, next_stop, D, K_ROW, not EVEN, D_PADDED > D,
                        TMA,
                    )  # fmt: skip
                    v1 = load_whole_tile(
                        v_tma, b, hk, v, next_first, keys, part, v_n, v_d, next_stop, DV, V_ROW, not EVEN, DV_PADDED > DV,
                        TMA,
                    )  # fmt: skip
                    s0 = tl.dot(q_tile, k0.T, input_precision="ieee")
                    s1 = tl.dot(q_tile, k1.T, input_precision="ieee")
                    if not EVEN:
                        s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
                    there1 = (n + 1 < hi) & (next_first + keys < next_stop)
                    s1 = tl.where(there1[None, :], s1, float("-inf"))
                    m_new = tl.maximum(m_i, tl.max(tl.maximum(s0, s1), 1))
                    shift = tl.where(m_new == float("-inf"), 0.0, m_new) * c
                    alpha = tl.exp2(m_i * c - shift)
                    p0 = tl.exp2(s0 * c - shift[:, None])
                    p1 = tl.exp2(s1 * c - shift[:, None])
                    m_i = m_new
                    l_i = l_i * alpha + tl.sum(p0 + p1, 1)
                    acc = tl.dot(p0.to(v0.dtype), v0, acc * alpha[:, None], input_precision="ieee")
                    acc = tl.dot(p1.to(v1.dtype), v1, acc, input_precision="ieee")
            else:
                for n in tl.range(lo, hi, num_stages=STAGES):
                    block = _id_at(ids, counts, place, n // per_block)
                    first = block * block_size + n % per_block * BN
                    stop = (block + 1) * block_size
                    k_tile = load_whole_tile(
                        k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
                    )  # fmt: skip
                    v_tile = load_whole_tile(
                        v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PADDED > DV, TMA,
                    )  # fmt: skip
                    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                    if not EVEN:
                        s = tl.where((first + keys < stop)[None, :], s, float("-inf"))
                    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
                    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
            n_masked = tl.where(split == SPLITS - 1, n_all - n_whole, 0)
            for n in tl.range((n_all - n_masked) * per_masked, n_all * per_masked, num_stages=1):
                block = _id_at(ids, counts, place, n // per_masked)
                first = block * block_size + n % per_masked * BN_MASKED
                stop = tl.minimum((block + 1) * block_size, end)
                if first < stop:
                    k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
                    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                    s = tl.where((first + few < stop)[None, :], s, float("-inf"))
                    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
                    v_tile = load_tile(v, first, few, part, v_n, v_d, stop, DV, V_ROW, True, DV_PADDED > DV)
                    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")

        o_row = (b * Hk * g + head) * N + i
        if SPLITS > 1:
            o_row += split * (tl.num_programs(1) // chunks).to(tl.int64) * g * N
        o = out + o_row[:, None] * DV + part[None, :]
        tl.store(o, finish(acc, l_i).to(out.dtype.element_ty), there[:, None] & (part < DV)[None, :])
        if LSE:
            tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


    @triton.jit(do_not_specialize=["rows"])
    def merge_kernel(
        parts, part_lse, out, lse, rows,
        DV: tl.constexpr, DV_PADDED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr,
    ):  # fmt: skip
        """Results of disjoint sets of keys to the result of their union, weighted by their softmax denominators."""
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        part = tl.arange(0, DV_PADDED)
        there = row < rows
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for s in tl.static_range(SPLITS):
            top = tl.maximum(top, tl.load(part_lse + s * rows.to(tl.int64) + row, there, other=float("-inf")))
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DV_PADDED], tl.float32)
        for s in tl.static_range(SPLITS):
            place = s * rows.to(tl.int64) + row
            weight = tl.exp(tl.load(part_lse + place, there, other=float("-inf")) - shift)
            total += weight
            o = tl.load(parts + place[:, None] * DV + part[None, :], there[:, None] & (part < DV)[None, :], other=0.0)
            acc += weight[:, None] * o
        total = tl.where(total == 0.0, 1.0, total)  # nothing seen by any part; NaN stays NaN
        o = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * DV + part[None, :], o, there[:, None] & (part < DV)[None, :])
        if LSE:
            tl.store(lse + row, top + tl.log(total), there)


# === sparse_attn/backends/triton_cuda/tiles.py =======================================================================

if SECTION == "backends.triton_cuda.tiles":  # annotations are values
    """What the kernels share: loading a tile of keys or values, one step of the online softmax, the end of a row.

    The softmax is the online one of FlashAttention-2 (Dao 2023, algorithm 1), in base 2: ``c = |sm_scale| * log2(e)``, m_i
    is the largest score before scaling (-inf: nothing seen yet), l_i the sum of ``exp2(c * (score - m_i))``.
    """

    import triton
    import triton.language as tl


    @triton.jit
    def load_tile(
        base, first, rows, features, stride_n, stride_d, stop, width,
        ROW: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_FEATURES: tl.constexpr,
    ):  # fmt: skip
        """Rows ``first + rows`` of k or v, zero from row ``stop`` and from feature ``width`` on.

        ROW is the row stride where it is a constant of the model and features are adjacent, else 0: with it every address
        is one register plus a constant.
        """
        if ROW > 0:
            pointers = base + first.to(tl.int64) * ROW + (rows[:, None] * ROW + features[None, :])
        else:
            offsets = rows.to(tl.int64)[:, None] * stride_n + features.to(tl.int64)[None, :] * stride_d
            pointers = base + first.to(tl.int64) * stride_n + offsets
        if MASK_ROWS and MASK_FEATURES:
            return tl.load(pointers, ((first + rows) < stop)[:, None] & (features < width)[None, :], other=0.0)
        elif MASK_ROWS:
            return tl.load(pointers, ((first + rows) < stop)[:, None], other=0.0)
        elif MASK_FEATURES:
            return tl.load(pointers, (features < width)[None, :], other=0.0)
        else:
            return tl.load(pointers)


    @triton.jit
    def load_whole_tile(
        descriptor, b, hk, base, first, rows, features, stride_n, stride_d, stop, width,
        ROW: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_FEATURES: tl.constexpr, TMA: tl.constexpr,
    ):  # fmt: skip
        """The same for a tile of which every row is a key that is seen: on Hopper, one instruction of the copy engine."""
        if TMA:
            tile = descriptor.load([b.to(tl.int32), hk.to(tl.int32), first, 0])
            return tl.reshape(tile, [tile.shape[2], tile.shape[3]])
        else:
            return load_tile(base, first, rows, features, stride_n, stride_d, stop, width, ROW, MASK_ROWS, MASK_FEATURES)


    @triton.jit
    def load_queries(q, rows, features, stride_d, there, D, NEGATIVE: tl.constexpr):
        """Rows of q by their offsets; negated for a negative sm_scale, so that the largest score has the largest weight."""
        q = tl.load(
            q + rows[:, None] + features.to(tl.int64)[None, :] * stride_d,
            there[:, None] & (features < D)[None, :],
            other=0.0,
        )
        return -q if NEGATIVE else q


    @triton.jit
    def softmax_step(s, m_i, l_i, selected, c):
        """Scores of one tile of keys to weights, for the rows that selected it: p, the factor on what was summed, m_i, l_i.

        Rows that did not select it get weights of 0 by what is subtracted, not by a mask over all scores.
        """
        m_new = tl.maximum(m_i, tl.where(selected, tl.max(s, 1), float("-inf")))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) * c
        alpha = tl.exp2(m_i * c - shift)
        p = tl.exp2(s * c - tl.where(selected, shift, float("inf"))[:, None])
        return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


    @triton.jit
    def finish(acc, l_i):
        """Divide by the sum. It is 0 for a row that saw nothing, and then so is the result; NaN stays NaN."""
        return acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]


    @triton.jit
    def natural_lse(m_i, l_i, c):
        """The natural logarithm of the softmax denominator; -inf, by its terms, for a row that saw nothing."""
        return (m_i * c + tl.log2(l_i)) * 0.6931471805599453


# === sparse_attn/backends/triton_cuda/union.py =======================================================================

if SECTION == "backends.triton_cuda.union":  # annotations are values
    """The union kernels: a tile of adjacent queries walks the union of their blocks once.

    The g heads of T adjacent queries are the rows of one tile, so that a block of keys is read once for all of them; a row
    that did not select it gets weights of 0. Against reading each query's own blocks, traffic falls by up to T and
    arithmetic grows by how much larger the union is than one query's selection (docs/performance.md has figures).

    Two forms. ``union_kernel`` is one tile. ``halved_union_kernel`` is two tiles of half the queries that share what they
    load: blocks that both need feed both, and those that one half needs are left out by the other, so that it does the
    arithmetic of the smaller tile at the traffic of the larger.
    """

    import triton
    import triton.language as tl

    from .block_lists import FIELDS
    from .tiles import finish, load_queries, load_tile, load_whole_tile, natural_lse, softmax_step

    # Lengths, offsets and the like are not worth a kernel of their own for every 1 or multiple of 16.
    _PLAIN = ["Hk", "g", "N", "M", "q_offset", "capacity"]


    @triton.jit
    def _entry(entries, t, per_block, block_size, BN: tl.constexpr):
        """The t-th tile of BN keys of a list: mask of queries, its first key, and the end of its block."""
        entry = tl.load(entries + t // per_block)
        first = (entry >> 32).to(tl.int32) * block_size
        return entry.to(tl.int32), first + t % per_block * BN, first + block_size


    @triton.jit
    def _queries_until_last(mask, T: tl.constexpr):
        """One more than the place of the highest bit that is set."""
        n = 0
        for t in tl.static_range(T):
            n = tl.where((mask >> t) & 1 != 0, t + 1, n)
        return n


    @triton.jit
    def _query_tile(q_tma, b, head, i):
        """Rows head-major. Where a group has fewer heads than the tile, the next group's: their results are not stored."""
        tile = q_tma.load([b.to(tl.int32), head.to(tl.int32), i, 0])
        return tl.reshape(tile, [tile.shape[1] * tile.shape[2], tile.shape[3]])


    @triton.jit(do_not_specialize=_PLAIN)
    def union_kernel(
        q, k, v, q_tma, k_tma, v_tma, out, lse, entries, fields, c,
        q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
        Hk, g, N, M, q_offset, capacity,
        D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PART: tl.constexpr, PARTS: tl.constexpr,
        R: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr,
        EVEN: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr, NEGATIVE: tl.constexpr,
        LSE: tl.constexpr, ROUTED: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """One program for each (tile of T queries; b, hk, R // T heads). Rows are head-major: row r is query r % T.

        v and the sums have PARTS parts of DV_PART features: on mma.sync, Triton gives each warp whole rows (reductions
        within a warp, no exchange of p) only where a product has at least as many rows as columns.
        """
        tiles = tl.cdiv(N, T)
        tile = tiles - 1 - tl.program_id(0)  # the longest first
        HEADS: tl.constexpr = R // T
        chunks = tl.cdiv(g, HEADS)
        bh = (tl.program_id(1) // chunks).to(tl.int64)
        chunk = tl.program_id(1) % chunks
        b, hk = bh // Hk, bh % Hk
        row = bh * tiles + tile
        fields += row * FIELDS
        if ROUTED:
            if tl.load(fields + 4) != 0:
                return
        entries += row * capacity

        rows = tl.arange(0, R)
        t_q = rows % T
        head = chunk * HEADS + rows // T
        i = tile * T + t_q
        # A query that sees nothing may hold anything. Read as 0, it makes no NaN in blocks that others selected.
        sees = (tl.load(fields + 6) >> t_q) & 1 != 0
        position = i + q_offset
        features = tl.arange(0, D_PADDED)
        part = tl.arange(0, DV_PART)
        keys = tl.arange(0, BN)
        per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
        if TMA:
            q_tile = _query_tile(q_tma, b, hk * g + chunk * HEADS, tile * T)
            q_tile = tl.where(sees[:, None], q_tile, 0.0)
        else:
            q_rows = b * q_b + (hk * g + head) * q_h + i.to(tl.int64) * q_n
            q_tile = load_queries(q, q_rows, features, q_d, sees & (head < g), D, NEGATIVE)
        k += b * k_b + hk * k_h
        v += b * v_b + hk * v_h

        m_i = tl.full([R], float("-inf"), tl.float32)
        l_i = tl.zeros([R], tl.float32)
        acc0 = tl.zeros([R, DV_PART], tl.float32)
        acc1 = acc0
        inner = tl.load(fields + 2)
        # Blocks in which single keys are hidden. What lies behind the last key that a query sees may never have been
        # written, and its values must not be loaded, since 0 times NaN is NaN. No branch around these products: with one,
        # ptxas makes every wgmma of the kernel wait for the one before.
        end = tl.minimum(tl.minimum(tile * T + T, N) + q_offset, M)
        few = tl.arange(0, BN_MASKED)
        per_masked = tl.cdiv(block_size, BN_MASKED)
        for t in tl.range(inner * per_masked, tl.load(fields + 3) * per_masked, num_stages=1):
            mask, first, stop = _entry(entries, t, per_masked, block_size, BN_MASKED)
            stop = tl.minimum(stop, end)
            stop_v = tl.minimum(stop, tile * T + _queries_until_last(mask, T) + q_offset)
            k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
            j = first + few
            seen = ((mask >> t_q) & 1 != 0)[:, None] & (j[None, :] <= position[:, None]) & (j < stop)[None, :]
            s = tl.where(seen, tl.dot(q_tile, k_tile.T, input_precision="ieee"), float("-inf"))
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
            p = p.to(v.dtype.element_ty)
            v0 = load_tile(v, first, few, part, v_n, v_d, stop_v, DV, V_ROW, True, DV_PART > DV)
            acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
            if PARTS == 2:
                v1 = load_tile(v, first, few, DV_PART + part, v_n, v_d, stop_v, DV, V_ROW, True, 2 * DV_PART > DV)
                acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")
        for t in tl.range(0, inner * per_block, num_stages=STAGES):
            mask, first, stop = _entry(entries, t, per_block, block_size, BN)
            k_tile = load_whole_tile(
                k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
            )  # fmt: skip
            v0 = load_whole_tile(
                v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
            )  # fmt: skip
            if PARTS == 2:
                v1 = load_whole_tile(
                    v_tma, b, hk, v, first, keys, DV_PART + part, v_n, v_d, stop, DV, V_ROW, not EVEN, 2 * DV_PART > DV,
                    TMA,
                )  # fmt: skip
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if not EVEN:
                s = tl.where((first + keys < stop)[None, :], s, float("-inf"))
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, (mask >> t_q) & 1 != 0, c)
            p = p.to(v.dtype.element_ty)
            acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
            if PARTS == 2:
                acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")

        rows = tl.arange(0, R) + tl.load(fields + 5)
        i = tile * T + rows % T
        head = chunk * HEADS + rows // T
        there = (i < N) & (head < g)
        o_row = (bh * g + head) * N + i
        o = out + o_row[:, None] * DV + part[None, :]
        tl.store(o, finish(acc0, l_i).to(out.dtype.element_ty), there[:, None] & (part < DV)[None, :])
        if PARTS == 2:
            o1 = finish(acc1, l_i).to(out.dtype.element_ty)
            tl.store(o + DV_PART, o1, there[:, None] & (DV_PART + part < DV)[None, :])
        if LSE:
            tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


    @triton.jit
    def _half_step(s, acc, m_i, l_i, v_tile, mask, bit, c):
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, mask & bit != 0, c)
        return tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee"), m_i, l_i


    @triton.jit
    def _store_half(
        out, lse, acc, m_i, l_i, first_query, zero, bh, Hk, g, N, c,
        R: tl.constexpr, HALF: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr, LSE: tl.constexpr,
    ):  # fmt: skip
        rows = tl.arange(0, R) + zero
        i = first_query + rows % HALF
        head = rows // HALF
        there = (i < N) & (head < g)
        o_row = (bh * g + head) * N + i
        part = tl.arange(0, DV_PADDED)
        o = finish(acc, l_i).to(out.dtype.element_ty)
        tl.store(out + o_row[:, None] * DV + part[None, :], o, there[:, None] & (part < DV)[None, :])
        if LSE:
            tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


    @triton.jit(do_not_specialize=_PLAIN)
    def halved_union_kernel(
        q, k, v, k_tma, v_tma, out, lse, entries, fields, c,
        q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
        Hk, g, N, M, q_offset, capacity,
        D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PART: tl.constexpr, PARTS: tl.constexpr,
        R: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr,
        EVEN: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr, NEGATIVE: tl.constexpr,
        LSE: tl.constexpr, ROUTED: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """One program for each (tile of T queries; b, hk).

        Two halves of R rows each, of T // 2 queries; the lists tell them apart. While one half's softmax runs, the other's
        product does: Triton issues wgmma asynchronously, in program order.
        """
        tl.static_assert(PARTS == 1)
        HALF: tl.constexpr = T // 2
        tiles = tl.cdiv(N, T)
        tile = tiles - 1 - tl.program_id(0)  # the longest first
        bh = tl.program_id(1).to(tl.int64)
        b, hk = bh // Hk, bh % Hk
        b_32, hk_32 = tl.program_id(1) // Hk, tl.program_id(1) % Hk
        row = bh * tiles + tile
        fields += row * FIELDS
        if ROUTED:
            if tl.load(fields + 4) != 0:
                return
        entries += row * capacity

        rows = tl.arange(0, R)
        t_q = rows % HALF
        bit = 1 << t_q
        head = rows // HALF
        i = tile * T + t_q
        features = tl.arange(0, D_PADDED)
        part = tl.arange(0, DV_PART)
        keys = tl.arange(0, BN)
        per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
        # A query that sees nothing may hold anything. Read as 0, it makes no NaN in blocks that others selected.
        sees = tl.load(fields + 6)
        # By pointers: what comes from a descriptor, Triton would keep in registers, and there are none left.
        q += b * q_b + hk * g * q_h
        q_rows = head.to(tl.int64) * q_h + i.to(tl.int64) * q_n
        q0 = load_queries(q, q_rows, features, q_d, (sees & bit != 0) & (head < g), D, NEGATIVE)
        q_rows = head.to(tl.int64) * q_h + (i + HALF).to(tl.int64) * q_n
        q1 = load_queries(q, q_rows, features, q_d, ((sees >> HALF) & bit != 0) & (head < g), D, NEGATIVE)
        k += b * k_b + hk * k_h
        v += b * v_b + hk * v_h

        m0 = tl.full([R], float("-inf"), tl.float32)
        l0 = tl.zeros([R], tl.float32)
        acc0 = tl.zeros([R, DV_PART], tl.float32)
        m1, l1, acc1 = m0, l0, acc0
        both = tl.load(fields) * per_block
        first_only = tl.load(fields + 1) * per_block
        second_only = tl.load(fields + 2)
        # Blocks in which single keys are hidden. What lies behind the last key that a query sees may never have been
        # written, and its values must not be loaded, since 0 times NaN is NaN. No branch around these products: with one,
        # ptxas makes every wgmma of the kernel wait for the one before.
        end = tl.minimum(tl.minimum(tile * T + T, N) + q_offset, M)
        few = tl.arange(0, BN_MASKED)
        per_masked = tl.cdiv(block_size, BN_MASKED)
        for t in tl.range(second_only * per_masked, tl.load(fields + 3) * per_masked, num_stages=1):
            mask, first, stop = _entry(entries, t, per_masked, block_size, BN_MASKED)
            stop = tl.minimum(stop, end)
            stop_v = tl.minimum(stop, tile * T + _queries_until_last(mask, T) + q_offset)
            k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
            j = tl.where(first + few < stop, first + few, 2147483647)[None, :]
            seen = (mask & bit != 0)[:, None] & (j <= (i + q_offset)[:, None])
            s0 = tl.where(seen, tl.dot(q0, k_tile.T, input_precision="ieee"), float("-inf"))
            p0, alpha0, m0, l0 = softmax_step(s0, m0, l0, True, c)
            p0 = p0.to(v.dtype.element_ty)
            seen = ((mask >> HALF) & bit != 0)[:, None] & (j <= (i + HALF + q_offset)[:, None])
            s1 = tl.where(seen, tl.dot(q1, k_tile.T, input_precision="ieee"), float("-inf"))
            p1, alpha1, m1, l1 = softmax_step(s1, m1, l1, True, c)
            p1 = p1.to(v.dtype.element_ty)
            # Loaded only now, through registers: k is out of them.
            v_tile = load_tile(v, first, few, part, v_n, v_d, stop_v, DV, V_ROW, True, DV_PART > DV)
            acc0 = tl.dot(p0, v_tile, acc0 * alpha0[:, None], input_precision="ieee")
            acc1 = tl.dot(p1, v_tile, acc1 * alpha1[:, None], input_precision="ieee")
        for t in tl.range(0, both, num_stages=STAGES):
            mask, first, stop = _entry(entries, t, per_block, block_size, BN)
            k_tile = load_whole_tile(
                k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
            )  # fmt: skip
            v_tile = load_whole_tile(
                v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
            )  # fmt: skip
            s0 = tl.dot(q0, k_tile.T, input_precision="ieee")
            if not EVEN:
                s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
            p0, alpha0, m0, l0 = softmax_step(s0, m0, l0, mask & bit != 0, c)
            p0 = p0.to(v_tile.dtype)
            acc0 = acc0 * alpha0[:, None]
            s1 = tl.dot(q1, k_tile.T, input_precision="ieee")
            acc0 = tl.dot(p0, v_tile, acc0, input_precision="ieee")
            if not EVEN:
                s1 = tl.where((first + keys < stop)[None, :], s1, float("-inf"))
            p1, alpha1, m1, l1 = softmax_step(s1, m1, l1, (mask >> HALF) & bit != 0, c)
            acc1 = tl.dot(p1.to(v_tile.dtype), v_tile, acc1 * alpha1[:, None], input_precision="ieee")
        for t in tl.range(both, first_only, num_stages=STAGES):
            mask, first, stop = _entry(entries, t, per_block, block_size, BN)
            k_tile = load_whole_tile(
                k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
            )  # fmt: skip
            v_tile = load_whole_tile(
                v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
            )  # fmt: skip
            s0 = tl.dot(q0, k_tile.T, input_precision="ieee")
            if not EVEN:
                s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
            acc0, m0, l0 = _half_step(s0, acc0, m0, l0, v_tile, mask, bit, c)
        # Stored before the last loop, which has its registers to itself then.
        zero = tl.load(fields + 5)
        _store_half(out, lse, acc0, m0, l0, tile * T, zero, bh, Hk, g, N, c, R, HALF, DV, DV_PART, LSE)
        for t in tl.range(first_only, second_only * per_block, num_stages=STAGES):
            mask, first, stop = _entry(entries, t, per_block, block_size, BN)
            k_tile = load_whole_tile(
                k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
            )  # fmt: skip
            v_tile = load_whole_tile(
                v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
            )  # fmt: skip
            s1 = tl.dot(q1, k_tile.T, input_precision="ieee")
            if not EVEN:
                s1 = tl.where((first + keys < stop)[None, :], s1, float("-inf"))
            acc1, m1, l1 = _half_step(s1, acc1, m1, l1, v_tile, mask >> HALF, bit, c)
        _store_half(out, lse, acc1, m1, l1, tile * T + HALF, zero, bh, Hk, g, N, c, R, HALF, DV, DV_PART, LSE)


# === sparse_attn/backends/tilelang_hopper/__init__.py ================================================================

if SECTION == "backends.tilelang_hopper":  # annotations are values
    """The TileLang backend for Hopper GPUs (sm_90a).

    ``adapter`` says what it can run, and runs it; ``plan`` chooses kernel and tiles by shape and GPU; ``compiled`` has
    kernels compiled and keeps them. Of the kernels, ``block_lists`` turns index into lists for tiles of queries, which
    ``union`` walks, or ``exact`` where products are slow; ``order`` deals queries into tiles where adjacent ones have
    little in common; ``parts`` has macros for what walks a list.
    """

    from .adapter import backend

    __all__ = ["backend"]


# === sparse_attn/backends/tilelang_hopper/adapter.py =================================================================

if SECTION == "backends.tilelang_hopper.adapter":
    """The backend's object: what it can run, and the way from the operator's arguments to two launches, or three."""

    import contextlib
    import math
    from collections.abc import Sequence
    from functools import cache, lru_cache
    from typing import NamedTuple

    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from ...contract import Problem
    from . import compiled
    from .plan import BLOCKS, WINDOW, Tiles, choose, expected_waste, few_or_sparse

    MAX_FEATURES = 256
    _DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    _INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
    # Positions, and the number of a tile, are 32-bit numbers.
    _MAX_LENGTH = 2**31 - 2**16
    # A tile has up to so many queries. Of the steps of 64 keys or more that it walks, pairs are multiplied in 32 bits.
    _MAX_QUERIES = 32
    _MAX_WALKED = 2**22
    # Grids have at most so many blocks along y and z.
    _MAX_GRID = 65535
    _LOG2E = 1.4426950408889634
    # Boxes of a block for which it is not worth a copy of k and v to have fewer.
    _FEW_BOXES = 8
    # Of keys and values in use at a time: a third of the L2 of an H100, H200 or H20.
    _L2_BYTES = 16 * 2**20
    # Features of a row: TMA copies rows that are multiples of 16 bytes.
    _ALIGNED_FEATURES = 8


    class TileLangBackend:
        """Forward pass of every problem in fp16 and bf16 with up to 256 features."""

        def unsupported(self, problem: Problem) -> Sequence[str]:
            missing = compiled.missing_compiler()
            reasons = [] if missing is None else [missing]
            if problem.dtype not in _DTYPES:
                reasons.append(f"needs fp16 or bf16, got {str(problem.dtype).removeprefix('torch.')}")
            reasons += [
                f"needs {name} <= {MAX_FEATURES}, got {name}={value}"
                for name, value in (("D", problem.D), ("Dv", problem.Dv))
                if value > MAX_FEATURES
            ]
            # Keys as they are read: blocks of 1 key become blocks of 8.
            size = problem.M if problem.block_size >= problem.M else packed_block(problem.block_size)
            keys = size * problem.num_blocks
            reach = problem.N + keys + size
            if reach > _MAX_LENGTH:
                reasons.append(
                    f"needs N + M + block_size of at most 2**31 - 2**16, with blocks of a size that it reads, got {reach}"
                )
            walked = min(keys, _MAX_QUERIES * problem.topk * size)
            if walked > _MAX_WALKED:
                reasons.append(
                    f"needs at most 2**22 keys in the blocks that {_MAX_QUERIES} queries may choose, got {walked}: "
                    f"M={problem.M}, topk={problem.topk}"
                )
            if max(problem.B, problem.Hk) > _MAX_GRID:
                reasons.append(f"needs B and Hk <= {_MAX_GRID}, got B={problem.B}, Hk={problem.Hk}")
            rows = problem.B * problem.Hq * problem.N
            if rows >= 2**31:
                reasons.append(f"needs B * Hq * N < 2**31, got {rows}")
            return reasons

        def slow_for(self, problem: Problem) -> Sequence[str]:
            reasons = few_or_sparse(problem)
            if problem.block_size < problem.M and packed_block(problem.block_size) != problem.block_size:
                size = packed_block(problem.block_size)
                reasons.append(f"copies k and v for blocks of {problem.block_size} keys, to read blocks of {size}")
            reasons += [
                f"copies tensors for {name}={value}, which is no multiple of {_ALIGNED_FEATURES}"
                for name, value in (("D", problem.D), ("Dv", problem.Dv))
                if value % _ALIGNED_FEATURES
            ]
            return reasons

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            B, Hq, N, _ = q.shape
            M, Dv = v.shape[2:]
            if 0 in (B, N, M, index.shape[3], Dv):
                out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
                return out, torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
            here = q.device.index == torch.cuda.current_device()
            with contextlib.nullcontext() if here else torch.cuda.device(q.device):
                return _run(q, k, v, index, block_size, sm_scale, q_offset, return_lse)


    def _run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        B, Hq, N, D = q.shape
        _, Hk, M, Dv = v.shape
        device = q.device
        if sm_scale < 0:  # so that the largest score has the largest weight
            q, sm_scale = -q, -sm_scale
        scale = max(sm_scale * _LOG2E, 1e-37)  # above 0: it is a factor of -inf
        q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
        call = _call(
            B, Hq, Hk, N, M, D, Dv, index.shape[3], block_size, q_offset // block_size, _multiprocessors(device)
        )  # fmt: skip
        block_size, packed_size = call.block_size, call.packed_size
        q = for_tma(q)
        k = for_tma(packed(k, block_size, packed_size))
        v = for_tma(packed(v, block_size, packed_size))

        listed = torch.empty(call.lists, call.capacity, dtype=torch.int32, device=device)
        masks = torch.empty(call.lists, call.capacity, dtype=torch.int32, device=device)
        counts = torch.empty(call.lists, call.tiles.facts, dtype=torch.int32, device=device)
        out = torch.empty(B, Hq, N, v.shape[3], dtype=q.dtype, device=device)
        # Something takes its place where it is not asked for. It is not kept: a CUDA graph's memory may be where it lies.
        lse = torch.empty(*((B, Hq, N) if return_lse else (1, 1, 1)), dtype=torch.float32, device=device)

        index_dtype = _INDEX_DTYPES[index.dtype]
        if call.tiles.ordered:
            num_blocks = -(-M // block_size)
            compiled.order(call.tiles, index_dtype, num_blocks)(
                index, counts, num_blocks, block_size, q_offset, call.tiles_of_head
            )
        compiled.block_lists(call.tiles, index_dtype)(
            index, listed, masks, counts, M, block_size, call.boxes_per_block, q_offset, call.tiles_of_head
        )
        (compiled.exact if call.exact else compiled.union)(call.tiles, _DTYPES[q.dtype])(
            q, k, v, listed, masks, counts, out, lse,
            scale, int(return_lse), M, block_size, call.boxes_per_block, q_offset, Hq // Hk, call.chunks,
            call.tiles_of_head, call.together, call.grid,
        )  # fmt: skip
        if v.shape[3] != Dv:
            out = out[..., :Dv].contiguous()
        return out, lse if return_lse else None


    class _Call(NamedTuple):
        """What follows from a problem's shape: arguments of the kernels, and sizes of what they fill."""

        block_size: int
        packed_size: int
        tiles: Tiles
        exact: bool
        boxes_per_block: int
        tiles_of_head: int
        chunks: int
        lists: int
        capacity: int
        together: int
        grid: int


    @lru_cache(maxsize=4096)
    def _call(
        B: int, Hq: int, Hk: int, N: int, M: int, D: int, Dv: int, topk: int, block_size: int, first_block: int, sms: int
    ) -> _Call:
        """Work it out, once: ``first_block`` is the block in which the first query stands."""
        g = Hq // Hk
        D, Dv = (-(-x // _ALIGNED_FEATURES) * _ALIGNED_FEATURES for x in (D, Dv))
        if block_size >= M:  # one block, of any length
            block_size = packed_size = -(-M // 128) * 128
        else:
            packed_size = packed_block(block_size)
        num_blocks = -(-M // block_size)
        waste = expected_waste(N, num_blocks, topk, block_size, first_block)
        tiles, exact = choose(sms, g, D, Dv, packed_size, num_blocks, B * Hk * (N // WINDOW), waste)
        boxes_per_block = packed_size // tiles.box
        boxes = num_blocks * boxes_per_block
        tiles_of_head = -(-N // tiles.queries)
        lists = B * Hk * tiles_of_head
        chunks = -(-g // tiles.heads)
        return _Call(
            block_size=block_size,
            packed_size=packed_size,
            tiles=tiles,
            exact=exact,
            boxes_per_block=boxes_per_block,
            tiles_of_head=tiles_of_head,
            chunks=chunks,
            lists=lists,
            # Two steps more than there are boxes: masked steps are padded, and what follows the last step is read, too.
            capacity=min(boxes, tiles.queries * topk * boxes_per_block) + 2 * (tiles.BN // tiles.box),
            together=min(together(M, D + Dv), B * Hk) * chunks,
            grid=min(sms * (BLOCKS if exact else 1), lists * chunks),
        )


    def together(M: int, features: int) -> int:
        """Key/value heads whose keys and values are to be in the L2 at the same time."""
        return max(1, _L2_BYTES // (2 * M * features))


    def packed_block(block_size: int) -> int:
        """Keys of a block as they are read: ``block_size`` or more.

        Not where a box of 8 keys or more divides it, and few of them make it up: lists name every box.
        """
        if block_size % 8 == 0 and block_size // min(128, block_size & -block_size) <= _FEW_BOXES:
            return block_size
        return -(-block_size // 8) * 8 if block_size < 64 else -(-block_size // 64) * 64


    def packed(x: Tensor, block_size: int, packed_size: int) -> Tensor:
        """k or v with blocks of ``packed_size`` keys, zeros at their ends: x itself where that is their size."""
        if block_size == packed_size:
            return x
        B, H, M, D = x.shape
        blocks = -(-M // block_size)
        x = F.pad(x, (0, 0, 0, blocks * block_size - M)).view(B, H, blocks, block_size, D)
        return F.pad(x, (0, 0, 0, packed_size - block_size)).view(B, H, blocks * packed_size, D)


    def for_tma(x: Tensor) -> Tensor:
        """q, k or v as TMA takes it: x, or its copy, with zeros behind the last feature if they are no multiple of 8."""
        if x.requires_grad:
            x = x.detach()  # what is exported to another library must not ask for gradients
        features = -(-x.shape[3] // _ALIGNED_FEATURES) * _ALIGNED_FEATURES
        if features != x.shape[3]:
            return F.pad(x, (0, features - x.shape[3])).contiguous()
        *strides, last = x.stride()
        if last == 1 and x.data_ptr() % 16 == 0:
            a, b, c = strides
            # Multiples of 16 bytes, by their lowest bits all at once.
            if (a | b | c) % _ALIGNED_FEATURES == 0 and min(strides) > 0 and max(strides) < 2**39:
                return x
            refused = [s <= 0 or s >= 2**39 or s % _ALIGNED_FEATURES != 0 for s in strides]
            if not any(no and length > 1 for no, length in zip(refused, x.shape, strict=False)):
                # The stride of a dimension of length 1 may be anything, and is not used: it has to be one that TMA takes.
                strides = [features if no else s for no, s in zip(refused, strides, strict=True)]
                return x.as_strided(x.shape, (*strides, 1))
        return x.clone(memory_format=torch.contiguous_format)


    @cache
    def _multiprocessors(device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count


    backend = TileLangBackend()


# === sparse_attn/backends/tilelang_hopper/compiled.py ================================================================

if SECTION == "backends.tilelang_hopper.compiled":
    """Kernels, compiled when they are first needed: once in a process, and kept on disk by TileLang for the next."""

    import threading
    from functools import cache
    from typing import Any

    import tilelang
    from tilelang.contrib.nvcc import find_cuda_path

    from .block_lists import block_lists_kernel
    from .exact import exact_kernel
    from .order import order_kernel
    from .plan import MAX_ORDERED_BLOCKS, Tiles
    from .union import union_kernel

    _Key = tilelang.PassConfigKey
    PASS_CONFIGS: dict[Any, bool] = {
        _Key.TL_ENABLE_FAST_MATH: True,  # exp2 as one instruction
        _Key.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # the kernels guard what can be outside
        _Key.TL_DISABLE_WARP_SPECIALIZED: True,  # done by hand
        _Key.TL_DISABLE_BUFFER_INIT_CHECK: True,  # it warns of what is only read after it was written
        _Key.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # done by hand: warps and warpgroups wait for themselves alone
    }
    _kernels: dict[tuple[Any, Tiles, str], Any] = {}
    _loaded: list[Any] = []  # their libraries
    # Two threads that need a kernel at once compile it once; TileLang's compiler is not known to be safe for threads.
    _lock = threading.Lock()


    @cache
    def missing_compiler() -> str | None:
        """Why kernels cannot be compiled here: TileLang runs the CUDA toolkit's nvcc, which comes with no package of it."""
        try:
            find_cuda_path()
        except RuntimeError:
            return "needs nvcc, of the CUDA toolkit, to compile its kernels, and found none: install it, or set CUDA_HOME"
        return None


    def _compile(kernel: Any, *variant: Any) -> Any:
        key = kernel, *variant
        compiled = _kernels.get(key)
        if compiled is None:
            with _lock:
                if key not in _kernels:
                    _loaded.append(tilelang.compile(kernel(*variant), pass_configs=PASS_CONFIGS))
                    _kernels[key] = _function(_loaded[-1])
                compiled = _kernels[key]
        return compiled


    def _function(kernel: Any) -> Any:
        """The compiled function itself, which checks its arguments: TileLang's way to it walks through them once more.

        Where a release keeps it elsewhere, the kernel as it is.
        """
        try:
            return kernel.adapter._get_executable()["main"]
        except (AttributeError, KeyError, TypeError):
            return kernel


    def union(tiles: Tiles, dtype: str) -> Any:
        """``union.union_kernel`` for ``tiles`` and ``"float16"`` or ``"bfloat16"``."""
        return _compile(union_kernel, tiles, dtype)


    def exact(tiles: Tiles, dtype: str) -> Any:
        """``exact.exact_kernel`` for ``tiles`` and ``"float16"`` or ``"bfloat16"``."""
        return _compile(exact_kernel, tiles, dtype)


    def block_lists(tiles: Tiles, index_dtype: str) -> Any:
        """``block_lists.block_lists_kernel`` for ``tiles`` and ``"int32"`` or ``"int64"``."""
        return _compile(block_lists_kernel, _listed(tiles), index_dtype)


    def order(tiles: Tiles, index_dtype: str, num_blocks: int) -> Any:
        """``order.order_kernel`` for ``tiles`` and ``"int32"`` or ``"int64"``: one for few blocks, one for many."""
        words = (256 if num_blocks <= 256 else MAX_ORDERED_BLOCKS) // 32
        return _compile(order_kernel, _listed(tiles)._replace(BN=0, box=0), index_dtype, words)


    def _listed(tiles: Tiles) -> Tiles:
        """Of the tiles, only what matters to lists: problems that differ in the rest share a kernel."""
        return tiles._replace(heads=0, D=0, Dv=0, k_stages=0, v_stages=0)


# === sparse_attn/backends/tilelang_hopper/block_lists.py =============================================================

if SECTION == "backends.tilelang_hopper.block_lists":  # annotations are values
    """Block lists: which boxes of keys a tile of queries has to walk, and which of its queries selected each.

    This is where the set semantics of ``index`` are settled, once: a list names every box once, however often and in
    whatever order the queries of the tile named its block, and leaves out ids that mean nothing and boxes that causality
    empties. A box is the part of a block that is copied as one: all of it, up to 128 keys.

    A list is made of steps of ``BN // box`` boxes, in this order:

    * masked steps: boxes in which some key is hidden from some query (behind the diagonal, past the end of the keys or of
      the block), and what the other kinds leave over; padded with a box that nobody selected;
    * then steps that both warpgroups' queries need. Spread evenly among them are pairs of a step that only the first
      warpgroup needs and one that only the second does: such pairs load twice as much for the same work. What one has more
      than the other comes last.

    A list that is not empty has a masked step.
    """

    from types import SimpleNamespace

    import tilelang.language as T

    from .order import place_of
    from .plan import WINDOW, Tiles

    # Tiles of a block of the grid, one for each warp.
    WARPS = 4
    # Key blocks looked at together: a mask of each lies in shared memory.
    _BLOCKS = 1024
    _LANES = 32
    # Ids that a lane reads before it waits for them.
    _AHEAD = 4
    # Kinds of boxes.
    _MASKED, _BOTH, _FIRST, _SECOND, _NONE = range(5)


    def block_lists_kernel(tiles: Tiles, index_dtype: str):
        """The kernel that fills lists for tiles of one shape, to be compiled; lengths and strides are arguments of it.

        It fills ``boxes`` and ``masks`` ``[B * Hk * tiles, capacity]``, numbers of boxes and masks of queries (bit t for
        the tile's query t), and of ``counts`` ``[B * Hk * tiles, tiles.facts]`` the first four: masked steps, steps for
        both warpgroups, for the first only, for the second only. Where tiles are ordered, the rest says their queries.
        """
        TQ, BX, P = tiles.queries, tiles.box, tiles.BN // tiles.box
        HALF = TQ // tiles.warpgroups
        LOW = (1 << HALF) - 1 if tiles.warpgroups == 2 else -1
        B, Hk, N, topk, lists, capacity = (T.dynamic(name) for name in ("B", "Hk", "N", "topk", "lists", "capacity"))
        i_b, i_h, i_n, i_t = (T.dynamic(name, "int64") for name in ("i_b", "i_h", "i_n", "i_t"))
        i32, u32 = T.int32, T.uint32
        warpgroups, queries = tuple(range(tiles.warpgroups)), tuple(range(TQ))

        def query_at(n, t):
            """Query t of a tile: see ``order.py``."""
            if not tiles.ordered:
                return n.first_query + t
            word = n.words[0] if tiles.warpgroups == 1 else T.Select(t < HALF, n.words[0], n.words[1])
            return n.first_query + place_of(word, t % HALF)

        @T.macro
        def collect(index, masks, warp, lane, b, h, n):
            """OR each query's bit into the masks of the blocks that it selected, of ``size`` blocks from ``start`` on."""
            ids = T.alloc_local([_AHEAD], i32)
            slot = T.alloc_var(i32)
            t = T.alloc_var(i32)
            query = T.alloc_var(i32)
            T.sync_warp()
            for z in T.serial((n.size + _LANES - 1) // _LANES):
                masks[warp, z * _LANES + lane] = 0
            T.sync_warp()
            for z in T.serial((TQ * topk + _LANES * _AHEAD - 1) // (_LANES * _AHEAD)):
                for x in T.unroll(_AHEAD):
                    slot = (z * _AHEAD + x) * _LANES + lane
                    t = T.truncdiv(slot, topk)
                    query = query_at(n, t)
                    ids[x] = -1
                    if t < TQ and query < N:
                        # Clamped before it is narrowed: an id may be any number.
                        ids[x] = T.cast(T.max(T.min(index[b, h, query, slot - t * topk], n.stop), -1), i32)
                for x in T.unroll(_AHEAD):
                    slot = (z * _AHEAD + x) * _LANES + lane
                    t = T.truncdiv(slot, topk)
                    ids[x] = ids[x] - n.start
                    if ids[x] >= 0 and ids[x] < n.size:  # noqa: SIM102 -- before it is multiplied
                        if (ids[x] + n.start) * n.block_size <= query_at(n, t) + n.q_offset:
                            T.call_extern("int32", "atomicOr", T.address_of(masks[warp, ids[x]]), 1 << t)
            T.sync_warp()

        @T.prim_func
        def sparse_attn_block_lists(
            index: T.StridedTensor([B, Hk, N, topk], [i_b, i_h, i_n, i_t], index_dtype),
            boxes: T.Tensor([lists, capacity], i32),
            masks_out: T.Tensor([lists, capacity], i32),
            counts: T.Tensor([lists, tiles.facts], i32),
            M: i32,
            block_size: i32,
            boxes_per_block: i32,
            q_offset: i32,
            tiles_of_head: i32,
        ):
            with T.Kernel(T.ceildiv(tiles_of_head, WARPS), Hk, B, threads=_LANES * WARPS) as (bx, h, b):
                T.pdl_trigger()  # the kernel that walks them may be started, and waits by itself
                if tiles.ordered:
                    T.pdl_sync()  # the order
                masks = T.alloc_shared([WARPS, _BLOCKS], i32)
                thread = T.get_thread_binding()
                lane = thread % _LANES
                warp = thread // _LANES
                tile = bx * WARPS + warp
                stop = T.alloc_var(i32)  # no query of the tile sees a key of a block from here on
                start = T.alloc_var(i32)
                size = T.alloc_var(i32)
                box = T.alloc_var(i32)
                block = T.alloc_var(i32)
                position = T.alloc_var(i32)
                mask = T.alloc_var(i32)
                kind = T.alloc_var(i32)
                rank = T.alloc_var(i32)
                step = T.alloc_var(i32)
                pairs = T.alloc_var(i32)
                votes = T.alloc_var(u32)
                masked_steps = T.alloc_var(i32)
                found = T.alloc_local([4], i32)  # boxes of each kind so far
                steps = T.alloc_local([4], i32)  # of each kind
                over = T.alloc_local([4], i32)  # boxes of each kind that go to masked steps, and where there
                place = T.alloc_local([5], i32)
                words = T.alloc_local([tiles.warpgroups], i32)
                first_query = T.alloc_var(i32)
                first_position = T.alloc_var(i32)  # of the first of them, and of the last
                last_position = T.alloc_var(i32)
                if tile < tiles_of_head:
                    row = (b * Hk + h) * tiles_of_head + tile
                    first_query = tile * TQ
                    if tiles.ordered:
                        first_query = first_query // WINDOW * WINDOW
                        for w in warpgroups:
                            words[w] = counts[row, 4 + w]
                    places = SimpleNamespace(first_query=first_query, words=words)
                    first_position = query_at(places, 0)
                    last_position = query_at(places, TQ - 1)
                    if tiles.ordered and tiles.warpgroups == 2:  # of which each has its queries in order
                        first_position = T.min(first_position, query_at(places, HALF))
                        last_position = T.max(last_position, query_at(places, HALF - 1))
                    first_position = first_position + q_offset
                    last_position = T.min(last_position, N - 1) + q_offset
                    stop = 0
                    if last_position >= 0:
                        stop = T.min(T.truncdiv(M + block_size - 1, block_size), T.truncdiv(last_position, block_size) + 1)
                    masked_steps = 0
                    for x in T.unroll(4):
                        found[x] = 0
                        steps[x] = 0
                        over[x] = 0
                        place[x] = 0
                    place[4] = 0
                    for fills in T.serial(2):  # counted first, then filled
                        for chunk in T.serial((stop + _BLOCKS - 1) // _BLOCKS):
                            start = chunk * _BLOCKS
                            size = T.min(_BLOCKS, stop - start)
                            if fills == 0 or stop > _BLOCKS:
                                n = SimpleNamespace(
                                    first_query=first_query, words=words, start=start, size=size, stop=stop,
                                    block_size=block_size, q_offset=q_offset,
                                )  # fmt: skip
                                collect(index, masks, warp, lane, b, h, n)
                            for z in T.serial((size * boxes_per_block + _LANES - 1) // _LANES):
                                box = z * _LANES + lane
                                block = T.truncdiv(box, boxes_per_block)
                                mask = 0
                                if block < size:
                                    mask = masks[warp, block]
                                position = (box - block * boxes_per_block) * BX  # in the block, then among all keys
                                kind = T.Select(position + BX > block_size, _MASKED, _BOTH)
                                position = position + (block + start) * block_size
                                box = box + start * boxes_per_block
                                # Not the queries before it; before a whole block are none.
                                if boxes_per_block > 1 and position > first_position:
                                    if tiles.ordered:
                                        for t in queries:
                                            if query_at(places, t) + q_offset < position:
                                                mask = mask & ~(1 << t)
                                    else:
                                        mask = T.Select(
                                            position - first_position >= TQ,
                                            0,
                                            mask & (-1 << T.min(position - first_position, 31)),
                                        )
                                kind = T.Select(position + BX - 1 > first_position or position + BX > M, _MASKED, kind)
                                if tiles.warpgroups == 2:
                                    kind = T.Select(kind == _BOTH and (mask & LOW) == 0, _SECOND, kind)
                                    kind = T.Select(kind == _BOTH and ((mask >> HALF) & LOW) == 0, _FIRST, kind)
                                kind = T.Select(mask == 0, _NONE, kind)
                                for x in T.unroll(4):
                                    votes = T.cast(T.ballot(kind == x), u32)
                                    if fills == 1 and kind == x:
                                        rank = found[x] + T.popcount(
                                            votes & ((T.cast(1, u32) << T.cast(lane, u32)) - T.cast(1, u32))
                                        )
                                        if rank < over[x]:
                                            step = place[x] + rank
                                        else:
                                            rank = rank - over[x]
                                            step = rank // P
                                            pairs = T.min(steps[_FIRST], steps[_SECOND])
                                            if x == _BOTH:
                                                step = step + 2 * T.min(
                                                    pairs, T.truncdiv((step + 1) * (pairs + 1) - 1, steps[_BOTH])
                                                )
                                            elif step < pairs:
                                                step = (
                                                    2 * step
                                                    + (x - _FIRST)
                                                    + T.truncdiv((step + 1) * steps[_BOTH], pairs + 1)
                                                )
                                            else:
                                                step = steps[_BOTH] + pairs + step
                                            step = (masked_steps + step) * P + rank % P
                                        boxes[row, step] = box
                                        masks_out[row, step] = mask
                                    found[x] = found[x] + T.popcount(votes)
                        if fills == 0:
                            over[_MASKED] = found[_MASKED]
                            for x in T.unroll(1, 4):
                                steps[x] = found[x] // P
                                over[x] = found[x] % P
                            if over[0] + over[1] + over[2] + over[3] == 0:
                                if steps[_BOTH] > 0:
                                    steps[_BOTH] = steps[_BOTH] - 1
                                    over[_BOTH] = P
                                elif steps[_FIRST] > 0:
                                    steps[_FIRST] = steps[_FIRST] - 1
                                    over[_FIRST] = P
                                elif steps[_SECOND] > 0:
                                    steps[_SECOND] = steps[_SECOND] - 1
                                    over[_SECOND] = P
                            for x in T.unroll(4):
                                place[x + 1] = place[x] + over[x]
                                found[x] = 0
                            masked_steps = (place[4] + P - 1) // P
                            if lane == 0:
                                counts[row, 0] = masked_steps
                                for x in T.unroll(1, 4):
                                    counts[row, x] = steps[x]
                            if lane < masked_steps * P - place[4]:
                                boxes[row, place[4] + lane] = 0
                                masks_out[row, place[4] + lane] = 0

        return sparse_attn_block_lists


# === sparse_attn/backends/tilelang_hopper/order.py ===================================================================

if SECTION == "backends.tilelang_hopper.order":  # annotations are values
    """Which queries make a tile: those of a window that selected much the same.

    The union kernel multiplies a warpgroup's queries by every block that any of them selected. With adjacent queries that
    is, for a random selection, up to twice what they need; of more queries, some agree. They are taken greedily: the first
    that is left, and then, until the warpgroup is full, whichever adds fewest blocks to those that are in.

    A window at the end that is not full keeps its order, and so does a problem whose plan says that it would not gain.
    """

    from types import SimpleNamespace

    import tilelang.language as T

    from .plan import WINDOW, Tiles

    _LANES = 32
    # Windows of a block of the grid, one for each warp.
    _WARPS = 4
    # Queries of a window that a lane looks at.
    _CANDIDATES = WINDOW // _LANES
    _BITS = 32
    # Ids of a query that a warp reads at once: all 32 would be bits of few words, whose atomics wait for each other; one of
    # each of 32 queries would be as many lines of the L1.
    _SIDE_BY_SIDE = 8
    # Ids that a lane reads before it waits for them.
    _AHEAD = 8
    # Words of sets that are looked at together.
    _TOGETHER = 4


    def place_of(word, query):
        """The place in the window of a warpgroup's query: byte ``query`` of its word."""
        return T.cast(T.call_extern("uint32", "__byte_perm", word, 0, 0x4440 + query), "int32")  # the other bytes are 0's


    def order_kernel(tiles: Tiles, index_dtype: str, words: int):
        """The kernel that fills ``counts[:, 4:]`` of ``[B * Hk * tiles, 4 + warpgroups]``, to be compiled.

        A word has a byte for each of a warpgroup's queries, in ascending order: its place in the window. There are up to
        32 ``words`` blocks; other lengths are arguments of the kernel.
        """
        W, G, FACTS = tiles.warpgroups, tiles.queries // tiles.warpgroups, tiles.facts
        # Of a query's set, one word more than it needs: lanes that read the same word of theirs hit different banks.
        STRIDE = words + 1
        ROWS = _LANES // _SIDE_BY_SIDE
        candidates, members = tuple(range(_CANDIDATES)), tuple(range(1, G))
        parts, together = tuple(range(0, words, _TOGETHER)), tuple(range(_TOGETHER))
        B, Hk, N, topk, lists = (T.dynamic(name) for name in ("B", "Hk", "N", "topk", "lists"))
        i_b, i_h, i_n, i_t = (T.dynamic(name, "int64") for name in ("i_b", "i_h", "i_n", "i_t"))
        i32, u32 = T.int32, T.uint32

        def least(key):
            return T.call_extern("uint32", "__reduce_min_sync", T.cast(0xFFFFFFFF, u32), key)

        @T.macro
        def collect(index, sets, warp, lane, b, h, first, n):
            """Bits of the blocks that each query selected, and of which it may see a key."""
            ids = T.alloc_local([_AHEAD], i32)
            slot = T.alloc_var(i32)
            query = T.alloc_var(i32)
            for z in T.serial(WINDOW * STRIDE // _LANES):
                sets[warp, z * _LANES + lane] = T.cast(0, u32)
            T.sync_warp()
            for z in T.serial((topk + _SIDE_BY_SIDE - 1) // _SIDE_BY_SIDE):
                slot = z * _SIDE_BY_SIDE + lane % _SIDE_BY_SIDE
                for y in T.serial(WINDOW // (_AHEAD * ROWS)):
                    for x in T.unroll(_AHEAD):
                        query = (y * _AHEAD + x) * ROWS + lane // _SIDE_BY_SIDE
                        ids[x] = -1
                        if slot < topk:
                            # Clamped before it is narrowed: an id may be any number.
                            ids[x] = T.cast(T.max(T.min(index[b, h, first + query, slot], n.blocks), -1), i32)
                    for x in T.unroll(_AHEAD):
                        query = (y * _AHEAD + x) * ROWS + lane // _SIDE_BY_SIDE
                        if ids[x] >= 0 and ids[x] < n.blocks:  # noqa: SIM102 -- before it is multiplied
                            if ids[x] * n.block_size <= first + query + n.q_offset:
                                T.call_extern(
                                    "uint32", "atomicOr", T.address_of(sets[warp, query * STRIDE + ids[x] // _BITS]),
                                    T.cast(1, u32) << T.cast(ids[x] % _BITS, u32),
                                )  # fmt: skip
            T.sync_warp()

        @T.macro
        def add(query, union, grown, sets, warp, lane, n):
            """Put a query's blocks into ``union``; then ``grown`` is how many each candidate would add."""
            T.clear(grown)
            for z in parts:
                if z * _BITS < n.blocks:
                    for y in together:
                        union[z + y] = union[z + y] | sets[warp, query * STRIDE + (z + y)]
                        for x in candidates:
                            grown[x] = grown[x] + T.cast(
                                T.popcount(sets[warp, (x * _LANES + lane) * STRIDE + (z + y)] & ~union[z + y]), i32
                            )

        @T.prim_func
        def sparse_attn_order(
            index: T.StridedTensor([B, Hk, N, topk], [i_b, i_h, i_n, i_t], index_dtype),
            counts: T.Tensor([lists, FACTS], i32),
            blocks: i32,
            block_size: i32,
            q_offset: i32,
            tiles_of_head: i32,
        ):
            with T.Kernel(T.ceildiv(N, WINDOW * _WARPS), Hk, B, threads=_LANES * _WARPS) as (bx, h, b):
                T.pdl_trigger()  # the kernel that makes lists may be started, and waits by itself
                sets = T.alloc_shared([_WARPS, WINDOW * STRIDE], u32)
                thread = T.get_thread_binding()
                lane = thread % _LANES
                warp = thread // _LANES
                union = T.alloc_local([words], u32)
                grown = T.alloc_local([_CANDIDATES], i32)
                found = T.alloc_local([G], i32)
                first = T.alloc_var(i32)
                row = T.alloc_var(i32)
                left = T.alloc_var(i32)  # bit i: query 32 * i + lane is in no group yet
                query = T.alloc_var(i32)
                key = T.alloc_var(u32)
                word = T.alloc_var(i32)
                swap = T.alloc_var(i32)
                first = (bx * _WARPS + warp) * WINDOW
                row = (b * Hk + h) * tiles_of_head + T.truncdiv(first, tiles.queries)
                if first + WINDOW <= N:
                    n = SimpleNamespace(blocks=blocks, block_size=block_size, q_offset=q_offset)
                    collect(index, sets, warp, lane, b, h, first, n)
                    left = (1 << _CANDIDATES) - 1
                    for group in T.serial(WINDOW // G):
                        # The first query that is left.
                        key = T.cast(WINDOW - 1, u32)
                        for x in reversed(candidates):
                            if ((left >> x) & 1) != 0:
                                key = T.cast(x * _LANES + lane, u32)
                        query = T.cast(least(key), i32)
                        if query % _LANES == lane:
                            left = left & ~(1 << (query // _LANES))
                        found[0] = query
                        for z in T.unroll(words):
                            union[z] = T.cast(0, u32)
                        for member in members:
                            # The one that adds fewest blocks; of those the first.
                            add(query, union, grown, sets, warp, lane, n)
                            key = T.cast(0x7FFFFFFF, u32)
                            for x in candidates:
                                if ((left >> x) & 1) != 0:
                                    key = T.min(key, T.cast(grown[x] * WINDOW + x * _LANES + lane, u32))
                            query = T.cast(least(key), i32) % WINDOW
                            if query % _LANES == lane:
                                left = left & ~(1 << (query // _LANES))
                            # Kept in order.
                            swap = query
                            for t in tuple(range(member)):
                                word = T.max(found[t], swap)
                                found[t] = T.min(found[t], swap)
                                swap = word
                            found[member] = swap
                        word = 0
                        for t in T.unroll(G):
                            word = word | (found[t] << (8 * t))
                        if lane == 0:
                            counts[row + group // W, 4 + group % W] = word
                elif first < N:
                    for z in T.serial((WINDOW // G + _LANES - 1) // _LANES):
                        query = (z * _LANES + lane) * G
                        if first + query // tiles.queries * tiles.queries < N:
                            word = 0
                            for t in T.unroll(G):
                                word = word | ((query + t) << (8 * t))
                            counts[row + query // tiles.queries, 4 + query // G % W] = word

        return sparse_attn_order


# === sparse_attn/backends/tilelang_hopper/plan.py ====================================================================

if SECTION == "backends.tilelang_hopper.plan":
    """Which kernel and tiles run a problem, from tables; nothing here touches a device or TileLang."""

    from functools import lru_cache
    from typing import NamedTuple

    from ...contract import Problem

    # Shared memory of one block on Hopper, without what barriers need.
    SHARED_BYTES = 227 * 1024 - 1024
    # Rows that one warpgroup multiplies: queries times heads.
    _ROWS = 64
    # Below so many tiles, a kernel that splits the blocks of one query keeps more of the GPU busy.
    _FEW_TILES = 100
    # Below so many queries that share a block, a kernel for one query at a time multiplies less, for the same traffic. At
    # 1.1 (65536 keys, 16 blocks of 64) this one was up to 6 % faster than the Triton backend's, or as fast. Alone
    # (decoding) it is not.
    _LITTLE_SHARING = 1.05

    # What tells Hopper GPUs apart: how many FLOP of wgmma (fp16, dense) a multiprocessor does in a clock. No property says
    # so; how many multiprocessors there are tells which GPU it is. Others have a Hopper multiprocessor's full rate.
    #
    # | multiprocessors | FLOP / clock | from |
    # |---|---|---|
    # | 132, 114, ... (H100, H200, H800, GH200) | 4096 | 989 TFLOP/s published for 132 at 1.83 GHz |
    # | 78 (H20) | 1037 | 148 TFLOP/s published, at 1.83 GHz |
    _FULL_RATE = 4096
    _RATES = {78: 1037}
    # At the full rate a product of 16 columns waits for shared memory (64 keys of 128 + 128 features: 256 clocks for k and
    # v, 128 for products); at a quarter of it for the tensor cores (506).
    _SLOW_RATE = 2048
    # Products of the union kernel for each that is needed, expected if each query chooses by itself, from which on it pays
    # to multiply less, all else being slower. By `python -m bench.model`, on an H20, for 58 ms of the union at 1.93
    # (statement large-2): 45 of the exact kernel, 52 with queries dealt into tiles (`order.py`). For 8.5 at 1.32 (large-1):
    # 8.3, and 8.1. On an H200, measured: dealt into tiles, 12.6 ms for 13.7 at 1.93, nothing gained at 1.32.
    _EXACT_FROM = 1.5
    _ORDERED_FROM, _ORDERED_FROM_IF_SLOW = 1.5, 1.25

    # Adjacent queries that are dealt into tiles; a place among them is a byte.
    WINDOW = 128
    # Of so many blocks at most: a mask of each query's lies in shared memory.
    MAX_ORDERED_BLOCKS = 1024
    # And of so many windows at least: to deal out one takes as long as those of all multiprocessors beside it.
    _FEW_WINDOWS = 256

    # Blocks of the exact kernel that share a multiprocessor.
    BLOCKS = 2


    class Tiles(NamedTuple):
        """What a kernel is compiled for, beside the dtype.

        Attributes:
            heads: of one tile: a power of two from 4 to 64; those beyond the group's are computed and not stored.
            queries: of one tile, for all warpgroups together, at most 32.
            BN: keys of a step.
            box: keys that lie together, in one block: a power of two from 8 to BN.
            D, Dv: features of q and k, and of v, multiples of 8.
            warpgroups: that multiply, 1 or 2.
            k_stages, v_stages: steps that are loaded ahead, powers of two; with two warpgroups v needs 4 or more, since a
                warpgroup keeps a stage of v while it leaves out a step.
            ordered: whether a tile's queries are those of a window that ``order.py`` put together; else adjacent ones.
        """

        heads: int
        queries: int
        BN: int
        box: int
        D: int
        Dv: int
        warpgroups: int
        k_stages: int
        v_stages: int
        ordered: bool = False

        @property
        def facts(self) -> int:
            """Numbers that are kept of a list: of its steps, and of which queries it is."""
            return 4 + (self.warpgroups if self.ordered else 0)

        @property
        def D_padded(self) -> int:
            """Features of q and k in shared memory."""
            return -(-self.D // 64) * 64

        @property
        def Dv_padded(self) -> int:
            """Features of v in shared memory."""
            return -(-self.Dv // 64) * 64

        @property
        def shared_bytes(self) -> int:
            """Shared memory of the tiles."""
            q = self.warpgroups * _ROWS * self.D_padded
            return 2 * (q + self.BN * (self.k_stages * self.D_padded + self.v_stages * self.Dv_padded))


    def choose(
        sms: int, g: int, D: int, Dv: int, block_size: int, num_blocks: int, windows: int, waste: float
    ) -> tuple[Tiles, bool]:
        """Choose tiles, and whether they are the exact kernel's; else they are the union kernel's.

        Args:
            sms: multiprocessors of the GPU.
            g, D, Dv, block_size: as for ``plan``.
            num_blocks: of a key/value head.
            windows: full ones, of all key/value heads and batch entries.
            waste: as ``expected_waste`` has it.
        """
        slow = _RATES.get(sms, _FULL_RATE) <= _SLOW_RATE
        if slow and waste > _EXACT_FROM and (tiles := exact_tiles(g, D, Dv, block_size)):
            return tiles, True
        tiles = plan(g, D, Dv, block_size)
        if waste > (_ORDERED_FROM_IF_SLOW if slow else _ORDERED_FROM) and windows >= _FEW_WINDOWS:
            tiles = ordered_tiles(tiles, num_blocks) or tiles
        return tiles, False


    def exact_tiles(g: int, D: int, Dv: int, block_size: int) -> Tiles | None:
        """Tiles of the exact kernel if it can run this: it has 16 heads, boxes of 64 keys, sums of up to 128 features."""
        if heads_of_tile(g) != 16 or block_size % 64 != 0 or max(D, Dv) > 128:
            return None
        return Tiles(16, 4, 64, 64, D, Dv, 1, 2, 2)


    def ordered_tiles(tiles: Tiles, num_blocks: int) -> Tiles | None:
        """``tiles`` for queries that are dealt into them, if they can be: a warpgroup has several, and a word for them."""
        if not 2 <= tiles.queries // tiles.warpgroups <= 4 or num_blocks > MAX_ORDERED_BLOCKS:
            return None
        return tiles._replace(ordered=True)


    @lru_cache(maxsize=4096)
    def expected_waste(N: int, num_blocks: int, topk: int, block_size: int, first_block: int) -> float:
        """Pairs of 4 queries and a block that any of them takes, times 4, for each pair of a query and a block.

        If each chooses as many blocks as it may, at random, among those in its reach. By blocks, not keys: while M and
        q_offset grow by 1, as in decoding, the answer is kept.
        """
        pairs = union = 0.0
        step = max(1, N // 64)
        for query in range(step // 2, N, step):
            reach = min(num_blocks, query // block_size + first_block + 1)
            if reach > 0:
                share = min(1.0, topk / reach)
                pairs += 4 * reach * share
                union += 4 * reach * (1 - (1 - share) ** 4)
        return union / pairs if pairs else 1.0


    @lru_cache(maxsize=4096)
    def plan(g: int, D: int, Dv: int, block_size: int) -> Tiles:
        """Choose tiles.

        Args:
            g: query heads of a group.
            D, Dv: multiples of 8, at most 256.
            block_size: a multiple of 8.
        """
        heads, warpgroups = heads_of_tile(g), _warpgroups(D, Dv)
        box = min(128, block_size & -block_size)
        BN = 64 if warpgroups == 1 or box < 32 else 128  # many boxes in a step take registers, too
        box = min(BN, box)
        for k_stages, v_stages in ((4, 8), (2, 4)):
            tiles = Tiles(heads, warpgroups * _ROWS // heads, BN, box, D, Dv, warpgroups, k_stages, v_stages)
            if tiles.shared_bytes <= SHARED_BYTES:
                return tiles
        raise AssertionError(f"no tiles fit: {tiles}")


    def heads_of_tile(g: int) -> int:
        """Heads of a group of g that are rows of one tile."""
        return min(_ROWS, max(4, 1 << (g - 1).bit_length()))


    def _warpgroups(D: int, Dv: int) -> int:
        """Sums of 64 x 256 take half of the registers: one warpgroup has them to itself, and takes half the keys."""
        return 1 if max(D, Dv) > 128 else 2


    def few_or_sparse(problem: Problem) -> list[str]:
        """Why another kernel than a union of many queries should run ``problem``: see docs/performance.md."""
        heads = heads_of_tile(problem.group)
        T = _warpgroups(problem.D, problem.Dv) * _ROWS // heads
        reasons = []
        tiles = problem.B * problem.Hk * -(-problem.group // heads) * -(-problem.N // T)
        if tiles < _FEW_TILES:
            reasons.append(f"is slow for few queries: fewer than {_FEW_TILES} tiles of {T} leave a GPU idle, got {tiles}")
        # The middle query, if as many blocks are in its reach as there are and it selects as many as it may.
        reach = problem.num_blocks if problem.has_q_offset else min(problem.N // 2, problem.M) // problem.block_size
        reach, T = max(1, reach), max(1, min(T, problem.N))
        share = min(1.0, problem.topk / reach)
        sharing = T * share / (1 - (1 - share) ** T) if share > 0 else 0.0
        if sharing < _LITTLE_SHARING:
            reasons.append(
                f"is slow where neighbours share few blocks: {sharing:.1f} of {T} queries take a block if each chooses "
                f"{problem.topk} of {reach} by itself"
            )
        return reasons


# === sparse_attn/backends/tilelang_hopper/exact.py ===================================================================

if SECTION == "backends.tilelang_hopper.exact":  # annotations are values
    """The exact kernel, for Hopper GPUs whose products are slow: a query is multiplied by the blocks that it selected.

    The union kernel multiplies 4 queries of 16 heads by every block that any of them selected, since a wgmma has 64 rows.
    Here its 64 rows are the keys of a block, and its columns the 16 heads of one query: scores are computed transposed, and
    so are sums. A tile of 4 queries shares what is loaded; a block that two of them selected is multiplied twice, one after
    the other. Two blocks on a multiprocessor fill each other's waits, which bound it on a GPU with the full rate of
    products: docs/performance.md has its times on one, and what they say of an H20.

    Maxima are over keys, which lie in all four warps: to find them takes an exchange through shared memory. So weights
    refer to maxima of an earlier step as long as they stay below 2**8: their sums say so, and one barrier, which is needed
    anyway, tells all warps. In a query's first step they do not.
    """

    from types import SimpleNamespace

    import tilelang.language as T

    from .parts import COLUMNS, FIRST_BARRIER, entry, parts, rings
    from .plan import BLOCKS, Tiles

    # Heads: the columns of a product.
    HEADS = 16
    _INF = float("inf")
    _COLUMNS_OF_A_THREAD = 4


    # How a thread's part of 64 x 16 scores lies, by wgmma: values 0 to 7 are rows r and r + 8, of columns c and c + 1,
    # c + 8 and c + 9; r = 16 * warp + lane / 4, c = lane % 4 * 2. Sums of 64 and 128 features have 8 and 16, likewise.
    def _place(row, column):
        """The thread that has a score, and the value's number there."""
        return row // 16 * 32 + row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2


    _SOFTMAX = """
template <bool BF16>
__device__ __forceinline__ void sparse_attn_weights(
    const float* s, unsigned* p, float* sums, float c0, float c1, float c2, float c3, float scale) {
  float w[8];
  #pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = exp2f(s[i] * scale - (i >> 2 ? i & 1 ? c3 : c2 : i & 1 ? c1 : c0));
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(w[2 * i + 1]), "f"(w[2 * i]));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(w[2 * i + 1]), "f"(w[2 * i]));
  }
  sums[0] = w[0] + w[2], sums[1] = w[1] + w[3], sums[2] = w[4] + w[6], sums[3] = w[5] + w[7];
}

// A barrier of the warpgroup: whether the condition holds for one of its threads.
template <int BARRIER>
__device__ __forceinline__ int sparse_attn_any(int condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %0, 0; barrier.cta.red.or.pred p, %1, 128, p; selp.s32 %0, 1, 0, p; }"
      : "+r"(condition) : "n"(BARRIER) : "memory");
  return condition;
}

// Weights of the queries that take a step, by ``shift``: their maxima when they were last looked at, times the scale.
// And sums of a thread's weights: whether some thread's have outgrown 2**8. Then maxima are to be looked at.
template <bool BF16, int BARRIER>
__device__ __forceinline__ int sparse_attn_weigh(
    const float* s0, const float* s1, const float* s2, const float* s3, void* p0, void* p1, void* p2, void* p3,
    float* sums, const float* shift, int taken, float scale) {
  const float* const s[4] = {s0, s1, s2, s3};
  void* const p[4] = {p0, p1, p2, p3};
  float total = 0.f;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    float* const t = sums + 4 * q;
    const float* const c = shift + 4 * q;
    if (taken >> q & 1) {
      sparse_attn_weights<BF16>(s[q], static_cast<unsigned*>(p[q]), t, c[0], c[1], c[2], c[3], scale);
      total += (t[0] + t[1]) + (t[2] + t[3]);
    } else {
      t[0] = t[1] = t[2] = t[3] = 0.f;
    }
  }
  return sparse_attn_any<BARRIER>(!(total <= 256.f));  // so said that it is true of NaN: a hidden key less -inf
}

// Of a query, keys from ``key + query + 1`` on are hidden, of all from ``left + 1`` on.
__device__ __forceinline__ void sparse_attn_hide(float* s0, float* s1, float* s2, float* s3, int key, int left) {
  float* const s[4] = {s0, s1, s2, s3};
  const int row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int limit = min(key + q, left) - row;
    #pragma unroll
    for (int i = 0; i < 8; ++i) s[q][i] = (i >> 1 & 1) * 8 > limit ? -INFINITY : s[q][i];
  }
}

__device__ __forceinline__ void sparse_attn_column_maxima(
    const float* s0, const float* s1, const float* s2, const float* s3, float* exchange, int taken) {
  const float* const s[4] = {s0, s1, s2, s3};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (taken >> q & 1) {
      float top[4];
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        top[c] = fmaxf(s[q][(c >> 1) * 4 + (c & 1)], s[q][(c >> 1) * 4 + (c & 1) + 2]);
        #pragma unroll
        for (int d = 4; d < 32; d *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], d));
      }
      if (lane < 4)
        reinterpret_cast<float4*>(exchange)[(q * 4 + warp) * 4 + lane] = make_float4(top[0], top[1], top[2], top[3]);
    }
  }
}

// New maxima, sums to refer to them, and weights once more.
template <int SUMS, bool BF16>
__device__ __forceinline__ void sparse_attn_grow(
    const float* s0, const float* s1, const float* s2, const float* s3, void* p0, void* p1, void* p2, void* p3,
    float* o0, float* o1, float* o2, float* o3, float* l, float* sums, float* shift, const float* exchange, int taken,
    float scale) {
  const float* const s[4] = {s0, s1, s2, s3};
  void* const p[4] = {p0, p1, p2, p3};
  float* const o[4] = {o0, o1, o2, o3};
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (taken >> q & 1) {
      float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, alpha[4];
      #pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const float4 x = reinterpret_cast<const float4*>(exchange)[(q * 4 + warp) * 4 + (threadIdx.x & 3)];
        top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
        top[2] = fmaxf(top[2], x.z), top[3] = fmaxf(top[3], x.w);
      }
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float old = shift[q * 4 + c], now = fmaxf(old, top[c] * scale);
        // Exactly 1 where the maximum stays: rounding errors would add up over many steps.
        alpha[c] = now > old ? exp2f(old - now) : 1.f;
        l[q * 4 + c] *= alpha[c];
        shift[q * 4 + c] = now;
        top[c] = now == -INFINITY ? 0.f : now;
      }
      sparse_attn_weights<BF16>(
          s[q], static_cast<unsigned*>(p[q]), sums + 4 * q, top[0], top[1], top[2], top[3], scale);
      #pragma unroll
      for (int i = 0; i < SUMS; ++i) o[q][i] *= alpha[(i >> 2 & 1) * 2 + (i & 1)];
    }
  }
}

__device__ __forceinline__ void sparse_attn_total(float* l, float* exchange) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    #pragma unroll
    for (int d = 4; d < 32; d *= 2) l[c] += __shfl_xor_sync(~0u, l[c], d);
  }
  if (lane < 4) reinterpret_cast<float4*>(exchange)[warp * 4 + lane] = make_float4(l[0], l[1], l[2], l[3]);
}

// Sums to rows of the result, in shared memory: ``stage`` has a row for each head of this query.
template <int SUMS, int STRIDE, typename T>
__device__ __forceinline__ void sparse_attn_stage(
    const float* o, const float* shift, const float* exchange, T* stage, void* lse, long long lse_stride, int heads) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  float l[4] = {0.f, 0.f, 0.f, 0.f}, factor[4];
  #pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float4 x = reinterpret_cast<const float4*>(exchange)[w * 4 + (lane & 3)];
    l[0] += x.x, l[1] += x.y, l[2] += x.z, l[3] += x.w;
  }
  #pragma unroll
  for (int c = 0; c < 4; ++c) factor[c] = l[c] == 0.f ? 0.f : 1.f / l[c];
  #pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int c = (i >> 2 & 1) * 2 + (i & 1), head = (lane & 3) * 2 + (c & 1) + (c >> 1) * 8;
    stage[head * STRIDE + (i >> 3) * 64 + warp * 16 + lane / 4 + (i >> 1 & 1) * 8] = T(o[i] * factor[c]);
  }
  if (lse != nullptr && warp == 0 && lane < 4) {
    #pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int head = lane * 2 + (c & 1) + (c >> 1) * 8;
      const float value = l[c] == 0.f ? -INFINITY : (shift[c] + log2f(l[c])) * 0.69314718f;
      if (head < heads) static_cast<float*>(lse)[head * lse_stride] = value;
    }
  }
}
"""


    def exact_kernel(tiles: Tiles, dtype: str):
        """The kernel for tiles of one shape, to be compiled; lengths, strides and batch are arguments of it."""
        BN, KST, VST, TQ = tiles.BN, tiles.k_stages, tiles.v_stages, tiles.queries
        DP, DV, DVP = tiles.D_padded, tiles.Dv, tiles.Dv_padded
        K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
        SUMS, STRIDE, VECTOR = DVP // 8, DVP + 8, 8
        BF16 = str(dtype == "bfloat16").lower()
        queries, q_columns = tuple(range(TQ)), tuple(range(0, DP, COLUMNS))
        do = parts(tiles, dtype)
        f32, i32 = T.float32, T.int32
        full_rows = T.GemmWarpPolicy.FullRow

        @T.macro
        def consume(mem, n, cta, grid):
            """The warpgroup that multiplies."""
            s = tuple(T.alloc_fragment([BN, HEADS], f32) for _ in queries)
            p = tuple(T.alloc_fragment([BN, HEADS], dtype) for _ in queries)
            o = tuple(T.alloc_fragment([DVP, HEADS], f32) for _ in queries)
            shift = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)
            sums = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)
            l = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)  # noqa: E741 -- of this thread's keys
            mask = T.alloc_local([1], i32)
            box = T.alloc_local([1], i32)
            next_mask, next_box, first_mask, first_box = (T.alloc_local([1], i32) for _ in range(4))
            next_counts = T.alloc_local([2], i32)
            next_place = T.alloc_local([6], i32)
            listed = T.alloc_var(i32)
            b = T.alloc_var(i32)
            head = T.alloc_var(i32)
            first = T.alloc_var(i32)
            heads = T.alloc_var(i32)
            any_hidden = T.alloc_var(i32)
            outgrown = T.alloc_var(i32)
            masked = T.alloc_var(i32)
            total = T.alloc_var(i32)
            key = T.alloc_var(i32)
            left = T.alloc_var(i32)
            c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
            turns = T.alloc_var(i32)
            thread = T.get_thread_binding()
            T.annotate_layout({x: T.Fragment([BN, HEADS], forward_fn=_place) for x in p})
            c = 0
            do.turns_of(turns, cta, grid, n)
            do.locate(next_place, 0, cta, grid, n)
            for x in T.unroll(2):
                next_counts[x] = mem.counts[next_place[0], x]
            do.prefetch(first_mask, mem.masks, next_place[0], 0)
            do.prefetch(first_box, mem.boxes, next_place[0], 0)
            for item in T.serial(turns):
                next_mask[0] = first_mask[0]
                next_box[0] = first_box[0]
                listed = next_place[0]
                b = next_place[1]
                head = next_place[2]
                first = next_place[4]
                tile = SimpleNamespace(first=first)
                heads = next_place[5]
                masked = next_counts[0]
                total = next_counts[0] + next_counts[1]
                do.locate(next_place, item + 1, cta, grid, n)
                for x in T.unroll(2):
                    next_counts[x] = mem.counts[next_place[0], x]
                do.prefetch(first_mask, mem.masks, next_place[0], 0)
                do.prefetch(first_box, mem.boxes, next_place[0], 0)
                for i in queries:
                    T.fill(o[i], 0)
                for x in T.unroll(TQ * _COLUMNS_OF_A_THREAD):
                    shift[x] = -_INF
                    l[x] = 0
                T.barrier_wait(mem.q_ready, item & 1)
                for t in T.serial(total):
                    do.take(mask, next_mask, mem.masks, listed, t)
                    do.take(box, next_box, mem.boxes, listed, t)
                    T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                    T.fence_proxy_async()  # else the compiler puts one before each product
                    for i in queries:
                        if ((mask[0] >> i) & 1) != 0:
                            T.wgmma_gemm(
                                mem.k[c & (KST - 1), :, :], mem.q[i, :, :], s[i], transpose_B=True, policy=full_rows,
                                clear_accum=True,
                            )  # fmt: skip
                    do.prefetch(next_mask, mem.masks, listed, t + 1)
                    if t < masked:
                        do.prefetch(next_box, mem.boxes, listed, t + 1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.k_free[c & (KST - 1)])
                    if t > 0:
                        T.barrier_arrive(mem.v_free[(c - 1) & (VST - 1)])
                    if t == total - 1:  # the next tile's queries may come
                        T.barrier_arrive(mem.q_free)
                    if t < masked:
                        # The last key that a query at the tile's first position sees in this box, and that anyone may see.
                        key = T.truncdiv(box[0], n.boxes_per_block)
                        left = (box[0] - key * n.boxes_per_block) * BN  # where the box begins in its block
                        key = key * n.block_size + left
                        left = T.min(n.block_size - left, n.M - key) - 1
                        key = first + n.q_offset - key
                        T.call_extern("handle", "sparse_attn_hide", *(x.access_ptr("rw") for x in s), key, left)
                    outgrown = T.call_extern(
                        "int32", f"sparse_attn_weigh<{BF16}, {FIRST_BARRIER}>", *(x.access_ptr("r") for x in s),
                        *(x.access_ptr("w") for x in p), sums.access_ptr("w"), shift.access_ptr("r"), mask[0], n.scale,
                    )  # fmt: skip
                    if outgrown != 0:
                        T.call_extern(
                            "handle", "sparse_attn_column_maxima", *(x.access_ptr("r") for x in s),
                            T.address_of(mem.exchange[0, 0, 0]), mask[0],
                        )  # fmt: skip
                        T.sync_threads(FIRST_BARRIER, 128)
                        T.call_extern(
                            "handle", f"sparse_attn_grow<{SUMS}, {BF16}>", *(x.access_ptr("r") for x in s),
                            *(x.access_ptr("w") for x in p), *(x.access_ptr("rw") for x in o), l.access_ptr("rw"),
                            sums.access_ptr("w"), shift.access_ptr("rw"), T.address_of(mem.exchange[0, 0, 0]), mask[0],
                            n.scale,
                        )  # fmt: skip
                    for x in T.unroll(TQ * _COLUMNS_OF_A_THREAD):
                        l[x] = l[x] + sums[x]
                    for i in queries:
                        if ((mask[0] >> i) & 1) != 0:
                            T.copy(p[i], mem.p[i, :, :])
                    T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                    if t < masked:
                        do.look(any_hidden, lambda x: box[0], mask, tile, n)
                        if any_hidden != 0:
                            do.zero_hidden(mem, thread, c, lambda x: box[0], mask, tile, n)
                    T.fence_proxy_async()
                    T.sync_threads(FIRST_BARRIER, 128)
                    for i in queries:
                        if ((mask[0] >> i) & 1) != 0:
                            T.wgmma_gemm(
                                mem.v[c & (VST - 1), :, :], mem.p[i, :, :], o[i], transpose_A=True, policy=full_rows
                            )
                    c = c + 1
                if total > 0:
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.v_free[(c - 1) & (VST - 1)])
                else:
                    T.barrier_arrive(mem.q_free)
                for i in queries:
                    T.call_extern(
                        "handle",
                        "sparse_attn_total",
                        l.access_ptr("rw", offset=i * _COLUMNS_OF_A_THREAD),
                        T.address_of(mem.exchange[i, 0, 0]),
                    )
                T.sync_threads(FIRST_BARRIER, 128)
                for i in queries:
                    T.call_extern(
                        "handle", f"sparse_attn_stage<{SUMS}, {STRIDE}>", o[i].access_ptr("r"),
                        shift.access_ptr("r", offset=i * _COLUMNS_OF_A_THREAD),
                        T.address_of(mem.exchange[i, 0, 0]), T.address_of(mem.stage[i * HEADS, 0]),
                        T.if_then_else(
                            n.want_lse != 0 and first + i < n.N, T.address_of(mem.lse[b, head, first + i]), _null()
                        ),
                        T.cast(n.N, "int64"), heads,
                    )  # fmt: skip
                T.sync_threads(FIRST_BARRIER, 128)
                for z in T.unroll(TQ * HEADS * DVP // VECTOR // 128):
                    row = (z * 128 + thread) // (DVP // VECTOR)
                    column = thread % (DVP // VECTOR) * VECTOR
                    if row % HEADS < heads and first + row // HEADS < n.N and column < DV:
                        for y in T.vectorized(VECTOR):
                            mem.out[b, head + row % HEADS, first + row // HEADS, column + y] = mem.stage[row, column + y]

        @T.macro
        def load_queries(mem, n, cta, grid):
            """Another warp's part."""
            place = T.alloc_local([6], i32)
            turns = T.alloc_var(i32)
            do.turns_of(turns, cta, grid, n)
            for item in T.serial(turns):
                do.locate(place, item, cta, grid, n)
                T.barrier_wait(mem.q_free, (item & 1) ^ 1)
                for y in q_columns:
                    for i in queries:
                        T.tma_copy(
                            mem.Q[place[1], place[2] : place[2] + HEADS, place[4] + i, y : y + COLUMNS],
                            mem.q[i, :, y : y + COLUMNS],
                            barrier=mem.q_ready,
                        )
                T.barrier_arrive(mem.q_ready)

        @T.macro
        def run(args, n, cta, grid):
            mem = SimpleNamespace(
                **vars(args),
                **vars(rings(tiles, dtype, 128)),
                q=T.alloc_shared([TQ, HEADS, DP], dtype),
                q_ready=T.alloc_barrier(arrive_count=32),
                q_free=T.alloc_barrier(arrive_count=128),
                p=T.alloc_shared([TQ, BN, HEADS], dtype),
                exchange=T.alloc_shared([TQ, 4, HEADS], f32),
                stage=T.alloc_shared([TQ * HEADS, STRIDE], dtype),
            )
            T.annotate_min_blocks_per_sm(BLOCKS)
            T.pdl_sync()  # the lists: this kernel may be started while they are made
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(208, 1)
                consume(mem, n, cta, grid)
            else:
                T.set_max_nreg(48, 0)
                if thread < 160:
                    do.load_keys_and_values(mem, n, cta, grid)
                elif thread < 192:
                    load_queries(mem, n, cta, grid)

        return entry(tiles, dtype, 256, run, "sparse_attn_exact", _SOFTMAX)


    def _null():
        """In the place of an lse that is not asked for."""
        return T.reinterpret(T.cast(0, "uint64"), "handle")


# === sparse_attn/backends/tilelang_hopper/parts.py ===================================================================

if SECTION == "backends.tilelang_hopper.parts":  # annotations are values
    """Macros for kernels that walk a list: where a tile is, what a step says, the softmax, loads, stores; their entry."""

    from functools import reduce
    from types import SimpleNamespace

    import tilelang.language as T
    from tilelang.layout import Fragment

    from .order import place_of
    from .plan import WINDOW, Tiles

    # Features of a box of TMA: 128 bytes, the widest swizzle.
    COLUMNS = 64
    # Rows of one warpgroup's wgmma.
    WARPGROUP_ROWS = 64
    # Barriers that this code names; the compiler takes those from 3 on.
    FIRST_BARRIER = 10
    _INF = float("inf")
    # A maximum that grew by less leaves the sums as they are: weights stay below 2**8.
    _LAZY = 8.0
    # Values of 16 bytes.
    _VECTOR = 8

    # The largest score of the boxes that a row takes, bit x of ``taken`` for box x. (TileLang's reduce_max of some of a
    # fragment's columns is one of all of them: what a row does not take may be so much larger that its weights vanish.)
    #
    # Sums times a factor, as rows of the result. A thread has 2 rows, and of each 2 features of every 8: the four threads
    # of a row exchange them, so that each stores 16 bytes at once. Stores of 4 bytes would take a third of a short tile's
    # time.
    PRELUDE = """
template <int KEYS, int BOX>
__device__ __forceinline__ void sparse_attn_row_maxima(const float* scores, int taken0, int taken1, float* maxima) {
  const float none = __int_as_float(0xff800000);
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = none;
    #pragma unroll
    for (int x = 0; x < KEYS / BOX; ++x) {
      float box = none;
      #pragma unroll
      for (int i = x * (BOX / 8); i < (x + 1) * (BOX / 8); ++i)
        box = fmaxf(box, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
      all = fmaxf(all, ((r ? taken1 : taken0) >> x) & 1 ? box : none);
    }
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
    maxima[r] = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
  }
}

template <int DV, int DV_PADDED, bool BF16>
__device__ __forceinline__ void sparse_attn_store(
    const float* sums, const float* factor, void* row0, void* row1, bool ok0, bool ok1) {
  const int lane = threadIdx.x & 3;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    #pragma unroll
    for (int j = 0; j < DV_PADDED / 32; ++j) {
      unsigned x[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A factor of 0 is a row that saw nothing: its sums may be NaN.
        const float* pair = sums + (4 * j + i) * 4 + 2 * r;
        const float low = factor[r] == 0.f ? 0.f : pair[0] * factor[r];
        const float high = factor[r] == 0.f ? 0.f : pair[1] * factor[r];
        if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[i]) : "f"(high), "f"(low));
        else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x[i]) : "f"(high), "f"(low));
      }
      const bool second = lane & 2, odd = lane & 1;
      unsigned a = __shfl_xor_sync(~0u, second ? x[0] : x[2], 2);
      unsigned b = __shfl_xor_sync(~0u, second ? x[1] : x[3], 2);
      x[0] = second ? a : x[0], x[2] = second ? x[2] : a;
      x[1] = second ? b : x[1], x[3] = second ? x[3] : b;
      a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
      b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
      const int column = 32 * j + 8 * lane;
      if ((r ? ok1 : ok0) && column < DV)
        *reinterpret_cast<uint4*>(static_cast<char*>(r ? row1 : row0) + 2 * column) =
            odd ? make_uint4(a, x[1], b, x[3]) : make_uint4(x[0], a, x[2], b);
    }
  }
}
"""


    def parts(tiles: Tiles, dtype: str) -> SimpleNamespace:
        """Macros for tiles of one shape. Fragments have 64 rows for each warpgroup, of its own queries.

        A tile is its first query; where tiles are ordered, its window's first query, and a word for each warpgroup.
        """
        ordered = tiles.ordered
        HP, BN, BX, W = tiles.heads, tiles.BN, tiles.box, tiles.warpgroups
        DV, KST, VST = tiles.Dv, tiles.k_stages, tiles.v_stages
        TQ, P, ROWS = tiles.queries, BN // BX, WARPGROUP_ROWS * W
        TW = TQ // W
        DVP = tiles.Dv_padded
        K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
        # Tuples, since the compiler makes loops of ranges: these are unrolled in Python.
        boxes, warpgroups = tuple(range(P)), tuple(range(W))
        q_columns, v_columns = tuple(range(0, tiles.D_padded, COLUMNS)), tuple(range(0, DVP, COLUMNS))
        # Which head and query of the tile a row is: such that the boxes in which q is loaded are as large as they can be.
        query_major = HP >= TW
        head_of = (lambda r: r % HP) if query_major else (lambda r: r % WARPGROUP_ROWS // TW)
        query_of = (lambda r: r // HP) if query_major else (lambda r: r // WARPGROUP_ROWS * TW + r % TW)
        words = W if ordered else 0

        def query_at(tile, t, w):
            """Query ``t`` of a tile, of warpgroup ``w``."""
            return tile.first + (place_of(tile.words[w], t % TW) if ordered else t)

        def query_of_row(tile, r):
            """The query of a row of this warpgroup."""
            return tile.first + (place_of(tile.own[0], query_of(r) % TW) if ordered else query_of(r))

        def rows_of(thread):
            """A thread's two rows, by the layout that wgmma gives its results."""
            first = thread // 32 * 16 + thread % 32 // 4
            return first, first + 8

        # The same from rows to threads, four of which have each. TileLang would find it, by trying every loop as the one
        # that all others follow, which takes as long as all else that it does with the kernel.
        layout = Fragment([ROWS], lambda r, copy: (r // 16 * 32 + r % 8 * 4 + copy, r % 16 // 8), replicate=4)

        def rows():
            return T.Parallel(ROWS, loop_layout=layout)

        def boxes_of(selected, r):
            """Bit x: whether row r takes box x."""
            return reduce(lambda bits, x: bits | T.Select(selected(x, r), 1 << x, 0), boxes, 0)

        # What a step of the list says is read one step ahead, unless that takes too many registers.
        ahead = P <= 4
        f32, i32 = T.float32, T.int32

        @T.macro
        def locate(place, turn, cta, grid, n):
            """Of a block's item number ``turn``: list, batch entry, first head, key/value head, first query (of the window,
            where tiles are ordered), valid heads.

            Items of ``n.together`` lists are taken together, the longest first, and dealt out there and back again: to the
            first block the longest, to the last the shortest, then the other way round. Blocks end at about the same time.
            """
            place[4] = turn * grid + T.Select(turn % 2 == 0, cta, grid - 1 - cta)
            place[4] = T.min(place[4], n.items - 1)
            place[0] = T.truncdiv(place[4], n.together * n.tiles)
            place[4] = place[4] - place[0] * (n.together * n.tiles)
            place[0] = place[0] * n.together
            place[1] = T.min(n.together, n.columns - place[0])
            place[2] = T.truncdiv(place[4], place[1])
            place[0] = place[0] + place[4] - place[2] * place[1]
            place[4] = n.tiles - 1 - place[2]  # the longest first
            place[3] = T.truncdiv(place[0], n.chunks)
            place[5] = (place[0] - place[3] * n.chunks) * HP
            place[0] = place[3] * n.tiles + place[4]
            place[4] = place[4] * TQ
            if ordered:
                place[4] = place[4] // WINDOW * WINDOW
            place[1] = T.truncdiv(place[3], n.Hk)
            place[3] = place[3] - place[1] * n.Hk
            place[2] = place[3] * n.g + place[5]
            place[5] = n.g - place[5]

        @T.macro
        def turns_of(turns: T.Ref, cta, grid, n):
            """Items that a block takes."""
            turns = T.truncdiv(n.items, grid)
            turns = turns + T.Select(n.items - turns * grid > T.Select(turns % 2 == 0, cta, grid - 1 - cta), 1, 0)

        @T.macro
        def take(now, then, values, listed, t):
            """What step t of a list says of each of its boxes."""
            for x in T.unroll(P):
                if ahead:
                    now[x] = then[x]
                else:
                    now[x] = values[listed, t * P + x]

        @T.macro
        def prefetch(then, values, listed, t):
            """Read what step t says, for ``take``: not right before a fence, which would wait for it."""
            if ahead:
                for x in T.unroll(P):
                    then[x] = values[listed, t * P + x]

        @T.macro
        def whereabouts(block: T.Ref, start: T.Ref, hidden: T.Ref, box, mask, tile, n):
            """Of a box: its block's first key, its own in the block, its first key behind all queries that take it."""
            start = box
            block = T.truncdiv(start, n.boxes_per_block)
            start = (start - block * n.boxes_per_block) * BX
            block = block * n.block_size
            hidden = 0
            if ordered:
                for w in warpgroups:  # a warpgroup's queries are in order
                    part = (mask >> (w * TW)) & ((1 << TW) - 1)
                    last = query_at(tile, T.max(31 - T.call_extern("int32", "__clz", part), 0), w)
                    hidden = T.max(hidden, T.Select(part != 0, last + n.q_offset + 1 - block - start, 0))
            elif mask != 0:
                hidden = tile.first + n.q_offset + 32 - T.call_extern("int32", "__clz", mask) - block - start

        @T.macro
        def look(any_hidden: T.Ref, box_of, mask, tile, n):
            """Whether some key of a step's boxes is behind all queries that take it: ``box_of(x)``, with these masks."""
            block = T.alloc_var(i32)
            start = T.alloc_var(i32)
            hidden = T.alloc_var(i32)
            any_hidden = 0
            for x in boxes:
                whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
                any_hidden = any_hidden | T.Select(hidden < BX, 1, 0)

        @T.macro
        def zero_hidden(mem, thread, step, box_of, mask, tile, n):
            """Zero values behind all queries that take their box: they may be NaN, never having been written."""
            block = T.alloc_var(i32)
            start = T.alloc_var(i32)
            hidden = T.alloc_var(i32)
            for x in boxes:
                whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
                for z in T.unroll(-(-BX * DVP // _VECTOR // 128)):
                    r = (z * 128 + thread) // (DVP // _VECTOR)
                    d = (z * 128 + thread) % (DVP // _VECTOR) * _VECTOR
                    if r >= hidden and r < BX:
                        for y in T.vectorized(_VECTOR):
                            mem.v[step & (VST - 1), x * BX + r, d + y] = 0

        @T.macro
        def hide(s, limit, box_of, mask, tile, n):
            """Scores of keys that a row does not see become -inf."""
            block = T.alloc_var(i32)
            start = T.alloc_var(i32)
            hidden = T.alloc_var(i32)
            for x in boxes:
                whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
                for r in rows():
                    limit[r] = T.Select(
                        ((mask[x] >> query_of(r)) & 1) != 0,
                        T.min(
                            T.min(query_of_row(tile, r) + n.q_offset, n.M - 1) - block - start,
                            n.block_size - start - 1,
                        ),
                        -1,
                    )
                for r, j in T.Parallel(ROWS, BX):
                    s[r, x * BX + j] = T.Select(j <= limit[r], s[r, x * BX + j], T.cast(-_INF, f32))

        @T.macro
        def exponentiate(thread, s, row, selected, scale, grown: T.Ref):
            """Scores to weights. ``selected(x, r)``: whether row r takes box x; None: all that are not -inf."""
            T.copy(row.m, row.m_old)
            if selected is None:
                T.reduce_max(s, row.tmp, dim=1, clear=True)
            else:
                T.call_extern(
                    "handle",
                    f"sparse_attn_row_maxima<{BN}, {BX}>",
                    s.access_ptr("r"),
                    boxes_of(selected, rows_of(thread)[0]),
                    boxes_of(selected, rows_of(thread)[1]),
                    row.tmp.access_ptr("w"),
                )
            for r in rows():
                row.m[r] = T.Select((row.tmp[r] - row.m[r]) * scale > _LAZY, row.tmp[r], row.m[r])
            grown = 0
            for r in rows():
                grown = grown | T.Select(row.m[r] > row.m_old[r], 1, 0)
            for r in rows():
                row.shift[r] = T.Select(row.m[r] == -_INF, T.cast(0, f32), row.m[r] * scale)
            # Exactly 1 where the maximum stays: what exp2 of a rounding error would give instead adds up over many steps.
            for r in rows():
                row.alpha[r] = T.Select(
                    row.m[r] > row.m_old[r], T.exp2(row.m_old[r] * scale - row.shift[r]), T.cast(1, f32)
                )
            if selected is None:
                for r, j in T.Parallel(ROWS, BN):
                    s[r, j] = T.exp2(s[r, j] * scale - row.shift[r])
            else:  # weights of 0 by what is subtracted, not by a mask over all scores
                for x in boxes:
                    for r in rows():
                        row.tmp[r] = T.Select(selected(x, r), row.shift[r], T.cast(_INF, f32))
                    for r, j in T.Parallel(ROWS, BX):
                        s[r, x * BX + j] = T.exp2(s[r, x * BX + j] * scale - row.tmp[r])
            T.reduce_sum(s, row.tmp, dim=1)
            for r in rows():
                row.sum[r] = row.sum[r] * row.alpha[r] + row.tmp[r]

        @T.macro
        def rescale(o, row, grown):
            """Sums to the maxima that they are to refer to, in warps where one grew."""
            if T.any_sync(grown != 0):
                for r, d in T.Parallel(ROWS, DVP):
                    o[r, d] *= row.alpha[r]

        @T.macro
        def store(mem, thread, o, row, seen, b, head, heads, tile, n):
            """Results; lse where it is asked for.

            A query whose bit in ``seen`` is not set took no box: 0 and -inf, whatever it holds. Its maximum is -inf.
            """
            for r in rows():
                row.sum[r] = T.Select(((seen >> query_of(r)) & 1) != 0, row.sum[r], T.cast(0, f32))
            if n.want_lse != 0:
                for r in rows():
                    if head_of(r) < heads and query_of_row(tile, r) < n.N:
                        mem.lse[b, head + head_of(r), query_of_row(tile, r)] = (
                            row.m[r] * n.scale + T.log2(row.sum[r])
                        ) * 0.6931471805599453
            for r in rows():
                row.tmp[r] = T.Select(row.sum[r] == 0, T.cast(0, f32), 1.0 / row.sum[r])
            r0, r1 = rows_of(thread)
            T.call_extern(
                "handle",
                f"sparse_attn_store<{DV}, {DVP}, {str(dtype == 'bfloat16').lower()}>",
                o.access_ptr("r"),
                row.tmp.access_ptr("r"),
                T.address_of(mem.out[b, head + head_of(r0), query_of_row(tile, r0), 0]),
                T.address_of(mem.out[b, head + head_of(r1), query_of_row(tile, r1), 0]),
                head_of(r0) < heads and query_of_row(tile, r0) < n.N,
                head_of(r1) < heads and query_of_row(tile, r1) < n.N,
            )

        @T.macro
        def load_keys_and_values(mem, n, cta, grid):
            """One warp's part: it walks the lists ahead of those that multiply."""
            box = T.alloc_local([P], i32)
            next_box = T.alloc_local([P if ahead else 1], i32)
            first_box = T.alloc_local([P if ahead else 1], i32)  # of the next tile
            place = T.alloc_local([6], i32)
            listed = T.alloc_var(i32)
            b = T.alloc_var(i32)
            h = T.alloc_var(i32)
            total = T.alloc_var(i32)
            next_total = T.alloc_var(i32)
            c = T.alloc_var(i32)
            turns = T.alloc_var(i32)
            c = 0
            turns_of(turns, cta, grid, n)
            locate(place, 0, cta, grid, n)
            next_total = (
                mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
            )
            prefetch(next_box, mem.boxes, place[0], 0)
            for item in T.serial(turns):
                listed = place[0]
                b = place[1]
                h = place[3]
                total = next_total
                locate(place, item + 1, cta, grid, n)
                next_total = (
                    mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
                )
                prefetch(first_box, mem.boxes, place[0], 0)
                for t in T.serial(total):
                    take(box, next_box, mem.boxes, listed, t)
                    prefetch(next_box, mem.boxes, listed, t + 1)
                    T.barrier_wait(mem.k_free[c & (KST - 1)], ((c >> K_LOG) & 1) ^ 1)
                    for y in q_columns:
                        for x in boxes:
                            T.tma_copy(
                                mem.K[b, h, box[x] * BX : box[x] * BX + BX, y : y + COLUMNS],
                                mem.k[c & (KST - 1), x * BX : x * BX + BX, y : y + COLUMNS],
                                barrier=mem.k_ready[c & (KST - 1)],
                            )
                    T.barrier_arrive(mem.k_ready[c & (KST - 1)])
                    T.barrier_wait(mem.v_free[c & (VST - 1)], ((c >> V_LOG) & 1) ^ 1)
                    for y in v_columns:
                        for x in boxes:
                            T.tma_copy(
                                mem.V[b, h, box[x] * BX : box[x] * BX + BX, y : y + COLUMNS],
                                mem.v[c & (VST - 1), x * BX : x * BX + BX, y : y + COLUMNS],
                                barrier=mem.v_ready[c & (VST - 1)],
                            )
                    T.barrier_arrive(mem.v_ready[c & (VST - 1)])
                    c = c + 1
                if ahead:
                    for x in T.unroll(P):
                        next_box[x] = first_box[x]

        return SimpleNamespace(
            locate=locate, turns_of=turns_of, query_at=query_at, words=words, take=take,
            prefetch=prefetch, look=look, hide=hide, zero_hidden=zero_hidden, exponentiate=exponentiate, rescale=rescale,
            store=store, load_keys_and_values=load_keys_and_values, query_of=query_of, query_major=query_major, ahead=ahead,
        )  # fmt: skip


    def rings(tiles: Tiles, dtype: str, threads: int) -> SimpleNamespace:
        """Shared memory for k and v, with barriers: ready when loaded, free when all ``threads`` that read it are done."""
        KST, VST = tiles.k_stages, tiles.v_stages
        return SimpleNamespace(
            k=T.alloc_shared([KST, tiles.BN, tiles.D_padded], dtype),
            v=T.alloc_shared([VST, tiles.BN, tiles.Dv_padded], dtype),
            k_ready=T.alloc_barrier(arrive_count=[32] * KST),
            k_free=T.alloc_barrier(arrive_count=[threads] * KST),
            v_ready=T.alloc_barrier(arrive_count=[32] * VST),
            v_free=T.alloc_barrier(arrive_count=[threads] * VST),
        )


    def row_state(rows: int) -> SimpleNamespace:
        """What an online softmax keeps of each row: maximum, sum, and what is worked out on the way."""
        names = ("m", "m_old", "shift", "alpha", "sum", "tmp")
        return SimpleNamespace(**{name: T.alloc_fragment([rows], T.float32) for name in names})


    def entry(tiles: Tiles, dtype: str, threads: int, run, name: str, prelude: str):
        """The kernel with everything it is launched with; ``run(mem, n, cta, grid)`` is a macro with what it does."""
        D, DV = tiles.D, tiles.Dv
        f32, i32 = T.float32, T.int32
        B, Hq, Hk, N, keys, lists, capacity = (
            T.dynamic(name) for name in ("B", "Hq", "Hk", "N", "keys", "lists", "capacity")
        )
        l_b, l_h, l_n = (T.dynamic(name) for name in ("l_b", "l_h", "l_n"))
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n = (
            T.dynamic(name, "int64") for name in ("q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n")
        )

        @T.prim_func
        def kernel(
            Q: T.StridedTensor([B, Hq, N, D], [q_b, q_h, q_n, 1], dtype),
            K: T.StridedTensor([B, Hk, keys, D], [k_b, k_h, k_n, 1], dtype),
            V: T.StridedTensor([B, Hk, keys, DV], [v_b, v_h, v_n, 1], dtype),
            list_boxes: T.Tensor([lists, capacity], i32),
            list_masks: T.Tensor([lists, capacity], i32),
            list_counts: T.Tensor([lists, tiles.facts], i32),
            out: T.Tensor([B, Hq, N, DV], dtype),
            lse: T.Tensor([l_b, l_h, l_n], f32),
            scale: f32,
            want_lse: i32,
            M: i32,
            block_size: i32,
            boxes_per_block: i32,
            q_offset: i32,
            g: i32,
            chunks: i32,
            tiles_of_head: i32,
            together: i32,
            grid: i32,
        ):
            with T.Kernel(grid, threads=threads, prelude=prelude) as cta:
                mem = SimpleNamespace(
                    Q=Q, K=K, V=V, out=out, lse=lse, boxes=list_boxes, masks=list_masks, counts=list_counts
                )  # fmt: skip
                n = SimpleNamespace(
                    scale=scale, want_lse=want_lse, M=M, N=N, block_size=block_size, boxes_per_block=boxes_per_block,
                    q_offset=q_offset, g=g, chunks=chunks, Hk=Hk, tiles=tiles_of_head,
                    together=together, columns=B * Hk * chunks, items=B * Hk * chunks * tiles_of_head,
                )  # fmt: skip
                run(mem, n, cta, grid)

        return kernel.with_attr("global_symbol", name)


# === sparse_attn/backends/tilelang_hopper/union.py ===================================================================

if SECTION == "backends.tilelang_hopper.union":  # annotations are values
    """The union kernel for Hopper: warps that load, and warpgroups that multiply, walk the union of a tile's blocks once.

    A tile is 4 queries of 16 heads (or 8 of 8, ...) for each warpgroup: the 64 rows of a wgmma. They are adjacent, or those
    that ``order.py`` put together. Two warpgroups share what is loaded, 128 keys a step, and each leaves out the steps that
    none of its own queries selected. A block stays on its multiprocessor for the whole launch and takes one tile after the
    other: loads for the next begin while the last is being finished.

    The softmax is FlashAttention-3's inner overlap (Shah et al., 2024, algorithm 2): scores of a step are multiplied while
    the step before is weighed, and turned into weights while that product still runs. Sums are rescaled only where a
    maximum grew by more than 2**8, as in FlashAttention-4: the result is the same, since weights and sums refer to the same
    number.
    """

    from types import SimpleNamespace

    import tilelang.language as T

    from .parts import COLUMNS, FIRST_BARRIER, PRELUDE, WARPGROUP_ROWS, entry, parts, rings, row_state
    from .plan import Tiles

    _INF = float("inf")


    def union_kernel(tiles: Tiles, dtype: str):
        """The kernel for tiles of one shape, to be compiled; lengths, strides and batch are arguments of it."""
        BN, W, KST, VST = tiles.BN, tiles.warpgroups, tiles.k_stages, tiles.v_stages
        HP, TW, P = tiles.heads, tiles.queries // tiles.warpgroups, tiles.BN // tiles.box
        DP, DVP, ROWS = tiles.D_padded, tiles.Dv_padded, WARPGROUP_ROWS * W
        LOW = (1 << TW) - 1
        K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
        # Tuples, since the compiler makes loops of ranges: these are unrolled in Python.
        warpgroups, q_columns = tuple(range(W)), tuple(range(0, DP, COLUMNS))
        do = parts(tiles, dtype)
        loads = tuple(range(TW if do.query_major else HP))
        f32, i32 = T.float32, T.int32
        full_rows = T.GemmWarpPolicy.FullRow

        @T.macro
        def multiply(mem, s, step):
            T.wgmma_gemm(
                mem.q[:, :], mem.k[step & (KST - 1), :, :], s, transpose_B=True, policy=full_rows, clear_accum=True
            )

        @T.macro
        def weigh(mem, p, o, step):
            T.wgmma_gemm(p, mem.v[step & (VST - 1), :, :], o, policy=full_rows)

        @T.macro
        def look_ahead(mem, place, counts, words, masks, boxes):
            """What the list of the next tile begins with."""
            for x in T.unroll(4):
                counts[x] = mem.counts[place[0], x]
            for x in T.unroll(do.words):
                words[x] = mem.counts[place[0], 4 + x]
            do.prefetch(masks, mem.masks, place[0], 0)
            do.prefetch(boxes, mem.boxes, place[0], 0)

        @T.macro
        def consume(mem, n, cta, grid):
            """The warpgroups that multiply: each for itself, but for what they share in memory. One code for both of them:
            two would not stay in the instruction cache."""
            s = T.alloc_fragment([ROWS, BN], f32)
            p = T.alloc_fragment([ROWS, BN], dtype)
            o = T.alloc_fragment([ROWS, DVP], f32)
            row = row_state(ROWS)
            limit = T.alloc_fragment([ROWS], i32)
            mask = T.alloc_local([P], i32)
            box = T.alloc_local([P if do.ahead else 1], i32)
            next_mask, next_box, first_mask, first_box = (T.alloc_local([P if do.ahead else 1], i32) for _ in range(4))
            next_counts = T.alloc_local([4], i32)
            next_words, words = (T.alloc_local([max(1, do.words)], i32) for _ in range(2))
            own = T.alloc_local([1], i32)  # this warpgroup's
            next_place = T.alloc_local([6], i32)
            listed = T.alloc_var(i32)
            b = T.alloc_var(i32)
            head = T.alloc_var(i32)
            first = T.alloc_var(i32)
            heads = T.alloc_var(i32)
            needed = T.alloc_var(i32)
            any_hidden = T.alloc_var(i32)
            grown = T.alloc_var(i32)
            masked = T.alloc_var(i32)
            total = T.alloc_var(i32)
            end = T.alloc_var(i32)
            held = T.alloc_var(i32)
            seen = T.alloc_var(i32)  # this warpgroup's queries that take any box
            c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
            turns = T.alloc_var(i32)
            thread = T.get_thread_binding()
            # Told that all lanes of a warp have the same number, the compiler works out addresses once for all of them.
            w = T.shfl_sync(thread // 128, 0) if W == 2 else 0
            c = 0
            do.turns_of(turns, cta, grid, n)
            do.locate(next_place, 0, cta, grid, n)
            look_ahead(mem, next_place, next_counts, next_words, first_mask, first_box)
            for item in T.serial(turns):
                if do.ahead:
                    for x in T.unroll(P):
                        next_mask[x] = first_mask[x]
                        next_box[x] = first_box[x]
                listed = next_place[0]
                b = next_place[1]
                head = next_place[2]
                first = next_place[4]
                for x in T.unroll(do.words):
                    words[x] = next_words[x]
                if do.words == 1:
                    own[0] = words[0]
                if do.words == 2:
                    own[0] = T.Select(w == 0, words[0], words[1])
                tile = SimpleNamespace(first=first, words=words, own=own)
                heads = next_place[5]
                masked = next_counts[0]
                total = next_counts[0] + next_counts[1] + next_counts[2] + next_counts[3]
                end = total  # of the steps that may be this warpgroup's
                if W == 2:
                    # Steps of one warpgroup alone alternate, until one has no more: it need not wait for the other's.
                    ahead_of = next_counts[3] - next_counts[2]
                    end = end - T.max(T.Select(w == 0, ahead_of, -ahead_of), 0)
                do.locate(next_place, item + 1, cta, grid, n)
                look_ahead(mem, next_place, next_counts, next_words, first_mask, first_box)
                seen = 0
                T.fill(o, 0)
                T.fill(row.sum, 0)
                T.fill(row.m, -_INF)
                T.barrier_wait(mem.q_ready[w], item & 1)
                # Steps in which single keys are hidden, or of boxes that were left over: all take part in all of them.
                for t in T.serial(masked):
                    do.take(mask, next_mask, mem.masks, listed, t)
                    if do.ahead:
                        do.take(box, next_box, mem.boxes, listed, t)
                    box_of = (lambda x: box[x]) if do.ahead else (lambda x: mem.boxes[listed, t * P + x])  # noqa: B023
                    for x in T.unroll(P):
                        seen = seen | mask[x]
                    T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                    multiply(mem, s, c)
                    do.prefetch(next_mask, mem.masks, listed, t + 1)
                    do.prefetch(next_box, mem.boxes, listed, t + 1)
                    do.look(any_hidden, box_of, mask, tile, n)
                    T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                    if any_hidden != 0:
                        # Both warpgroups write the same zeros: neither waits for the other.
                        do.zero_hidden(mem, thread % 128, c, box_of, mask, tile, n)
                        T.fence_proxy_async()
                        T.sync_threads(FIRST_BARRIER + w, 128)
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.k_free[c & (KST - 1)])
                    if t == end - 1:
                        T.barrier_arrive(mem.q_free[w])
                    do.hide(s, limit, box_of, mask, tile, n)
                    do.exponentiate(thread, s, row, None, n.scale, grown)
                    do.rescale(o, row, grown)
                    T.copy(s, p)
                    held = c
                    if t < masked - 1:
                        weigh(mem, p, o, c)
                        T.wait_wgmma(0)
                        T.barrier_arrive(mem.v_free[c & (VST - 1)])
                    c = c + 1
                if masked > 0:  # else the list is empty
                    for t_ in T.serial(end - masked):
                        t = t_ + masked
                        do.take(mask, next_mask, mem.masks, listed, t)
                        do.prefetch(next_mask, mem.masks, listed, t + 1)
                        needed = 0
                        for x in T.unroll(P):
                            needed = needed | mask[x]
                        seen = seen | needed
                        T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                        if ((needed >> (w * TW)) & LOW) != 0:
                            multiply(mem, s, c)
                            weigh(mem, p, o, held)
                            T.wait_wgmma(1)
                            T.barrier_arrive(mem.k_free[c & (KST - 1)])
                            if t == end - 1:  # the next tile's queries may come
                                T.barrier_arrive(mem.q_free[w])
                            do.exponentiate(
                                thread, s, row, lambda x, r: ((mask[x] >> do.query_of(r)) & 1) != 0, n.scale, grown
                            )
                            # The fence, and a barrier's loop, keep ptxas from waiting for the product before that.
                            T.warpgroup_fence_operand(s, num_regs=WARPGROUP_ROWS * BN // 128)
                            T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                            T.wait_wgmma(0)
                            T.barrier_arrive(mem.v_free[held & (VST - 1)])
                            do.rescale(o, row, grown)
                            T.copy(s, p)
                            held = c
                        else:
                            T.barrier_arrive(mem.k_free[c & (KST - 1)])
                            if t == end - 1:
                                T.barrier_arrive(mem.q_free[w])
                            T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                            T.barrier_arrive(mem.v_free[c & (VST - 1)])
                        c = c + 1
                    weigh(mem, p, o, held)
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.v_free[held & (VST - 1)])
                    for _ in T.serial(total - end):
                        T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                        T.barrier_arrive(mem.k_free[c & (KST - 1)])
                        T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                        T.barrier_arrive(mem.v_free[c & (VST - 1)])
                        c = c + 1
                else:
                    T.barrier_arrive(mem.q_free[w])
                do.store(mem, thread, o, row, seen, b, head, heads, tile, n)

        @T.macro
        def load_queries(mem, n, cta, grid):
            """Another warp's part."""
            place = T.alloc_local([6], i32)
            words = T.alloc_local([max(1, do.words)], i32)
            first = T.alloc_var(i32)
            turns = T.alloc_var(i32)
            do.turns_of(turns, cta, grid, n)
            for item in T.serial(turns):
                do.locate(place, item, cta, grid, n)
                for x in T.unroll(do.words):
                    words[x] = mem.counts[place[0], 4 + x]
                first = place[4]
                tile = SimpleNamespace(first=first, words=words)
                for w in warpgroups:
                    T.barrier_wait(mem.q_free[w], (item & 1) ^ 1)
                    for y in q_columns:
                        for i in loads:
                            if do.query_major:
                                T.tma_copy(
                                    mem.Q[
                                        place[1],
                                        place[2] : place[2] + HP,
                                        do.query_at(tile, w * TW + i, w),
                                        y : y + COLUMNS,
                                    ],
                                    mem.q[
                                        w * WARPGROUP_ROWS + i * HP : w * WARPGROUP_ROWS + (i * HP + HP), y : y + COLUMNS
                                    ],
                                    barrier=mem.q_ready[w],
                                )
                            else:
                                T.tma_copy(
                                    mem.Q[
                                        place[1],
                                        place[2] + i,
                                        place[4] + w * TW : place[4] + (w * TW + TW),
                                        y : y + COLUMNS,
                                    ],
                                    mem.q[
                                        w * WARPGROUP_ROWS + i * TW : w * WARPGROUP_ROWS + (i * TW + TW), y : y + COLUMNS
                                    ],
                                    barrier=mem.q_ready[w],
                                )
                    T.barrier_arrive(mem.q_ready[w])

        @T.macro
        def run(args, n, cta, grid):
            mem = SimpleNamespace(
                **vars(args),
                **vars(rings(tiles, dtype, 128 * W)),
                q=T.alloc_shared([ROWS, DP], dtype),
                q_ready=T.alloc_barrier(arrive_count=[32] * W),
                q_free=T.alloc_barrier(arrive_count=[128] * W),
            )
            T.pdl_sync()  # the lists: this kernel may be started while they are made
            thread = T.get_thread_binding()
            if thread < 128 * W:
                if W == 2:
                    T.set_max_nreg(224, 1)
                consume(mem, n, cta, grid)
            else:
                if W == 2:
                    T.set_max_nreg(56, 0)
                if thread < 128 * W + 32:
                    do.load_keys_and_values(mem, n, cta, grid)
                elif thread < 128 * W + 64:
                    load_queries(mem, n, cta, grid)

        return entry(tiles, dtype, 128 * (W + 1), run, "sparse_attn_union", PRELUDE)


# === sparse_attn/backends/triton_ascend/__init__.py ==================================================================

if SECTION == "backends.triton_ascend":  # annotations are values
    """Ascend 910B, by a Triton kernel for its cube and vector cores (triton-ascend). See ``adapter`` for the way in."""

    from .adapter import backend

    __all__ = ["backend"]


# === sparse_attn/backends/triton_ascend/adapter.py ===================================================================

if SECTION == "backends.triton_ascend.adapter":
    """The backend's object: what it can run, and the way from the operator's arguments to one launch."""

    import math
    from collections.abc import Sequence
    from functools import cache
    from typing import Any, NamedTuple

    import torch
    from torch import Tensor

    from ...contract import Problem
    from .attention import attention_kernel
    from .block_lists import MAX_SORTED, block_lists
    from .plan import MOST_CORES, MOST_HEADS, Tiles, padded, tiles_for

    MAX_FEATURES = 256
    MAX_BLOCK = 128
    # Offsets inside a tile are 32-bit numbers.
    _MAX_OFFSET = 2**31
    # Ids are sorted with their segment and place as one fp32 number.
    MAX_TOPK = 2**18


    class Launch(NamedTuple):
        """The kernel with everything it is launched with, as a value: tests compile it, or run it on a CPU.

        Attributes:
            kernel: the kernel.
            programs: how many share the tasks; on a device, at most the cube cores that it has.
            args: in the order of the kernel's parameters, up to the constants.
            constants: what the kernel is compiled for, by name.
        """

        kernel: Any
        programs: int
        args: tuple[Any, ...]
        constants: dict[str, Any]

        def run(self) -> None:
            """Launch on the current device and stream."""
            self.kernel[(self.programs,)](*self.args, **self.constants)


    class TritonAscendBackend:
        """Forward pass in fp16 and bf16 with up to 256 features and blocks of up to 128 keys."""

        def unsupported(self, problem: Problem) -> Sequence[str]:
            reasons = []
            if problem.dtype not in (torch.float16, torch.bfloat16):
                reasons.append(f"needs fp16 or bf16, got {str(problem.dtype).removeprefix('torch.')}")
            reasons.extend(
                f"needs {name} <= {MAX_FEATURES}, got {name}={getattr(problem, name)}"
                for name in ("D", "Dv")
                if getattr(problem, name) > MAX_FEATURES
            )
            if min(problem.block_size, problem.M) > MAX_BLOCK:
                reasons.append(f"needs block_size or M <= {MAX_BLOCK}, got {problem.block_size} and M={problem.M}")
            if problem.topk > MAX_TOPK:
                reasons.append(f"needs topk <= {MAX_TOPK}, got {problem.topk}")
            if 4 * problem.num_blocks >= MAX_SORTED:
                reasons.append(f"needs fewer than 2**22 key blocks, got {problem.num_blocks}")
            # So many heads of N rows are what a tile of q, copied if need be, or of the result spans.
            heads, width = min(padded(problem.group), MOST_HEADS), max(problem.D, problem.Dv)
            if problem.N * width * heads >= _MAX_OFFSET:
                reasons.append(
                    f"needs N * max(D, Dv) < 2**31 / {heads} with {problem.group} heads in a group, got N={problem.N}, "
                    f"D={problem.D} and Dv={problem.Dv}"
                )
            return reasons

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            B, Hq, N, _ = q.shape
            M, Dv = v.shape[2:]
            if 0 in (B, N, M, index.shape[3], Dv):
                out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
                return out, torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
            out, lse, launch = prepare(q, k, v, index, block_size, sm_scale, q_offset, return_lse)
            if q.device.type == "npu":
                with torch.npu.device(q.device):  # type: ignore[attr-defined]  # Triton launches on the current device
                    launch._replace(programs=min(launch.programs, cube_cores(q.device))).run()
            else:
                launch.run()
            return out, lse


    def prepare(
        q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int, return_lse: bool,
        tiles: Tiles | None = None,
    ) -> tuple[Tensor, Tensor | None, Launch]:  # fmt: skip
        """Make results, unfilled, and the launch that fills them. No argument is empty; ``tiles`` replaces the plan's."""
        B, Hq, N, D = q.shape
        _, Hk, M, Dv = v.shape
        g, topk = Hq // Hk, index.shape[3]
        block_size = min(block_size, M)
        q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
        if tiles is None:
            tiles = tiles_for(g, N, M, D, Dv, block_size, B * Hk)
        q = _readable(q, {1: tiles.heads, 2: tiles.T})
        k, v = (_readable(x, {2: tiles.BN}) for x in (k, v))
        lists = block_lists(index, M, block_size, q_offset, tiles.T, mask_all=block_size % tiles.BN != 0)
        out = torch.empty((B, Hq, N, Dv), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, Hq, N), dtype=torch.float32, device=q.device) if return_lse else None
        n_tiles, chunks = -(-N // tiles.T), -(-g // tiles.heads)
        tasks = B * Hk * chunks * n_tiles
        args = (
            q, k, v, out, out if lse is None else lse, lists.blocks, lists.masks, lists.fields, sm_scale,
            *_strides(q), *_strides(k), *_strides(v), block_size,
            Hk, g, N, M, q_offset, tiles.T * topk, n_tiles, tasks,
        )  # fmt: skip
        constants = {
            "D": D, "DV": Dv, "D_PADDED": padded(D), "DV_PADDED": padded(Dv), "HEADS": tiles.heads, "T": tiles.T,
            "BN": tiles.BN, "LSE": return_lse,
        }  # fmt: skip
        return out, lse, Launch(attention_kernel, min(tasks, MOST_CORES), args, constants)


    def _readable(x: Tensor, tile: dict[int, int]) -> Tensor:
        """Features side by side, and a tile, so long along these axes, within 2**31 elements along each: else a copy."""
        within = all(_strides(x)[axis] * length < _MAX_OFFSET for axis, length in tile.items())
        return x if x.stride(3) == 1 and within else x.contiguous()


    def _strides(x: Tensor) -> list[int]:
        """The first three; 0 where there is nothing to step over, whatever the tensor says."""
        return [stride if length > 1 else 0 for length, stride in zip(x.shape[:3], x.stride(), strict=False)]


    @cache
    def cube_cores(device: torch.device) -> int:
        """Cube cores of a device, of which a grid needs no more programs than there are."""
        from triton.runtime import driver

        return int(driver.active.utils.get_device_properties(device.index)["num_aicore"])


    backend = TritonAscendBackend()


# === sparse_attn/backends/triton_ascend/attention.py =================================================================

if SECTION == "backends.triton_ascend.attention":  # annotations are values
    """The attention kernel for the 910B: one tile of queries walks the blocks that its queries selected.

    Written to what the compiler does with it (docs/ascend.md): a grid as large as the cores with a loop over tiles inside;
    block ids as scalars and tiles of k and v as contiguous rows, which the cube core then copies into its L1 by itself; no
    branch around a product; a finite number for "nothing"; 64-bit numbers in scalars only.

    The softmax is the online one of FlashAttention-2 (Dao 2023, algorithm 1): m_i is the largest score so far, l_i the sum
    of ``exp(score - m_i)``.
    """

    import triton
    import triton.language as tl

    from .block_lists import FIELDS as _FIELDS

    FIELDS = tl.constexpr(_FIELDS)
    # Below every score, and in its place where nothing was seen. -inf would make NaN of the difference of two of them.
    NOTHING = tl.constexpr(-1.0e30)
    # What is subtracted instead: a row that saw nothing so far gets weights of exp(NOTHING - LEAST) = 0.
    LEAST = tl.constexpr(-1.0e29)

    _SIZES = ["Hk", "g", "N", "M", "q_offset", "capacity", "tiles", "tasks"]


    @triton.jit
    def _step(q_tile, k_tile, v_tile, m_i, l_i, acc, scale, hide):
        """Scores of a tile of keys that a query sees as a whole; or not at all, with ``hide`` 1e30 instead of 0."""
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        m_new = tl.maximum(m_i, tl.max(s, 1) - hide)
        return _add(s, tl.maximum(m_new, LEAST) + hide, v_tile, m_i, m_new, l_i, acc)


    @triton.jit
    def _masked_step(q_tile, k_tile, v_tile, m_i, l_i, acc, scale, seen):
        """The same where a query sees some of the keys."""
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        s = tl.where(seen[None, :], s, NOTHING)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        return _add(s, tl.maximum(m_new, LEAST), v_tile, m_i, m_new, l_i, acc)


    @triton.jit
    def _add(s, shift, v_tile, m_i, m_new, l_i, acc):
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        return m_new, l_i, tl.dot(p.to(v_tile.dtype), v_tile, acc)


    @triton.jit
    def _load_rows(base, stride, rows, features, n, width, PADDED: tl.constexpr):
        """Rows of which the first n are there, zero behind; features, zero from ``width`` on."""
        pointers = base + rows[:, None] * stride + features[None, :]
        if PADDED:
            return tl.load(pointers, (rows < n)[:, None] & (features < width)[None, :], other=0.0)
        else:
            return tl.load(pointers, (rows < n)[:, None], other=0.0)


    @triton.jit
    def _load_whole(base, stride, rows, features, width, PADDED: tl.constexpr):
        """The same where all rows are there: without a mask over rows, a tile is not zeroed before it is loaded."""
        pointers = base + rows[:, None] * stride + features[None, :]
        if PADDED:
            return tl.load(pointers, (features < width)[None, :], other=0.0)
        else:
            return tl.load(pointers)


    @triton.jit
    def _store(out, lse, m_i, l_i, acc, row, N, heads, n, features, DV: tl.constexpr, LSE: tl.constexpr):
        """The first n heads of one query. A row that saw nothing has l_i = 0, and is 0; NaN stays NaN."""
        acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        o = out + row * DV + heads[:, None] * (N * DV) + features[None, :]
        tl.store(o, acc.to(out.dtype.element_ty), (heads < n)[:, None] & (features < DV)[None, :])
        if LSE:
            tl.store(lse + row + heads * N, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_i)), heads < n)


    @triton.jit
    def _bit(mask, t):
        return (mask >> t) & 1


    @triton.jit(do_not_specialize=_SIZES)
    def attention_kernel(
        q, k, v, out, lse, blocks, masks, fields, scale,
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, block_size,
        Hk, g, N, M, q_offset, capacity, tiles, tasks,
        D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
        HEADS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, LSE: tl.constexpr,
    ):  # fmt: skip
        """Tasks are (tile of T queries; HEADS heads; b, hk), dealt out to the programs one by one. T is 1, 2 or 4.

        Each query of a tile has its own scores and sums, HEADS rows of them, which is what a cube core multiplies at once;
        a tile of k and v is loaded once for all of them. With T = 2 the lists tell apart what only one query selected, and
        nothing is computed in vain; with T = 4 all four take every block, and weights are 0 where one did not select it.
        """
        heads = tl.arange(0, HEADS)
        features = tl.arange(0, D_PADDED)
        part = tl.arange(0, DV_PADDED)
        keys = tl.arange(0, BN)
        per_block = tl.cdiv(block_size, BN)
        chunks = tl.cdiv(g, HEADS)
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            tile = task % tiles
            chunk = task // tiles % chunks
            bh = task // tiles // chunks
            b = (bh // Hk).to(tl.int64)
            hk = (bh % Hk).to(tl.int64)
            head = hk * g + chunk * HEADS
            n_heads = g - chunk * HEADS
            i = tile * T
            list_row = bh.to(tl.int64) * tiles + tile
            fields_row = fields + list_row * FIELDS
            together = tl.load(fields_row)
            first_only = tl.load(fields_row + 1)
            second_only = tl.load(fields_row + 2)
            end = tl.load(fields_row + 3)
            sees = tl.load(fields_row + 4)  # bit t: query t sees a key. One that sees none may hold anything: read as 0
            q_row = q + b * q_b + head * q_h + i.to(tl.int64) * q_n
            k_rows = k + b * k_b + hk * k_h
            v_rows = v + b * v_b + hk * v_h
            ids = blocks + list_row * capacity
            selected = masks + list_row * capacity

            q0 = _load_rows(q_row, q_h, heads, features, n_heads * _bit(sees, 0), D, D_PADDED > D)
            m0 = tl.full([HEADS], NOTHING, tl.float32)
            l0 = tl.zeros([HEADS], tl.float32)
            acc0 = tl.zeros([HEADS, DV_PADDED], tl.float32)
            q1, m1, l1, acc1 = q0, m0, l0, acc0
            q2, m2, l2, acc2 = q0, m0, l0, acc0
            q3, m3, l3, acc3 = q0, m0, l0, acc0
            if T >= 2:
                q1 = _load_rows(q_row + q_n, q_h, heads, features, n_heads * _bit(sees, 1), D, D_PADDED > D)
            if T == 4:
                q2 = _load_rows(q_row + 2 * q_n, q_h, heads, features, n_heads * _bit(sees, 2), D, D_PADDED > D)
                q3 = _load_rows(q_row + 3 * q_n, q_h, heads, features, n_heads * _bit(sees, 3), D, D_PADDED > D)

            # Blocks of which every key is seen.
            for e in range(0, together * per_block):
                first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
                k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
                v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
                if T < 4:
                    m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, 0.0)
                    if T == 2:
                        m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, 0.0)
                else:
                    mask = tl.load(selected + e // per_block)
                    m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, (1 - _bit(mask, 0)) * 1.0e30)
                    m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, (1 - _bit(mask, 1)) * 1.0e30)
                    m2, l2, acc2 = _step(q2, k_tile, v_tile, m2, l2, acc2, scale, (1 - _bit(mask, 2)) * 1.0e30)
                    m3, l3, acc3 = _step(q3, k_tile, v_tile, m3, l3, acc3, scale, (1 - _bit(mask, 3)) * 1.0e30)
            if T == 2:
                for e in range(together * per_block, first_only * per_block):
                    first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
                    k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
                    v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
                    m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, 0.0)
                for e in range(first_only * per_block, second_only * per_block):
                    first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
                    k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
                    v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
                    m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, 0.0)
            # Blocks of which some key is hidden from some query, or that do not end with a tile of BN keys.
            for e in range(second_only * per_block, end * per_block):
                block = tl.load(ids + e // per_block)
                mask = tl.load(selected + e // per_block)
                first = block * block_size + e % per_block * BN
                stop = tl.minimum(block * block_size + block_size, M) - first
                seen = i + q_offset + 1 - first  # keys of this tile, for query 0
                n0 = tl.minimum(stop, seen) * _bit(mask, 0)
                n1 = tl.minimum(stop, seen + 1) * _bit(mask, 1)
                n2 = tl.minimum(stop, seen + 2) * _bit(mask, 2)
                n3 = tl.minimum(stop, seen + 3) * _bit(mask, 3)
                n = n0  # what lies behind the last key seen may be NaN: it is not loaded
                if T >= 2:
                    n = tl.maximum(n, n1)
                if T == 4:
                    n = tl.maximum(n, tl.maximum(n2, n3))
                first_64 = first.to(tl.int64)
                k_tile = _load_rows(k_rows + first_64 * k_n, k_n, keys, features, n, D, D_PADDED > D)
                v_tile = _load_rows(v_rows + first_64 * v_n, v_n, keys, part, n, DV, DV_PADDED > DV)
                m0, l0, acc0 = _masked_step(q0, k_tile, v_tile, m0, l0, acc0, scale, keys < n0)
                if T >= 2:
                    m1, l1, acc1 = _masked_step(q1, k_tile, v_tile, m1, l1, acc1, scale, keys < n1)
                if T == 4:
                    m2, l2, acc2 = _masked_step(q2, k_tile, v_tile, m2, l2, acc2, scale, keys < n2)
                    m3, l3, acc3 = _masked_step(q3, k_tile, v_tile, m3, l3, acc3, scale, keys < n3)

            row = (b * Hk * g + head) * N + i
            _store(out, lse, m0, l0, acc0, row, N, heads, n_heads, part, DV, LSE)
            if T >= 2:
                n = tl.where(i + 1 < N, n_heads, 0)
                _store(out, lse, m1, l1, acc1, row + 1, N, heads, n, part, DV, LSE)
            if T == 4:
                n = tl.where(i + 2 < N, n_heads, 0)
                _store(out, lse, m2, l2, acc2, row + 2, N, heads, n, part, DV, LSE)
                n = tl.where(i + 3 < N, n_heads, 0)
                _store(out, lse, m3, l3, acc3, row + 3, N, heads, n, part, DV, LSE)


# === sparse_attn/backends/triton_ascend/block_lists.py ===============================================================

if SECTION == "backends.triton_ascend.block_lists":
    """Block lists: which key blocks a tile of queries walks, and which of its queries selected each.

    This is where the set semantics of ``index`` are settled, once. In torch's operators rather than a kernel: comparing all
    ids of a tile with each other fits no 910B vector core's buffer beyond 16 ids at a time (docs/ascend.md), and sorting is
    what the vendor's library does well. Nothing is read on the host, and no length of a tensor depends on what index holds.
    """

    from typing import NamedTuple

    import torch
    import torch.nn.functional as F
    from torch import Tensor

    # Numbers kept for each tile: the ends of its four segments, and a mask of the queries that see any key.
    FIELDS = 5
    # Sorted as fp32, which a 910B sorts on its vector cores, ids stay exact below this; times the queries of a tile.
    MAX_SORTED = 2**24


    class BlockLists(NamedTuple):
        """Lists of all tiles.

        Attributes:
            blocks: int32 ``[B * Hk * tiles, capacity]``, ids in ascending order within a segment.
            masks: int32, the same shape: bit t for query t of the tile.
            fields: int32 ``[B * Hk * tiles, 5]``: ends of the segments (below), mask of the queries that see anything.

        Segments: blocks that several queries take, or one query that is alone in its tile; that only the first of two
        queries takes; that only the second takes; blocks in which some key is hidden from some query (behind the diagonal,
        past the end of the keys), or all blocks if single keys have to be masked anyway.
        Tiles of four leave the second and third empty.
        """

        blocks: Tensor
        masks: Tensor
        fields: Tensor


    def block_lists(index: Tensor, M: int, block_size: int, q_offset: int, T: int, mask_all: bool) -> BlockLists:
        """Lists for tiles of ``T`` queries: 1, 2 or 4.

        Args:
            index: ``[B, Hk, N, topk]``, int32 or int64, any strides; topk at least 1.
            mask_all: put all blocks into the last segment.
        """
        B, Hk, N, topk = index.shape
        device = index.device
        tiles, num_blocks = -(-N // T), -(-M // block_size)
        capacity = T * topk
        # The last block of which query i sees a key, for every query of every tile; -1: none.
        position = torch.arange(tiles * T, dtype=torch.int32, device=device) + q_offset
        last = torch.div(position, block_size, rounding_mode="floor").clamp(-1, num_blocks - 1)
        last[N:] = -1
        ids = F.pad(index, (0, 0, 0, tiles * T - N), value=-1)
        valid = (ids >= 0) & (ids <= last[:, None])
        seen = (valid.any(-1).reshape(B * Hk * tiles, T).int() << torch.arange(T, dtype=torch.int32, device=device)).sum(-1)

        # One number for an id and the query that named it, in order: what is the same stands side by side.
        query = torch.arange(tiles * T, dtype=torch.int32, device=device)[:, None] % T
        named = torch.where(valid, ids * T + query, num_blocks * T).reshape(B * Hk * tiles, capacity)
        named = named.float().sort(-1).values.int()
        block, query = named // T, named % T
        real = block < num_blocks
        before, behind = (F.pad(x, edge, value=-1) for x, edge in ((named[:, :-1], (1, 0)), (block[:, 1:], (0, 1))))
        starts = real & (block != torch.div(before, T, rounding_mode="floor"))
        ends = real & (block != behind)
        # Queries of a block: what the sum of bits, once for each pair, grows by from the end of one block to the next's.
        bits = ((real & (named != before)).int() << query).cumsum(-1, dtype=torch.int32)
        place = starts.cumsum(-1, dtype=torch.int32) - 1
        blocks = _gathered(block, place, ends, capacity)
        bits = _gathered(bits, place, ends, capacity)
        n = starts.sum(-1, dtype=torch.int32)
        there = torch.arange(capacity, dtype=torch.int32, device=device) < n[:, None]
        masks = torch.where(there, bits - F.pad(bits[:, :-1], (1, 0)), 0)

        # Every query sees all keys of the blocks before this one.
        first_position = position[::T].repeat(B * Hk)
        edge = torch.div((first_position + 1).clamp(0, M), block_size, rounding_mode="floor")
        segment = torch.zeros_like(masks)
        if T == 2:
            segment = torch.where(masks == 3, 0, masks)
        masked = torch.ones_like(there) if mask_all else blocks >= edge[:, None]
        segment = torch.where(there, torch.where(masked, 3, segment), 4)
        # Ids keep their order within a segment. A number for a segment and a place is exact in fp32, too: topk is limited.
        order = (segment * capacity + torch.arange(capacity, dtype=torch.int32, device=device)).float().argsort(-1)
        ends_of = torch.stack([(segment <= s).sum(-1, dtype=torch.int32) for s in range(4)], -1)
        return BlockLists(
            blocks.gather(-1, order).contiguous(),
            masks.gather(-1, order).contiguous(),
            torch.cat([ends_of, seen[:, None].int()], -1).contiguous(),
        )


    def _gathered(values: Tensor, place: Tensor, chosen: Tensor, capacity: int) -> Tensor:
        """What is chosen of each row, at its place; 0 behind. Everything else goes to a column that is cut off."""
        out = torch.zeros(values.shape[0], capacity + 1, dtype=torch.int32, device=values.device)
        return out.scatter_(-1, torch.where(chosen, place, capacity).long(), values)[:, :capacity]


# === sparse_attn/backends/triton_ascend/plan.py ======================================================================

if SECTION == "backends.triton_ascend.plan":
    """Tile sizes by a problem's shape alone. What they rest on is in docs/ascend.md: compiled, never timed on a device."""

    from typing import NamedTuple

    # Rows of a product: a fractal of the cube has 16; 32 are what the compilers' plans for the vector cores' buffer hold.
    _LEAST_HEADS, MOST_HEADS = 16, 32
    # Rows of all queries of a tile, by padded width: each has its own scores and sums in that buffer.
    _MOST_ROWS = {128: 64, 256: 32}
    # Queries of a tile, where they fit. Four share more, but take every block of their union, and the newest compiler
    # overlaps cube and vector cores over several blocks only for fewer: the first thing to compare on a device.
    QUERIES = 2
    # Cube cores of the largest 910B: below that many tiles, cores idle.
    MOST_CORES = 24


    class Tiles(NamedTuple):
        """Tiles of the attention kernel.

        Attributes:
            heads: rows of one query's product; a group that has more goes to several tasks.
            T: queries of a tile.
            BN: keys at a time.
        """

        heads: int
        T: int
        BN: int


    def tiles_for(g: int, N: int, M: int, D: int, Dv: int, block_size: int, lanes: int) -> Tiles:
        """Choose tiles.

        Args:
            lanes: tasks for each query, ``B * Hk``; with few of them, queries are not worth sharing a tile.
        """
        width = max(padded(D), padded(Dv))
        heads = min(padded(g), MOST_HEADS)
        BN = min(64 if width <= 128 else 32, padded(min(block_size, M)))
        T = min(QUERIES, _MOST_ROWS[max(width, 128)] // heads)
        return Tiles(heads, T if N * lanes >= T * MOST_CORES else 1, BN)


    def padded(n: int) -> int:
        """The power of two, at least 16, that holds n."""
        return max(_LEAST_HEADS, 1 << max(0, n - 1).bit_length())


# === sparse_attn/backends/torch_npu/__init__.py ======================================================================

if SECTION == "backends.torch_npu":  # annotations are values
    """The backend that maps the operator onto torch_npu's fused attention for decoding with a paged cache.

    ``mapping`` turns a call into such a decoding, in plain torch: every query of every key/value head is a sequence of its
    own with one new token, whose pages are the blocks that it selects. ``fused_op`` is the one place that knows torch_npu.
    ``adapter`` says what that operator takes, calls it, and undoes the mapping.
    """

    from .adapter import backend

    __all__ = ["backend"]


# === sparse_attn/backends/torch_npu/adapter.py =======================================================================

if SECTION == "backends.torch_npu.adapter":
    """The backend's object: what it can run, and the way to the fused operator and back."""

    import math
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ...contract import Problem
    from . import mapping
    from .fused_op import paged_attention

    # Limits that the operator's documentation gives for one query a row. Rows beyond the first go to another call.
    MAX_ROWS = 65536
    MAX_PAGE = 512
    MAX_KEYS = 262144
    MAX_FEATURES = 512
    MAX_GROUP = 64
    MAX_ELEMENTS = 2**31 - 1
    # The documentation asks for it with several queries a row, and is silent for one.
    FEATURE_ALIGNMENT = 16

    _DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


    class TorchNpuBackend:
        """Forward pass in fp16 and bf16, by torch_npu's ``npu_fused_infer_attention_score_v2``, or the version before it.

        The operator takes the lengths of its rows as a list on the host. They depend on ``index``, so every call waits for
        the device once: it cannot be captured in a graph, and the host does not run ahead. This, and that no device has
        confirmed it, is why the automatic choice leaves it out.
        """

        def unsupported(self, problem: Problem) -> Sequence[str]:
            """Reasons from the operator's documented limits; a call with nothing to compute does not reach the operator."""
            reasons = []
            if problem.dtype not in (torch.float16, torch.bfloat16):
                reasons.append(f"needs fp16 or bf16, got {_DTYPES.get(problem.dtype, problem.dtype)}")
            if problem.Dv != problem.D:
                reasons.append(f"needs D == Dv, got D={problem.D} and Dv={problem.Dv}")
            if problem.D > MAX_FEATURES or problem.D % FEATURE_ALIGNMENT:
                reasons.append(f"needs D <= {MAX_FEATURES} and a multiple of {FEATURE_ALIGNMENT}, got D={problem.D}")
            if problem.group > MAX_GROUP:
                reasons.append(f"needs Hq / Hk <= {MAX_GROUP}, got {problem.group}")
            if problem.M and problem.topk:
                reasons += _page_limits(problem)
            return reasons

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            index: Tensor,
            block_size: int,
            sm_scale: float,
            q_offset: int,
            return_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            """Contract: :class:`sparse_attn.contract.Backend`. Waits for the device once, for the rows' lengths."""
            B, Hq, N, D = q.shape
            Hk, M = k.shape[1:3]
            if 0 in (B, N, M, index.shape[3]):
                out = torch.zeros(B, Hq, N, D, dtype=q.dtype, device=q.device)
                lse = torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
                return out, lse
            size = mapping.page_size(M, block_size)
            k_pages, v_pages = mapping.pages(k, size), mapping.pages(v, size)
            q_rows = mapping.queries_to_rows(q, Hk)
            tables, row_lengths, empty = mapping.rows(index, M, block_size, q_offset)
            lengths = row_lengths.tolist()
            outs, lses = [], []
            for start in range(0, len(lengths), MAX_ROWS):
                part = slice(start, start + MAX_ROWS)
                out, lse = paged_attention(
                    q_rows[part], k_pages, v_pages, tables[part], lengths[part], sm_scale, return_lse
                )
                outs.append(out)
                lses.append(lse)
            # Rows that see nothing have looked at one key, which may hold NaN: replaced, not multiplied.
            nothing = empty.view(-1, 1, 1, 1)
            out = mapping.rows_to_queries(_join(outs).masked_fill_(nothing, 0), B, Hk, N)
            if not return_lse:
                return out, None
            lse = mapping.rows_to_queries(_join(lses).masked_fill_(nothing, -math.inf), B, Hk, N)
            return out, lse.squeeze(-1)


    def _join(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)


    def _page_limits(problem: Problem) -> list[str]:
        reasons = []
        M, block_size = problem.M, problem.block_size
        size = mapping.page_size(M, block_size)
        if size > MAX_PAGE or size % mapping.PAGE_ALIGNMENT:
            reasons.append(
                f"needs block_size <= {MAX_PAGE} and a multiple of {mapping.PAGE_ALIGNMENT}, or a single block of at most "
                f"{MAX_PAGE} keys, got block_size={block_size} and M={M}"
            )
        keys = mapping.table_width(M, problem.topk, block_size) * size
        if keys > MAX_KEYS:
            reasons.append(f"needs min(topk, ceil(M / block_size)) * block_size <= {MAX_KEYS}, got {keys}")
        elements = problem.B * problem.Hk * problem.num_blocks * size * problem.D
        if elements > MAX_ELEMENTS:
            reasons.append(f"needs k and v of less than 2**31 elements, filled up to whole blocks, got {elements}")
        return reasons


    backend = TorchNpuBackend()


# === sparse_attn/backends/torch_npu/mapping.py =======================================================================

if SECTION == "backends.torch_npu.mapping":
    """From the operator's arguments to a paged cache, a table of pages for each row, and the rows' lengths.

    A *row* is one query of one key/value head with the g query heads of that group: ``R = B * Hk * N`` rows, ordered as
    ``[B, Hk, N]``. A *page* is a block of keys of one batch entry and key/value head. No value is read on the host here.

    A row has no mask: it sees the first ``lengths[r]`` keys of its pages, one page after the other. That is enough. Query i
    may see keys before ``L = clamp(i + q_offset + 1, 0, M)``, and of the blocks that it selects it sees those before block
    ``L // block_size`` whole, that one up to key L, and later ones not at all. Whether L stands for the query's position or
    for the end of the keys makes no difference: at most one block is seen in part, and it has the largest id that counts.
    With ids in ascending order it is the row's last page, and the row's length ends within it.
    """

    from typing import NamedTuple

    import torch
    from torch import Tensor

    # What a page's length has to be a multiple of.
    PAGE_ALIGNMENT = 16


    class Rows(NamedTuple):
        """What each of the R rows sees.

        ``tables`` ``[R, W]`` int32: the row's pages; what is behind them names a page too, so that it may be read.
        ``lengths`` ``[R]`` int64: keys seen, at least 1. ``empty`` ``[R]`` bool: in truth none, the result is void.
        """

        tables: Tensor
        lengths: Tensor
        empty: Tensor


    def page_size(M: int, block_size: int) -> int:
        """Keys in a page: those of a block. A single block need not be longer than the keys in it."""
        return block_size if block_size < M else -(-M // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


    def table_width(M: int, topk: int, block_size: int) -> int:
        """Columns of a table: no row has more pages than there are ids, or blocks."""
        return min(topk, -(-M // block_size))


    def pages(x: Tensor, size: int) -> Tensor:
        """See k or v ``[B, H, M, D]`` as pages ``[B * H * ceil(M / size), 1, size, D]``.

        A view if x is contiguous and size divides M. Otherwise a copy, with zeros behind the last key: no row's length
        reaches them, but a fused operator may load them, and what is uninitialised may be NaN.
        """
        B, H, M, D = x.shape
        count = -(-M // size)
        if count * size != M:
            padded = x.new_zeros(B, H, count * size, D)
            padded[:, :, :M] = x
            x = padded
        return x.contiguous().view(B * H * count, 1, size, D)


    def rows(index: Tensor, M: int, block_size: int, q_offset: int) -> Rows:
        """Turn index ``[B, Hk, N, topk]`` into rows. Needs ``M > 0`` and ``topk > 0``."""
        B, Hk, N, topk = index.shape
        num_blocks = -(-M // block_size)
        device = index.device
        seen = (torch.arange(1, N + 1, device=device) + q_offset).clamp(0, M)[:, None]
        whole, rest = seen // block_size, seen % block_size
        counts = (index >= 0) & (index < whole + (rest > 0))
        # What does not count gets an id behind all others, and so do repetitions, found as neighbours.
        ids = torch.where(counts, index, num_blocks).int().sort(-1).values
        repeated = torch.zeros_like(ids, dtype=torch.bool)
        repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]
        ids = ids.masked_fill(repeated, num_blocks).sort(-1).values[..., : table_width(M, topk, block_size)]

        valid = ids < num_blocks
        count = valid.sum(-1, keepdim=True)
        in_part = (valid & (ids == whole)).any(-1, keepdim=True)
        lengths = count * block_size - torch.where(in_part, block_size - rest, 0)
        empty = count == 0
        first_page = torch.arange(B * Hk, dtype=torch.int32, device=device).view(B, Hk, 1, 1) * num_blocks
        tables = ids.masked_fill(~valid, 0) + first_page
        # index may have any strides, and what is made of it may have them too.
        return Rows(tables.reshape(B * Hk * N, -1).contiguous(), lengths.masked_fill(empty, 1).flatten(), empty.flatten())


    def queries_to_rows(q: Tensor, Hk: int) -> Tensor:
        """``[B, Hq, N, D]`` -> ``[R, g, 1, D]``, contiguous."""
        B, Hq, N, D = q.shape
        return q.unflatten(1, (Hk, Hq // Hk)).transpose(2, 3).contiguous().view(B * Hk * N, Hq // Hk, 1, D)


    def rows_to_queries(x: Tensor, B: int, Hk: int, N: int) -> Tensor:
        """``[R, g, 1, D]`` -> ``[B, Hq, N, D]``, contiguous."""
        return x.view(B, Hk, N, x.shape[1], x.shape[3]).transpose(2, 3).flatten(1, 2).contiguous()


# === sparse_attn/backends/torch_npu/fused_op.py ======================================================================

if SECTION == "backends.torch_npu.fused_op":
    """The only place that knows torch_npu: its operator for paged decoding, in either of its two versions.

    Both compute the same; the second has other names and is the one that torch_npu's documentation recommends.
    """

    from collections.abc import Callable, Sequence
    from typing import NamedTuple

    from torch import Tensor


    class Version(NamedTuple):
        """The operator's name in torch_npu, and the names of those arguments that the versions call differently."""

        function: str
        heads: str
        scale: str
        lengths: str
        return_lse: str


    V2 = Version(
        "npu_fused_infer_attention_score_v2",
        heads="num_query_heads",
        scale="softmax_scale",
        lengths="actual_seq_kvlen",
        return_lse="return_softmax_lse",
    )
    V1 = Version(
        "npu_fused_infer_attention_score",
        heads="num_heads",
        scale="scale",
        lengths="actual_seq_lengths_kv",
        return_lse="softmax_lse_flag",
    )


    def paged_attention(
        q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Sequence[int], sm_scale: float, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of R rows of g heads, each to the first ``lengths[r]`` keys of its pages.

        Args:
            q: ``[R, g, 1, D]``, float16 or bfloat16, contiguous.
            k, v: pages, ``[P, 1, page, D]``, q's dtype, contiguous.
            tables: ``[R, W]``, int32, contiguous: ids of pages.
            lengths: R numbers from 1 to ``W * page``, on the host.
            sm_scale: factor on the scores.
            return_lse: compute the second result.

        Returns:
            out ``[R, g, 1, D]`` in q's dtype, and lse ``[R, g, 1, 1]`` in float32, natural logarithm.
        """
        function, version = _find()
        return function(q, k, v, **arguments(version, q, k, tables, lengths, sm_scale, return_lse))


    def arguments(
        version: Version, q: Tensor, k: Tensor, tables: Tensor, lengths: Sequence[int], sm_scale: float, return_lse: bool
    ) -> dict[str, object]:
        """The arguments behind q, k and v. All others keep their defaults: no mask, no quantisation."""
        return {
            version.heads: q.shape[1],
            "num_key_value_heads": 1,
            version.scale: sm_scale,
            "input_layout": "BNSD",
            "block_table": tables,
            "block_size": k.shape[2],
            version.lengths: lengths,
            version.return_lse: return_lse,
            "inner_precise": 0,  # high precision: scores of float16 may pass its largest number
        }


    def _find() -> tuple[Callable[..., tuple[Tensor, Tensor]], Version]:
        # Here, not on top: what comes this far is on an NPU, so torch_npu is loaded, and the mapping is tested without it.
        import torch_npu

        version = V2 if hasattr(torch_npu, V2.function) else V1
        return getattr(torch_npu, version.function), version
