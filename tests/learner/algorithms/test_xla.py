"""A compiled function that is called by its graph does as the same function called by TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from learner.algorithms import dqn, xla
from tests.learner.algorithms import test_dqn


def test_it_is_traced_once_for_each_set_of_shapes_and_sees_what_its_variable_holds() -> None:
    seen, total = [], tf.Variable(1.0)

    def add(x: Any, y: Any) -> tuple[Any, Any]:
        seen.append((x.shape, y.shape, x.dtype))
        total.assign_add(tf.reduce_sum(x))
        return total + y, tf.shape(x)

    program = xla.Program(add)
    one, two, ten, none = (
        np.ones(2, np.float32),
        np.ones((3, 2), np.float32),
        np.full(1, 10.0, np.float32),
        np.zeros(1, np.float32),
    )
    first, second = (program(one, ten)[0] for _ in range(2))
    assert (float(first[0]), float(second[0])) == (13.0, 15.0)
    assert program(two, none)[1].numpy().tolist() == [3, 2]
    total.assign(100.0)
    again = program.given(one, none)
    assert [float(again()[0][0]) for _ in range(2)] == [102.0, 104.0]
    assert seen == [((2,), (1,), tf.float32), ((3, 2), (1,), tf.float32)]
    with pytest.raises(TypeError, match="Cannot cast"):  # it is traced for no other type, and takes none for one
        program(np.ones(2, np.int32), none)
    assert (float(first[0]), float(second[0])) == (13.0, 15.0), "what came of a call stays"


def test_arrays_are_read_wherever_they_lie_and_may_change_afterwards() -> None:
    program = xla.Program(lambda x, y: [tf.reduce_sum(tf.cast(x, tf.float32), axis=0) + y])
    frames, number = np.arange(24, dtype=np.uint8).reshape(4, 6), np.full(3, 0.5, np.float32)
    expected = frames[:, ::2].astype(np.float32).sum(axis=0) + 0.5
    (found,) = program(frames[:, ::2], number)
    frames[:], number[:] = 0, 0.0
    assert found.numpy().tolist() == expected.tolist()


def test_weights_become_what_they_become_by_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [dqn.Dqn(test_dqn.SPEC, test_dqn.settings(), seed=0) for _ in range(2)]
    function = agents[1]._steps.function
    monkeypatch.setattr(agents[1], "_steps", lambda *arrays: function(*map(tf.constant, arrays)))
    for batch in [test_dqn.batches(4, 8, seed) for seed in range(3)]:
        one, other = (agent.update(batch) for agent in agents)
        assert one.metrics == other.metrics and (one.td_error == other.td_error).all()
    first, second = (agent.state() for agent in agents)
    assert all((first[name] == second[name]).all() for name in first)
