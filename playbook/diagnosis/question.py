"""From a question about speed, in somebody's own words, to the command that answers it."""

from __future__ import annotations

import re

from playbook.cards.terms import GPUS, Facts, facts, normal

_MFU = re.compile(r"\b(\d{1,2}(?:\.\d{1,2})?) ?%? ?mfu\b|\bmfu (?:of |is |at |only )?(\d{1,2}(?:\.\d{1,2})?)\b")
_SPEED = re.compile(r"\b(?:mfu|slow|slower|too slow|throughput|utili[sz]ation|tokens per second|tokens/s|step time)\b")

_MANY = re.compile(r"\b(\d{1,6}) (?:nvidia )?([a-z]{1,2}\d{2,3})s?\b")
"""A number before a GPU's name, which the search takes for no count."""


def diagnosis_of(query: str, run: Facts) -> str:
    """The diagnosis that a question asks for; nothing where it names no speed, or neither model nor GPUs. Capital words are left to fill
    in.
    """
    line, facts_over = normal(query[:2000]), run.over(facts(query[:2000]))
    gpus = facts_over.gpus or next((int(m[1]) for m in _MANY.finditer(line) if m[2] in GPUS), None)
    if not _SPEED.search(line) or not (facts_over.model or (facts_over.hardware and gpus)):
        return ""
    share = _MFU.search(line)
    gpu = facts_over.hardware[0] if len(facts_over.hardware) == 1 else "KIND"
    speed = f" --mfu {share[1] or share[2]}" if share else ""
    return f"playbook diagnose --model {facts_over.model or 'MODEL'} --gpus {gpus or 'N'} --gpu {gpu}{speed}"
