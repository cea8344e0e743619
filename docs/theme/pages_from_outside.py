"""What the site has beside the pages of `docs/`: examples, results of benchmarks, the changelog; and links to them.

A hook of MkDocs (`hooks` in mkdocs.yml). Pages link to files of the repository by relative paths, which work in a
checkout; in the site the same link leads to the page that is made of the file. A link to a file that is neither fails
the build.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".service": "ini"}


def pages() -> dict[str, str]:
    """Files of the repository outside of `docs/` that the site has, by the path that they have there."""
    found = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
    found["examples/README.md"] = "examples/index.md"
    found["benchmarks/NOTES.md"] = "benchmarks/notes.md"
    for file in sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.ipynb")]):
        found[f"examples/{file.name}"] = f"examples/{file.name.replace('.', '_')}.md"
    for file in sorted(ROOT.glob("benchmarks/results/*")):
        if file.suffix in (".md", ".png", ".svg"):
            found[f"benchmarks/results/{file.name}"] = f"benchmarks/results/{file.name}"
    return found


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those that MkDocs has found."""
    results = []
    for source, page in pages().items():
        path = ROOT / source
        if path.suffix in (".md", ".png", ".svg"):
            files.append(File.generated(config, page, abs_src_path=str(path)))
        elif path.suffix == ".ipynb":
            files.append(File.generated(config, page, content=notebook(path)))
        else:
            listing = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, page, content=listing))
        if source.startswith("benchmarks/results/") and path.suffix == ".md":
            title = path.read_text().partition("\n")[0].removeprefix("# ")
            results.append(f"- [{title}]({posixpath.basename(page)})")
    listing = "# Results of benchmarks\n\nOne page for each machine and benchmark. "
    listing += "How they are made: [Benchmarks](../../benchmarks.md).\n\n"
    files.append(File.generated(config, "benchmarks/results/index.md", content=listing + "\n".join(results) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links out of `docs/` to the pages that the site has of them, and drops the marks that tests read."""
    outside = pages()
    of_page = {site: source for source, site in outside.items()}
    source = of_page.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if wanted.startswith("docs/"):
            wanted = wanted.removeprefix("docs/")
            if source.startswith("docs/"):
                return match.group(0)
        elif wanted in outside:
            wanted = outside[wanted]
        elif wanted.rstrip("/") == "examples":
            wanted = "examples/index.md"
        elif wanted.rstrip("/") == "benchmarks/results":
            wanted = "benchmarks/results/index.md"
        elif source not in outside and page.file.generated_by is None:
            raise PluginError(f"{source}: the site has no page of {wanted}; see docs/theme/pages_from_outside.py")
        else:
            return match.group(0)
        return before + posixpath.relpath(wanted, posixpath.dirname(page.file.src_uri) or ".") + after

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(lead, markdown[end : fence.start()]), fence.group(0)]
        end = fence.end()
    markdown = "".join(parts) + LINK.sub(lead, markdown[end:])
    return re.sub(r"^```(\w+) no-run$", r"```\1", markdown, flags=re.MULTILINE)


def notebook(path: Path) -> str:
    """A notebook as Markdown: its cells, and what they printed."""
    pieces = [] if path.read_text().lstrip().startswith("#") else [f"# {path.name}"]
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(text)
            continue
        pieces.append(f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            printed = output.get("text") or output.get("data", {}).get("text/plain", "")
            if printed:
                pieces.append(f"```text\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(pieces) + "\n"
