"""The timeline, which plays three iterations of a loop, against a machine that runs all of them."""

import pytest
from modules import DATA, GPU, MESH, multiply
from oracles import unrolled

from jzero.plan import cost
from jzero.plan.cost import Collective
from jzero.plan.hlo import Module, parse
from jzero.plan.timeline import play


def costs(module: Module, target, mesh, domain):
    def of(where: str, name: str) -> tuple[str, float]:
        computation = module.computations[where]
        here = (module, computation, computation.by_name[name], target)
        found = cost.collective(*here, mesh, domain) or cost.kernel(*here)
        if found is None:
            return "", 0.0
        if isinstance(found, Collective):
            return "async" if found.asynchronous else "sync", found.seconds
        return "copy" if found.moves else "compute", found.seconds

    return of


def agree(text: str, target=GPU, mesh=MESH, domain: int = 8) -> None:
    module = parse(text)
    timeline = play(module, target, mesh, domain)
    seconds, uses = unrolled.run(text, costs(module, target, mesh, domain))
    assert timeline.seconds == pytest.approx(seconds)
    assert {c.site: c.count for c in timeline.calls} == {site: use.calls for site, use in uses.items()}
    for call in timeline.calls:
        assert call.exposed == pytest.approx(uses[call.site].exposed, abs=1e-9), call.site


def module(body: str, entry: str, carry: str, others: str = "") -> str:
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
{others}
%body (p: f32[]) -> f32[] {{
  %p = {carry} parameter(0)
{body}
}}
%cond (r: f32[]) -> pred[] {{
  %r = {carry} parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
{entry}
}}
"""


def loop(times: int, init: str, carry: str) -> str:
    config = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    return f"  %w = {carry} while(%{init}), condition=%cond, body=%body, {config}"


SCATTER = "((f32[1000]{0}), f32[250]{0})"
WRAPPED = f"""
%wrapped (q: f32[1000]) -> f32[250] {{
  %q = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[250]{{0}} reduce-scatter(%q), {DATA}, to_apply=%add
}}
"""


@pytest.mark.parametrize("times", [1, 2, 3, 4, 5, 23])
@pytest.mark.parametrize("size", [100, 1000, 3000])
def test_a_scatter_awaited_one_iteration_later_in_a_double_buffered_loop(times, size):
    """Two copies of the body: the first's done stands in the second, the second's in the next iteration."""
    carry = f"({SCATTER}, f32[1000]{{0}})"
    body = f"""
  %i = {SCATTER} get-tuple-element(%p), index=0
  %y = f32[1000]{{0}} get-tuple-element(%p), index=1
  %s1 = {SCATTER} async-start(%y), calls=%wrapped
  %d1 = f32[250]{{0}} async-done(%i)
{multiply("m1", "y", size)}
  %c1 = f32[1000]{{0}} copy(%y)
  %s2 = {SCATTER} async-start(%y), calls=%wrapped
{multiply("m2", "y", size)}
  %d2 = f32[250]{{0}} async-done(%s1)
{multiply("m3", "y")}
  ROOT %out = {carry} tuple(%s2, %m3)
"""
    entry = f"""
  %s0 = {SCATTER} async-start(%x), calls=%wrapped
  %init = {carry} tuple(%s0, %x)
{loop(times, "init", carry)}
  %last = {SCATTER} get-tuple-element(%w), index=0
  %sync = f32[1000]{{0}} all-reduce(%x), {DATA}, to_apply=%add
  ROOT %d = f32[250]{{0}} async-done(%last)
"""
    agree(module(body, entry, carry, WRAPPED))


@pytest.mark.parametrize("times", [1, 3, 23])
def test_gathers_and_permutations_that_share_the_link(times):
    carry = "f32[1000]{0}"
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}"
    body = f"""
  %g = (f32[1000]{{0}}, f32[4000]{{0}}) all-gather-start(%p), {DATA}, dimensions={{0}}
  %s = {SCATTER} async-start(%p), calls=%wrapped
{multiply("m1", "p")}
  %k = (f32[1000]{{0}}, f32[1000]{{0}}) collective-permute-start(%p), {pairs}
  %e = f32[1000]{{0}} collective-permute-done(%k)
  %r = f32[1000]{{0}} all-reduce(%p), {DATA}, to_apply=%add
{multiply("m2", "p")}
  %h = f32[4000]{{0}} all-gather-done(%g)
  %d = f32[250]{{0}} async-done(%s)
  ROOT %n = f32[1000]{{0}} multiply(%p, %p)
"""
    entry = f"{loop(times, 'x', carry)}\n  ROOT %z = f32[1000]{{0}} multiply(%w, %w)"
    agree(module(body, entry, carry, WRAPPED))
