"""Keys and values that users bring from NeMo and that do not exist here, with what to do instead.

A key stands for everything below it; "key=value" stands for one value of an existing key. Keys that are merely unknown
need no line: the nearest known one is offered for them.
"""

_XLA_SCHEDULES = "no such knob: XLA schedules and fuses the compiled step; remove the line"
_BUFFERS = "no such knob: XLA plans the buffers and the step donates its inputs; remove the line"
_CUDA = "no such knob: it tunes PyTorch's or NCCL's use of CUDA; remove the line"
_FP16 = "fp16 with loss scaling is not available in this version; remove the line and use trainer.precision=bf16"
_STATE = (
    "use model.optim.master (auto, none, fp32, remainder or scaled_fp16) for the master parameters, "
    "model.optim.exp_avg_dtype and exp_avg_sq_dtype for the moments"
)
_CHECKPOINTS = "use exp_manager.checkpoint: monitor, save_top_k, save_last_k, every_n_steps, async_save"
_SEQUENCE = "use model.encoder_seq_length, the one length of model and data"
_TOKENIZER = "use model.tokenizer.library=tokenizers and model.tokenizer.model=path of a Hugging Face tokenizer.json"
_LIGHTNING = "no such knob: there is no PyTorch Lightning here; remove the line"
_RECOMPUTE = "no such knob: model.activations_checkpoint_granularity (null, selective, full) holds for every layer"
_PARALLEL = "this kind of parallelism is not available in this version; remove the line"

HINTS = {
    "name": "use exp_manager.name",
    "restore_from_path": "use model.restore_from_path",
    **dict.fromkeys(
        (
            "trainer.accelerator",
            "trainer.strategy",
            "trainer.logger",
            "trainer.enable_checkpointing",
            "trainer.benchmark",
            "trainer.replace_sampler_ddp",
            "trainer.use_distributed_sampler",
            "trainer.enable_model_summary",
        ),
        _LIGHTNING,
    ),
    "trainer.accumulate_grad_batches": "accumulation follows from model.global_batch_size and model.micro_batch_size",
    "trainer.max_epochs": "use trainer.max_steps",
    "trainer.limit_test_batches": "the test split is not evaluated during training; use trainer.limit_val_batches",
    "trainer.precision=16": "fp16 with loss scaling is not available in this version; use bf16",
    "trainer.precision=16-mixed": "fp16 with loss scaling is not available in this version; use bf16",
    "trainer.precision=bf16-mixed": "bf16 has fp32 masters in the optimizer",
    "exp_manager.explicit_log_dir": "use exp_manager.exp_dir and exp_manager.name",
    "exp_manager.checkpoint_callback_params": _CHECKPOINTS,
    "exp_manager.resume_ignore_no_checkpoint": "a run without a checkpoint always starts anew; remove the line",
    "exp_manager.create_wandb_logger": "the logs are metrics.jsonl and TensorBoard files; remove the line",
    "exp_manager.wandb_logger_kwargs": "the logs are metrics.jsonl and TensorBoard files; remove the line",
    "exp_manager.checkpoint.mode": "val_loss is minimized; remove the line",
    "exp_manager.checkpoint.every_n_train_steps": "use exp_manager.checkpoint.every_n_steps",
    "exp_manager.checkpoint.save_last": "use exp_manager.checkpoint.save_last_k",
    "model.rampup_batch_size": "a growing batch is not available in this version; model.global_batch_size is constant",
    "model.fp8_wgrad": "all three products of a layer are in FP8; remove the line",
    "model.reduce_amax": "amaxes are always reduced over all ranks, once a step; remove the line",
    "model.fp8_recipe=tensorwise": "use current",
    **dict.fromkeys(
        (
            "model.native_amp_init_scale",
            "model.native_amp_growth_interval",
            "model.hysteresis",
            "model.fp16_lm_cross_entropy",
        ),
        _FP16,
    ),
    **dict.fromkeys(("model.context_parallel_size", "model.expert_model_parallel_size"), _PARALLEL),
    **dict.fromkeys(("model.seq_length", "model.data.seq_length"), _SEQUENCE),
    **dict.fromkeys(
        ("model.activations_checkpoint_method", "model.activations_checkpoint_num_layers"),
        _RECOMPUTE,
    ),
    **dict.fromkeys(
        (
            "model.bias_activation_fusion",
            "model.bias_dropout_add_fusion",
            "model.gradient_accumulation_fusion",
            "model.grad_div_ar_fusion",
            "model.masked_softmax_fusion",
            "model.persist_layer_norm",
            "model.grad_allreduce_chunk_size_mb",
            "model.optim.pipeline_size",
        ),
        _XLA_SCHEDULES,
    ),
    **dict.fromkeys(
        (
            "model.gradient_as_bucket_view",
            "model.optim.contiguous_grad_buffer",
            "model.optim.contiguous_param_buffer",
        ),
        _BUFFERS,
    ),
    **dict.fromkeys(("model.optim.nccl_ub", "model.optim.capturable", "model.use_cpu_initialization"), _CUDA),
    **dict.fromkeys(
        (
            "model.optim.dtype",
            "model.optim.store_params",
            "model.optim.store_param_remainders",
            "model.optim.with_scaled_states",
        ),
        _STATE,
    ),
    "model.optim.distribute_within_nodes": "use model.replica_parallel_size=number of nodes",
    "model.precision": "use trainer.precision",
    "model.check_for_nan_in_grad": "use trainer.terminate_on_nan",
    "model.resume_from_checkpoint": "a run continues from its own folder: set exp_manager.exp_dir and exp_manager.name",
    "model.nsys_profile": "use JAX's profiler, or run the command under nsys",
    **dict.fromkeys(
        (
            "model.tokenizer.type",
            "model.tokenizer.vocab_file",
            "model.tokenizer.merge_file",
            "model.tokenizer.delimiter",
            "model.tokenizer.sentencepiece_legacy",
        ),
        _TOKENIZER,
    ),
    "model.tokenizer.library=megatron": _TOKENIZER,
    "model.tokenizer.library=huggingface": _TOKENIZER,
    "model.tokenizer.library=sentencepiece": _TOKENIZER,
    "model.add_pooler": "a BERT has a pooler where it has model.bert_binary_head; remove the line",
    "model.add_lm_head": "a BERT always has one; remove the line",
    "model.data.masking_do_full_word": "use model.data.whole_word_masking",
    "model.data.index_mapping_dir": "no such files: the order of samples is computed; remove the line",
}
