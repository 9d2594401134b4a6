"""Names of compiled instructions in the program's words, and which parts of a stack are the program's."""

from pathlib import Path

import pytest
from modules import module

from jzero.plan import names
from jzero.plan.hlo import parse

PLANNER = Path(names.__file__).parent / "compile.py"
TABLES = f"""
FileNames
1 "/home/me/model.py"
2 "{PLANNER}"
3 "/home/me/main.py"

FunctionNames
1 "Block.__call__"
2 "compile_step"
3 "<module>"
4 "step.<locals>.loss"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}}
2 {{file_name_id=1 function_name_id=4 line=20 end_line=20 column=1 end_column=2}}
3 {{file_name_id=2 function_name_id=2 line=30 end_line=30 column=1 end_column=2}}
4 {{file_name_id=3 function_name_id=3 line=40 end_line=40 column=1 end_column=2}}

StackFrames
1 {{file_location_id=4 parent_frame_id=1}}
2 {{file_location_id=3 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=3}}
4 {{file_location_id=1 parent_frame_id=4}}
"""
ENTRY = """  %a = f32[1000]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=4}
  %b = f32[1000]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=2}
  %c = f32[1000]{0} fusion(%x), kind=kLoop, calls=%f
  %d.double_buffer_clone = f32[1000]{0} tanh(%x)
  %e = f32[1000]{0} custom-call(%a), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/transpose" \
stack_frame_id=3}
  %g = f32[1000]{0} copy(%a)
  ROOT %r = f32[1000]{0} add(%b, %c)
"""
FUSED = """%f (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %i = f32[1000]{0} exponential(%p), metadata={op_name="jit(step)/exp" stack_frame_id=3}
  ROOT %o = f32[1000]{0} convert(%i)
}
"""


@pytest.fixture(scope="module")
def read():
    header = "HloModule m, is_scheduled=true, num_partitions=8\n"
    body = "%f (p" + FUSED.split("%f (p", 1)[1] + "\nENTRY %main (x: f32[1000]) -> f32[1000] {\n"
    return parse(f"{header}{TABLES}\n\n{body}  %x = f32[1000]{{0}} parameter(0)\n{ENTRY}}}\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a", "neg in Block < step.loss (model.py:20)"),
        ("b", "neg"),  # only the planner's own stack
        ("c", "exp in step.loss (model.py:20)"),
        ("e", "matrix product in step.loss (model.py:20)"),
        ("g", "copy of neg in Block < step.loss (model.py:20)"),
    ],
)
def test_descriptions(read, name, text):
    assert names.describe(read, read.entry, read.entry.by_name[name]) == text


@pytest.mark.parametrize(
    ("name", "word"), [("a", "neg"), ("c", "exp"), ("d.double_buffer_clone", "d"), ("e", "matrix product")]
)
def test_kernels_in_one_word(read, name, word):
    assert names.kernel(read, read.entry.by_name[name]) == word


def test_without_tables_the_operation_is_all_there_is():
    bare = module('  ROOT %y = f32[1000]{0} negate(%x), metadata={op_name="jit(step)/while/body/neg"}')
    assert names.describe(bare, bare.entry, bare.entry.root) == "neg"


def test_a_loop_is_named_after_the_function_that_it_stands_in(read):
    """Not after that of its body: a backward pass runs what the forward pass made."""
    lines = (
        TABLES
        + """

%body (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %n = f32[1000]{0} negate(%p), metadata={op_name="jit(step)/neg" stack_frame_id=4}
}
ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %v = f32[1000]{0} while(%x), condition=%body, body=%body
  ROOT %w = f32[1000]{0} while(%v), condition=%body, body=%body, metadata={op_name="jit(step)/while" \
stack_frame_id=3}, backend_config={"known_trip_count":{"n":"24"}}
}
"""
    )
    loops = parse("HloModule m, is_scheduled=true, num_partitions=8\n" + lines)
    assert names.loop(loops, loops.entry.by_name["w"]) == "step.loss ×24"
    assert names.loop(loops, loops.entry.by_name["v"]) == "Block ×?"
