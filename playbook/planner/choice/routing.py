"""How uneven tokens are routed to experts, as a run measured it, and what that costs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from playbook.errors import ConfigError
from playbook.files import read_bytes
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import step_time

_RATIO = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,9})?", re.ASCII)
_METRICS = "metrics.jsonl"
_MOST_BYTES = 200_000_000
_MOST = 1000.0
_EXPERT, _RANK = "max_over_mean", re.compile(r"ep([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class Routing:
    """Loads over the mean: of the fullest expert, and of the fullest rank by EP degree; `rank` is that of every degree where `ranks` is
    empty, 0 if unknown.
    """

    words: str
    rank: float = 0.0
    expert: float = 0.0
    ranks: Mapping[int, float] = field(default_factory=dict, hash=False)

    def on(self, plan: Plan) -> Plan:
        """The plan with its fullest rank's load; where EP is 1 all ranks have all experts, and only their rows differ."""
        if not plan.shape.experts:
            raise ConfigError("imbalance has no effect with a model without experts; leave it out")
        return replace(plan, imbalance=self._at(plan.ep, plan.shape.experts), even_rows=False)

    def _at(self, ep: int, experts: int) -> float:
        if ep == 1:
            return 1.0
        if self.rank:
            return self.rank
        if ep in self.ranks:
            return self.ranks[ep]
        return 1 + (self.expert - 1) / sqrt(experts / ep)  # loads of experts taken as independent

    def about(self, plan: Plan, cluster: Cluster) -> str:
        """What is said of it beside a plan."""
        fullest = f"the fullest of {plan.ep} ranks {plan.imbalance:.3g} times the mean" if plan.ep > 1 else "every rank has all experts"
        share = routing_share(plan, cluster) or 0.0
        return f"{self.words}: {fullest}; costs {share:.0%} of the step against even routing"


def routing_share(plan: Plan, cluster: Cluster) -> float | None:
    """The share of a step that uneven routing costs: what it would save if every expert had equally many tokens; None where it has."""
    if not plan.shape.experts or (plan.even_rows and plan.imbalance == 1):
        return None
    even = replace(plan, imbalance=1.0, even_rows=True)
    return 1 - step_time(even, cluster).seconds.value / step_time(plan, cluster).seconds.value


def measured(text: str) -> Routing:
    """The routing of `--imbalance`: a ratio such as `1.35`, tokens of the fullest rank over the mean, or a run that wrote down its experts'
    load.

    Raises:
        ConfigError: it is neither.
    """
    plain = text.strip()
    if _RATIO.fullmatch(plain):
        rank = float(plain)
        if not 1 <= rank <= _MOST:
            raise ConfigError(f"imbalance is '{plain}'; expected a ratio from 1 to {_MOST:g}: tokens of the fullest rank over the mean")
        return Routing("routing, stated", rank=rank)
    path = Path(plain)
    routing = of_run(path)
    if routing is None:
        raise ConfigError(
            f"imbalance {str(path)[:200]}: no step with an expert_load; expected a ratio such as 1.35, or a run with moe.load_every"
        )
    return routing


def of_run(path: Path) -> Routing | None:
    """The routing of a run's folder or of its metrics: the median of its steps, each over its layers; None where it wrote down none.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = path / _METRICS if path.is_dir() else path
    try:
        lines = read_bytes(file, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"imbalance {str(file)[:200]}: {getattr(e, 'strerror', None) or e}; expected a ratio such as 1.35, or a run"
        ) from e
    loads = [load for line in lines if '"expert_load"' in line and (load := _load(line))]
    if not loads:
        return None
    degrees = set.intersection(*(set(load) for load in loads))
    middle = {key: median(load[key] for load in loads) for key in degrees}
    expert = middle[_EXPERT]
    run = re.sub("[^ -~]", "?", file.parent.name or file.name)[:40]
    words = f"routing, measured in {len(loads)} steps of {run}, the fullest expert {expert:.3g} times the mean"
    return Routing(words, expert=expert, ranks={int(m[1]): value for key, value in middle.items() if (m := _RANK.fullmatch(key))})


def _load(line: str) -> dict[str, float]:
    """The loads of one line; nothing where it has none that make sense."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    load = data.get("expert_load") if isinstance(data, dict) else None
    loads = {
        k: float(v)
        for k, v in (load.items() if isinstance(load, dict) else ())
        if (k == _EXPERT or _RANK.fullmatch(k)) and isinstance(v, int | float) and not isinstance(v, bool) and 1 <= v <= _MOST
    }
    return loads if _EXPERT in loads else {}
