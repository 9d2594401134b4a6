"""Layouts that make sense, and a sweep over them that can be stopped, resumed, and outlives a compiler that dies."""

import dataclasses
import json
import sys

import pytest

from jzero import JzeroError
from jzero.plan import available, search, sweep
from jzero.plan.layouts import Layout, layouts
from jzero.plan.search import ABORTED, SKIPPED, Outcome
from jzero.plan.worker import Worker, WorkerError
from jzero.train.config import Config, Model, Optim, Trainer, load_config, to_yaml
from jzero.train.config_check import validate

TINY = Config(
    trainer=Trainer(devices=4),
    model=Model(
        num_layers=1, hidden_size=32, num_attention_heads=2, encoder_seq_length=16, vocab_size=64, micro_batch_size=1,
        global_batch_size=8, hidden_dropout=0.0, attention_dropout=0.0,
    ),
)  # fmt: skip
FIXED = ["model.optim.policy", "model.activations_checkpoint_granularity"]
needs_compiler = pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")


def test_every_layout_is_a_valid_configuration(tmp_path):
    found = layouts(TINY)
    assert len(set(found)) == len(found) == 3 * 3 * (2 + 1)  # micro-batch 1 sums two, micro-batch 2 sums nothing
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(TINY))
    for layout in found:
        config = validate(load_config(path, layout.overrides), 4)
        assert config.policy == layout.policy
        assert config.model.micro_batch_size == layout.micro_batch_size
        assert (config.model.activations_checkpoint_granularity or "") == layout.granularity


def test_the_axes_that_the_trainer_cannot_use_are_left_out():
    """What its own check refuses is no layout; one layer makes no pipeline, 32 columns are too few to split."""
    assert {(x.tensor, x.pipeline, x.sequence) for x in layouts(TINY)} == {(1, 1, False)}
    wide = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, hidden_size=4096, num_attention_heads=32))
    for x in layouts(wide):
        assert x.tensor <= 4
        assert x.sequence == (x.tensor > 1)
        sizes = {"tensor_model_parallel_size": x.tensor, "sequence_parallel": x.sequence}
        validate(dataclasses.replace(wide, model=dataclasses.replace(wide.model, **sizes)), 4)


def test_keys_that_are_fixed_keep_their_value():
    found = layouts(TINY, FIXED)
    assert {(x.policy, x.granularity) for x in found} == {("replicated", "")}
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, micro_batch_size=2))
    assert {x.micro_batch_size for x in layouts(config, ["model.micro_batch_size"])} == {2}


def test_replicas_are_tried_on_several_machines_only():
    four = dataclasses.replace(TINY, trainer=Trainer(devices=2, num_nodes=2))
    assert {x.replica for x in layouts(TINY)} == {1}
    assert {x.replica for x in layouts(four)} == {1, 2}


def test_without_zero_there_is_one_policy():
    model = dataclasses.replace(TINY.model, optim=Optim(name="fused_adam"))
    assert {x.policy for x in layouts(dataclasses.replace(TINY, model=model))} == {"replicated"}


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"micro_batch_size": 4}, True),
        ({"granularity": ""}, True),
        ({"granularity": "", "micro_batch_size": 1}, False),
        ({"granularity": "full", "micro_batch_size": 8}, False),
        ({"policy": "gather_twice"}, False),
        ({"accumulation": "sharded"}, False),
        ({}, True),
    ],
)
def test_which_layouts_need_no_less(changes, more):
    base = Layout(2, "selective", "replicated", "local", 1)
    assert dataclasses.replace(base, **changes).needs_no_less_than(base) == more


@pytest.fixture
def answered(monkeypatch):
    """A sweep whose workers answer at once: `answered(layout)` gives the numbers; asked overrides are recorded."""
    asked = []

    def install(answer):
        def ask(self, overrides):
            asked.append(overrides)
            return answer(dict(o.split("=", 1) for o in overrides))

        monkeypatch.setattr(Worker, "ask", ask)
        monkeypatch.setattr(search.targets, "require", lambda: None)
        return asked

    return install


def numbers(values):
    """A step that fits up to micro-batch 1 without full recomputation, and is faster with larger ones."""
    size = int(values["model.micro_batch_size"])
    fits = size == 1 or values["model.activations_checkpoint_granularity"] == "full"
    return {"fits": fits, "tokens_per_second": 100.0 * size, "step_ms": 1.0, "exposed_ms": 0.1, "peak": 1, "mfu": 0.1}


def test_the_best_comes_first_and_what_cannot_fit_is_not_compiled(answered, tmp_path):
    asked = answered(numbers)
    progress = []
    found = sweep(
        TINY, "h100-sxm-80gb", results=tmp_path / "r.jsonl", workers=1, progress=lambda *x: progress.append(x)
    )
    assert len(found) == 27
    assert [o.layout.micro_batch_size for o in found[:3]] == [2, 2, 2]
    assert {o.layout.granularity for o in found[:3]} == {"full"}
    skipped = [o.layout for o in found if o.error == SKIPPED]
    assert {(x.micro_batch_size, x.granularity) for x in skipped} == {(2, "")}
    assert len(asked) == 27 - len(skipped)
    assert progress[0] == (0, 27)
    assert progress[-1] == (27, 27)


def test_a_sweep_continues_where_it_was_stopped(answered, tmp_path):
    path = tmp_path / "r.jsonl"
    stop = answered(lambda values: (_ for _ in ()).throw(KeyboardInterrupt) if len(stop) > 5 else numbers(values))
    with pytest.raises(KeyboardInterrupt):
        sweep(TINY, "h100-sxm-80gb", results=path, workers=1)
    assert len(path.read_text().splitlines()) == 1 + 5
    with path.open("a") as file:
        file.write('{"layout": {"micro_ba')  # cut off
    before = len(stop)
    asked = answered(numbers)
    again = sweep(TINY, "h100-sxm-80gb", results=path, workers=1)
    assert len(again) == 27
    assert asked is stop
    assert len(asked) - before == 27 - 5 - sum(o.error == SKIPPED for o in again)
    assert sweep(TINY, "h100-sxm-80gb", results=path, workers=1)[0] == again[0]


def test_results_of_another_sweep_are_refused(answered, tmp_path):
    path = tmp_path / "r.jsonl"
    answered(numbers)
    sweep(TINY, "h100-sxm-80gb", results=path, workers=1, fixed=FIXED)
    with pytest.raises(JzeroError, match=r"r.jsonl: expected the results of this sweep, found those of another"):
        sweep(TINY, "b200-sxm-180gb", results=path, workers=1)
    path.write_text("not json\n")
    with pytest.raises(JzeroError, match="another configuration, target or version"):
        sweep(TINY, "h100-sxm-80gb", results=path, workers=1)


def test_the_micro_batch_of_the_file_need_not_suit_the_devices(answered, tmp_path):
    answered(numbers)
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, micro_batch_size=3))
    assert len(sweep(config, "h100-sxm-80gb", results=tmp_path / "r.jsonl", workers=2)) == 27
    with pytest.raises(JzeroError, match="micro_batch_size 3"):
        sweep(config, "h100-sxm-80gb", results=tmp_path / "r.jsonl", fixed=["model.micro_batch_size"])


def test_a_worker_that_dies_costs_its_own_layout(answered, tmp_path):
    def answer(values):
        if values["model.optim.policy"] == "gather_twice":
            raise WorkerError("with -6: Check failed")
        return numbers(values)

    answered(answer)
    path = tmp_path / "r.jsonl"
    found = sweep(TINY, "h100-sxm-80gb", results=path, workers=2)
    died = [o for o in found if o.error == f"{ABORTED} with -6: Check failed"]
    assert {o.layout.policy for o in died} == {"gather_twice"}
    assert found[0].fits
    assert found[-1].speed == 0.0
    assert "gather_twice" not in path.read_text()  # it is tried again next time


@needs_compiler
@pytest.mark.gpu_compiler
def test_a_real_worker_plans_refuses_dies_and_starts_again(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(TINY))
    worker = Worker([str(path), "h100-sxm-80gb", "4", "1"])
    try:
        assert "num_attention_heads" in worker.ask(["model.hidden_size=33"])["error"]
        found = worker.ask([])
        assert found["fits"]
        assert found["tokens_per_second"] == pytest.approx(8 * 16 / found["step_ms"] * 1e3)
        monkeypatch.setattr(sys, "executable", "false")
        worker.close()
        with pytest.raises(WorkerError, match="with 1: no output"):
            worker.ask([])
    finally:
        worker.close()


def test_outcomes_are_kept_as_json():
    outcome = Outcome(Layout(1, "", "replicated", "local", 1), {"fits": True, "tokens_per_second": 1.0})
    row = json.loads(json.dumps(dataclasses.asdict(outcome)))
    assert Outcome(Layout(**row["layout"]), row["numbers"], row["error"]) == outcome
