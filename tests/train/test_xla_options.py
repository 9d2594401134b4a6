"""The table of XLA's options: this jaxlib knows each of them, and the trainer compiles with them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jzero import make_mesh
from jzero.plan import available, devices
from jzero.train.config import Config, Model, Optim, Trainer
from jzero.train.step import build_program
from jzero.train.xla_options import BUCKETS, GPU, compiler_options, newest

needs_compiler = pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
NAMES = sorted(
    {name for table in GPU.values() for name in table} | {name for names in BUCKETS.values() for name in names}
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, devices=devices("h100-sxm-80gb", 2))


def compile_with(options, mesh):
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(jnp.sin, compiler_options=options).lower(x).compile()


@needs_compiler
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", NAMES)
def test_this_jaxlib_knows_every_option_of_its_table(name, mesh):
    options = compiler_options(mesh, gathered=32, scattered=4)
    if name not in options:
        pytest.skip("an option of another jaxlib")
    compile_with({name: options[name]}, mesh)


@needs_compiler
@pytest.mark.gpu_compiler
def test_a_name_that_was_removed_is_refused(mesh):
    with pytest.raises(Exception, match="xla_gpu_enable_async_all_gather"):
        compile_with({"xla_gpu_enable_async_all_gather": True}, mesh)


@needs_compiler
@pytest.mark.gpu_compiler
def test_the_trainers_step_has_the_options_of_its_devices(mesh):
    model = Model(num_layers=1, hidden_size=32, num_attention_heads=2, encoder_seq_length=16, vocab_size=64,
                  micro_batch_size=1, global_batch_size=2, optim=Optim(bucket_cap_mb=3.0))  # fmt: skip
    config = Config(trainer=Trainer(devices=2), model=model)
    options = build_program(config, mesh).layout.compiler_options
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == 3 * 2**20
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 3 * 2**19  # of the shard, on 2 ranks
    assert options == compiler_options(mesh, gathered=3 * 2**20, scattered=3 * 2**19)
    assert set(options) == {*newest(GPU), *newest(BUCKETS)}
    assert build_program(config, make_mesh(data=2, devices=jax.devices()[:2])).layout.compiler_options == {}


@needs_compiler
@pytest.mark.gpu_compiler
def test_without_a_cap_collectives_merge_up_to_one_layer(mesh):
    model = Model(num_layers=3, hidden_size=32, num_attention_heads=2, encoder_seq_length=16, vocab_size=64,
                  micro_batch_size=1, global_batch_size=2)  # fmt: skip
    program = build_program(Config(trainer=Trainer(devices=2), model=model), mesh)
    one_layer = sum(x.size for x in jax.tree.leaves(program.model.abstract["blocks"])) // 3
    assert program.layout.compiler_options == compiler_options(
        mesh, gathered=2 * one_layer, scattered=4 * one_layer // 2
    )


def test_the_entry_of_a_version():
    table = {(0, 10): "a", (0, 12): "b"}
    found = {version: newest(table, version) for version in ("0.9.1", "0.10.2", "0.11.0", "0.12.0", "1.0.0.dev1")}
    assert list(found.values()) == ["a", "a", "a", "b", "b"]
