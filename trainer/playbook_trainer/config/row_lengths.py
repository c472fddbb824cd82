"""Where micro-batches have unlike lengths. Torch-free."""

from __future__ import annotations

from playbook_trainer.config.tree import TrainerConfig


def variable_lengths(config: TrainerConfig) -> bool:
    """Whether pipeline stages send each other streams of other lengths: filling documents up to what context ranks can share makes them."""
    return config.parallel.pp > 1 and _filled_up(config)


def unlike_lengths(config: TrainerConfig) -> bool:
    """Whether ranks that exchange tokens for experts may hold unlike numbers of them: they read other rows, and rows differ."""
    par = config.parallel
    return par.ep * (par.etp or par.tp) > par.tp * par.cp and (not config.data.pad or _filled_up(config))


def _filled_up(config: TrainerConfig) -> bool:
    return config.parallel.cp > 1 and (config.data.pack or config.model.vision is not None)
