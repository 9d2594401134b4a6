"""Advice: when it is given, which keys it names, and that its numbers follow from the report."""

import dataclasses

import jax
import pytest

from jzero.models.gpt import functions
from jzero.plan.advice import advise, advise_config, helps, measured
from jzero.plan.hlo import Array
from jzero.plan.memory import Temporary
from jzero.plan.result import CollectiveUse, Memory, Report
from jzero.plan.timeline import Timeline
from jzero.train.config import Config, Model, Optim, Trainer, model_config

GIB = 2**30


def use(kind="all-gather", ms=5.0, hidden=0.0, between=()) -> CollectiveUse:
    return CollectiveUse(kind, "data", 2, 2**21, ms, hidden, True, "forward ×2", list(between), "gather")


def a_report(uses=(), peak=50, limit=70, outputs=0, largest=()) -> Report:
    memory = Memory(0, 0, 0, 0, outputs * GIB, peak * GIB, peak * GIB, limit * GIB, list(largest))
    exposed = sum(u.exposed_ms for u in uses)
    empty = Timeline(0, 0, 0, 0, 0, [], {}, [])
    numbers = {
        "step_ms": 100 + exposed,
        "compute_ms": 100.0,
        "copies_ms": 0.0,
        "exposed_ms": exposed,
        "pipeline_idle": 0.0,
        "model_flops": 0.0,
    }
    return Report(
        "t", "GPU", {"data": 8}, memory, list(uses), **numbers, mfu=0.4, tokens_per_second=1.0, compile_seconds=1.0,
        notes=[], advice=[], text="", timeline=empty,
    )  # fmt: skip


def configuration(devices=8, nodes=1, **changes) -> Config:
    model = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "encoder_seq_length": 32, "vocab_size": 128,
        "micro_batch_size": 2, "global_batch_size": 32,
    } | changes  # fmt: skip
    return Config(trainer=Trainer(devices=devices, num_nodes=nodes), model=Model(**model))


def given(report, config):
    abstract = functions(model_config(config)).abstract
    return {key: a for a in advise_config(report, config, abstract) for key in a.overrides[:1] or [a.text]}


def size(config) -> int:
    return sum(x.size for x in jax.tree.leaves(functions(model_config(config)).abstract))


def test_a_step_that_fits_and_hides_gets_none():
    report = a_report([use(hidden=0.99)])
    assert advise(report) == []
    assert given(report, configuration()) == {}


def test_what_does_not_fit_names_options_with_their_bytes():
    stack = Temporary("add", Array("bf16", (4, 2, 32, 64)), 20 * GIB)
    report = a_report(peak=80, largest=[stack])
    config = configuration(optim=Optim(policy="replicated"))
    found = given(report, config)
    assert list(found) == [
        "model.grad_accumulation=sharded",
        "model.optim.policy=gather_twice",
        "model.activations_checkpoint_granularity=full",
        "model.micro_batch_size=1",
    ]
    assert found["model.micro_batch_size=1"].effect == "peak about 70.00 GiB instead of 80.00, fits"
    assert found["model.activations_checkpoint_granularity=full"].effect.startswith("peak about 60.00 GiB")
    gathers = found["model.optim.policy=gather_twice"]
    assert gathers.overrides[1] == "model.optim.overlap_param_sync=true"
    assert (gathers.how, "still too much" in gathers.effect) == ("formula", True)
    one = given(report, dataclasses.replace(config, model=dataclasses.replace(config.model, global_batch_size=16)))
    assert "model.grad_accumulation=sharded" not in one


@pytest.mark.parametrize("policy", ["replicated", "gather_on_forward"])
def test_the_bytes_of_whole_weights(policy):
    config = configuration(hidden_size=12288, num_attention_heads=96, optim=Optim(policy=policy))
    found = given(a_report(peak=80), config)["model.optim.policy=gather_twice"]
    blocks = size(config) - (128 + 32 + 2) * 12288
    kept = size(config) * 7 // 8 if policy == "replicated" else blocks
    assert found.effect.startswith(f"peak about {80 - 2 * kept / GIB:,.2f} GiB")


def test_exposed_gathers_after_the_update_are_moved_into_the_forward_pass():
    report = a_report([use(ms=4.0)])
    found = given(report, configuration(optim=Optim(policy="replicated")))
    assert found["model.optim.overlap_param_sync=true"].effect == "step about 100.00 ms instead of 104.00"
    assert "model.optim.overlap_param_sync=true" not in given(report, configuration(optim=Optim(policy="gather_twice")))


def test_exposed_scatters_may_be_sent_in_half_the_bytes():
    report = a_report([use("reduce-scatter", ms=4.0)])
    found = given(report, configuration())
    assert found["model.optim.grad_sync_dtype=bf16"].effect == "step about 102.00 ms instead of 104.00"
    assert "model.optim.grad_sync_dtype=bf16" not in given(report, configuration(optim=Optim(grad_sync_dtype="bf16")))


def test_across_the_network_shards_may_stay_inside_a_machine():
    report = a_report([use(ms=8.0)])
    found = given(report, configuration(nodes=4, global_batch_size=64))
    assert found["model.replica_parallel_size=4"].effect == "step about 102.00 ms instead of 108.00"


def test_one_micro_batch_may_compute_more_per_step():
    found = given(a_report([use(ms=5.0)]), configuration(global_batch_size=16))
    assert found["model.global_batch_size=32"].effect == "exposed 2.4% of the step instead of 4.8%"


def test_any_step_hears_of_its_worst_collective():
    [found] = advise(a_report([use(ms=1.0, hidden=0.9), use("reduce-scatter", ms=6.0)]))
    assert "reduce-scatter of 1.0 MiB over data (2 calls) in forward ×2 is waited for at once" in found.text
    assert found.effect == "step about 100.10 ms instead of 106.10"
    [found] = advise(a_report([use(ms=6.0, hidden=0.5, between=[("dot", 1.0)])]))
    assert "hides only 50%" in found.text


def test_any_step_hears_what_is_too_large():
    largest = Temporary("exp in attend", Array("f32", (8, 8)), 20 * GIB)
    [found] = advise(a_report(peak=80, largest=[largest]))
    assert "10.00 GiB too much" in found.text
    assert "f32[8,8] (exp in attend)" in found.text


def test_compiled_numbers_replace_the_formula():
    before, after = a_report([use(ms=4.0)], peak=80), a_report([use(ms=1.0)], peak=60)
    first = advise(before)[0]
    found = measured(first, before, after)
    assert (found.how, found.text) == ("compiled", first.text)
    assert found.effect == (
        "peak 60.00 GiB instead of 80.00; step 101.00 ms instead of 104.00; exposed 0.99 % instead of 3.85; "
        "tokens/s 1 instead of 1; fits"
    )


def test_what_helps():
    large, small = a_report(peak=80), a_report(peak=60)
    fast = dataclasses.replace(small, tokens_per_second=2.0)
    assert helps(large, small)
    assert helps(large, a_report(peak=75))  # still too much, but less
    assert not helps(large, a_report(peak=85))
    assert helps(small, fast)
    assert not helps(fast, small)
    assert not helps(small, dataclasses.replace(large, tokens_per_second=2.0))
