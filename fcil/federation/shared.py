"""Memory that processes share: tensors are written into it in place, again and again, and read where they lie.

A block is mapped once at both ends. Every reading of it is a loan: its owner writes into it again only when
nobody looks at it any more.
"""

import json
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from math import prod
from multiprocessing import connection, reduction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.records import Weights

SMALL = 65_536  # bytes up to which a tensor is copied out of shared memory, so that it does not keep a block from use
MOST_LENT = 64  # blocks that one end looks at; what comes beyond them is copied out
ALIGNED = 64  # bytes, as PyTorch aligns its own


class Place(NamedTuple):
    """Where a tensor lies in a block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    at: int

    def view(self, memory: Any) -> Tensor:
        """Return the tensor that lies here; it keeps `memory` alive."""
        dtype, numbers = getattr(torch, self.dtype), prod(self.shape)
        if not numbers:
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=numbers, offset=self.at)
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


class Layout(NamedTuple):
    """Where the tensors of some flat records lie in a block: small ones first."""

    records: tuple[tuple[Place, ...], ...]
    small: int  # where the small ones end
    end: int

    @staticmethod
    def of(flats: Sequence[Weights]) -> "Layout":
        """Lay records out."""
        rooms = [[-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in flat.values()] for flat in flats]
        small = sum(room for some in rooms for room in some if room <= SMALL)
        near, far, records = 0, small, []
        for flat, some in zip(flats, rooms, strict=True):
            places = []
            for (name, tensor), room in zip(flat.items(), some, strict=True):
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                strides = None if tensor.is_contiguous() else torch.empty_like(tensor).stride()
                places.append(Place(name, dtype, shape, strides, near if room <= SMALL else far))
                near, far = (near + room, far) if room <= SMALL else (near, far + room)
            records.append(tuple(places))
        return Layout(tuple(records), small, far)

    @staticmethod
    def read(text: bytes) -> "Layout":
        """Invert `json.dumps`."""
        records, small, end = json.loads(text)
        return Layout(tuple(tuple(Place(*place) for place in places) for places in records), small, end)


class Block:
    """Shared memory that is mapped once and written many times."""

    def __init__(self, number: int, size: int, fd: int):
        self.number, self.size, self.fd = number, size, fd
        self.memory = mmap.mmap(fd, size)
        self.layout: Layout | None = None
        self.head = 0  # bytes of the layout in words, which stands after the tensors
        self.edition = 0  # how often the layout has changed
        self.lent = 0  # readings that were not given back; only its owner counts
        self._views: list[Tensor] = []

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def write(self, flats: Sequence[Weights], layout: Layout, head: bytes) -> None:
        """Copy records into the block."""
        if layout != self.layout:
            self.layout, self.head, self.edition = layout, len(head), self.edition + 1
            self.memory[layout.end : layout.end + len(head)] = head
            self._views = [p.view(self.memory) for places in layout.records for p in places if prod(p.shape)]
        tensors = [tensor for flat in flats for tensor in flat.values() if tensor.numel()]
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._views, tensors)

    def read(self, edition: int, end: int, head: int, own: bool) -> "tuple[list[Weights], weakref.ref[Any] | None]":
        """Return the records, in place but for small tensors, and what tells whether anyone still looks at them."""
        if edition != self.edition or self.layout is None:
            self.layout, self.edition = Layout.read(self.memory[end : end + head]), edition
        copied = self.layout.end if own else self.layout.small
        mine = torch.empty(copied, dtype=torch.uint8)
        if copied:
            mine.copy_(torch.frombuffer(self.memory, dtype=torch.uint8, count=copied))
        near, far = mine.numpy(), memoryview(self.memory)
        flats = [{p.name: p.view(near if p.at < copied else far) for p in places} for places in self.layout.records]
        return flats, None if copied == self.layout.end else weakref.ref(far)


class Shelf:
    """Blocks of one owner, none of which is written while another process looks at it."""

    numbers = count()

    def __init__(self, wires: "Sequence[Wire]"):
        self.wires, self.blocks = wires, list[Block]()

    def put(self, *flats: Weights) -> Block:
        """Write records into a block that is free."""
        layout, free = Layout.of(flats), [block for block in self.blocks if not block.lent]
        for block in free:
            if block.layout == layout:
                block.write(flats, layout, b"")
                return block
        head = json.dumps(layout).encode()
        need = layout.end + len(head)
        fitting = sorted((block for block in free if block.size >= need), key=lambda block: block.size)
        if not fitting:
            for block in free:
                self._drop(block)
            fitting = [_shared(next(self.numbers), need + need // 8)]
            self.blocks += fitting
        fitting[0].write(flats, layout, head)
        return fitting[0]

    def _drop(self, block: Block) -> None:
        self.blocks.remove(block)
        block.close()
        for wire in self.wires:
            wire.forget(block)


def _shared(number: int, size: int) -> Block:
    size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = -1
    try:
        fd = _anonymous()
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # else a lack of memory would be a SIGBUS later on
        return Block(number, size, fd)
    except (OSError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise UserError(
            f"there is no room for {size / 2**20:,.1f} MiB of memory shared with worker processes ({error}); "
            "use --workers 1 to do without them"
        ) from error


def _anonymous() -> int:
    """Return a file without a name: in memory, whatever the size of /dev/shm, where the system has such files."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.memfd_create("fcil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Wire:
    """One end of the line between two processes; every reading of a block is a loan that is given back."""

    def __init__(self, line: "connection.Connection[Any, Any]", pid: int):
        self.line, self._pid = line, pid
        self._lent: dict[int, Block] = {}  # ours, as the other end knows them
        self._gone: list[int] = []  # ours, that the other end can forget
        self._seen: dict[int, Block] = {}  # theirs
        self._looking: list[tuple[int, weakref.ref[Any]]] = []  # at theirs
        self._back: list[int] = []

    def send(self, words: Any, *blocks: Block) -> None:
        """Send words, and blocks to be read."""
        for number, looked in self._looking:
            if looked() is None:
                self._back.append(number)
        self._looking = [(number, looked) for number, looked in self._looking if looked() is not None]
        shown = []
        for block in blocks:
            assert block.layout is not None
            shown.append((block.number, block.size, block.edition, block.layout.end, block.head))
            block.lent += 1
        self.line.send((words, shown, self._back, self._gone))
        self._back, self._gone = [], []
        for block in blocks:
            if block.number not in self._lent:
                reduction.send_handle(self.line, block.fd, self._pid)
                self._lent[block.number] = block

    def receive(self, *own: bool) -> tuple[Any, list[list[Weights]]]:
        """Return words, and the records in each block; `own` says of each whether all of it is to be copied out."""
        words, shown, back, gone = self.line.recv()
        for number in back:
            self._lent[number].lent -= 1
        for number in gone:
            del self._seen[number]
        found = []
        for (number, size, edition, end, head), mine in zip(shown, own, strict=False):
            if number not in self._seen:
                self._seen[number] = Block(number, size, reduction.recv_handle(self.line))
                self._seen[number].close()
            flats, looked = self._seen[number].read(edition, end, head, mine or len(self._looking) >= MOST_LENT)
            if looked is None:
                self._back.append(number)
            else:
                self._looking.append((number, looked))
            found.append(flats)
        return words, found

    def forget(self, block: Block) -> None:
        """Tell the other end, when it is next told anything, that a block is no longer used."""
        if self._lent.pop(block.number, None) is not None:
            self._gone.append(block.number)
