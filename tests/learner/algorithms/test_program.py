"""A compiled function that is called by its graph does as the same function called by TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from learner.algorithms import compiled, dqn
from tests.learner.algorithms import test_dqn


def test_it_is_traced_once_for_each_set_of_shapes_and_sees_what_its_variable_holds() -> None:
    seen, total = [], tf.Variable(1.0)

    def add(x: Any, y: Any) -> tuple[Any, Any]:
        seen.append((x.shape, y.shape, x.dtype))
        total.assign_add(tf.reduce_sum(x))
        return total + y, tf.shape(x)

    program = compiled.Program(add)
    one, two = np.ones(2, np.float32), np.ones((3, 2), np.float32)
    assert [float(program(one, np.float32(10.0))[0]) for _ in range(2)] == [13.0, 15.0]
    assert program(two, np.float32(0.0))[1].numpy().tolist() == [3, 2]
    total.assign(100.0)
    assert float(program(one, np.float32(0.0))[0]) == 102.0
    assert seen == [((2,), (), tf.float32), ((3, 2), (), tf.float32)]
    with pytest.raises(
        tf.errors.InvalidArgumentError
    ):  # nothing is traced for another type, and nothing is taken for one
        program(np.ones(2, np.int32), np.float32(0.0))


def test_weights_become_what_they_become_by_the_function_itself() -> None:
    agents = [dqn.Dqn(test_dqn.SPEC, test_dqn.settings(), seed=0) for _ in range(2)]
    function = agents[1]._steps.function
    agents[1]._steps = lambda *arrays: function(*map(tf.constant, arrays))  # type: ignore[assignment]
    for batch in [test_dqn.batches(4, 8, seed) for seed in range(3)]:
        one, other = (agent.update(batch) for agent in agents)
        assert one.metrics == other.metrics and (one.td_error == other.td_error).all()
    first, second = (agent.state() for agent in agents)
    assert all((first[name] == second[name]).all() for name in first)
