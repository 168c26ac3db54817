"""Write ``solution.py``, one file that does what the package does: ``python -m bench.make_solution``.

It is ``solution_front.py`` and, behind it, every module that this and the backends need, found by their imports: each
as it is, indented under a condition, and loaded as ``solution_front`` says. Only of the modules in ``PARTS`` are there
parts: the definitions named here, and what these need.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sparse_attn.backends import BUILTIN

ROOT = Path(__file__).parent.parent
FRONT = ROOT / "bench" / "solution_front.py"
SOLUTION = ROOT / "solution.py"
PACKAGE = ROOT / "sparse_attn"

# Without plugins, torch.library and torch.compile, most of these modules has no use.
PARTS = {
    "ops": ("problem_of_call",),
    "registry": ("candidates", "current_override", "reasons_against", "reluctance", "_loaded", "_warning"),
}
_IMPORTS = (ast.Import, ast.ImportFrom)
_FUTURE = "from __future__ import annotations"


class Section(NamedTuple):
    """A module in ``solution.py``: its name behind that of the package, its file, its text, what it imports of it."""

    name: str
    path: Path
    source: str
    imports: list[str]


def solution() -> str:
    """The text of ``solution.py``."""
    front = FRONT.read_text(encoding="utf-8")
    found = sections(front)
    docstring = ast.parse(front).body[0].end_lineno
    lines = front.splitlines(keepends=True)
    return "".join([*lines[:docstring], *_contents(found), *lines[docstring:], *map(rendered, found)])


def _contents(found: list[Section]) -> list[str]:
    names = ", ".join(section.name for section in found)
    lines = textwrap.wrap(f"Behind the first part, in this order: {names}.", width=118)
    return ["\n", *(f"# {line}\n" for line in lines)]


def sections(front: str) -> list[Section]:
    """What the front asks for, then backend by backend; a module's imports follow it, in its order."""
    found: dict[str, Section] = {}

    def add(name: str) -> None:
        if name in found:
            return
        package, _, _ = name.rpartition(".")
        if package:  # is imported first
            add(package)
        found[name] = section = _read(name)
        for other in section.imports:
            add(other)

    for name in _sections_named(front):
        add(name)
    for spec in BUILTIN:
        add(spec.module.partition(".")[2])
    return list(found.values())


def _sections_named(front: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(front)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_section":
            assert isinstance(node.args[0], ast.Constant)
            yield str(node.args[0].value)


def _read(name: str) -> Section:
    path = _path(name)
    assert path is not None, f"there is no module sparse_attn.{name}"
    source = path.read_text(encoding="utf-8")
    if name in PARTS:
        source = _part(source, PARTS[name])
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    imports: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _IMPORTS) and not getattr(node, "level", 0):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(other.partition(".")[0] == PACKAGE.name for other in names), f"{path} names the package"
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            module = ".".join(filter(None, base))
            for alias in node.names:  # a module's name, or a name in a module
                inner = f"{module}.{alias.name}".strip(".")
                imports[inner if _path(inner) else module] = None
    assert "" not in imports, f"{path} imports from the package itself, which is not in solution.py"
    return Section(name, path, source, list(imports))


def _path(name: str) -> Path | None:
    """The file of a module, by its name behind that of the package."""
    path = PACKAGE.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


# --- a part of a module ----------------------------------------------------------------------------------------------


def _part(source: str, wanted: tuple[str, ...]) -> str:
    """The definitions of these names in a module and, as far as they need them, its other definitions and imports."""
    statements = [node for node in ast.parse(source).body if not _is_future(node)]
    defined = {name: node for node in statements for name in _defines(node)}
    needed: set[str] = set()
    left = list(wanted)
    while left:
        name = left.pop()
        if name in needed or name not in defined:  # a builtin, or a name inside of a function
            continue
        needed.add(name)
        if not isinstance(defined[name], _IMPORTS):
            left += [other.id for other in ast.walk(defined[name]) if isinstance(other, ast.Name)]
    assert needed.issuperset(wanted), f"not defined: {set(wanted) - needed}"

    lines = source.splitlines()
    part, before = f"{_FUTURE}\n", None
    for node in statements:
        if needed.isdisjoint(_defines(node)):
            continue
        if isinstance(node, _IMPORTS):
            node.names = [alias for alias in node.names if _bound(alias) in needed]
            text = ast.unparse(node)
        else:
            text = "\n".join(lines[_first_line(node, lines) : node.end_lineno])
        part += "\n" * _blank_lines(before, node) + text + "\n"
        before = node
    return part


def _defines(node: ast.stmt) -> list[str]:
    """Names that a statement of a module gives a meaning to."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, _IMPORTS):
        return [_bound(alias) for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """Of a definition with its decorators and the comment above, counted from 0."""
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", []))) - 1
    while first and lines[first - 1].startswith("# ") and not lines[first - 1].startswith("# ---"):
        first -= 1
    return first


def _blank_lines(before: ast.stmt | None, node: ast.stmt) -> int:
    """Between two statements, as a formatter wants them."""
    if before is None:
        return 1
    if any(isinstance(x, (ast.FunctionDef, ast.ClassDef)) for x in (before, node)):
        return 2
    kinds = [getattr(x, "level", 0) > 0 if isinstance(x, _IMPORTS) else None for x in (before, node)]
    return int(kinds[0] != kinds[1])


# --- a module as a section -------------------------------------------------------------------------------------------


def rendered(section: Section) -> str:
    """The lines of a section, with its heading and its condition."""
    lines = section.source.splitlines(keepends=True)
    evaluated = not any(_is_future(node) for node in ast.parse(section.source).body)
    if not evaluated:  # the front has this statement, and a section must not
        at = lines.index(f"{_FUTURE}\n")
        del lines[at : at + 1 + (lines[at + 1 : at + 2] == ["\n"])]
    inside = _inside_strings("".join(lines))
    body = [line if n in inside or line == "\n" else f"    {line}" for n, line in enumerate(lines, start=1)]
    where = section.path.relative_to(ROOT).as_posix() + (", in part" if section.name in PARTS else "")
    heading = f"# === {where} ".ljust(119, "=")
    condition = f'if SECTION == "{section.name}":' + ("  # annotations are values" if evaluated else "")
    return f"\n\n{heading}\n\n{condition}\n{''.join(body).rstrip()}\n"


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _inside_strings(source: str) -> set[int]:
    """Numbers of the lines that begin inside of a string, docstrings left out: what they begin with is a value."""
    tree = ast.parse(source)
    docs = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found: set[int] = set()
    middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, middle) and token.start[0] not in docs:
            found |= set(range(token.start[0] + 1, token.end[0] + 1))
    return found


if __name__ == "__main__":
    SOLUTION.write_text(solution(), encoding="utf-8")
    print(f"wrote {SOLUTION}")
