"""Everything that the project claims, measured: ``python -m bench.proof --out docs/results``.

Each run of :mod:`bench.claims` is a ``python -m bench`` in a process of its own, so that a crash costs its rows alone.
After each one ``results.json`` (all rows), ``results.md`` and ``index.html`` are written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparse_attn.registry import ENVIRONMENT_VARIABLE

from . import claims, proof_pages, table
from .claims import Proof, Run
from .environment import commit
from .results import is_bad, load
from .verdicts import judge, summary

COMMAND = (sys.executable, "-m", "bench")
_ROOT = Path(__file__).resolve().parent.parent
_EPILOG = """\
In several calls: --only, with the same --out; or --out in several places, and then --from with all their results.json.
README's table: --from docs/results/results.json --readme README.md, which needs lines <!-- results --> and
<!-- /results --> there, and writes between them.

exit status: 0, also where bars are missed; 1 if a run failed, or has a wrong result; 2 if the command line is wrong.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m bench.proof``."""
    p = argparse.ArgumentParser(
        prog="python -m bench.proof",
        description="Measure all that is claimed, and say of each bar whether it holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = [run.name for run in claims.RUNS]
    p.add_argument("--list", action="store_true", help="show the runs, and measure nothing")
    p.add_argument("--out", type=Path, metavar="DIR", help="write results.json, results.md and index.html into DIR")
    p.add_argument(
        "--only", nargs="+", action="extend", choices=names, metavar="NAME",
        help="make these runs alone; the others stay as they are in DIR/results.json. See --list",
    )  # fmt: skip
    p.add_argument(
        "--from", dest="stored", nargs="+", type=Path, metavar="FILE",
        help="measure nothing: take a results.json, or several; where two have the same run, the later one's",
    )  # fmt: skip
    p.add_argument("--readme", type=Path, metavar="FILE", help="write the table of the large points into FILE")
    p.add_argument("--commit", metavar="HASH", help="what is measured, where the copy at hand has no history")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say (default: the command line's) and return the exit status."""
    p = parser()
    args = p.parse_args(argv)
    if args.list:
        columns = (("run", _field(0)), ("what", _field(1)), ("python -m bench", _field(2)))
        table.show("Runs", columns, claims.RUNS)
        return 0
    if args.stored is None and args.out is None:
        p.error("needs --out DIR, or --from FILE")
    if args.stored is not None and args.only is not None:
        p.error("--from measures nothing: leave out --only")
    try:
        document = _stored(args)
        if args.readme is not None:
            proof_pages.between_markers(args.readme)  # which raises now, not after all runs
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        if args.stored is None:
            at = args.commit or commit(besides=args.out)  # now: files that are written make a tree differ
            for run in claims.RUNS:
                if args.only is None or run.name in args.only:
                    _put(document, run, at)
                    _write(document, args.out)
        elif args.out is not None:
            _write(document, args.out)
        if args.readme is not None:
            proof_pages.write_readme(args.readme, document)
    except (OSError, ValueError) as error:
        p.error(str(error))
    verdicts = judge(claims.BARS, document)
    table.show("Bars", proof_pages.BAR_COLUMNS, verdicts, [summary(verdicts)])
    return int(is_bad(document["rows"]) or any(entry["failed"] is not None for entry in document["runs"].values()))


def _field(position: int) -> Any:
    return lambda run: run[position]


# --- one run ----------------------------------------------------------------------------------------------------------


def _put(document: Proof, run: Run, at: str | None) -> None:
    """Make ``run`` of the commit ``at`` and put it into ``document``, in place of what was there."""
    start = time.monotonic()
    header, rows, failed = None, [], None
    try:
        measured = measure(run)
    except RuntimeError as error:
        failed = _without_places(str(error))
    else:
        header = {name: value for name, value in measured["header"].items() if name != "date"}
        header["commit"] = at
        header["notes"] = [_without_places(note) for note in header["notes"]]
        rows = [{"run": run.name, **row, "reason": _without_places(row["reason"])} for row in measured["rows"]]
    made = {"runs": {run.name: {"arguments": run.arguments, "failed": failed, "header": header}}, "rows": rows}
    _merge(document, made)
    said = f"failed: {failed}" if failed is not None else f"{len(rows)} rows"
    print(f"{run.name}: {said}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def measure(run: Run) -> dict[str, Any]:
    """Make one run, in a process of its own, and return its document.

    Raises:
        RuntimeError: if the process fails, with what it said last, or does not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    with tempfile.TemporaryDirectory(prefix="sparse_attn_proof_", ignore_cleanup_errors=True) as folder:
        result, said = Path(folder) / "run.json", Path(folder) / "stderr"
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                [*COMMAND, *run.words, "--json", str(result)], cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL,
                stderr=stderr, preexec_fn=os.setpgrp,
            )  # fmt: skip
            try:
                status = process.wait(run.timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # and what it started: compilers, fresh processes
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RuntimeError(f"no result within {run.timeout_s:.0f} s") from None
        if result.exists():
            try:
                return load(str(result))
            except ValueError as error:
                raise RuntimeError(str(error)) from None
        lines = [line for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    raise RuntimeError(f"{ended}: {lines[-1].strip()[:300]}" if lines else ended)


def _without_places(text: str | None) -> Any:
    """A reason without folders of the machine at hand."""
    if text is not None:
        for place, name in ((_ROOT, "."), (sys.prefix, "PYTHON"), (tempfile.gettempdir(), "TMP"), (Path.home(), "~")):
            text = text.replace(f"{place}/", f"{name}/")
    return text


# --- documents --------------------------------------------------------------------------------------------------------


def _stored(args: argparse.Namespace) -> Proof:
    """What the runs to come are added to, or what is to be shown."""
    document: Proof = {"runs": {}, "rows": []}
    files: list[Path] = args.stored or []
    if args.only is not None and (args.out / "results.json").exists():
        files = [args.out / "results.json"]
    for file in files:
        _merge(document, _read(file))
    return document


def _read(path: Path) -> Proof:
    wanted = f"{path}: needs a results.json that `python -m bench.proof` wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}; it cannot be read: {error}") from None
    if not isinstance(document, dict) or not {"runs", "rows"} <= document.keys():
        raise ValueError(wanted)
    return document


def _merge(document: Proof, other: Proof) -> None:
    """Put the runs of ``other`` into ``document``, in the order of ``RUNS``; runs that are made no more go."""
    runs = {**document["runs"], **other["runs"]}
    rows = [row for row in document["rows"] if row["run"] not in other["runs"]] + other["rows"]
    names = [run.name for run in claims.RUNS if run.name in runs]
    document["runs"] = {name: runs[name] for name in names}
    document["rows"] = [row for name in names for row in rows if row["run"] == name]


def _write(document: Proof, folder: Path) -> None:
    """The three files; of the JSON one line a run and a row, so that two versions can be compared."""
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in document["runs"].items())
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    text = f'{{"runs": {{\n{runs}\n}}, "rows": [\n{rows}\n]}}\n'
    (folder / "results.json").write_text(text, encoding="utf-8")
    proof_pages.write(document, folder)


if __name__ == "__main__":
    sys.exit(main())
