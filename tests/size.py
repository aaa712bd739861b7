"""How large the project is, against limits that only fall: `python -m tests.size`.

Who adds something takes something else away. A limit is lowered to what is left, and raised only
with a reason in the commit.
"""

import ast
from collections.abc import Iterable, Iterator
import inspect
import io
from pathlib import Path
import re
import sys
import tokenize
from typing import Any

import optax_largebatch as lb

ROOT = Path(__file__).parents[1]
LIMITS = {
    "tokens of the package": 122_850,
    "tokens a line of the package": 8.75,
    "files in the package": 146,
    "public names": 126,
    "arguments of public functions and classes": 687,
    "names in the package that say nothing": 143,
    "types in the package with the name of another": 0,
    "`told`, `apart`, `besides` and `beside` in the package": 23,
    "tokens of benchmarks": 45_765,
    "tokens of tests": 215_000,
    "words in docs": 38_600,
    "pages in docs": 46,
}
EMPTY = ("found", "numbers", "one", "own", "part", "parts")
WORN = re.compile(r"\b(told|apart|besides?)\b", re.IGNORECASE)
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def files(folder: str, pattern: str = "*.py") -> list[Path]:
    """The files below a folder that are not made by a build."""
    return [x for x in sorted((ROOT / folder).rglob(pattern)) if "_build" not in x.parts]


def code(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a file without comments, docstrings and layout: they grow by no joined line."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                docstrings |= {*range(first, (last or first) + 1)}
            case _:
                pass
    tokens = _with_whole_strings(tokenize.generate_tokens(io.StringIO(source).readline))
    return [x for x in tokens if x.type not in NO_CODE and x.start[0] not in docstrings]


def _with_whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens with each f-string as one, which Python from 3.12 on takes apart."""
    begins, ends = (getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END"))
    depth = 0
    for token in tokens:
        if depth == 0:
            yield token
        depth += (token.type == begins) - (token.type == ends)


def tokens_of(paths: Iterable[Path]) -> int:
    """The tokens of several files."""
    return sum(len(code(path)) for path in paths)


def lines_of(paths: Iterable[Path]) -> int:
    """The lines of several files that have a token."""
    return sum(
        len({line for x in code(path) for line in range(x.start[0], x.end[0] + 1)})
        for path in paths
    )


def names(path: Path) -> Iterator[str]:
    """Every place in a file where a variable, an argument or a field is called something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr


def types_of(paths: Iterable[Path]) -> Iterator[str]:
    """The names of the classes in several files."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name


def public() -> dict[str, object]:
    """The public names and what they are, with those of `recipes` and `states`."""
    rooms = {"": lb, "recipes.": lb.recipes, "states.": lb.states}
    return {
        f"{prefix}{name}": getattr(room, name)
        for prefix, room in rooms.items()
        for name in room.__all__
    }


def arguments_of(thing: Any) -> int:
    """The arguments of a function; of a class, its fields and the arguments of its methods."""
    if inspect.isfunction(thing):
        return len(inspect.signature(thing).parameters)
    if not inspect.isclass(thing):
        return 0
    methods = [
        value
        for name, value in vars(thing).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    fields = inspect.signature(thing).parameters
    return len(fields) + sum(len(inspect.signature(x).parameters) - 1 for x in methods)


def sizes() -> dict[str, float]:
    """What is limited, as it is now."""
    package, pages = files("optax_largebatch"), files("docs", "*.md")
    tokens = tokens_of(package)
    return {
        "tokens of the package": tokens,
        "tokens a line of the package": round(tokens / lines_of(package), 2),
        "files in the package": len(package),
        "public names": len(public()),
        "arguments of public functions and classes": sum(map(arguments_of, public().values())),
        "names in the package that say nothing": sum(
            name in EMPTY for path in package for name in names(path)
        ),
        "types in the package with the name of another": len(types := [*types_of(package)])
        - len({*types}),
        "`told`, `apart`, `besides` and `beside` in the package": sum(
            len(WORN.findall(path.read_text())) for path in package
        ),
        "tokens of benchmarks": tokens_of(files("benchmarks")),
        "tokens of tests": tokens_of(files("tests")),
        "words in docs": sum(len(path.read_text().split()) for path in pages),
        "pages in docs": len(pages),
    }


def main() -> int:
    """Prints the table; the exit status is 1 if something is past its limit."""
    found = sizes()
    for name, size in found.items():
        past = "  past its limit" if size > LIMITS[name] else ""
        print(f"{name:<55}{size:>7,} of {LIMITS[name]:>6,}{past}")
    return any(size > LIMITS[name] for name, size in found.items())


if __name__ == "__main__":
    sys.exit(main())
