"""Overlap in schedules written by hand, in every form in which XLA prints a start and a done."""

import itertools

import pytest
from modules import DATA, SYNC, module, multiply, timeline

from jzero.plan import cost

KERNEL = 12e-6 + 2e-6  # a multiply of 1000 numbers
GATHER = 12e-6 + 10e-6 + 3 * 2e-6  # 16,000 bytes over 4 ranks
SCATTER = 3e-6 + 10e-6 + 3 * 2e-6  # 4,000 bytes

FORMS = {
    "all-gather-start": (
        f"  %s = (f32[1000]{{0}}, f32[4000]{{0}}) all-gather-start(%x), {DATA}, dimensions={{0}}",
        "  %d = f32[4000]{0} all-gather-done(%s)",
        "all-gather",
        16000,
        GATHER,
    ),
    "all-gather-start of a tuple": (
        f"  %s = ((f32[1000]{{0}}, f32[1000]{{0}}), (f32[4000]{{0}}, f32[4000]{{0}})) all-gather-start(%x, %x), {DATA}",
        "  %d = (f32[4000]{0}, f32[4000]{0}) all-gather-done(%s)",
        "all-gather",
        32000,
        GATHER + 12e-6,
    ),
    "all-reduce-start": (
        f"  %s = f32[1000]{{0}} all-reduce-start(%x), {DATA}, to_apply=%add",
        "  %d = f32[1000]{0} all-reduce-done(%s)",
        "all-reduce",
        4000,
        6e-6 + 10e-6 + 12e-6,
    ),
    "reduce-scatter-start": (
        f"  %s = ((f32[1000]{{0}}), (f32[250]{{0}})) reduce-scatter-start(%x), {DATA}, to_apply=%add",
        "  %d = f32[250]{0} reduce-scatter-done(%s)",
        "reduce-scatter",
        4000,
        SCATTER,
    ),
    "async-start of a reduce-scatter": (
        "  %s = ((f32[1000]{0}), f32[250]{0}) async-start(%x), calls=%wrapped",
        "  %d = f32[250]{0} async-done(%s)",
        "reduce-scatter",
        4000,
        SCATTER,
    ),
    "async-start of a fusion": (
        "  %s = ((f32[1000]{0}), f32[250]{0}) async-start(%x), calls=%wrapped_fusion",
        "  %d = f32[250]{0} async-done(%s)",
        "reduce-scatter",
        4000,
        SCATTER,
    ),
    "async-start of an all-to-all": (
        "  %s = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-start(%x), calls=%exchange",
        "  %d = f32[1000]{0} async-done(%s)",
        "all-to-all",
        4000,
        3e-6 + 12e-6,
    ),
    "async-start of a ragged all-to-all": (
        "  %s = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-start(%x), calls=%ragged",
        "  %u = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-update(%s)\n  %d = f32[1000]{0} async-done(%u)",
        "ragged-all-to-all",
        4000,
        3e-6 + 12e-6,
    ),
    "reduce-scatter-start of a tuple": (
        "  %s = ((f32[1000]{0}, f32[1000]{0}), (f32[250]{0}, f32[250]{0})) reduce-scatter-start(%x, %x), " + DATA,
        "  %d = (f32[250]{0}, f32[250]{0}) reduce-scatter-done(%s)",
        "reduce-scatter",
        8000,
        SCATTER + 3e-6,
    ),
    "a call of a start": (
        "  %s = (f32[1000]{0}, f32[4000]{0}) call(%x), to_apply=%starts",
        "  %d = f32[4000]{0} all-gather-done(%s)",
        "all-gather",
        16000,
        GATHER,
    ),
    "collective-permute-start": (
        "  %s = (f32[1000]{0}, f32[1000]{0}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,2},{2,4}}",
        "  %d = f32[1000]{0} collective-permute-done(%s)",
        "collective-permute",
        4000,
        4e-6 + 12e-6,
    ),
    "recv": (
        "  %t = token[] after-all()\n  %s = (f32[1000]{0}, u32[], token[]) recv(%t), channel_id=1, "
        'frontend_attributes={_xla_send_recv_source_target_pairs={{0,2},{2,4}}}',
        "  %d = (f32[1000]{0}, token[]) recv-done(%s)",
        "collective-permute",
        4000,
        4e-6 + 12e-6,
    ),
}  # fmt: skip
WRAPPED = f"""
%wrapped (p: f32[1000]) -> f32[250] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[250]{{0}} reduce-scatter(%p), {DATA}, to_apply=%add
}}
%exchange (p: f32[1000]) -> f32[1000] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[1000]{{0}} all-to-all(%p), {DATA}, dimensions={{0}}
}}
%ragged (p: f32[1000]) -> f32[1000] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[1000]{{0}} ragged-all-to-all(%p), {DATA}
}}
%starts (p: f32[1000]) -> (f32[1000], f32[4000]) {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %g = (f32[1000]{{0}}, f32[4000]{{0}}) all-gather-start(%p), {DATA}, dimensions={{0}}
}}
%wrapped_fusion (p: f32[1000]) -> f32[250] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %f = f32[250]{{0}} fusion(%p), kind=kCustom, calls=%wrapped
}}
"""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [0, 1, 4])
def test_a_start_is_hidden_by_the_kernels_before_its_done(form, kernels):
    start, done, kind, size, seconds = FORMS[form]
    between = "\n".join(multiply(f"m{i}", "x") for i in range(kernels))
    found = timeline(f"{start}\n{between}\n{done}\n{multiply('after', 'x').replace('%after', 'ROOT %after')}", WRAPPED)
    [call] = found.calls
    assert (call.collective.kind, call.collective.bytes, call.collective.asynchronous) == (kind, size, True)
    assert call.seconds == pytest.approx(seconds)
    exposed = max(0.0, seconds - kernels * KERNEL)
    assert call.hidden == pytest.approx(1 - exposed / seconds)
    assert found.exposed == pytest.approx(exposed)
    assert [name for (_, name), _ in call.between] == [f"m{i}" for i in range(kernels)]
    assert found.seconds == pytest.approx(found.compute + found.moves + found.exposed)
    assert found.compute == pytest.approx((kernels + 1) * KERNEL)


def test_a_collective_that_is_marked_synchronous_hides_nothing():
    found = timeline(
        f"  %s = f32[1000]{{0}} all-reduce-start(%x), {DATA}, to_apply=%add, {SYNC}\n{multiply('m', 'x')}\n"
        "  ROOT %d = f32[1000]{0} all-reduce-done(%s)"
    )
    assert (found.calls[0].hidden, found.calls[0].collective.asynchronous) == (0.0, False)
    assert found.seconds == pytest.approx(KERNEL + found.calls[0].seconds)


def test_a_fusion_that_holds_a_collective_is_one():
    found = timeline("  ROOT %f = f32[250]{0} fusion(%x), kind=kCustom, calls=%wrapped", WRAPPED)
    assert [(c.collective.kind, c.hidden) for c in found.calls] == [("reduce-scatter", 0.0)]
    assert found.compute == 0.0


def test_copies_hide_nothing():
    gather = FORMS["all-gather-start"]
    copies = "\n".join(f"  %c{i} = f32[1000]{{0}} copy(%x)" for i in range(9))
    found = timeline(f"{gather[0]}\n{copies}\n{multiply('m', 'x')}\n{gather[1].replace('%d', 'ROOT %d')}")
    assert found.moves == pytest.approx(9 * (8e-6 + 2e-6))
    assert found.calls[0].hidden == pytest.approx(KERNEL / GATHER)
    assert found.seconds == pytest.approx(found.moves + GATHER)


def test_two_collectives_share_the_link_and_the_kernel_that_hides_them():
    """Counting the kernel once for each would call both of them hidden."""
    gather, scatter = FORMS["all-gather-start"], FORMS["reduce-scatter-start"]
    both = f"{gather[0]}\n{scatter[0].replace('%s', '%s2')}\n{multiply('m', 'x', 2000)}\n{gather[1]}\n"
    found = timeline(both + scatter[1].replace("%d", "ROOT %d2").replace("%s", "%s2"))
    first, second = found.calls
    kernel = 16e-6 + 2e-6
    assert first.exposed == pytest.approx(GATHER - kernel)
    assert second.exposed == pytest.approx(SCATTER)
    assert found.exposed == pytest.approx(first.exposed + second.exposed)


def loop(body: str, times: int, init: str = "%x", carry: str = "f32[1000]{0}") -> tuple[str, str]:
    """A loop of these instructions, and the line that calls it."""
    others = (
        f"%body (p: f32[]) -> f32[] {{\n  %p = {carry} parameter(0)\n{body}\n}}\n"
        f"%cond (r: f32[]) -> pred[] {{\n  %r = {carry} parameter(0)\n  ROOT %t = pred[] constant(true)\n}}\n"
    )
    config = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    return others, f"  %w = {carry} while({init}), condition=%cond, body=%body, {config}"


@pytest.mark.parametrize("times", [1, 2, 3, 4, 24])
def test_a_loop_counts_as_often_as_it_runs(times):
    start = FORMS["all-gather-start"][0].replace("%x", "%p")
    body = f"{start}\n{multiply('m', 'p')}\n{FORMS['all-gather-start'][1]}\n  ROOT %n = f32[1000]{{0}} multiply(%p, %p)"
    others, line = loop(body, times)
    found = timeline(line.replace("%w", "ROOT %w"), others)
    [call] = found.calls
    assert (call.count, call.loops) == (times, ("w",))
    assert call.seconds == pytest.approx(times * GATHER)
    assert call.hidden == pytest.approx(KERNEL / GATHER)
    assert found.seconds == pytest.approx(times * (GATHER + KERNEL))
    assert sum(found.kernels.values()) == pytest.approx(found.compute) == pytest.approx(2 * times * KERNEL)


PIPELINED = """
  %i = ((f32[1000]{0}), f32[250]{0}) get-tuple-element(%p), index=0
  %y = f32[1000]{0} get-tuple-element(%p), index=1
  %s = ((f32[1000]{0}), f32[250]{0}) reduce-scatter-start(%y), DATA, to_apply=%add
  %m1 = f32[1000]{0} multiply(%y, %y)
  %d = f32[250]{0} reduce-scatter-done(%i)
  %m2 = f32[1000]{0} multiply(%y, %y)
  ROOT %t = (((f32[1000]{0}), f32[250]{0}), f32[1000]{0}) tuple(%s, %m2)
""".replace("DATA", DATA)


@pytest.mark.parametrize("times", [1, 3, 24])
def test_a_start_whose_done_is_in_the_next_iteration(times):
    """The first is started before the loop, the last is awaited behind it."""
    others, line = loop(PIPELINED, times, init="%init", carry="(((f32[1000]{0}), f32[250]{0}), f32[1000]{0})")
    entry = f"""
  %s0 = ((f32[1000]{{0}}), f32[250]{{0}}) reduce-scatter-start(%x), {DATA}, to_apply=%add
  %init = (((f32[1000]{{0}}), f32[250]{{0}}), f32[1000]{{0}}) tuple(%s0, %x)
{line}
  %last = ((f32[1000]{{0}}), f32[250]{{0}}) get-tuple-element(%w), index=0
  ROOT %d2 = f32[250]{{0}} reduce-scatter-done(%last)
"""
    found = timeline(entry, others)
    first, inside = found.calls
    assert (first.count, inside.count) == (1, times)
    assert first.exposed == pytest.approx(SCATTER - KERNEL)  # m1 of the first iteration only
    # it ends at 38 us, behind the first one; one iteration ends at 33 us, a second one at 61 us
    assert inside.exposed == pytest.approx(SCATTER - KERNEL if times == 1 else 0.0)
    assert found.compute == pytest.approx(2 * times * KERNEL)
    assert found.seconds == pytest.approx(found.compute + found.exposed)


def test_nested_loops_with_waits_in_both():
    start = FORMS["all-gather-start"][0].replace("%x", "%p")
    inner = f"{start}\n  %d = f32[4000]{{0}} all-gather-done(%s)\n  ROOT %n = f32[1000]{{0}} multiply(%p, %p)"
    others, line = loop(inner, 24)
    outer = f"""
%outer (q: f32[1000]) -> f32[1000] {{
  %q = f32[1000]{{0}} parameter(0)
  {line.strip().replace("%x", "%q").replace("%w", "ROOT %w")}
}}
"""
    seven = 'backend_config={"known_trip_count":{"n":"7"}}'
    entry = f"  ROOT %v = f32[1000]{{0}} while(%x), condition=%cond, body=%outer, {seven}"
    found = timeline(entry, others + outer)
    assert found.calls[0].count == 7 * 24
    assert found.calls[0].loops == ("v", "w")
    assert found.exposed == pytest.approx(7 * 24 * GATHER)
    assert found.seconds == pytest.approx(7 * 24 * (GATHER + KERNEL))


def test_a_branch_counts_as_its_longest():
    branches = f"""
%short (p: f32[1000]) -> f32[1000] {{
  ROOT %p = f32[1000]{{0}} parameter(0)
}}
%long (q: f32[1000]) -> f32[1000] {{
  %q = f32[1000]{{0}} parameter(0)
{multiply("m", "q").replace("%m", "ROOT %m")}
}}
"""
    call = "conditional(%i, %x, %x), branch_computations={%short, %long}"
    entry = f"  %i = s32[] bitcast(%x)\n  ROOT %y = f32[1000]{{0}} {call}"
    assert timeline(entry, branches).seconds == pytest.approx(KERNEL)


def test_events_do_not_overlap_on_a_stream_and_lie_within_the_step():
    start = FORMS["all-gather-start"][0].replace("%x", "%p")
    body = f"{start}\n{multiply('m', 'p')}\n  %c = f32[1000]{{0}} copy(%p)\n  %d = f32[4000]{{0}} all-gather-done(%s)\n"
    others, line = loop(body + "  ROOT %n = f32[1000]{0} multiply(%p, %p)", 3)
    found = timeline(line.replace("%w", "ROOT %w"), others)
    for streams in ({"compute", "copy", "wait"}, {"collective"}):
        spans = sorted((e.start, e.end) for e in found.events if e.stream in streams)
        assert len(spans) >= 3
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
        assert spans[0][0] >= 0
        assert spans[-1][1] <= found.seconds + 1e-12
    assert {e.loops for e in found.events} == {(("w", 0),), (("w", 1),), (("w", 2),)}


def test_an_unfinished_collective_is_awaited_at_the_end():
    found = timeline(FORMS["all-gather-start"][0].replace("%s", "ROOT %s"))
    assert found.exposed == pytest.approx(GATHER)


def test_the_hand_written_numbers_follow_from_the_module():
    read = module(multiply("m", "x").replace("%m", "ROOT %m"))
    assert cost.traffic(read, read.entry, read.entry.root) == 12000


def test_a_synchronous_collective_waits_for_those_before_it_and_hides_none():
    gather = FORMS["all-gather-start"]
    found = timeline(
        f"{gather[0]}\n  %r = f32[1000]{{0}} all-reduce(%x), {DATA}, to_apply=%add\n"
        f"{gather[1].replace('%d', 'ROOT %d')}"
    )
    first, second = found.calls
    assert (first.hidden, second.hidden) == pytest.approx((0.0, 0.0))
    assert found.seconds == pytest.approx(first.seconds + second.seconds)


def test_what_is_sent_counts_once():
    """A send and its recv are one transfer, and neither is a kernel."""
    pairs = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,2},{2,4}}}"
    found = timeline(
        f"  %t = token[] after-all()\n  %r = (f32[1000]{{0}}, u32[], token[]) recv(%t), {pairs}\n"
        f"  %s = (f32[1000]{{0}}, u32[], token[]) send(%x, %t), {pairs}\n{multiply('m', 'x')}\n"
        "  %sd = token[] send-done(%s)\n  ROOT %d = (f32[1000]{0}, token[]) recv-done(%r)"
    )
    assert [(c.collective.kind, c.collective.bytes, c.count) for c in found.calls] == [("collective-permute", 4000, 1)]
    assert (found.compute, found.moves) == (pytest.approx(KERNEL), 0.0)
