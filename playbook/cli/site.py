"""`playbook site build`: hands the site generator the tables that other packages own. Part of the command line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from playbook import schemas
from playbook.cli import recipes
from playbook.cli.evidence import present
from playbook.site.build import Reference
from playbook.site.reference import Command, field_docs
from playbook_bench.judge import metrics
from playbook_trainer.config import megatron, model
from playbook_trainer.config import tree as trainer


def reference(root: Any) -> Reference:
    """Metrics, commands, the trainer's keys and the packages' folders as plain data; `root` is the command tree of the command line."""
    rows = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "value"} for row in metrics.METRICS.values()]
    schema = schemas.schema("trainer", trainer.TrainerConfig)
    docs = {k: v for m in (trainer, megatron, model) for k, v in field_docs(Path(inspect.getfile(m)).read_text(encoding="utf-8")).items()}
    packages = {m.__name__.split(".")[0]: Path(inspect.getfile(m)).parent for m in (schemas, metrics, trainer)}
    return Reference(
        metrics=rows,
        commands=list(commands(root, "playbook")),
        schema=schema,
        field_docs=docs,
        packages=packages,
        present=present(None),
        recipes=recipes.rows(),
    )


def commands(node: Any, name: str) -> Iterator[Command]:
    """Every command below a node of the command tree, depth first."""
    children: Mapping[str, Any] = getattr(node, "commands", {})
    for child in sorted(children):
        yield from commands(children[child], f"{name} {child}")
    if not children:
        context = node.make_context(name, [], resilient_parsing=True)
        usage = " ".join([name, *node.collect_usage_pieces(context)])
        yield Command(name=name, summary=inspect.cleandoc(node.help or ""), usage=usage, options=list(_options(node)))


def _options(node: Any) -> Iterator[tuple[str, str]]:
    for parameter in node.params:
        if parameter.param_type_name == "argument":
            yield parameter.metavar or parameter.name.upper(), getattr(parameter, "help", "") or ""
        else:
            yield ", ".join([*parameter.opts, *parameter.secondary_opts]), parameter.help or ""
