"""Tables in Markdown, and the pages that have them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import re


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def with_table(page: str, name: str, script: str, table: str) -> str:
    """The page with the table between the two comments that are its place."""
    begin, end = f"<!-- {name}: made by {script} -->", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have one {begin!r} and one {end!r}.")
    between = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    return between.sub(lambda _: f"\n{table}\n\n", page)


def with_tables(page: str, script: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with all tables that a script makes for it."""
    for name, table in tables.items():
        page = with_table(page, name, script, table())
    return page
