"""How large the project is, against limits that only fall: `python -m tests.size`.

Who adds something takes something else away. A limit is lowered to what is left, and raised only
with a reason in the commit.
"""

import ast
from collections.abc import Iterator
import inspect
import io
from pathlib import Path
import re
import sys
import tokenize

import optax_largebatch as lb

ROOT = Path(__file__).parents[1]
LIMITS = {
    "lines of code in the package": 11_849,
    "files in the package": 140,
    "public names": 100,
    "arguments of public functions": 446,
    "`own` as a name in the package": 20,
    "`told`, `apart`, `besides` and `beside` in the package": 32,
    "lines of code in benchmarks": 4_000,
    "lines of code in tests": 19_800,
    "words in docs": 40_000,
    "pages in docs": 52,
}
WORN = re.compile(r"\b(told|apart|besides?)\b", re.IGNORECASE)
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def files(folder: str, pattern: str = "*.py") -> list[Path]:
    """The files below a folder that are not made by a build."""
    found = sorted((ROOT / folder).rglob(pattern))
    return [path for path in found if "_build" not in path.parts]


def lines_of_code(path: Path) -> int:
    """The lines of a file without blank ones, comments and docstrings."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            case _:
                pass
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def names(path: Path) -> Iterator[str]:
    """Every place in a file where a variable, an argument or a field is called something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr


def public() -> dict[str, object]:
    """The public names and what they are, with those of `recipes`."""
    return {name: getattr(lb, name) for name in lb.__all__} | {
        f"recipes.{name}": getattr(lb.recipes, name) for name in lb.recipes.__all__
    }


def sizes() -> dict[str, int]:
    """What is limited, as it is now."""
    package, pages = files("optax_largebatch"), files("docs", "*.md")
    functions = [one for one in public().values() if inspect.isfunction(one)]
    return {
        "lines of code in the package": sum(map(lines_of_code, package)),
        "files in the package": len(package),
        "public names": len(lb.__all__),
        "arguments of public functions": sum(
            len(inspect.signature(function).parameters) for function in functions
        ),
        "`own` as a name in the package": sum(
            name == "own" for path in package for name in names(path)
        ),
        "`told`, `apart`, `besides` and `beside` in the package": sum(
            len(WORN.findall(path.read_text())) for path in package
        ),
        "lines of code in benchmarks": sum(map(lines_of_code, files("benchmarks"))),
        "lines of code in tests": sum(map(lines_of_code, files("tests"))),
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
