"""The source of a script says which arrays it carries from one batch to the next."""

from __future__ import annotations

import ast
import textwrap

import pytest
from paceline.train.script.array_updates import ArrayUpdates, array_updates


def updates_of(source: str) -> ArrayUpdates:
    return array_updates(ast.parse(textwrap.dedent(source)))


def carried(source: str) -> set[str]:
    """Return all words under which a source carries arrays."""
    updates = updates_of(source)
    variables = set[str]().union(*updates.variables.values())
    return variables | updates.shared | updates.attributes | updates.keys


@pytest.mark.parametrize(
    "statement",
    [
        "center = 0.9 * center + 0.1 * x.mean(0)",
        "center = torch.lerp(center, x.mean(0), 0.1)",
        "center = (center * momentum + x).clamp(min=0)",
        "center = torch.cat([center, x])[-size:]",
        "center, x = center * 0.9 + x, None",
        "center += x",
        "center.mul_(0.9).add_(x)",
        "center.data.mul_(0.9)",
        "center[labels] = x",
        "center[:, at : at + len(x)] = x.T",
        "center[0] += x",
        "np.add.at(center, labels, x)",
        "torch.mul(center, 0.9, out=center)",
    ],
)
def test_an_array_that_is_made_from_itself_is_carried(statement: str) -> None:
    assert "center" in carried(f"center = zeros(4)\nfor x in batches:\n    {statement}")
    assert "center" in carried(f"def f(self, x):\n    {statement.replace('center', 'self.center')}")
    in_dict = statement.replace("center", "state['center']")
    assert "center" in carried(f"def f(state, x):\n    {in_dict}")


@pytest.mark.parametrize(
    "statement",
    [
        "x = x.to(device)",
        "x = x.float() / 255",
        "x += noise",
        "x[mask] = 0",
        "x.clamp_(0, 1)",
        "hidden = model(x, hidden)",
        "hidden = hidden.detach()",
        "hidden.zero_()",
        "hidden.copy_(x)",
        "torch.mul(x, y, out=hidden)",
    ],
)
def test_a_value_of_one_batch_is_not_carried(statement: str) -> None:
    assert carried(f"hidden = None\nfor x in batches:\n    {statement}") == set()
    assert carried(f"while True:\n    x, y = next(batches)\n    {statement}") <= {"hidden"}
    assert carried(f"def step(x):\n    {statement}") == set()


def test_a_sum_of_one_epoch_is_carried_and_known_to_be_reset() -> None:
    updates = updates_of(
        """
        def train():
            weights = ones(4)
            for epoch in range(3):
                errors = zeros(4)
                for x, y in loader:
                    errors[y] += 1
                weights = 0.5 * weights + errors
        """
    )
    assert updates.variables == {("train", 2): {"errors", "weights"}}
    assert "errors" in updates.resets
    assert "weights" not in updates.resets
    assert updates.in_place == {"errors"}


def test_an_array_that_is_reset_at_times_is_carried_between() -> None:
    updates = updates_of(
        """
        for step, x in enumerate(loader):
            if step % 100 == 0:
                errors = zeros(4)
            errors += x
            if flips:
                x = x.flip(0)
            else:
                x = x.roll(1)
            x = x * 2
        """
    )
    assert updates.of_module() == {"errors"}
    assert "errors" in updates.resets


def test_an_attribute_that_another_method_sets_anew_is_known_to_be_reset() -> None:
    updates = updates_of(
        """
        class Meter:
            def __init__(self):
                self.errors, self.mean = zeros(4), zeros(4)

            def reset(self):
                self.errors = zeros(4)

            def add(self, x):
                self.errors += x
                self.mean = 0.9 * self.mean + x
        """
    )
    assert updates.attributes == {"errors", "mean"}
    assert "errors" in updates.resets
    assert "mean" not in updates.resets


def test_variables_of_the_functions_and_the_file_around_are_carried() -> None:
    updates = updates_of(
        """
        bank = zeros(8)

        def remember(rows):
            bank[:4] = rows

        def follower():
            center = zeros(4)

            def follow(x):
                nonlocal center
                center = 0.9 * center + x

            return follow
        """
    )
    assert updates.shared == {"bank", "center"}


def test_an_argument_that_a_function_changes_is_carried_by_its_caller() -> None:
    updates = updates_of(
        """
        def enqueue(bank, rows):
            bank[: len(rows)] = rows

        def train():
            memory = zeros(8)
            for x in loader:
                enqueue(memory, rows=x)
        """
    )
    assert updates.variables == {("train", 5): {"memory"}}


def test_other_names_are_left_out() -> None:
    updates = updates_of("for x in loader:\n    of_rank[x] = 1\n    bank[x] = 1")
    assert updates.without({"of_rank"}).of_module() == {"bank"}


@pytest.mark.parametrize(
    "first",
    [
        "if center is None:\n        center = x\n    center += x",
        "if center is None:\n        center = x\n    else:\n        center = 0.9 * center + x",
        "if step == 0:\n        center = x\n    else:\n        center = 0.9 * center + x",
    ],
)
def test_an_array_may_get_its_first_value_from_a_batch(first: str) -> None:
    assert carried(f"for x in batches:\n    {first}") == {"center"}
    of_self = first.replace("center", "self.center")
    assert carried(f"def update(self, x, step):\n    {of_self}") == {"center"}


def test_an_array_that_is_made_from_itself_by_other_variables_is_carried() -> None:
    updates = updates_of(
        """
        class Statistics:
            def update(self, mean, var, count):
                delta, total = mean - self.mean, self.count + count
                new_mean = self.mean + delta * count / total
                m_a = self.var * self.count
                self.var = (m_a + var * count) / total
                self.mean, self.count = new_mean, total
                self.last = mean

        class Moments:
            def update(self, x):
                self.first, self.second = combined(self.first, self.second, x)

        def combined(first, second, x):
            return first + x, second + x
        """
    )
    assert updates.attributes == {"mean", "var", "count", "first", "second"}


def test_a_state_that_a_model_returns_is_not_carried() -> None:
    updates = updates_of(
        """
        class Agent:
            def act(self, x):
                output, self.hidden = self.rnn(x, self.hidden)
                self.hidden = self.hidden.detach()
                return output
        """
    )
    assert updates.attributes == set()
