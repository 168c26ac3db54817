"""Every sentence that a user reads when a backend is refused, chosen against their wish, or unknown.

A reason says what is needed, then what was got, then what to do where something can be done.
"""

from __future__ import annotations

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
