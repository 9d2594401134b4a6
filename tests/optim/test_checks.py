"""What callers mix up most easily is told in one line that says what to write."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optim.contexts import mesh, problem

import jzero

SHAPES = {"w": (8, 16), "odd": (5, 3)}


@pytest.fixture
def pr():
    return problem(mesh(data=8), SHAPES)


def adam(m, **options):
    return jzero.distributed_fused_adam(1e-2, mesh=m, **options)


# --- what zero is put around -----------------------------------------------------------------------------------------

UNCALLED = [optax.adam, optax.contrib.prodigy, functools.partial(optax.adamw, b1=0.8), jzero.distributed_fused_adam]


@pytest.mark.parametrize("inner", UNCALLED)
def test_a_function_that_was_not_called(inner):
    name = getattr(inner, "func", inner).__name__
    with pytest.raises(
        ValueError, match=rf"^zero: expected a transformation, found the function {name}; call it, as in"
    ):
        jzero.zero(inner, mesh=mesh(data=8))


def test_apex_names_lead_to_optax_ones(pr):
    with pytest.raises(TypeError, match=r"^distributed_fused_adam: unexpected option 'betas'; here it is b1 and b2"):
        jzero.distributed_fused_adam(1e-3, mesh=pr.mesh, betas=(0.9, 0.95))


def test_what_is_no_transformation(pr):
    with pytest.raises(ValueError, match=r"expected an optax transformation such as optax\.adamw\(1e-3\), found float"):
        jzero.zero(1e-3, mesh=pr.mesh)
    with pytest.raises(ValueError, match=r"expected a function from the parameters to .*, found one that returns dict"):
        jzero.zero(lambda params: params, mesh=pr.mesh).init(pr.params)


@pytest.mark.parametrize("make", [lambda m: jzero.zero(optax.sgd(0.1), mesh=m), lambda m: jzero.scatter_gradients(m)])
def test_what_is_no_mesh(make):
    with pytest.raises(ValueError, match=r"^mesh: expected a jax\.sharding\.Mesh, as jzero\.make_mesh.*, found dict"):
        make({"data": 8})


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("form", ["update", "step"])
def test_arguments_in_another_order(pr, form, jitted):
    tx = adam(pr.mesh)
    f = jax.jit(getattr(tx, form)) if jitted else getattr(tx, form)
    state, params = tx.init(pr.params), pr.params
    for arguments, found in [
        ((params, params, state), "the state in place of the params"),
        ((state, params, params), "the state in place of the gradients"),
        ((params, optax.adam(1e-2).init(params), params), "tuple in place of the state"),
    ]:
        with pytest.raises(ValueError, match=rf"{found}; call it as \(gradients, state, params\)"):
            f(*arguments)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda m: adam(m, state_dtype="bf16"), r"expected \['inner'\]\[0\]\.mu\['odd'\] float32, found it bfloat16"),
        (lambda m: jzero.zero(optax.sgd(0.1), mesh=m), r"expected \['inner'\]\[0\]\.count int32, found it missing"),
        (lambda m: adam(m, master="fp32"), r"expected \['master'\]\['odd'\] not there, found it float32"),
        (lambda m: adam(mesh(data=4)), "it is cut into 4 shards over 'data', expected 8 over 'data'"),
        (lambda m: adam(m, axis=None), "it is cut into 1 shards over 'None', expected 8 over 'data'"),
    ],
)
def test_a_state_of_another_zero(pr, other, found):
    state = other(pr.mesh).init(pr.start)
    with pytest.raises(ValueError, match=f"^zero: the state is of another .*: {found}; use the one that made it, or"):
        adam(pr.mesh).step(pr.params, state, pr.params)


# --- init inside jit -------------------------------------------------------------------------------------------------

HIDDEN = (
    r"^\['odd'\]: inside jit the sharding of the parameters does not show; call init outside of jit, or tell it by "
)


@pytest.mark.parametrize("known", [False, True], ids=["no mesh set", "mesh set"])
def test_init_inside_jit_needs_specs_on_auto_axes(known):
    pr = problem(mesh(data=4, tensor=2), SHAPES, {"w": P(None, "tensor")})
    tx = adam(pr.mesh)
    setting = jax.set_mesh(pr.mesh) if known else contextlib.nullcontext()
    with setting, pytest.raises(ValueError, match=HIDDEN + r"param_specs: PartitionSpec\(\) where they are whole"):
        jax.jit(tx.init)(pr.params)
    whole = adam(mesh(data=8), param_specs=P())
    assert jax.jit(whole.init)(pr.start).inner[0].mu["w"].sharding.spec == P("data")


def test_init_inside_jit_of_arrays_that_lie_nowhere_on_explicit_axes():
    tx = adam(mesh(explicit=True, data=8))
    with pytest.raises(ValueError, match=HIDDEN + r".*, or place them with jax\.device_put"):
        jax.jit(tx.init)({"odd": jnp.ones((5, 3))})
