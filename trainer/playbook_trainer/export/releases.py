"""Which release of another trainer the printed fields were compared with, and which of them it does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from playbook_trainer.export.sheet import Setting, Target

RELEASES: Mapping[Target, str] = {
    "megatron-lm": "megatron-core 0.16.1",
    "megatron-bridge": "megatron-bridge 0.3.1",
    "torchtitan": "torchtitan 0.3.0",
}
"""By target, a package and its version; a test compares the fields with those of its dataclasses."""

_LATER = "ddp.megatron_fsdp_main_grads_dtype model.cuda_graph_modules validation.eval_interval validation.eval_iters"
_LACKING: Mapping[Target, str] = {
    # The package has no training loop: what is no field of the model, of data parallelism or of the optimizer is an argument of Megatron-LM's own.
    "megatron-lm": f"{_LATER} ddp.fp8_param model.max_position_embeddings model.position_embedding_type model.seq_length "
    "model.share_embeddings_and_output_weights model.vocab_size tokenizer.padded_vocab_size tokenizer.tokenizer_type tokenizer.tokenizer_model "
    "dataset.mock_data dataset.num_workers dataset.reset_attention_mask dataset.reset_position_ids rng.seed rng.te_rng_tracker "
    "dist.distributed_timeout_minutes dist.use_megatron_fsdp dist.use_torch_fsdp2 scheduler.lr_decay_iters scheduler.lr_decay_style "
    "scheduler.lr_warmup_iters scheduler.lr_wsd_decay_iters scheduler.lr_wsd_decay_style train.global_batch_size train.micro_batch_size "
    "train.train_iters logger.log_interval logger.log_throughput logger.tensorboard_dir logger.wandb_exp_name logger.wandb_project "
    "rerun_state_machine.check_for_nan_in_loss profiling.nvtx_ranges profiling.profile_step_end profiling.profile_step_start "
    "profiling.use_pytorch_profiler checkpoint.async_save checkpoint.ckpt_format checkpoint.load checkpoint.save checkpoint.save_interval",
    "megatron-bridge": f"{_LATER} checkpoint.also_save_hf_checkpoint",
    "torchtitan": "",
}
LACKS: Mapping[Target, frozenset[str]] = {target: frozenset(names.split()) for target, names in _LACKING.items()}
"""By target, fields (`section.field`) of its documentation or of a later version, which that release does not have."""


def unchecked(target: Target, settings: Iterable[Setting]) -> list[str]:
    """Those of the settings that the release cannot vouch for."""
    return list(dict.fromkeys(name for s in settings if s.value is not None and (name := f"{s.section}.{s.field}") in LACKS[target]))
