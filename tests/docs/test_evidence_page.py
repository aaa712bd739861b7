"""The pages say what the committed trials say."""

from pathlib import Path
import runpy

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


@pytest.mark.parametrize("name", ["README.md", "docs/evidence.md"])
class TestPage:
    def test_is_what_the_script_writes(self, script, name):
        page = (ROOT / name).read_text()
        assert script["written"](ROOT / name, page) == page

    def test_the_script_puts_right_what_is_wrong(self, script, name):
        page = (ROOT / name).read_text()
        wrong = page.replace("| `lamb` | ", "| `lamb` | 7")
        assert wrong != page
        assert script["written"](ROOT / name, wrong) == page

    def test_refuses_a_page_without_the_places(self, script, name):
        with pytest.raises(ValueError, match="must have one '<!-- "):
            script["written"](ROOT / name, "# Evidence\n")
