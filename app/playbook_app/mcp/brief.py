"""The server's answers and schemas in short: a few lines of text beside each structured answer, and schemas without what names say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from playbook.planner.memory import GIB
from playbook.text import count, pairs


def shortened(schema: Any) -> Any:
    """A JSON Schema without titles, and without the null that an argument takes when it is left out."""
    if isinstance(schema, list):
        return [shortened(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    short = {k: v if k == "default" else shortened(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    options = [o for o in short.get("anyOf", ()) if o != {"type": "null"}]
    if len(options) == 1 and short.get("default", "") is None:
        short = {**options[0], **{k: v for k, v in short.items() if k not in ("anyOf", "default")}}
    return short


def shallow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's schema to the depth of one level; below that an answer says the names of its fields itself."""

    def kind(each: Mapping[str, Any]) -> dict[str, Any]:
        if "$ref" in each:
            return {"type": "object"}
        if "items" in each:
            return {"type": "array", "items": kind(each["items"])}
        return {k: v for k, v in each.items() if k == "type"}

    fields = {name: kind(each) for name, each in schema["properties"].items()}
    return {"type": "object", "properties": fields}


def _verdicts(verdicts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each claim."""
    return [f"{claim}: {'; '.join(map(_stands, standing)) or 'untested'}" for claim, standing in verdicts.items()]


def _stands(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['stands']} ({verdict['sentence']})"


def _search(answer: Mapping[str, Any]) -> str:
    lines = [f"a speed is judged by: {answer['diagnosis']}"] if answer["diagnosis"] else []
    lines += [answer["none"]] if answer["none"] else []
    lines += [f"nearest, perhaps of no use: {', '.join(answer['nearest'])}"] if answer["nearest"] else []
    for hit in answer["hits"]:
        stands = "; ".join(f"{i} {', '.join(hit['standing'][i]) or 'untested'}" for i in hit["claims"][:3])
        lines.append(f"{hit['id']}: {hit['title']}{'' if hit['applies'] else ' [does not apply]'}. {stands}")
        lines += [f"size: {line}" for line in hit["sizes"]]
    return "\n".join(lines)


def _cards(answer: Mapping[str, Any]) -> str:
    return "\n".join(f"{c['id']}: {c['title']}" for c in answer["cards"])


def _card(answer: Mapping[str, Any]) -> str:
    card = answer["card"]
    rules = [
        f"{basis}: when {pairs(d['when'])}: set {pairs(d.get('set', {}))} (because {', '.join(d['because'])})"
        for d, basis in zip(card.get("decide", ()), answer["rests_on"], strict=True)
    ]
    head = [card["title"], card["summary"]] if "title" in card else [f"{', '.join(card) or 'nothing'} of the card"]
    return "\n".join([*head, *rules, *_verdicts(answer["verdicts"]), f"other sections: {', '.join(answer['more'])}"])


def _claim(answer: Mapping[str, Any]) -> str:
    return "\n".join([answer["claim"]["statement"], *_verdicts(answer["verdicts"])])


def _evidence(answer: Mapping[str, Any]) -> str:
    lines = [f"{r['created']}  {_stands(r)}" for r in answer["records"]]
    return "\n".join([*lines, f"{answer['left_out']} older left out"] if answer["left_out"] else lines) or "no records"


def _confirmation(answer: Mapping[str, Any]) -> str:
    return f"{answer['command']}: {count(len(answer['cases']), 'case')}, {', '.join(c['case'] for c in answer['cases'])}"


def _layout(answer: Mapping[str, Any]) -> str:
    if not answer["legal"]:
        near = [f"nearest: {pairs(n['changes'])}" for n in answer["nearest"]]
        return "\n".join([*answer["broken"], *near])
    return f"legal: DP {answer['dp']}, expert DP {answer['edp']}; at least {count(answer['min_gpus'], 'GPU')}"


def _memory(answer: Mapping[str, Any]) -> str:
    of = f" of {answer['gpu_gib']:g} GiB" if answer["gpu_gib"] else ""
    return f"{answer['verdict']}: peak {answer['peak'] / GIB:.1f} GiB per GPU{of}, on stage {answer['stage']} of {len(answer['stages'])}"


def _plans(answer: Mapping[str, Any]) -> str:
    if not answer["plans"]:
        near = answer["nearest"]
        return (
            f"nothing fits; nearest {near['memory_gib']:.1f} GiB; fits with {', or '.join(near['ways'])}" if near else "no layout is legal"
        )
    lines = [f"{_speed(p)}, {p['memory_gib']:.0f} GiB: {' '.join(p['settings'])}" for p in answer["plans"]]
    asked = f"{answer['seq_len']:,} tokens, global batch {answer['global_batch_size']:,}, at most {answer['limit_gib']:.1f} GiB of a GPU"
    tied = ", ".join(map(str, answer["ties"]))
    lines += [f"cannot be told apart: plans {tied}"] if len(answer["ties"]) > 1 else []
    return "\n".join(
        [asked, *lines, *_ahead(answer["published"]), *([answer["other_backend"]["sentence"]] if answer["other_backend"] else [])]
    )


def _ahead(published: Mapping[str, Any] | None) -> list[str]:
    """The published run that was faster than the first plan is predicted to be."""
    rows = published["rows"] if published else ()
    return [
        f"ahead of plan 1: published {r['id']}, {r['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU measured, {r['layout'] or 'layout not said'}"
        for r in rows
        if published and r["id"] == published["ahead"]
    ]


def _export(answer: Mapping[str, Any]) -> str:
    return f"{answer['verdict']}: {answer['memory_gib']:.1f} of {answer['gpu_gib']:g} GiB\n{answer['text']}"


def _diagnosis(answer: Mapping[str, Any]) -> str:
    """The position, the walls, one line for each action, and the fastest plan."""
    lines = [answer["position"], f"wall: {', '.join(w['name'] for w in answer['walls']) or 'unknown'}"]
    for action in answer["actions"]:
        gain = "" if action["expected"] is None else f" {'at most' if action['at_most'] else 'about'} {action['expected']:+.0%}"
        gain += ", if your run leaves it out:" if gain and action["in_plan"] else ""
        changes = [
            f"{word} {' '.join(action[key])}"
            for word, key in (("set", "flags"), ("unset", "without"), ("env", "environment"))
            if action[key]
        ]
        stands = "; ".join(f"{c['id']} {c['standing']}" for c in action["claims"])
        lines.append(f"{action['title']}:{gain} {', '.join(changes)} [{stands or 'no claim'}]")
    best = answer["predicted"]["best"]
    lines += [f"fastest: {_speed(best)}, {' '.join(best['settings'])}"] if best else []
    return "\n".join(lines)


def _tuning(answer: Mapping[str, Any]) -> str:
    launch = answer["launch"]
    lines = [f"{answer['launches']} launches; next ({answer['why']}): {launch or 'as today'}" if launch is not None else answer["why"]]
    lines += [
        f"kept {r['knob']}={r['value']}" + (f" {r['effect']:+.1f} % [{r['low']:.1f}, {r['high']:.1f}]" if r["effect"] is not None else "")
        for r in answer["kept"]
    ]
    return "\n".join([*lines, *(f"refused {r['knob']}={r['value']}: {r['reason']}" for r in answer["refused"])])


def _speed(predicted: Mapping[str, Any]) -> str:
    tokens = predicted["tokens_per_s_per_gpu"]
    return f"{tokens['value']:.0f} tokens/s/GPU [{tokens['low']:.0f}, {tokens['high']:.0f}]"


SUMMARIES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "search": _search,
    "list_cards": _cards,
    "get_card": _card,
    "get_claim": _claim,
    "list_evidence": _evidence,
    "plan_confirmation": _confirmation,
    "check_layout": _layout,
    "estimate_memory": _memory,
    "plan_layout": _plans,
    "export_layout": _export,
    "diagnose": _diagnosis,
    "tune_next": _tuning,
}
"""The text of each tool's answer; the whole of it is the structured content. A tool without one sends the whole as text too."""
