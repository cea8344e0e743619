"""The Python of the documentation runs as it stands there: the blocks of a page, one after the other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *(
        f"docs/{page}.md"
        for page in (
            "quickstart",
            "kv-variable",
            "policies",
            "optimizers",
            "saving",
            "tensorflow-changes",
            "optimizer-rules",
            "sok",
            "from-tfra",
        )
    ),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+\.md|[^):]*examples/[^)#:]*)(?:#[^)]*)?\)")


@pytest.fixture(scope="session")
def tfplugin(tf):
    """The plugin. Its first import on a machine compiles its ops, minutes that are no page's own."""
    return pytest.importorskip("tfplugin")


PRINTED = re.compile(r"^print\(.*\)\n# (.*)$", re.MULTILINE)
"""What a page says that it prints: a comment of one line behind."""


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys, tfplugin):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} has no Python"
    names = {"__name__": page}
    try:
        for block in blocks:
            # Line numbers in a traceback are those of the page.
            source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
            exec(compile(source, page, "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            for told in PRINTED.findall(block.group(1)):
                assert told in printed
    finally:
        tfplugin.install()


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_between_pages_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"
