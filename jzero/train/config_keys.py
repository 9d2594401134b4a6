"""Every key of a run but its sections' nesting: name, type, default, meaning and limits, each in one place.

Names and defaults are NeMo's (examples/nlp/language_modeling/conf/megatron_model_config.yaml) where the thing exists
there. `jzero.train.config` puts the sections together and derives what follows from them; `jzero.train.config_check`
holds the rules between keys.
"""

from dataclasses import dataclass, field

from jzero.train.options import option


def _devices(value: int) -> str | None:
    return None if value == -1 or 1 <= value <= 1024 else "1 to 1024, or -1 for all there are"


def _some_text(value: str) -> str | None:
    return None if value.strip() else "some text"


def _folder_name(value: str) -> str | None:
    return "some text without \\" if "\\" in value else _some_text(value)  # checkpoints take \\ for another /


def _splits(value: str) -> str | None:
    expected = 'up to three weights "train,validation,test" such as 900,50,50, the first above 0'
    try:
        weights = [float(w) for w in value.split(",")]
    except ValueError:
        return expected
    return None if len(weights) <= 3 and weights[0] > 0 and all(0 <= w < float("inf") for w in weights) else expected


def _data_prefix(value: str | tuple[str | float, ...]) -> str | None:
    entries = (value,) if isinstance(value, str) else value
    if entries and all(isinstance(e, str) and e for e in entries):
        return None
    weights, paths = entries[::2], entries[1::2]
    paired = len(weights) == len(paths) > 0 and all(isinstance(p, str) and p for p in paths)
    if paired and all(isinstance(w, float) and w > 0 for w in weights):
        return None
    return "stdlib, a path, a list of paths, or [weight, path, weight, path, ...] with weights above 0"


@dataclass(frozen=True)
class Trainer:
    """How long, on how many devices and in which precision to train."""

    devices: int = option(1, "Devices per node; -1 takes all there are.", check=_devices)
    num_nodes: int = option(1, "Number of hosts.", at_least=1)
    precision: str | int = option(
        "bf16",
        "Compute: bf16 (weights too, with fp32 masters in the optimizer) or plain float32.",
        choices=("bf16", 32),
    )
    max_steps: int = option(100_000, "Optimizer steps of the whole run.", at_least=1)
    log_every_n_steps: int = option(10, "Steps between two lines of the console.", at_least=1)
    val_check_interval: int = option(100, "Steps between two evaluations.", at_least=1)
    limit_val_batches: int = option(50, "Global batches per evaluation; 0 evaluates never.", at_least=0)
    gradient_clip_val: float | None = option(
        1.0, "Largest global norm of the gradient, larger ones are scaled down to it; 0 or null is off.", at_least=0
    )
    log_fp8_every_n_steps: int = option(
        0,
        "Steps between two lines of metrics.jsonl with amax, scale and the shares of saturated and flushed values of "
        "each FP8 product; each costs a forward and a backward pass. 0: none.",
        at_least=0,
    )
    skip_nonfinite: bool = option(
        False, "Leave parameters and optimizer as they are in a step whose gradient norm is not finite, and go on."
    )
    terminate_on_nan: bool = option(
        True,
        "End the run, keeping its last checkpoint, at the first loss or gradient norm that is not finite; "
        "false warns once and trains on without saving.",
    )


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints a run keeps."""

    monitor: str = option("val_loss", "The measure that makes a checkpoint one of the best.", choices=("val_loss",))
    save_top_k: int = option(10, "The best checkpoints to keep, of those whose step was evaluated.", at_least=0)
    save_last_k: int = option(1, "The latest checkpoints to keep.", at_least=1)
    every_n_steps: int = option(1000, "Steps between two checkpoints.", at_least=1)
    async_save: bool = option(True, "Write while training goes on.")


@dataclass(frozen=True)
class ExpManager:
    """Where a run's files go, and whether it continues."""

    exp_dir: str = option("runs", "Folder of all runs; ~ is the user's home.", check=_folder_name)
    name: str = option("gpt", "Folder of this run, in exp_dir.", check=_folder_name)
    resume_if_exists: bool = option(
        True, "Continue from the latest checkpoint in the run's folder; if false, the folder must be new."
    )
    create_tensorboard_logger: bool = option(True, "Write TensorBoard files besides metrics.jsonl.")
    create_checkpoint_callback: bool = option(True, "Save checkpoints.")
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens."""

    library: str = option(
        "bytes", "bytes: one token per UTF-8 byte; tokenizers: a Hugging Face file.", choices=("bytes", "tokenizers")
    )
    model: str | None = option(
        None,
        "Path of tokenizer.json, for the library tokenizers; stdlib is the WordPiece vocabulary of the built-in corpus "
        "(model.type bert).",
    )


@dataclass(frozen=True)
class Data:
    """What to train on."""

    data_prefix: str | tuple[str | float, ...] = option(
        "stdlib",
        "Indexed files without .bin/.idx: a path, a list of paths, or [weight, path, weight, path, ...]; "
        "stdlib is the built-in corpus (the source text of Python's standard library, as bytes; for bert as words).",
        check=_data_prefix,
    )
    data_impl: str = option("mmap", "Format: Megatron's memory-mapped .bin/.idx.", choices=("mmap",))
    splits_string: str = option(
        "900,50,50", "Weights of training, validation and test documents; those left out are 0.", check=_splits
    )
    num_workers: int = option(0, "Processes that prepare batches; 0 does it in the trainer.", at_least=0)
    shuffle_documents: bool = option(True, "Shuffle the order of documents in every epoch.")
    reset_position_ids: bool = option(False, "Count positions from 0 again after each end of document.")
    reset_attention_mask: bool = option(False, "Let no token attend across an end of document.")
    eod_mask_loss: bool = option(False, "No loss where the input is the end-of-document token.")
    masked_lm_prob: float = option(0.15, "bert: share of the tokens to be predicted.", above=0, below=1)
    short_seq_prob: float = option(0.1, "bert: share of the samples cut to a random length.", at_least=0, at_most=1)
    whole_word_masking: bool = option(False, "bert: mask whole words.")
    cache_dir: str | None = option(None, "Folder for the built-in corpus; null is the user's cache folder.")


@dataclass(frozen=True)
class Sched:
    """The learning rate over the steps; the formulas are in `jzero.train.schedule`."""

    name: str = option(
        "CosineAnnealing",
        "Shape: a cosine down to min_lr, or constant after the warm-up.",
        choices=("CosineAnnealing", "WarmupPolicy"),
    )
    warmup_steps: int = option(500, "Steps of linear warm-up.", at_least=0)
    constant_steps: int = option(
        0, "Last steps, at min_lr; above 0 the warm-up starts at 0, as Megatron's.", at_least=0
    )
    min_lr: float = option(2e-5, "Learning rate at the end of the cosine and after max_steps.", at_least=0)
    max_steps: int | None = option(None, "Steps of the schedule; null is trainer.max_steps.", at_least=1)


@dataclass(frozen=True)
class Optim:
    """The optimizer: AdamW, its state sharded over the data-parallel devices (ZeRO) or not."""

    name: str = option(
        "distributed_fused_adam",
        "distributed_fused_adam shards the optimizer's state (ZeRO), fused_adam replicates it.",
        choices=("distributed_fused_adam", "fused_adam"),
    )
    lr: float = option(2e-4, "Peak learning rate.", at_least=0)
    weight_decay: float = option(0.01, "Decoupled weight decay (AdamW).", at_least=0)
    betas: tuple[float, float] = option((0.9, 0.98), "Decay of the first and second moment.", at_least=0, below=1)
    eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    grad_sync_dtype: str | None = option(None, "Gradients on the wire; null is fp32.", choices=("fp32", "bf16"))
    param_sync_dtype: str | None = option(
        None, "Parameters on the wire; null is their own type.", choices=("fp32", "bf16")
    )
    overlap_grad_sync: bool = option(True, "Reduce each layer's gradient during the backward pass; always on.")
    overlap_param_sync: bool = option(False, "Gather each layer's parameters during the next forward pass.")
    policy: str | None = option(
        None,
        "What is kept between steps: replicated parameters; gather_on_forward: shards, gathered once per step; "
        "gather_twice: shards, gathered in forward and in backward (ZeRO-3). "
        "null follows overlap_param_sync: gather_on_forward if true, else replicated.",
        choices=("replicated", "gather_on_forward", "gather_twice"),
    )
    bucket_cap_mb: float | None = option(
        None, "Size in MiB up to which XLA merges small collectives on GPUs; null: that of one layer.", above=0
    )
    master: str = option(
        "auto",
        "What is kept beside the parameters: an fp32 copy, the 16 bits that bf16 lacks (remainder: the same numbers as "
        "fp32), a float16 copy with scales, or none. auto: none for fp32 parameters; for bf16 ones remainder, none if "
        "the moments are bf16, scaled_fp16 if they are.",
        choices=("auto", "none", "fp32", "remainder", "scaled_fp16"),
    )
    exp_avg_dtype: str = option(
        "fp32",
        "Storage of Adam's first moment; scaled: one scale per layer of each shard.",
        choices=("fp32", "bf16", "scaled_fp16", "scaled_fp8"),
    )
    exp_avg_sq_dtype: str = option("fp32", "Storage of Adam's second moment.", choices=("fp32", "bf16", "scaled_fp16"))
    stochastic_rounding: bool = option(
        False, "Round bf16 state without a scale, and bf16 parameters without a master, up or down at random."
    )
    sched: Sched = field(default_factory=Sched)


@dataclass(frozen=True)
class Model:
    """The transformer, its parallel layout and its batch."""

    type: str = option(
        "gpt",
        "gpt predicts the next token; bert masked tokens, from both sides, and whether a sentence follows another.",
        choices=("gpt", "bert"),
    )
    micro_batch_size: int = option(4, "Sequences a device computes at once.", at_least=1)
    global_batch_size: int = option(8, "Sequences of one optimizer step, over all devices.", at_least=1)
    tensor_model_parallel_size: int = option(
        1, "Devices that share each layer: heads, feed-forward width and vocabulary are split.", at_least=1
    )
    pipeline_model_parallel_size: int = option(
        1, "Stages that split the layers; micro-batches go through them one behind the other (1F1B).", at_least=1
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "Chunks of layers per stage (interleaved 1F1B): less idle time, more communication.", at_least=2
    )
    sequence_parallel: bool = option(
        False, "Split the sequence over the tensor ranks wherever a layer is not split otherwise: norms, dropout."
    )
    replica_parallel_size: int = option(
        1, "Copies of the sharded optimizer: state is sharded within a copy, gradients averaged over all.", at_least=1
    )
    encoder_seq_length: int = option(512, "Tokens of a training sequence.", at_least=1)
    max_position_embeddings: int | None = option(None, "Longest sequence; null is encoder_seq_length.", at_least=1)
    num_layers: int = option(12, "Transformer blocks.", at_least=1)
    hidden_size: int = option(768, "Width of the residual stream.", at_least=1)
    ffn_hidden_size: int | None = option(None, "Width of the feed-forward layer; null is 4 × hidden_size.", at_least=1)
    num_attention_heads: int = option(12, "Query heads.", at_least=1)
    num_query_groups: int | None = option(
        None, "Key and value heads (grouped-query attention); null is num_attention_heads.", at_least=1
    )
    kv_channels: int | None = option(None, "Width of a head; null is hidden_size / num_attention_heads.", at_least=1)
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", above=0)
    use_scaled_init_method: bool = option(True, "Divide that of the output projections by √(2 × num_layers).")
    hidden_dropout: float = option(
        0.1, "Dropout of the embedding and of both branches of a block.", at_least=0, below=1
    )
    attention_dropout: float = option(0.1, "Dropout of the attention weights.", at_least=0, below=1)
    normalization: str = option("layernorm", "Kind of norm.", choices=("layernorm", "rmsnorm"))
    layernorm_epsilon: float = option(1e-5, "Added to the variance in a norm.", above=0)
    activation: str = option(
        "gelu",
        "Feed-forward nonlinearity; gelu is the tanh approximation, gelu_exact has the error function.",
        choices=("gelu", "gelu_exact", "swiglu"),
    )
    bias: bool = option(True, "Biases in the linear layers.")
    transformer_block_type: str = option(
        "pre_ln",
        "Norms come before attention and MLP; post_ln: after their sums with the residual stream (bert alone).",
        choices=("pre_ln", "post_ln"),
    )
    position_embedding_type: str = option(
        "learned_absolute", "How positions enter.", choices=("learned_absolute", "rope")
    )
    rotary_base: float = option(10_000.0, "Base of the rotary wavelengths.", above=1)
    rotary_percentage: float = option(1.0, "Share of a head's channels that rotate.", above=0, at_most=1)
    share_embeddings_and_output_weights: bool = option(True, "Use the token embedding as the output layer too.")
    num_tokentypes: int = option(2, "bert: kinds of segments that have an embedding; 0: none.", at_least=0)
    bert_binary_head: bool = option(
        True, "bert: a pooler and a head that tells whether sentence B follows A; false: samples are no pairs."
    )
    make_vocab_size_divisible_by: int = option(
        128, "The vocabulary is padded to a multiple of this, and of tensor_model_parallel_size.", at_least=1
    )
    do_layer_norm_weight_decay: bool = option(False, "Decay norms and biases too.")
    seed: int = option(1234, "Seed of weights, dropout and data order.", at_least=0, at_most=2**31 - 1)
    megatron_amp_O2: bool = option(  # noqa: N815 - NeMo's name
        True, "bf16 weights with fp32 masters in the optimizer; must be true with precision bf16."
    )
    activations_checkpoint_granularity: str | None = option(
        None,
        "What the backward pass recomputes: nothing, the attention (selective) or whole blocks (full).",
        choices=("selective", "full"),
    )
    grad_accumulation: str = option(
        "local",
        "local sums micro-batches in fp32 on the device and reduces once per step; "
        "sharded reduces every micro-batch into the shard.",
        choices=("local", "sharded"),
    )
    attention_implementation: str = option(
        "auto",
        "Attention kernel: auto is cuDNN's where it can be used, else plain operations; xla and cudnn are JAX's.",
        choices=("auto", "xla", "cudnn"),
    )
    fp8: bool = option(
        False, "Multiply in FP8 in the four projections of each block; embedding, head and norms stay as they are."
    )
    fp8_recipe: str = option(
        "delayed",
        "Scales of FP8: delayed: from the amaxes of earlier steps; current: from each tensor's own; "
        "mxfp8: one per 32 elements, a single kernel on GPUs since Blackwell.",
        choices=("delayed", "current", "mxfp8"),
    )
    fp8_params: bool = option(
        False,
        "Keep and gather the weights of these projections as FP8, one byte per element; their masters are in the "
        "optimizer. Needs fp8=true.",
    )
    first_last_layers_bf16: bool = option(
        False,
        "With fp8: the first and the last blocks multiply in the type of the activations. Not with fp8_params.",
    )
    num_layers_at_start_in_bf16: int = option(1, "first_last_layers_bf16: how many of the first blocks.", at_least=0)
    num_layers_at_end_in_bf16: int = option(1, "first_last_layers_bf16: how many of the last blocks.", at_least=0)
    fp8_hybrid: bool = option(True, "E4M3, and E5M2 for gradients.")
    fp8_e4m3: bool = option(False, "E4M3 for all, also for gradients; needs fp8_hybrid=false.")
    fp8_margin: int = option(0, "Powers of two kept free above the amax.", at_least=0)
    fp8_interval: int = option(1, "delayed: steps between two updates of the scales.", at_least=1)
    fp8_amax_history_len: int = option(1024, "delayed: steps whose amaxes are remembered.", at_least=1)
    fp8_amax_compute_algo: str = option(
        "max", "delayed: scales follow the largest amax remembered, or the last.", choices=("max", "most_recent")
    )
    fp8_power_of_two_scales: bool = option(False, "delayed, current: scales are powers of two.")
    vocab_size: int | None = option(None, "Tokens before padding; null is the tokenizer's.", at_least=1)
    restore_from_path: str | None = option(
        None,
        "Weights to start from, where the run has no checkpoint of its own: a folder of Hugging Face's (config.json "
        "and safetensors), or the folder of another run.",
    )
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)


@dataclass(frozen=True)
class Generate:
    """The text sample at the end of training."""

    prompt: str = option("def ", "Text to continue; bert: with [MASK] for what is to be filled in, else no sample.")
    tokens: int = option(200, "Tokens to add; 0: no sample.", at_least=0)
    temperature: float = option(0.8, "Below 1 prefers likely tokens more; 0 always takes the likeliest.", at_least=0)
    top_k: int = option(50, "Draw from this many likeliest tokens; 0 draws from all.", at_least=0)
