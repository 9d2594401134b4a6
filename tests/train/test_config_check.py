"""The rules between keys, and what `validate` resolves."""

import pytest

from jzero.errors import JzeroError
from jzero.train.config import load_config
from jzero.train.config_check import validate

BERT = ["model.type=bert", "model.tokenizer={library: tokenizers, model: stdlib}"]


def test_validate_resolves_all_devices():
    config = load_config(None, ["trainer.devices=-1", "trainer.num_nodes=2", "model.global_batch_size=32"])
    with pytest.raises(JzeroError, match=r"trainer\.devices: expected a number of devices, found -1"):
        _ = config.num_devices
    resolved = validate(config, 8)
    assert (resolved.trainer.devices, resolved.data_parallel_size) == (4, 8)
    assert validate(resolved, 8) == resolved
    assert validate(resolved) == resolved


def test_fewer_devices_than_there_are_is_fine_on_one_node():
    assert validate(load_config(None, ["trainer.devices=2"]), 8).num_devices == 2


@pytest.mark.parametrize(
    ("overrides", "n_devices", "message"),
    [
        (["model.fp8=true", "model.fp8_e4m3=true"], 1, "found true for both; set fp8_hybrid=false for E4M3 alone"),
        (["model.fp8=true", "model.fp8_hybrid=false"], 1, "found false for both; set fp8_hybrid=true"),
        (
            ["model.fp8=true", "model.fp8_recipe=current", "model.fp8_interval=2"],
            1,
            "model.fp8_interval: 2 has no meaning for model.fp8_recipe current; remove the line, or set "
            "fp8_recipe=delayed",
        ),
        (
            ["model.fp8=true", "model.fp8_recipe=mxfp8", "model.fp8_margin=1"],
            1,
            "model.fp8_margin: 1 has no meaning for model.fp8_recipe mxfp8",
        ),
        (
            ["model.fp8=true", "model.fp8_recipe=mxfp8", "model.ffn_hidden_size=3000"],
            1,
            "model.ffn_hidden_size of a tensor rank: 3000 is not divisible by the 32 elements that share a scale",
        ),
        (["trainer.log_fp8_every_n_steps=5"], 1, "there is nothing to log without model.fp8; set it to 0"),
        (
            ["trainer.devices=4", "model.global_batch_size=24"],
            4,
            "model.global_batch_size: 24 is not divisible by model.micro_batch_size 4 × data-parallel size 4 = 16; "
            "nearest valid: 16 or 32",
        ),
        (["trainer.devices=4"], 4, "4 × data-parallel size 4 = 16; nearest valid: 16"),
        (
            ["trainer.devices=4", "model.replica_parallel_size=2"],
            4,
            "model.micro_batch_size 4 × data-parallel size 4 = 16; nearest valid: 16",
        ),
        (
            ["trainer.devices=6", "model.replica_parallel_size=4"],
            6,
            "trainer.devices × trainer.num_nodes = 6 is not divisible by model.tensor_model_parallel_size 1 × "
            "model.pipeline_model_parallel_size 1 × model.replica_parallel_size 4 = 4; nearest valid: 4 or 8 devices",
        ),
        (["trainer.devices=4"], 2, "trainer.devices: 4 × trainer.num_nodes 1 = 4 devices, but there are 2"),
        (["trainer.num_nodes=2"], 4, "trainer.devices: 1 × trainer.num_nodes 2 = 2 devices, but there are 4"),
        (
            ["trainer.devices=-1", "trainer.num_nodes=3"],
            8,
            "trainer.num_nodes: 8 devices cannot be split evenly over 3",
        ),
        (["trainer.devices=-1"], None, "trainer.devices: -1 stands for all devices, but none are known here"),
        (
            ["model.tensor_model_parallel_size=8", "trainer.devices=8"],
            8,
            "model.num_attention_heads: expected a multiple of tensor_model_parallel_size 8, found 12",
        ),
        (
            ["model.tensor_model_parallel_size=4", "trainer.devices=4", "model.num_query_groups=6"],
            4,
            "model.num_query_groups: expected a multiple of tensor_model_parallel_size 4, found 6",
        ),
        (
            ["model.tensor_model_parallel_size=4", "trainer.devices=4", "model.ffn_hidden_size=1026"],
            4,
            "model.ffn_hidden_size: expected a multiple of tensor_model_parallel_size 4, found 1026",
        ),
        (
            ["model.tensor_model_parallel_size=2", "trainer.devices=3"],
            3,
            "trainer.devices × trainer.num_nodes = 3 is not divisible by model.tensor_model_parallel_size 2",
        ),
        (
            [
                "model.tensor_model_parallel_size=4",
                "trainer.devices=4",
                "model.sequence_parallel=true",
                "model.encoder_seq_length=514",
            ],
            4,
            "model.encoder_seq_length: 514 is not divisible by model.tensor_model_parallel_size 4, as "
            "model.sequence_parallel needs; nearest valid: 512 or 516",
        ),
        (
            ["model.pipeline_model_parallel_size=8", "trainer.devices=8"],
            8,
            "model.num_layers: 12 is not divisible by model.pipeline_model_parallel_size 8; every chunk has as many",
        ),
        (
            [
                "model.pipeline_model_parallel_size=4",
                "model.virtual_pipeline_model_parallel_size=2",
                "trainer.devices=4",
            ],
            8,
            "model.num_layers: 12 is not divisible by model.pipeline_model_parallel_size 4 × "
            "model.virtual_pipeline_model_parallel_size 2 = 8",
        ),
        (
            ["model.virtual_pipeline_model_parallel_size=2"],
            1,
            "model.virtual_pipeline_model_parallel_size: 2 chunks per stage need several stages, but "
            "model.pipeline_model_parallel_size is 1; set it to null",
        ),
        (
            [
                "model={pipeline_model_parallel_size: 4, virtual_pipeline_model_parallel_size: 3, micro_batch_size: 1, "
                "global_batch_size: 6}",
                "trainer.devices=4",
            ],
            4,
            "micro-batches: 6 is not divisible by model.pipeline_model_parallel_size 4",
        ),
        (
            ["model.sequence_parallel=true"],
            8,
            "model.sequence_parallel: true splits the sequence over the tensor ranks, but "
            "model.tensor_model_parallel_size is 1; set it to false",
        ),
        (
            ["model.hidden_size=770"],
            1,
            "model.num_attention_heads: expected a divisor of hidden_size 770 (or kv_channels set), found 12",
        ),
        (
            ["model.num_query_groups=5"],
            1,
            "model.num_query_groups: expected a divisor of num_attention_heads 12, found 5",
        ),
        (
            ["model.num_query_groups=24"],
            1,
            "model.num_query_groups: expected a divisor of num_attention_heads 12, found 24",
        ),
        (
            ["model.max_position_embeddings=100"],
            1,
            "model.max_position_embeddings: 100 is below model.encoder_seq_length 512",
        ),
        (
            ["model.position_embedding_type=rope", "model.rotary_percentage=0.3"],
            1,
            "model.rotary_percentage: expected a share of the 64 channels of a head that is an even number",
        ),
        (
            ["model.position_embedding_type=rope", "model.kv_channels=9"],
            1,
            "model.rotary_percentage: expected a share of the 9 channels of a head",
        ),
        (
            ["model.rotary_base=500"],
            1,
            "model.rotary_base: expected its default 10000.0 unless position_embedding_type is",
        ),
        (["model.megatron_amp_O2=false"], 1, "model.megatron_amp_O2: trainer.precision bf16 keeps the weights in bf16"),
        (
            ["model={attention_implementation: cudnn, attention_dropout: 0}", "trainer.precision=32"],
            1,
            "model.attention_implementation: cudnn computes in 16 bits only",
        ),
        (
            ["model.attention_implementation=cudnn"],
            1,
            "model.attention_dropout: expected 0 with attention_implementation cudnn, which has no dropout, found 0.1",
        ),
        (
            ["model.optim.master=fp32", "trainer.precision=32"],
            1,
            "model.optim.master: fp32 parameters (trainer.precision 32) are their own master",
        ),
        (
            ["model.optim.master=none", "model.optim.param_sync_dtype=bf16", "trainer.precision=32"],
            1,
            "model.optim.param_sync_dtype: bf16 would round the only copy of the fp32 parameters",
        ),
        (["model.optim.overlap_grad_sync=false"], 1, "model.optim.overlap_grad_sync: gradients are always reduced"),
        (
            ["model.optim.overlap_param_sync=true", "model.optim.policy=replicated"],
            1,
            "model.optim.policy: replicated contradicts model.optim.overlap_param_sync true",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.policy=gather_twice"],
            1,
            "model.optim.policy: gather_twice needs the sharded state of model.optim.name=distributed_fused_adam",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.overlap_param_sync=true"],
            1,
            "model.optim.overlap_param_sync: true needs the sharded state",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.param_sync_dtype=bf16"],
            1,
            "model.optim.param_sync_dtype: bf16 needs the sharded state",
        ),
        (
            ["model.optim.name=fused_adam", "model.grad_accumulation=sharded"],
            1,
            "model.grad_accumulation: sharded needs the sharded state",
        ),
        (["model.optim.lr=1e-6"], 1, "model.optim.lr: 1e-06 is below model.optim.sched.min_lr 2e-05"),
        (["model.tokenizer.library=tokenizers"], 1, "model.tokenizer.model: the library tokenizers needs the path"),
        (["model.tokenizer.model=t.json"], 1, "model.tokenizer.model: the library bytes reads no file, found t.json"),
        (
            ["model.tokenizer.library=tokenizers", "model.tokenizer.model=t.json"],
            1,
            "model.data.data_prefix: stdlib holds byte tokens, found model.tokenizer.library tokenizers",
        ),
        (
            ["model.tokenizer={library: tokenizers, model: t.json}", "model.data.data_prefix=[1, a, 2, stdlib]"],
            1,
            "model.data.data_prefix: stdlib holds byte tokens, found model.tokenizer.library tokenizers",
        ),
        (
            ["model.type=bert", "model.tokenizer={library: tokenizers, model: t.json}"],
            1,
            "model.data.data_prefix: stdlib holds words, found model.tokenizer.library tokenizers and "
            "model.tokenizer.model t.json; set tokenizers and stdlib",
        ),
        (
            ["model.tokenizer={library: tokenizers, model: stdlib}", "model.data.data_prefix=a"],
            1,
            "model.tokenizer.model: stdlib is a vocabulary for model.type bert, found gpt",
        ),
        (["model.data.masked_lm_prob=0.2"], 1, "model.data.masked_lm_prob: 0.2 has no meaning for model.type gpt"),
        (["model.bert_binary_head=false"], 1, "model.bert_binary_head: False has no meaning for model.type gpt"),
        (["model.transformer_block_type=post_ln"], 1, "transformer_block_type: expected pre_ln for a GPT, found post"),
        (
            [*BERT, "model.data.eod_mask_loss=true"],
            1,
            "model.data.eod_mask_loss: True has no meaning for model.type bert; leave it out",
        ),
        (
            [*BERT, "model.share_embeddings_and_output_weights=false"],
            1,
            "model.share_embeddings_and_output_weights: False has no meaning for model.type bert",
        ),
        ([*BERT, "model.num_tokentypes=1"], 1, "model.num_tokentypes: expected 2 (sentence A and B) or 0 with"),
    ],
)
def test_rules_between_keys(overrides, n_devices, message):
    config = load_config(None, overrides)
    with pytest.raises(JzeroError) as error:
        validate(config, n_devices)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_default_configuration_is_valid_without_zero_too():
    assert validate(load_config(None, ["model.optim.name=fused_adam"]), 1).zero is False
