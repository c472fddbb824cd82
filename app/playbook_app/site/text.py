"""Markdown for the site: escaping, numbers with units, tables. Text from files is data: none of it becomes markup."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from playbook.text import in_markdown

NBSP = "\u00a0"
_SPACE = re.compile(r"\s+")

text = in_markdown


def prose(value: object) -> str:
    """`value` as `text` gives it, with what stands between backticks as code."""
    return _TICKED.sub(r"<code>\1</code>", text(value))


_TICKED = re.compile("&#96;(.+?)&#96;")


def code(value: object) -> str:
    """`value` as code within a line."""
    return f"<code>{html.escape(_SPACE.sub(' ', str(value)).strip()).translate(_CODE)}</code>"


_CODE = {ord(c): f"&#{ord(c)};" for c in "\\`*_{}[]()#!|~^:$"}


def attribute(value: object) -> str:
    """`value` for an HTML attribute in double quotes."""
    return html.escape(_SPACE.sub(" ", str(value)).strip(), quote=True).translate(_CODE)


def block(content: str, language: str) -> str:
    """A fenced block; the fence is longer than any in the content."""
    longest = max((len(m) for m in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{content}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells are Markdown already. A column whose title ends with `>` is aligned right, an empty one is left out."""
    lines = [list(r) for r in rows]
    used = [i for i in range(len(header)) if not lines or any(line[i] for line in lines)]
    titles = [header[i].removesuffix(">") for i in used]
    rule = ["---:" if header[i].endswith(">") else "---" for i in used]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, rule, *([line[i] for i in used] for line in lines)])


def link(label: str, target: str) -> str:
    """A Markdown link; `label` is Markdown already."""
    return f"[{label}]({target})"


def badge(status: str, label: str | None = None) -> str:
    """The word of a verdict, coloured by its class."""
    name = status.replace("_", "-")
    return f'<span class="pb-badge pb-{attribute(name)}">{html.escape((label or status).replace("_", " "))}</span>'


def front_matter(title: str, *, search: str = "", **fields: str) -> str:
    """A page's front matter; `search` is a setting of the page's place in the search, such as `exclude: true` or `boost: 2`."""
    lines = [f"{k}: {_quoted(v)}" for k, v in {"title": title, **fields}.items()]
    return "---\n" + "\n".join([*lines, *([f"search:\n  {search}"] if search else [])]) + "\n---\n"


def _quoted(value: str) -> str:
    clean = _SPACE.sub(" ", value).strip().replace("\\", "\\\\").replace('"', '\\"')
    return f'"{clean}"'


def day(stamp: Any) -> str:
    """The date of a time stamp, kept on one line."""
    return f'<span class="pb-nowrap">{html.escape(str(stamp)[:10])}</span>'


def sentence(status: str, words: Any) -> str:
    """A verdict's sentence, without the word that its badge shows already."""
    return text(str(words or "").removeprefix(status.replace("_", " ")).lstrip(": "))


def number(value: Any) -> str:
    """A number in as many digits as a reader needs."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text("none" if value is None else value)
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB")


def quantity(value: Any, unit: str) -> str:
    """A value of a metric with its unit, scaled for reading."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return number(value)
    if unit == "bytes":
        step = min(len(_BINARY) - 1, int(math.log(abs(value), 1024)) if abs(value) >= 1 else 0)
        return f"{number(round(value / 1024**step, 3))} {_BINARY[step]}"
    if unit == "s":
        return f"{number(value)} s" if abs(value) >= 1 or value == 0 else f"{number(value * 1000)} ms"
    if unit == "share":
        return f"{value * 100:.1f} %"
    return f"{number(value)} {text(unit)}"


def percent(share: float) -> str:
    """A share as a signed percentage; the sign of a rounded zero is dropped."""
    shown = f"{share * 100:+.1f}"
    return ("0.0" if shown in ("+0.0", "-0.0") else shown.replace("-", "−")) + NBSP + "%"


def milliseconds(value: float) -> str:
    """Milliseconds for a table."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def signed(ms: float) -> str:
    """A difference in milliseconds for a table."""
    return ("+" if ms > 0 else "−" if ms < 0 else "") + milliseconds(abs(ms))


def mapping(values: Mapping[str, Any]) -> str:
    """Keys and values as code, joined by commas."""
    return ", ".join(code(f"{k}: {plain(v)}") for k, v in values.items()) or "the configuration as it is"


def plain(value: Any) -> str:
    """A configuration value as YAML would show it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(v) for v in value) + "]"
    return str(value)


def details(kind: str, title: str, body: str) -> str:
    """A part of the page that opens on demand; `body` is Markdown already."""
    return f'??? {kind} "{attribute(title)}"\n\n    ' + body.replace("\n", "\n    ")
