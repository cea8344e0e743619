"""The Python of the documentation runs as it stands there: the blocks of a page, one after the other."""

import re
import shlex

import pytest
from page_blocks import ROOT, blocks, commands, pages
from test_console_pages import PYTHON_OF_TOOLS

from kvtools.cli.main import main

RUN_ELSEWHERE = {
    "docs/client.md": "tests/docs/test_client_page.py",
    "docs/dialects/redis.md": "tests/kvtools/test_redis.py",
    "docs/dialects/snapshot.md": "tests/docs/test_snapshot_page.py",
    "docs/export.md": "tests/tfplugin/test_export_meta.py",
    "docs/python-api.md": "tests/docs/test_python_api_page.py",
    "docs/remote.md": "tests/remote/test_remote_page.py",
    "docs/serve.md": "tests/server/test_serving_protocols_page.py",
    "docs/serving-protocols.md": "tests/server/test_serving_protocols_page.py",
}
"""Pages whose Python another test runs: it needs a server, or no TensorFlow."""

GO_ON = ("README.md", "docs/quickstart.md")
"""Pages whose commands are about the files that their Python has saved."""

NEEDS = re.compile(r"^kvtools (serve|follow|setup-horovod|doctor)")
"""Commands that do not end by themselves, or look at the machine."""

THOROUGH = ("docs/from-keras.md", "docs/keras.md")

PRINTED = re.compile(r"^print\(.*\)\n# (.*)$", re.MULTILINE)
"""What a page says that it prints: a comment of one line behind."""

LINK = re.compile(r"\]\(([^)#:]+\.md|[^):]*examples/[^)#:]*)(?:#[^)]*)?\)")

PAGES = [
    pytest.param(page, marks=pytest.mark.thorough) if page in THOROUGH else page
    for page in pages()
    if page not in (*RUN_ELSEWHERE, *PYTHON_OF_TOOLS)
    if any(block.language == "python" and not block.no_run for block in blocks(page))
]


@pytest.fixture(scope="session")
def tfplugin(tf):
    """The plugin. Its first import on a machine compiles its ops, minutes that are no page's own."""
    return pytest.importorskip("tfplugin")


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys, tfplugin):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    try:
        for block in blocks(page):
            if block.language == "python" and not block.no_run:
                # Line numbers in a traceback are those of the page.
                exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
                printed = capsys.readouterr().out.splitlines()
                for told in PRINTED.findall(block.text):
                    assert told in printed
        for command in [command for block in blocks(page) for command in commands(block) if page in GO_ON]:
            if command.text.startswith("kvtools ") and not NEEDS.search(command.text):
                assert main(shlex.split(command.text, comments=True)[1:]) == 0, command.text
    finally:
        tfplugin.install()


def test_every_test_that_runs_a_page_is_there():
    for page, test in RUN_ELSEWHERE.items():
        assert (ROOT / page).is_file() and (ROOT / test).is_file()


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_links_between_pages_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"
