"""The reader of scheduled modules, on text in every form that XLA prints."""

import pytest
from modules import module

from jzero import JzeroError
from jzero.plan.hlo import Array, bits, parse, walk

TEXT = """HloModule jit_step, is_scheduled=true, \
input_output_alias={ {0}: (0, {}, may-alias), {1,0}: (2, {}, may-alias) }, \
entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

FileNames
1 "/home/me/step.py"
2 "/home/me/model.py"

FunctionNames
1 "step"
2 "Block.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

ENTRY %main.1_spmd (x: f32[4], y: (f32[2,3], /*index=1*/bf16[])) -> (f32[4], (f32[2,3], bf16[])) {
  %x = f32[4]{0:T(8)} parameter(0), sharding={devices=[8]<=[8]}, metadata={op_name="state[\\'w\\']"}
  %y = (f32[2,3]{1,0}, /*index=1*/bf16[]) parameter(1)
  %c = s32[] constant(-7)
  %f = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/neg" stack_frame_id=2}, \
backend_config={"operation_queue_id":"0","note":"a ) in a \\"string\\""}
  ROOT %t = (f32[4]{0}, (f32[2,3]{1,0}, bf16[])) tuple(%f, %y)
}
"""


def test_shapes_operands_attributes_and_root():
    main = parse(TEXT).entry
    x, y, c, f, t = main.instructions
    assert x.shape == Array("f32", (4,))
    assert (x.op_name, x.literal) == ("state['w']", "0")
    assert [str(a) for a in y.arrays] == ["f32[2,3]", "bf16[]"]
    assert y.bytes == 26
    assert (c.literal, c.operands) == ("-7", ())
    assert (f.operands, f.callees, f.attribute("kind")) == (("x",), ("fused",), "kLoop")
    assert f.backend_config["note"] == 'a ) in a "string"'
    assert t is main.root
    assert t.shape == (Array("f32", (4,)), (Array("f32", (2, 3)), Array("bf16", ())))


def test_the_header_and_the_tables():
    read = parse(TEXT)
    assert read.partitions == 8
    assert [frame.function for frame in read.frames(read.entry.by_name["f"])] == ["Block.__call__", "step"]
    assert read.frames(read.entry.by_name["f"])[0].line == 20
    assert read.frames(read.entry.by_name["x"]) == []


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("pred", 8), ("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("c64", 64), ("u32", 32), ("token", 0)],
)
def test_widths(dtype, expected):
    assert bits(dtype) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{{0,1},{2,3}}",
        "[2,4]<=[8]",
        "[2,4]<=[4,2]T(1,0)",
        "mesh['axis_0'=4,'axis_1'=2] {'axis_1'}",
        "mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'a':(1)2}",
    ],
)
def test_groups_are_taken_whole(text):
    read = module(f"  ROOT %y = f32[1000]{{0}} all-reduce(%x), channel_id=3, replica_groups={text}, dimensions={{0}}")
    root = read.entry.root
    assert root.attribute("replica_groups") == text
    assert (root.attribute("channel_id"), root.attribute("dimensions")) == ("3", "{0}")


def test_walking_multiplies_the_trip_counts_of_nested_loops():
    loops = """
%inner (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %m = f32[1000]{0} multiply(%p, %p)
}
%outer (q: f32[1000]) -> f32[1000] {
  %q = f32[1000]{0} parameter(0)
  ROOT %w = f32[1000]{0} while(%q), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
%cond (r: f32[1000]) -> pred[] {
  %r = f32[1000]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}
"""
    three = 'backend_config={"known_trip_count":{"n":"3"}}'
    entry = f"  ROOT %v = f32[1000]{{0}} while(%x), condition=%cond, body=%outer, {three}"
    read = module(entry, loops)
    times = {i.name: n for i, _, n in walk(read, read.entry)}
    assert times["m"] == 15
    assert times["w"] == 3


@pytest.mark.parametrize(
    "text", ["", "HloModule m\n\nENTRY %main () -> f32[] {\n}\n", "HloModule m, is_scheduled=true\n"]
)
def test_text_that_is_no_schedule(text):
    with pytest.raises(JzeroError, match="compiled module: expected"):
        parse(text)
