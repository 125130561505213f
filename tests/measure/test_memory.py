"The memory of a tensor may be freed or exchanged. Freed memory is not read, and exchanged memory is read again."
import pytest
import torch

from torchember.measure.arena import Arena
from torchember.measure.elements import Unmeasurable
from torchember.measure.tap import observe


@pytest.mark.parametrize('n', [64, 1<<21])
def test_a_tensor_without_memory_is_not_read(n):
    "The storage of the tensor was freed, as FSDP does with sharded weights."
    arena,x = Arena(),torch.randn(n)
    tap = arena.tap('x')
    observe(x, tap)
    x.untyped_storage().resize_(0)
    for lost in (x, torch._efficientzerotensor(n)):
        with pytest.raises(Unmeasurable, match='no memory'): observe(lost, tap)
    assert len(arena.take())==1


def test_exchanged_memory_of_a_tensor_is_read_again():
    "`x.data = y` exchanges the memory of x without changing its version counter."
    arena,x = Arena(),torch.zeros(3)
    tap = arena.tap('x', ['mean', 'shape'])
    observe(x, tap)
    x.data = torch.full((7,), 5.)
    observe(x, tap)
    assert [r['stats'] for r in arena.take().rows()]==[{'mean': 0., 'shape': [3]}, {'mean': 5., 'shape': [7]}]
