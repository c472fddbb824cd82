"""Runs before the site is built: writes the generated pages and adds the cards to the navigation."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from playbook.errors import PlaybookError
from playbook_app.cli.commands.site import reference
from playbook_app.site import build
from playbook_app.site.indexes import shortened

RESULTS = "PLAYBOOK_SITE_RESULTS"
RECORD = re.compile(r"`(01[0-9A-Z]{24})`")
CLONED = re.compile(r"(pipx?) install '?\.(\[[a-z,]+\])?'? +# in a clone of this repository")
"""How every page installs: what it says of a clone holds until the repository has an address."""
NAME = "perf-playbook"
LUNR = ("e=e+s+o.id}return e}", 'e=e+s+o.id+","}return e}')
"""The theme's search (lunr 2.3.9) names a state of its automaton by its edges, a character and a number each, with nothing in between: states whose edges are digits
may get one name, words that stand on no page are found then, and the search ends with an error (its issue 503). A comma keeps the names apart.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Generate the pages; a card or record that does not load stops the build."""
    root = Path(config.config_file_path).parent
    more = [Path(p) for p in os.environ.get(RESULTS, "").split(os.pathsep) if p]
    folders = [*(root / p for p in config.extra["results"]), *more]
    cards = root / config.extra["cards"] if "cards" in config.extra else None
    try:
        made = build.generate(Path(config.docs_dir), folders, cards=cards, reference=reference(), base=config.site_url or "")
    except PlaybookError as e:
        raise PluginError(str(e)) from e
    config.extra["inserts"], config.extra["plain"] = made.inserts, made.plain
    config.extra["searched"] = {"cards": made.question_box, "diagnosis": made.compared}
    config.extra["questions"] = made.questions
    config.extra["records"] = {p.stem for p in made.files if p.parent.name == "evidence"}
    for entry in config.nav or []:
        if "Cards" in entry:
            phases = ({phase: [{made.cards[name]: f"cards/{name}.md"} for name in names]} for phase, names in made.phases.items())
            entry["Cards"] = ["cards/index.md", *phases]
    trainer = [{made.cards[name]: f"cards/{name}.md"} for name in made.trainer]
    config.nav = [*(config.nav or []), *_project(Path(config.docs_dir), trainer)]
    return config


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Put what cards and evidence say where a page asks for it by a comment, link the ids of records on pages of experiments, and install
    from the repository's address where `repo_url` says it.
    """
    page.edit_url = _edit_url(page.file.src_uri, page.edit_url)
    if "asked" in page.meta:
        config.extra["questions"][page.file.dest_uri] = page.meta["asked"]
    for name, content in config.extra["inserts"].items():
        markdown = markdown.replace(f"<!-- {name} -->", content)
    if config.repo_url:
        markdown = CLONED.sub(lambda m: f"{m[1]} install '{NAME}{m[2] or ''} @ git+{config.repo_url}'", markdown)
    if page.file.src_uri.startswith("experiments/"):
        markdown = RECORD.sub(lambda m: f"[{m[0]}](../evidence/{m[1]}.md)" if m[1] in config.extra["records"] else m[0], markdown)
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Put each card beside its page as plain Markdown, for readers that follow llms.txt, write what the question box asks, and mend the search."""
    for name, content in config.extra["plain"].items():
        (Path(config.site_dir) / name).write_text(content, encoding="utf-8")
    for name, content in config.extra["searched"].items():
        (Path(config.site_dir) / f"search/{name}.json").write_text(content, encoding="utf-8")
    index = Path(config.site_dir) / "search/search_index.json"
    short = shortened(json.loads(index.read_text(encoding="utf-8")), config.extra["questions"])
    index.write_text(json.dumps(short, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")
    for worker in (Path(config.site_dir) / "assets/javascripts/workers").glob("search.*.min.js"):
        worker.write_text(worker.read_text(encoding="utf-8").replace(*LUNR), encoding="utf-8")


def _edit_url(page: str, address: str | None) -> str | None:
    """Where the source of a page is edited: a card's is its YAML; other generated pages have none."""
    if address and page.startswith("cards/") and page != "cards/index.md":
        return address.replace(f"docs/{page}", page.removesuffix(".md") + ".yaml")
    return None if page.startswith(("cards/", "evidence/", "_generated/")) else address


def _project(docs: Path, trainer: list[dict[str, str]]) -> list[dict[str, Any]]:
    """How it is built, how fast its trainer is, what was tried and what was decided, where there are such pages."""
    experiments = sorted(
        (p.relative_to(docs).as_posix() for p in (docs / "experiments").glob("*.md")), key=lambda p: (not p.endswith("index.md"), p)
    )
    entries: list[Any] = ["guide/architecture.md"] if (docs / "guide/architecture.md").is_file() else []
    entries += trainer
    entries += [{"Experiments": experiments}] if experiments else []
    decisions = sorted(p.relative_to(docs).as_posix() for p in (docs / "adr").glob("*.md"))
    if decisions:
        entries.append({"Decisions": decisions})
    return [{"Project": entries}] if entries else []
