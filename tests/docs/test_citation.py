"""The citation is of this version."""

from pathlib import Path
import re

import optax_largebatch as lb

TEXT = (Path(__file__).parents[2] / "CITATION.cff").read_text()


def test_names_the_version():
    assert re.findall(r"^version: (.+)$", TEXT, re.MULTILINE) == [lb.__version__]


def test_has_the_paper_of_every_docstring_that_names_one():
    optimizers = (lb.lamb, lb.lans, lb.lars, lb.scaled_adam)
    for optimizer in optimizers:
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", optimizer.__doc__):
            assert f"https://arxiv.org/abs/{paper}" in TEXT
