"""Pages from the templates beside this module. Text from files is data: none of it becomes markup.

Whatever a template prints is escaped for Markdown and HTML, by `text`. What is Markdown already has to say so: the functions of
`playbook_app.site.text` do in templates, and `markdown` marks what Python code put together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from playbook_app.site import text

_HELPERS = (
    text.attribute,
    text.badge,
    text.block,
    text.code,
    text.day,
    text.details,
    text.front_matter,
    text.mapping,
    text.milliseconds,
    text.number,
    text.prose,
    text.quantity,
    text.sentence,
    text.table,
)


def markdown(content: str) -> Markup:
    """`content`, marked as Markdown that a template prints as it is."""
    return Markup(content)


def render(template: str, **values: Any) -> str:
    """The page that a template makes of the values."""
    return _tidied(_environment(_escaped).get_template(f"{template}.j2").render(values))


def render_plain(template: str, **values: Any) -> str:
    """A file for readers that take plain Markdown: values stand as they are, each on one line."""
    return _tidied(_environment(_one_line).get_template(f"{template}.j2").render(values))


@cache
def _environment(shown: Callable[[Any], Markup]) -> Environment:
    """The templates' environment, whose values go through `shown`."""
    environment = Environment(
        loader=PackageLoader("playbook_app.site"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {f.__name__: _marked(f) for f in _HELPERS} | {
        "link": _link,
        "plain": text.plain,
        "md": markdown,
        "NBSP": markdown(text.NBSP),
    }
    return environment


def _marked(make: Callable[..., str]) -> Callable[..., Markup]:
    @wraps(make)
    def marked(*args: Any, **more: Any) -> Markup:
        # A helper puts its text together as plain strings, which a Markup would turn into more Markup, escaped for HTML.
        return Markup(make(*(str(a) if isinstance(a, Markup) else a for a in args), **more))

    return marked


def _link(label: Any, target: str) -> Markup:
    return Markup(text.link(_escaped(label), target))


def _escaped(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(text.text(value))


def _one_line(value: Any) -> Markup:
    """The value without the markup that only a page needs."""
    return value if isinstance(value, Markup) else Markup(" ".join(str(value).split()))


def _tidied(page: str) -> str:
    """One empty line between blocks, so that templates may have as many as reading them takes."""
    lines: list[str] = []
    fence = ""
    for line in page.splitlines():
        mark = line.lstrip()[: len(line.lstrip()) - len(line.lstrip().lstrip("`"))]
        if len(mark) >= 3 and (not fence or mark == fence):
            fence = "" if fence else mark
        if line.strip() or fence or (lines and lines[-1].strip()):
            lines.append(line if line.strip() or fence else "")
    return "\n".join(lines).strip() + "\n"
