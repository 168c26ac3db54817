"""The table of backends, and the choice among them.

``select`` is on the path of every call: for a problem seen before it is one look-up in a dictionary. Everything slower
(imports, reasons, plugins) happens when a problem is new.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, NamedTuple

from . import messages
from .backends import BUILTIN
from .contract import Backend, BackendSpec, Device, Problem
from .errors import BackendUnavailableError, FallbackWarning, PluginWarning, UnknownBackendError
from .preference import FALLBACK, PREFERENCE

ENVIRONMENT_VARIABLE = "SPARSE_ATTN_BACKEND"
ENTRY_POINT_GROUP = "sparse_attn.backends"
_AUTO = "auto"


class Override(NamedTuple):
    """A backend that somebody asked for by name, and the words in which they did, for messages."""

    name: str
    source: str


class Selection(NamedTuple):
    """The outcome of a choice: ``skipped`` has the backends tried before ``name``, with their reasons against."""

    name: str
    backend: Backend
    skipped: dict[str, tuple[str, ...]]
    warning: str | None


# --- the table -------------------------------------------------------------------------------------------------------

_BUILTIN_NAMES = frozenset(spec.name for spec in BUILTIN)
# Replaced, never changed: a thread that reads it needs no lock.
_specs: dict[str, BackendSpec] = {spec.name: spec for spec in BUILTIN}
_plugins_loaded = False
_table_lock = threading.RLock()


def register_backend(spec: BackendSpec) -> None:
    """Announce a backend at run time. Packages announce theirs with an entry point in ``sparse_attn.backends``.

    Raises:
        TypeError: if ``spec`` is not a :class:`BackendSpec`.
        ValueError: if the name is taken by another backend.
    """
    global _specs
    if not isinstance(spec, BackendSpec):
        raise TypeError(f"spec must be a BackendSpec, got {type(spec).__name__}")
    with _table_lock:
        if _specs.get(spec.name, spec) != spec:
            raise ValueError(f"the backend name {spec.name!r} is taken by {_specs[spec.name].target}")
        _specs = {**_specs, spec.name: spec}
    _forget()


def unregister_backend(name: str) -> None:
    """Take a backend out of the table that :func:`register_backend` put in.

    Raises:
        UnknownBackendError: if no backend has that name.
        ValueError: if it is one of those that ship.
    """
    global _specs
    if name in _BUILTIN_NAMES:
        raise ValueError(f"the backend {name!r} ships with sparse_attn and cannot be taken out")
    with _table_lock:
        _check_known(Override(name, f"unregister_backend({name!r})"))
        _specs = {other: spec for other, spec in _specs.items() if other != name}
    _forget()


def backend_specs() -> dict[str, BackendSpec]:
    """Every known backend by name: those that ship, then plugins."""
    _load_plugins()
    return dict(_specs)


def _forget() -> None:
    select.cache_clear()
    _missing.cache_clear()
    _load.cache_clear()


def _load_plugins() -> None:
    global _plugins_loaded
    if _plugins_loaded:
        return
    with _table_lock:
        if _plugins_loaded:  # by another thread while this one waited, or by a plugin that asks while it is loaded
            return
        _plugins_loaded = True
        from importlib.metadata import entry_points  # scans every installed distribution: not at import

        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                register_backend(entry_point.load())
            except Exception as error:  # a third party's code: whatever it raises must not break this package
                said = messages.plugin_ignored(entry_point.name, f"{type(error).__name__}: {error}")
                warnings.warn(said, PluginWarning, stacklevel=2)


# --- reasons, cheapest first -----------------------------------------------------------------------------------------


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


# --- the choice ------------------------------------------------------------------------------------------------------

_override: ContextVar[Override | None] = ContextVar("sparse_attn_override", default=None)
_last: ContextVar[str | None] = ContextVar("sparse_attn_last_backend", default=None)


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


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside on the backend ``name``, whatever ``SPARSE_ATTN_BACKEND`` says; ``"auto"`` for the table.

    Holds for the current thread or asynchronous task. A call that the backend cannot run raises
    :class:`BackendUnavailableError`: nothing else is tried.

    Raises:
        TypeError: if ``name`` is not a string.
        UnknownBackendError: if no backend has that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"use_backend needs a backend's name or 'auto', got {type(name).__name__}")
    override = Override(name.strip(), f"use_backend({name!r})")
    if override.name != _AUTO:
        _check_known(override)
    with override_as(override):
        yield


@contextmanager
def override_as(override: Override | None) -> Iterator[None]:
    """Put back what ``current_override`` returned elsewhere, e.g. in another thread; None is the automatic choice."""
    token = _override.set(override or Override(_AUTO, _AUTO))
    try:
        yield
    finally:
        _override.reset(token)


@lru_cache(maxsize=4096)  # bounded: a server sees a new M at every decoding step
def select(problem: Problem, override: Override | None = None) -> Selection:
    """Choose the backend that runs ``problem``.

    Raises:
        UnknownBackendError: if ``override`` names no backend.
        BackendUnavailableError: if the backend of ``override`` cannot run ``problem``, or no backend can.
    """
    _load_plugins()
    if override is not None:
        _check_known(override)
        reasons = reasons_against(override.name, problem)
        if reasons:
            raise BackendUnavailableError(messages.forced_unavailable(override.name, override.source, reasons))
        return Selection(override.name, _loaded(override.name), {}, None)

    skipped: dict[str, tuple[str, ...]] = {}
    reluctant: str | None = None
    for name in candidates(problem.device):
        if name == FALLBACK and reluctant is not None:  # slow, but made for the device
            del skipped[reluctant]
            return Selection(reluctant, _loaded(reluctant), skipped, _warning(reluctant, problem.device, skipped))
        if not _specs[name].automatic:  # not even imported: nobody has asked for it
            skipped[name] = (messages.not_automatic(name),)
            continue
        reasons = reasons_against(name, problem)
        if not reasons:
            reasons = reluctance(name, problem)
            if not reasons:
                return Selection(name, _loaded(name), skipped, _warning(name, problem.device, skipped))
            reluctant = reluctant or name
        skipped[name] = reasons
    raise BackendUnavailableError(messages.none_available(problem.device, skipped))


def candidates(device: Device) -> tuple[str, ...]:
    """Names of the backends for ``device`` in order of preference, those that run only on request included."""
    row = next(names for pattern, names in PREFERENCE if fnmatchcase(device.arch, pattern))
    plugins = [
        name
        for name, spec in _specs.items()
        if name not in _BUILTIN_NAMES and any(fnmatchcase(device.arch, pattern) for pattern in spec.architectures)
    ]
    return (*(name for name in row if name != FALLBACK), *plugins, FALLBACK)


def explanation(problem: Problem) -> messages.Explanation:
    """Say what would run ``problem`` under the current override, and why not each of the others."""
    _load_plugins()
    order = dict.fromkeys((*candidates(problem.device), *_specs))
    reasons = {name: reasons_against(name, problem) for name in order}
    override = current_override()
    how = override.source if override else f"automatic choice for {problem.device.arch}"
    try:
        chosen = select(problem, override).name
    except BackendUnavailableError:
        chosen = None
    on_request = frozenset(name for name in order if not _specs[name].automatic)
    slow = {name: reluctance(name, problem) for name in order if not reasons[name]}
    return messages.Explanation(chosen, how, problem.device, reasons, on_request, slow)


def last_backend() -> str | None:
    """Name of the backend that ran the latest forward call of this thread or task; None before the first."""
    return _last.get()


def record(selection: Selection, device: Device) -> None:
    """Remember what has run, and say so, the first time, if it was a fallback.

    Called afterwards, since a backend may call others on its way.
    """
    _last.set(selection.name)
    if selection.warning is not None:
        # The reasons may name lengths, which change with every call: what fell back to what is the key.
        key = (selection.name, device, tuple(selection.skipped))
        if key not in _warned:
            _warned.add(key)
            warnings.warn(selection.warning, FallbackWarning, stacklevel=5)  # the caller of sparse_attention


_warned: set[tuple[str, Device, tuple[str, ...]]] = set()


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


def _check_known(override: Override) -> None:
    if override.name not in backend_specs():
        raise UnknownBackendError(messages.unknown_backend(override.name, override.source, list(_specs)))
