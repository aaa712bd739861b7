"""The settings of the site; `make docs` builds it."""

from pathlib import Path
import re
import runpy
import tomllib

from nbclient import NotebookClient
import nbformat
from sphinx.application import Sphinx

import optax_largebatch

DOCS = Path(__file__).parent
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]

project = "optax_largebatch"
author = "the authors of optax_largebatch"
project_copyright = author
release = version = optax_largebatch.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # the table above the API
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # equations need no network
    "sphinx_copybutton",
    "sphinx_design",  # tabs
]
exclude_patterns = ["_build", "chains"]
autosummary_generate = False  # the pages are written by hand

# Markdown: pages that say so in their head, and notebooks, are executed.
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_output_stderr = "remove"  # progress bars
# A kernel warns of its open ports before every page; the build shows errors only.
NotebookClient.extra_arguments.default_args = (["--IPKernelApp.log_level=ERROR"],)

# Docstrings: `name` is a link where there is such a name, and else code.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    # What the alias LeafProgram is made of:
    ("py:class", r"collections\.abc\.\w+|optax_largebatch\.engine\.requests\.\w+|jax\..*"),
]
autodoc_typehints = "none"  # the arguments say it in words
autodoc_member_order = "bysource"
add_module_names = False
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"optax_largebatch {release}"
html_theme_options = {
    "source_repository": PROJECT["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [],
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def draw_chains(app: Sphinx) -> None:
    """Draws the chain of every optimizer from its source."""
    runpy.run_path(str(DOCS / "draw_chains.py"))["draw_all"](DOCS / "chains")


def copy_notebooks(app: Sphinx) -> None:
    """Copies notebooks to where Sphinx reads; a hidden last cell checks what their text says."""
    tests = DOCS.parent / "tests" / "notebooks" / "key_numbers.py"
    key_numbers = runpy.run_path(str(tests))["KEY_NUMBERS"]
    (DOCS / "notebooks").mkdir(exist_ok=True)
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        hidden = {"tags": ["remove-cell"]}
        checks = nbformat.v4.new_code_cell(key_numbers[path.stem], metadata=hidden)
        notebook.cells.append(checks)
        nbformat.write(notebook, DOCS / "notebooks" / path.name)


def summarize_api(app: Sphinx) -> None:
    """Makes the table of all functions from the pages that document them."""
    lines = []
    for page in re.findall(r"^api/\w+$", (DOCS / "api.md").read_text(), re.MULTILINE):
        text = (DOCS / f"{page}.md").read_text()
        title = re.findall(r"^# (.+)$", text, re.MULTILINE)[0]
        module, names = "", []
        entries = re.findall(r"^\.\. (currentmodule|autofunction):: (\S+)$", text, re.MULTILINE)
        for directive, name in entries:
            if directive == "currentmodule":
                module = name
            else:
                names.append(f"   ~{module}.{name}")
        lines += [title, "-" * len(title), "", ".. autosummary::", "   :nosignatures:", ""]
        lines += [*names, ""]
    (DOCS / "chains" / "api_summary.rst").write_text("\n".join(lines))


def keep_colons(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """What stands before a colon is a type for napoleon, where here it is a part of a sentence."""
    begins = [lines.index("Returns:") + 1] if "Returns:" in lines else []
    if what in ("attribute", "property"):
        begins.append(0)
    for index in begins:
        text = lines[index].lstrip()
        lines[index] = f"{lines[index][: -len(text)]}: {text}" if ":" in text else lines[index]


def setup(app: Sphinx) -> None:
    """Makes the files that pages show before Sphinx looks for them."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("builder-inited", draw_chains)
    app.connect("builder-inited", summarize_api)
    app.connect("builder-inited", copy_notebooks)
