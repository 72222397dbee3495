from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=2000, help="Mutated inputs that tests/test_fuzz.py tries")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Graphs:
    """A backend for `torch.compile` that keeps each graph and runs it as it is."""

    def __init__(self) -> None:
        self.seen: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.seen.append(graph)
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()
