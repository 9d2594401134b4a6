"""Live ranges in modules written by hand: what shares a buffer, what lives at the fullest moment, and its name."""

import pytest
from modules import DATA, module

from jzero.plan.compile import role
from jzero.plan.memory import Buffers

KB = 4000  # a value of f32[1000]


def fullest(entry: str, others: str = "") -> list[int]:
    return sorted((b.bytes for b in Buffers(module(entry, others)).fullest()), reverse=True)


def test_a_value_lives_from_its_making_to_its_last_use():
    chain = """
  %a = f32[1000]{0} negate(%x)
  %b = f32[1000]{0} negate(%a)
  %c = f32[1000]{0} negate(%b)
  ROOT %d = f32[1000]{0} add(%c, %c)
"""
    assert fullest(chain) == [KB, KB]  # two of a, b, c at a time; x and d are arguments and results
    kept = chain.replace("add(%c, %c)", "add(%c, %a)")
    assert fullest(kept) == [KB, KB, KB]


def test_names_for_the_same_memory_count_once():
    entry = """
  %a = f32[1000]{0} negate(%x)
  %b = f32[10,100]{1,0} bitcast(%a)
  %t = (f32[10,100]{1,0}, f32[1000]{0}) tuple(%b, %a)
  %g = f32[10,100]{1,0} get-tuple-element(%t), index=0
  %c = f32[10,100]{1,0} custom-call(%g), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}
  ROOT %d = f32[1000]{0} bitcast-convert(%c)
"""
    assert fullest(entry) == [KB]


STACK = """
%write (p: f32[24,1000], u: f32[1000], i: s32[]) -> f32[24,1000] {
  %p = f32[24,1000]{1,0} parameter(0)
  %u = f32[1000]{0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %r = f32[1,1000]{1,0} bitcast(%u)
  ROOT %w = f32[24,1000]{1,0} dynamic-update-slice(%p, %r, %i, %z)
}
%body (c: (s32[], f32[24,1000], f32[1000])) -> (s32[], f32[24,1000], f32[1000]) {
  %c = (s32[], f32[24,1000]{1,0}, f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %s = f32[24,1000]{1,0} get-tuple-element(%c), index=1
  %y = f32[1000]{0} get-tuple-element(%c), index=2
  %v = f32[1000]{0} tanh(%y), metadata={op_name="jit(f)/while/body/tanh"}
  %w = f32[24,1000]{1,0} fusion(%s, %v, %i), kind=kLoop, calls=%write
  ROOT %t = (s32[], f32[24,1000]{1,0}, f32[1000]{0}) tuple(%i, %w, %v)
}
%cond (d: (s32[], f32[24,1000], f32[1000])) -> pred[] {
  %d = (s32[], f32[24,1000]{1,0}, f32[1000]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
"""
LOOP = """
  %zero = s32[] constant(0)
  %i0 = s32[] copy(%zero)
  %s0 = f32[24,1000]{1,0} broadcast(%zero), dimensions={}
  %y0 = f32[1000]{0} negate(%x)
  %init = (s32[], f32[24,1000]{1,0}, f32[1000]{0}) tuple(%i0, %s0, %y0)
  %loop = (s32[], f32[24,1000]{1,0}, f32[1000]{0}) while(%init), condition=%cond, body=%body
  %out = f32[24,1000]{1,0} get-tuple-element(%loop), index=1
  ROOT %sum = f32[1000]{0} reduce(%out, %zero), dimensions={0}, to_apply=%add
"""


def test_what_a_loop_carries_and_writes_in_place_is_one_buffer():
    assert fullest(LOOP, STACK) == [24 * KB, KB, 4]  # the stack, the value (v overwrites y), the counter


def test_a_stack_is_named_after_what_is_written_into_it():
    largest = Buffers(module(LOOP, STACK)).largest()[0]
    assert (largest.name, str(largest.array), largest.bytes) == ("tanh", "f32[24,1000]", 24 * KB)


def test_another_layout_of_a_stack_is_a_copy_of_it():
    turn = """%turn (p: f32[24,1000]) -> f32[24,1000] {
  %p = f32[24,1000]{1,0} parameter(0)
  ROOT %r = f32[24,1000]{0,1} transpose(%p), dimensions={0,1}
}
"""
    entry = LOOP.replace(
        "  ROOT %sum", "  %turned = f32[24,1000]{0,1} fusion(%out), kind=kInput, calls=%turn\n  ROOT %sum"
    )
    entry = entry.replace("reduce(%out,", "reduce(%turned,")
    assert [t.name for t in Buffers(module(entry, STACK + turn)).largest(2)] == ["tanh", "copy of tanh"]


def test_buffers_of_one_name_and_shape_are_told_together():
    entry = "\n".join(f'  %a{i} = f32[1000]{{0}} negate(%x), metadata={{op_name="jit(f)/neg"}}' for i in range(3))
    largest = Buffers(module(entry + "\n  ROOT %d = f32[1000]{0} select(%a0, %a1, %a2)")).largest()
    assert [(t.name, t.count, t.bytes) for t in largest] == [("neg", 3, 3 * KB)]


@pytest.mark.parametrize(
    ("start", "done"),
    [
        (
            f"(f32[1000]{{0}}, f32[4000]{{0}}) all-gather-start(%a), {DATA}",
            "f32[4000]{0} all-gather-done(%s)",
        ),
        (
            f"((f32[1000]{{0}}, f32[1000]{{0}}), (f32[4000]{{0}}, f32[4000]{{0}})) all-gather-start(%a, %a), {DATA}",
            "(f32[4000]{0}, f32[4000]{0}) all-gather-done(%s)",
        ),
        (f"f32[1000]{{0}} all-reduce-start(%a), {DATA}", "f32[1000]{0} all-reduce-done(%s)"),
    ],
)
def test_operand_and_result_of_a_collective_both_live_while_it_runs(start, done):
    entry = f"  %a = f32[1000]{{0}} negate(%x)\n  %s = {start}\n  %m = f32[1]{{0}} negate(%x)\n  %d = {done}\n"
    results = [KB, KB] if "reduce" in start else [4 * KB] * (2 if "((" in start else 1) + [KB, 4]
    assert fullest(entry + "  ROOT %r = f32[1000]{0} custom-call(%d, %m)") == results


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["params", "w"], "parameters"),
        (["state", "params", "blocks"], "parameters"),
        (["state", "opt", "master", "params"], "optimizer"),
        (["opt_state", "0", "mu"], "optimizer"),
        (["batch", "tokens"], "batch"),
        (["state", "step"], "other"),
        ([], "other"),
    ],
)
def test_what_an_argument_is_for(names, expected):
    assert role(names) == expected
