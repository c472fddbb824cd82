"""The pages of three decisions: the answer, a form over what the planner was asked, the evidence, and what would change the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from playbook.planner.time.cluster import clusters
from playbook_app.site.cards import badges
from playbook_app.site.lists import each
from playbook_app.site.pages import markdown, render
from playbook_app.site.planned.doors import DOORS, Answered, Door, read
from playbook_app.site.shelf import Shelf, anchor
from playbook_app.site.text import attribute, link, table, text

_NEAR = 0.05
"""Two plans whose predicted speeds differ by less are for a pair of runs to tell apart."""
_SHOWN = 6
"""Claims of a card that stand on the page of a decision."""


def door_pages(path: Path, shelf: Shelf) -> dict[str, str]:
    """Each page by its path; none without answers."""
    if not path.is_file():
        return {}
    rows = read(path)
    return {f"_generated/{door.page}.md": _page(door, [r for r in rows if r.asked.door == door.door], shelf) for door in DOORS}


def _page(door: Door, rows: Sequence[Answered], shelf: Shelf) -> str:
    shown = [{**asdict(r.asked), **{k: v for k, v in asdict(r).items() if k != "asked"}} for r in rows]
    data = json.dumps({"door": door.door, "rows": shown}, separators=(",", ":")).replace("<", "\\u003c")
    return render(
        "door.md",
        door=door,
        summary=_summary(rows),
        form=markdown(_form(door, rows[0])),
        data=markdown(data),
        evidence=markdown(_evidence(door, shelf)),
    )


def _summary(rows: Sequence[Answered]) -> str:
    """How often each way is as good as the fastest one."""
    cases: dict[tuple[object, ...], list[Answered]] = {}
    for r in rows:
        cases.setdefault((r.asked.model, r.asked.hardware, r.asked.gpus, r.asked.seq_len, r.asked.network), []).append(r)
    fitting = [c for c in cases.values() if any(r.speed for r in c)]
    ways = [w for w in dict.fromkeys(r.asked.way for r in rows) if not w.startswith("any")]
    near = {w: sum(r.asked.way == w and r.speed > (1 - _NEAR) * max(o.speed for o in c) for c in fitting for r in c) for w in ways}
    told = ", ".join(f"{w} in {n}" for w, n in near.items())
    return f"Of {len(fitting)} cases that the planner was asked, these come within {_NEAR:.0%} of the fastest plan: {told}."


def _form(door: Door, first: Answered) -> str:
    a = first.asked
    gpus = "".join(f"<option{' selected' if g == a.hardware else ''}>{attribute(g)}</option>" for g in clusters())
    links = (
        '<label>Between nodes<select name="network"><option value="">data sheet</option><option>100GbE</option></select></label>'
        if door.door == "dispatcher"
        else ""
    )
    return (
        '<form id="pb-door" class="pb-filters pb-diagnose" data-search-exclude hidden>'
        f'<label>Model<input name="model" list="pb-models" value="{a.model}" autocomplete="off" spellcheck="false"></label><datalist id="pb-models"></datalist>'
        '<label>GPUs<input name="gpus" type="number" min="1" step="1" value="64" inputmode="numeric"></label>'
        f'<label>of kind<select name="hardware">{gpus}</select></label>'
        f'<label>Tokens of a row<input name="seq_len" type="number" min="1" step="1" value="{a.seq_len}" inputmode="numeric"></label>{links}</form>'
    )


def _evidence(door: Door, shelf: Shelf) -> str:
    """The claims of the door's cards, those with verdicts first."""
    lines = []
    for name in door.cards:
        card = shelf.cards.get(name)
        if card:
            claims = sorted(each(card), key=lambda c: "untested" in badges(shelf, c))[:_SHOWN]
            rows = [[link(text(c.id), f"../cards/{name}.md#{anchor(c.id)}"), text(c.statement), badges(shelf, c)] for c in claims]
            lines.append(
                f"**{link(text(card.title), f'../cards/{name}.md')}**\n\n"
                + '<div class="pb-matrix" markdown="1">\n\n'
                + table(["Claim", "Statement", "Verdict"], rows)
                + "\n\n</div>"
            )
    return "\n\n".join(lines)
