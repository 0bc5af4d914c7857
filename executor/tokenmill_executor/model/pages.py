"""Has the system give memory that was reserved, before a step would have to wait for it.

A page costs its first writer the time to be found and zeroed: 0.2 ms for 2 MiB, and 2 to 5 ms in a virtual machine that has to get
it from its host, while all other threads of the step wait. Prompts, which write to new blocks all the time, took a twelfth longer.

Must not know: what the memory is for, when there is time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import torch

_PIECE_BYTES = 2 << 20  # a huge page of x86-64 and of most ARM systems


def populate(tensors: SequenceOf[torch.Tensor]) -> Iterator[None]:
    """A piece of memory at each step, contents as before, of contiguous tensors: the beginnings of all, then what follows.

    Nobody else may write to a tensor meanwhile.
    """
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    for begin in range(0, max((len(each) for each in flat), default=0), _PIECE_BYTES):
        for each in flat:
            if begin < len(each):
                each[begin : begin + _PIECE_BYTES : mmap.PAGESIZE].bitwise_or_(0)
                yield
