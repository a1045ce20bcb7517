"""Lines of code: those of a method's own file, and those of blocks and networks that it uses.

A line counts that is neither blank nor comment nor docstring. What a method uses is followed from name to name: what
its file imports of blocks and networks, or has its `Setting` build, and what these definitions name in turn, each once.
So moving a definition from one block to another changes nothing, and its neighbours in a file do not count by it.
"""

import ast
import io
import tokenize
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOMS = ("fcil.blocks", "fcil.networks")
SETTING = "fcil.method"  # where `setting.classifier()` and its like are defined; its own lines do not count


class Lines(NamedTuple):
    """Lines of code: of a method's own file, and of what it uses of blocks and networks."""

    own: int
    used: int


def lines_of(module: str) -> Lines:
    """Count the lines of a method's module, and those of blocks and networks that it uses."""
    return Lines(code_lines(source_of(module)), sum(map(len, used(module).values())))


def code_lines(source: str) -> int:
    """Count the lines of a source that are neither blank nor comment nor docstring."""
    return len(_numbers(source))


def used(module: str) -> dict[str, set[int]]:
    """Return which lines of which blocks and networks a module uses, itself or through others."""
    found: dict[str, set[int]] = {}
    waiting: list[tuple[str, ast.stmt]] = [(module, part) for part in _read(source_of(module)).body]
    seen = set(waiting)
    while waiting:
        home, part = waiting.pop()
        if home.startswith(ROOMS):
            first = min([part.lineno, *(line.lineno for line in getattr(part, "decorator_list", ()))])
            own = set(range(first, (part.end_lineno or first) + 1)) & _numbers(source_of(home))
            found.setdefault(home, set()).update(own)
        new = {place for of, name in _names(part) for place in _places(home, of, name)} - seen
        seen |= new
        waiting += new
    return found


@cache
def source_of(module: str) -> str:
    """Return the text of a module's file."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


class _Read(NamedTuple):
    """A source: its statements, those that define a name, and what it imports of blocks and networks."""

    body: list[ast.stmt]
    defined: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str]]  # a name here: the module that it is from, and its name there


@cache
def _read(source: str) -> _Read:
    tree = ast.parse(source)
    read = _Read(tree.body, {}, {})
    for part in tree.body:
        for name in _defined(part):
            read.defined.setdefault(name, []).append(part)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(ROOMS):
            read.imported.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
    return read


def _defined(part: ast.stmt) -> list[str]:
    """Name what a statement of a module defines."""
    if isinstance(part, ast.ClassDef | ast.FunctionDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _names(part: ast.stmt) -> set[tuple[str, str]]:
    """Return the names that a statement uses, each with what it is a name of: a module, a setting, or nothing."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(part):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(("", node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
        elif isinstance(node, ast.Attribute) and ("", "setting") in _names(ast.Expr(node.value)):
            found.add(("setting", node.attr))  # as in replace(setting, norm="group").encoder(...)
    return found


def _places(home: str, of: str, name: str) -> list[tuple[str, ast.stmt]]:
    """Find what defines a name that is used in `home`: there, or in the block or network that it is imported from."""
    read = _read(source_of(home))
    if of == "setting":
        [setting] = _read(source_of(SETTING)).defined["Setting"]
        assert isinstance(setting, ast.ClassDef)
        return [(SETTING, part) for part in setting.body if isinstance(part, ast.FunctionDef) and part.name == name]
    if of:  # as in inversion.inverted, after `from fcil.blocks import inversion`
        module = ".".join(read.imported.get(of, ()))
        return _places(module, "", name) if _is_module(module) else []
    if name in read.defined:
        return [(home, part) for part in read.defined[name]] if home.startswith(ROOMS) else []
    if name in read.imported and not _is_module(".".join(read.imported[name])):
        module, other = read.imported[name]
        return _places(module, "", other)
    return []


@cache
def _is_module(name: str) -> bool:
    room = name.rpartition(".")[0]
    return room in ROOMS and find_spec(name) is not None


@cache
def _numbers(source: str) -> frozenset[int]:
    """Return the numbers of the lines that are code."""
    found: set[int] = set()
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            found -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return frozenset(found)
