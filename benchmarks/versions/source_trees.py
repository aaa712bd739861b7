"""Where the library is taken from: the working tree, or a revision that git has."""

from collections.abc import Iterator
import contextlib
from pathlib import Path
import subprocess
import tempfile

ROOT = Path(__file__).parents[2]
WORKING_TREE = "."


def git(*arguments: str, root: Path = ROOT) -> str:
    """The answer of git."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


@contextlib.contextmanager
def source_tree(version: str) -> Iterator[Path]:
    """The root of a version; that of a revision is checked out, and removed afterwards."""
    if version == WORKING_TREE:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        git("worktree", "add", "--detach", "--quiet", str(root), version)
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def commit(root: Path) -> str:
    """The commit of a source tree, and whether something in it has been changed since."""
    return git("describe", "--always", "--dirty", "--exclude=*", root=root)
