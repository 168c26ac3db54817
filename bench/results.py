"""The document that one run leaves behind: what ``--json`` writes, ``--from`` and ``--compare`` read.

It has three parts: ``header`` (see :func:`bench.environment.header`; and ``code_for``; ``peers``, the versions of those
that were asked for; ``peers_absent``; ``ceilings``, the fields of :class:`bench.roofline.Ceilings`, or null; and
``notes``, what else went wrong), ``rows`` (:meth:`bench.measure.Row.flat`) and ``support`` (:func:`support_matrix`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import sparse_attn
from sparse_attn import registry
from sparse_attn.__main__ import _typical_problem
from sparse_attn.device import present_devices

from .cases import Point
from .measure import Row
from .peers import PEERS, Peer
from .roofline import Ceilings
from .timers import L2

Document = dict[str, Any]
_POINT = tuple(field.name for field in fields(Point))
_NEEDED = (*_POINT, "dtype", "pattern", "requested_backend", "status", "median_ms")
_KNOWN = tuple(field.name for field in fields(Row) if field.name != "point")


def support_matrix() -> list[dict[str, str]]:
    """What ``python -m sparse_attn`` shows: ``device``, ``backend``, ``answer`` (chosen, yes, no) and ``why`` not.

    Of the automatic choice, whatever backend is forced here.
    """
    lines = []
    with sparse_attn.use_backend("auto"):
        for device in present_devices():
            explained = registry.explanation(_typical_problem(device))
            for name, reasons in explained.reasons.items():
                answer = "chosen" if name == explained.chosen else "no" if reasons else "yes"
                where = f"{device}: {explained.device}" if str(device) != str(explained.device) else str(device)
                lines.append({"device": where, "backend": name, "answer": answer, "why": explained.says(name)})
    return lines


def device_of(header: dict[str, Any]) -> str:
    """The device of a run, in the words of ``sparse_attn.contract.Device``, and whose code it ran."""
    name, arch = header["device"], header["arch"]
    text = str(name) if name == arch else f"{name} ({arch})"
    return f"{text}, code for {header['code_for']}" if header.get("code_for") else text


def ceilings_of(header: dict[str, Any]) -> Ceilings | None:
    """The ceilings that a run measured, if it did."""
    return Ceilings(**header["ceilings"]) if header.get("ceilings") else None


def names_of(row: dict[str, Any]) -> str:
    """The backend that ran, or that was asked for."""
    return row["resolved_backend"] or row["requested_backend"]


def is_bad(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a run deserves exit status 1: a result is wrong, something failed, or nothing was timed."""
    return any(row["status"] in ("FAIL", "error") for row in rows) or all(row["median_ms"] is None for row in rows)


def load(path: str) -> Document:
    """Read what ``--json`` wrote, now or in an earlier version, whose missing fields are filled in.

    Raises:
        ValueError: if it cannot be read, or is something else.
    """
    wanted = f"{path}: needs a file that `python -m bench --json FILE` wrote"
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}; it cannot be read: {error}") from None
    header = document.get("header") if isinstance(document, dict) else None
    if not isinstance(header, dict) or not {"device", "arch", "torch", "sparse_attn"} <= header.keys():
        raise ValueError(f"{wanted}, got JSON without its header")
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{wanted}, got one without measurements: --list and --overhead write others")
    for number, row in enumerate(rows):
        missing = [name for name in _NEEDED if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{wanted}; row {number} lacks {', '.join(missing)}")
    return {"header": header, "rows": [_filled(row) for row in rows], "support": document.get("support") or []}


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    whole = {**row, **{name: None for name in _KNOWN if name not in row}}
    whole["density"] = row.get("density") or Point(**{name: row[name] for name in _POINT}).density
    peer = {peer.name: peer for peer in PEERS}.get(row["requested_backend"])
    whole["kind"] = row.get("kind") or (peer.kind if peer else "backend")
    whole["l2"] = row.get("l2") or L2.get(row.get("timer") or "")
    return whole


def peer_facts(chosen: Sequence[Peer], absent: Sequence[Peer]) -> dict[str, Any]:
    """For the header: versions of the peers that are measured, and how those could be had that are not there."""
    from .environment import package_version

    versions = {peer.name: package_version(peer.distribution) for peer in chosen if peer.distribution != "torch"}
    return {"peers": versions, "peers_absent": {peer.name: peer.install for peer in absent}}
