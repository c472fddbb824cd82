"""The built site in headless Chromium: a server for it, a browser, and what a page may not do."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are not news."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder over HTTP on a free port of this machine; the address of its root."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def started() -> Iterator[Any]:
    """The system's Chromium. Where it or its driver is missing the checks fail: a skip would look like success."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"no Chromium: none of {', '.join(CHROMIUM)} is on PATH; install it (Debian: apt-get install chromium)", pytrace=False)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is not installed; run `make test-browser`, or pip install -e '.[browser]'", pytrace=False)
    with sync_playwright() as driver, driver.chromium.launch(executable_path=found, args=["--no-sandbox"]) as browser:
        yield browser


def watched(page: Any, root: str) -> list[str]:
    """A list that fills with what the page does wrong: console errors, exceptions, failed or foreign requests."""
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(f"console {m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(f"exception: {e}"))
    # Leaving a page aborts what it still loads; a file that is missing answers with 404, below.
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url} {r.failure}") if "ERR_ABORTED" not in str(r.failure) else None)
    page.on("response", lambda r: wrong.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on("request", lambda r: wrong.append(f"foreign: {r.url}") if not r.url.startswith((root, "data:", "blob:")) else None)
    return wrong


ASK = """
async (questions) => {
  const config = JSON.parse(document.getElementById("__config").textContent);
  const index = await (await fetch(`${config.base}/search/search_index.json`)).json();
  const worker = new Worker(config.search);
  const answer = (message) => new Promise((done) => { worker.onmessage = (e) => done(e.data); worker.postMessage(message); });
  await answer({type: 0, data: {...index, options: {suggest: true}}});
  const found = {};
  for (const question of questions) {
    found[question] = (await answer({type: 2, data: question})).data.items.map((group) => group.map((item) => item.location.split("#")[0]));
  }
  return found;
}
"""
"""Asks the search of a built site, in its own worker: the pages and sections that each question finds, in the order in which they are shown."""


def places(found: list[list[str]]) -> list[str]:
    """Pages in the order in which the search shows them."""
    return [group[0] for group in found]


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    """The tags of a page that open something, with their attributes."""
    found: list[tuple[str, dict[str, str | None]]] = []

    class Opens(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(reversed(attrs))))  # of an attribute that is there twice a browser takes the first

    Opens().feed(text)
    return found


def names(built: Path) -> list[str]:
    """The pages of a built site."""
    return sorted(p.relative_to(built).as_posix() for p in built.rglob("*.html") if p.name != "404.html")
