"""The documentation as a site: whole, without a link that leads nowhere, and without a network."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tf: object) -> Path:
    """The site, built so that a warning is an error. The fixtures see to the ops, which its build imports."""
    for package in ("material", "mkdocstrings_handlers.python", "tfplugin"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    # Not `python -m`, which would import kvtools from the sources here.
    mkdocs = str(Path(sys.executable).with_name("mkdocs"))
    # With -q, mkdocs counts no warnings, and --strict lets every link pass.
    command = [mkdocs, "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_ask_no_other_host_for_anything(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\" >]+)", page.read_text()
        )
        assert not loaded, f"{page.name}: {loaded}"


def test_every_public_name_has_a_place(site: Path) -> None:
    reference = "".join(page.read_text() for page in sorted((site / "reference").glob("*.html")))
    for name in (
        *("tfplugin.get_kv_variable.get_kv_variable", "tfplugin.KvVariable", "tfplugin.KvVariable.sparse_read"),
        *("tfplugin.keras.Embedding", "tfplugin.keras.EmbeddingCollection", "tfplugin.sok.All2AllDenseEmbedding"),
        *("tfplugin.dynamic_embedding.keras.layers.SquashedEmbedding", "tfplugin.policies.KeepTop"),
        *("tfplugin.optimizers.GroupAdam", "kvtools.open", "kvtools.client.Client.lookup"),
    ):
        assert f'id="{name}"' in reference, name


def test_files_of_the_repository_are_pages(site: Path) -> None:
    assert "get_kv_variable" in (site / "examples" / "kv_variable_py.html").read_text()
    assert "Keep a Changelog" in (site / "changelog.html").read_text()
    assert 'href="examples/kv_variable_py.html"' in (site / "index.html").read_text()
    assert (site / "benchmarks" / "results" / "index.html").is_file()


def test_the_reference_shows_sections_of_docstrings_whole(site: Path) -> None:
    reference = (site / "reference" / "kvtools.html").read_text()
    told = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", reference)))
    assert "whose chunks have keys [n], values [n, dim], slots (name to [n, width]), freqs [n]" in told
    assert '>>> open("no/such/model.ckpt")' in told
    for page in ("keras", "kvtools", "sok", "tfplugin"):  # of classes that are made at run time, too
        shown = (site / "reference" / f"{page}.html").read_text()
        assert "<blockquote>" not in shown, f"{page}: a doctest as a quotation"
        assert "<p>Raises:" not in shown, f"{page}: a section as running text"


def test_search_works_from_a_disk(site: Path) -> None:
    if not (chromium := shutil.which("chromium")):
        pytest.skip("needs chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--virtual-time-budget=20000", "--dump-dom"]
    address = (site / "index.html").as_uri() + "?q=expiry"
    done = subprocess.run([chromium, *options, address], capture_output=True, text=True, timeout=300)
    assert re.search(r"\d+ matching documents", done.stdout)
    assert "policies.html" in done.stdout
