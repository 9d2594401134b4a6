"""The rules between keys that can be checked before anything is compiled; one function per subject."""

import dataclasses

from jzero.errors import JzeroError
from jzero.train.config import Config, Model, model_config
from jzero.train.schedule import schedule


def validate(config: Config, n_devices: int | None = None) -> Config:
    """Check the rules between keys, and replace `trainer.devices=-1` by its number.

    Args:
        config: As `load_config` gives it: each key is already of the right type and within its own limits.
        n_devices: Devices of all processes together (`len(jax.devices())`); None where they are not known yet: then
            the config's own number is believed.

    Returns:
        The config with `trainer.devices` at least 1.

    Raises:
        JzeroError: A rule is broken; one line that names the keys, their values and what to set.

    Example:
        >>> from jzero.train.config import load_config
        >>> validate(load_config(None, ["trainer.devices=-1"]), 2).num_devices
        2
    """
    config = _devices(config, n_devices)
    _layout(config)
    _sequence(config)
    _batch(config)
    _pipeline(config)
    _model(config)
    _precision(config)
    _fp8(config)
    _optimizer(config)
    _data(config)
    schedule(config)
    return config


def _devices(config: Config, n_devices: int | None) -> Config:
    t = config.trainer
    if n_devices is None:
        if t.devices == -1:
            raise JzeroError("trainer.devices: -1 stands for all devices, but none are known here; set their number")
        return config
    if t.devices == -1:
        if n_devices % t.num_nodes:
            raise JzeroError(
                f"trainer.num_nodes: {n_devices} devices cannot be split evenly over {t.num_nodes} nodes; "
                "set trainer.num_nodes to the number of hosts"
            )
        return dataclasses.replace(config, trainer=dataclasses.replace(t, devices=n_devices // t.num_nodes))
    wanted = t.devices * t.num_nodes
    if wanted > n_devices or (t.num_nodes > 1 and wanted != n_devices):
        raise JzeroError(
            f"trainer.devices: {t.devices} × trainer.num_nodes {t.num_nodes} = {wanted} devices, "
            f"but there are {n_devices}; set trainer.devices=-1 to use all"
        )
    return config


def _layout(config: Config) -> None:
    m = config.model
    pipeline, replica, tensor = m.pipeline_model_parallel_size, m.replica_parallel_size, m.tensor_model_parallel_size
    unit = pipeline * replica * tensor
    if config.num_devices % unit:
        raise JzeroError(
            f"trainer.devices × trainer.num_nodes = {config.num_devices} is not divisible by "
            f"model.tensor_model_parallel_size {tensor} × model.pipeline_model_parallel_size {pipeline} × "
            f"model.replica_parallel_size {replica} = {unit}; nearest valid: "
            f"{_nearest(config.num_devices, unit)} devices"
        )


def _sequence(config: Config) -> None:
    m = config.model
    tensor = m.tensor_model_parallel_size
    if m.sequence_parallel and tensor == 1:
        raise JzeroError(
            "model.sequence_parallel: true splits the sequence over the tensor ranks, but "
            "model.tensor_model_parallel_size is 1; set it to false"
        )
    if m.sequence_parallel and m.encoder_seq_length % tensor:
        raise JzeroError(
            f"model.encoder_seq_length: {m.encoder_seq_length} is not divisible by model.tensor_model_parallel_size "
            f"{tensor}, as model.sequence_parallel needs; nearest valid: {_nearest(m.encoder_seq_length, tensor)}"
        )


def _batch(config: Config) -> None:
    m = config.model
    unit = m.micro_batch_size * config.batch_parallel_size
    if m.global_batch_size % unit:
        raise JzeroError(
            f"model.global_batch_size: {m.global_batch_size} is not divisible by model.micro_batch_size "
            f"{m.micro_batch_size} × data-parallel size {config.batch_parallel_size} = {unit}; "
            f"nearest valid: {_nearest(m.global_batch_size, unit)}"
        )


def _pipeline(config: Config) -> None:
    from jzero.parallel.pipeline import check_layers  # a configuration is read without JAX's numerics
    from jzero.parallel.timetable import check_micro_batches

    m = config.model
    stages, chunks = m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size
    check_layers(m.num_layers, stages, chunks)
    check_micro_batches(stages, chunks or 1, config.num_micro_batches)


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, which is none: "8 or 16"; never 0."""
    low = value // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)


def _model(config: Config) -> None:
    from jzero.models.config import check_split  # a configuration is read without Flax

    m = config.model
    if m.max_position_embeddings is not None and m.max_position_embeddings < m.encoder_seq_length:
        raise JzeroError(
            f"model.max_position_embeddings: {m.max_position_embeddings} is below model.encoder_seq_length "
            f"{m.encoder_seq_length}; raise it, or set null"
        )
    architecture = model_config(config, None if m.vocab_size else 1)  # has its own rules, whatever the vocabulary
    check_split(architecture, m.tensor_model_parallel_size)


def _precision(config: Config) -> None:
    m, bf16 = config.model, config.trainer.precision == "bf16"
    if bf16 and not m.megatron_amp_O2:
        raise JzeroError(
            "model.megatron_amp_O2: trainer.precision bf16 keeps the weights in bf16 and their masters in the "
            "optimizer, so it must be true; for fp32 weights set trainer.precision=32"
        )
    if m.attention_implementation == "cudnn" and not bf16:
        raise JzeroError(
            "model.attention_implementation: cudnn computes in 16 bits only; set trainer.precision=bf16, or auto or xla"
        )
    if m.optim.master == "fp32" and not bf16:
        raise JzeroError("model.optim.master: fp32 parameters (trainer.precision 32) are their own master; set auto")
    if m.optim.master in ("remainder", "scaled_fp16") and not bf16:
        raise JzeroError(
            f"model.optim.master: {m.optim.master} is for bf16 parameters, found trainer.precision 32; set auto"
        )
    unscaled = "bf16" in (m.optim.exp_avg_dtype, m.optim.exp_avg_sq_dtype)
    if m.optim.stochastic_rounding and not unscaled and not (bf16 and m.optim.master == "none"):
        raise JzeroError(
            "model.optim.stochastic_rounding: nothing is stored as bf16 without a scale or a master; set "
            "model.optim.exp_avg_dtype=bf16, or model.optim.master=none with trainer.precision=bf16"
        )
    if m.optim.master == "none" and m.optim.param_sync_dtype == "bf16" and not bf16:
        raise JzeroError(
            "model.optim.param_sync_dtype: bf16 would round the only copy of the fp32 parameters (trainer.precision "
            "32) in every step, as model.optim.master is none; set master=auto, or param_sync_dtype=null"
        )


def _fp8(config: Config) -> None:
    m = config.model
    _wide_layers(config)
    if not m.fp8:
        if config.trainer.log_fp8_every_n_steps:
            raise JzeroError("trainer.log_fp8_every_n_steps: there is nothing to log without model.fp8; set it to 0")
        if m.fp8_params:
            raise JzeroError(
                "model.fp8_params: FP8 parameters are multiplied in FP8, found model.fp8 false; set it too"
            )
        return
    if m.fp8_hybrid == m.fp8_e4m3:
        found = str(m.fp8_e4m3).lower()
        advice = "fp8_hybrid=false for E4M3 alone" if m.fp8_e4m3 else "fp8_hybrid=true"
        raise JzeroError(
            f"model.fp8_hybrid, model.fp8_e4m3: expected one of the two formats, found {found} for both; set {advice}"
        )
    unused = () if m.fp8_recipe == "delayed" else ("fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")
    unused += ("fp8_margin", "fp8_power_of_two_scales") if m.fp8_recipe == "mxfp8" else ()
    for key in unused:
        if getattr(m, key) != getattr(type(m)(), key):
            raise JzeroError(
                f"model.{key}: {getattr(m, key)} has no meaning for model.fp8_recipe {m.fp8_recipe}; remove the line, "
                "or set fp8_recipe=delayed"
            )
    if m.fp8_params and m.fp8_recipe == "mxfp8":
        raise JzeroError(
            "model.fp8_params: FP8 parameters have a scale per layer, found model.fp8_recipe mxfp8, with one per 32; "
            "set fp8_recipe=delayed or current, or fp8_params=false"
        )
    if m.fp8_params and m.optim.master in ("none", "remainder"):
        raise JzeroError(
            f"model.optim.master: {m.optim.master} would leave FP8 parameters without the values that they are cast "
            "from; set auto, fp32 or scaled_fp16"
        )
    if m.fp8_recipe == "mxfp8":
        _blocks(config)


def _wide_layers(config: Config) -> None:
    m = config.model
    if m.first_last_layers_bf16 and not m.fp8:
        raise JzeroError(
            "model.first_last_layers_bf16: without model.fp8 no layer is in FP8; remove the line, or set fp8"
        )
    if m.first_last_layers_bf16 and m.fp8_params:
        raise JzeroError(
            "model.first_last_layers_bf16: model.fp8_params keeps the weights of all layers in FP8, as one array; "
            "set one of the two to false"
        )
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(m, key) != getattr(type(m)(), key) and not m.first_last_layers_bf16:
            raise JzeroError(f"model.{key}: has no meaning while model.first_last_layers_bf16 is false; set it too")


def _blocks(config: Config) -> None:
    """MX blocks lie along what is contracted, in each of the three products of each projection."""
    from jzero.fp8.blocks import BLOCK  # a configuration is read without JAX's numerics

    m = config.model
    model, tensor = model_config(config, None if m.vocab_size else 1), m.tensor_model_parallel_size
    heads = m.num_attention_heads + 2 * model.query_groups
    sizes = {
        "hidden_size": m.hidden_size,
        "kv_channels × query heads of a tensor rank": m.num_attention_heads * model.head_width // tensor,
        "kv_channels × all heads of a tensor rank": heads * model.head_width // tensor,
        "ffn_hidden_size of a tensor rank": model.ffn_width // tensor,
        "micro_batch_size × encoder_seq_length": m.micro_batch_size * m.encoder_seq_length,
    }
    for name, size in sizes.items():
        if size % BLOCK:
            raise JzeroError(
                f"model.{name}: {size} is not divisible by the {BLOCK} elements that share a scale in "
                "model.fp8_recipe mxfp8; change it, or set fp8_recipe=current"
            )


def _optimizer(config: Config) -> None:
    o = config.model.optim
    if not o.overlap_grad_sync:
        raise JzeroError(
            "model.optim.overlap_grad_sync: gradients are always reduced during the backward pass; set it to true"
        )
    if o.overlap_param_sync and o.policy == "replicated":
        raise JzeroError(
            "model.optim.policy: replicated contradicts model.optim.overlap_param_sync true; "
            "set policy to gather_on_forward or null, or overlap_param_sync to false"
        )
    if config.zero:
        return
    needs = "needs the sharded state of model.optim.name=distributed_fused_adam, found fused_adam"
    if config.policy != "replicated":
        key = "policy" if o.policy else "overlap_param_sync"
        raise JzeroError(f"model.optim.{key}: {o.policy or 'true'} {needs}")
    if o.param_sync_dtype is not None:
        raise JzeroError(f"model.optim.param_sync_dtype: {o.param_sync_dtype} {needs}")
    if config.model.grad_accumulation == "sharded":
        raise JzeroError(f"model.grad_accumulation: sharded {needs}")


def _data(config: Config) -> None:
    tokenizer, data = config.model.tokenizer, config.model.data
    if tokenizer.library == "tokenizers" and tokenizer.model is None:
        raise JzeroError("model.tokenizer.model: the library tokenizers needs the path of a tokenizer.json, found null")
    if tokenizer.library == "bytes" and tokenizer.model is not None:
        raise JzeroError(
            f"model.tokenizer.model: the library bytes reads no file, found {tokenizer.model}; "
            "set model.tokenizer.library=tokenizers"
        )
    prefixes = (data.data_prefix,) if isinstance(data.data_prefix, str) else data.data_prefix
    words = config.model.type == "bert"
    if "stdlib" in prefixes and not (tokenizer.model == "stdlib" if words else tokenizer.library == "bytes"):
        raise JzeroError(
            f"model.data.data_prefix: stdlib holds {'words' if words else 'byte tokens'}, found "
            f"model.tokenizer.library {tokenizer.library} and model.tokenizer.model {tokenizer.model}; set "
            f"{'tokenizers and stdlib' if words else 'bytes and null'}, or build your own data"
        )
    _kind(config)


def _kind(config: Config) -> None:
    """Keys of one kind of model, set for another."""
    m, defaults = config.model, Model()
    if m.type == "bert":
        of_model = ["share_embeddings_and_output_weights"]
        of_data = ["shuffle_documents", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
    else:
        of_model = ["num_tokentypes", "bert_binary_head"]
        of_data = ["masked_lm_prob", "short_seq_prob", "whole_word_masking"]
        if m.tokenizer.model == "stdlib":
            raise JzeroError("model.tokenizer.model: stdlib is a vocabulary for model.type bert, found gpt; set a path")
    for section, keys, found, default in (
        ("model", of_model, m, defaults),
        ("model.data", of_data, m.data, defaults.data),
    ):
        for key in keys:
            if getattr(found, key) != getattr(default, key):
                raise JzeroError(
                    f"{section}.{key}: {getattr(found, key)} has no meaning for model.type {m.type}; leave it out"
                )
    if m.type == "bert" and m.bert_binary_head and m.num_tokentypes == 1:
        raise JzeroError(
            "model.num_tokentypes: expected 2 (sentence A and B) or 0 with model.bert_binary_head, found 1"
        )
