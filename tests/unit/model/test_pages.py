"""Memory that is used for the first time ahead of the steps that need it."""

from __future__ import annotations

import resource

import torch
from tokenmill_executor.cpu.memory import HugeArena
from tokenmill_executor.model.pages import populate

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_all_pages_are_there_afterwards_and_what_they_held() -> None:
    arena = HugeArena(65 * MIB)
    tensors = [arena.take((32, MIB // 2), torch.uint8), arena.take((31, MIB // 4), torch.bfloat16)]
    tensors[0][7, 5:9] = torch.tensor([1, 2, 3, 255])
    tensors[1][30, -1] = -1.5
    before = resident_bytes()
    pieces = sum(1 for _ in populate(tensors))
    assert pieces == 8 + 8
    assert resident_bytes() - before > 24 * MIB
    assert tensors[0][7, 5:9].tolist() == [1, 2, 3, 255]
    assert tensors[1][30, -1] == -1.5
    assert int(tensors[0].count_nonzero()) == 4
    assert int(tensors[1].count_nonzero()) == 1


def test_the_beginnings_of_all_tensors_come_first() -> None:
    tensors = [torch.zeros(3 * MIB, dtype=torch.uint8), torch.zeros(5 * MIB, dtype=torch.uint8)]
    assert sum(1 for _ in populate(tensors)) == 2 + 3
    assert list(populate([])) == []
