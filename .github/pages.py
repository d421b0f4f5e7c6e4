"""Publish files outside of docs/ that pages link to: results, CONTRIBUTING, CHANGELOG, examples.

A hook of mkdocs. In the repository the links are relative to the files; in the site these files
stand beside the pages.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files to the site."""
    found = dict(PAGES)
    found |= {
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
        for path in ROOT.glob("examples/**/*")
        if path.suffix in (".py", ".sh", ".cpp")
    }
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*")):
        if path.suffix in (".md", ".png"):
            found[str(path.relative_to(ROOT))] = str(path.relative_to(ROOT / "benchmarks"))
    for source, target in found.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    if page.file.src_uri in PAGES.values():
        return markdown.replace("](docs/", "](")
    if page.file.src_uri.startswith("results/"):
        return markdown.replace("](../../docs/", "](../")
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    markdown = markdown.replace("](../examples/", "](examples/")
    for source, target in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return markdown
