"""Host memory of tensors: their own if it is flat and on the CPU, a staging copy otherwise.

A tensor on an accelerator is copied into pinned memory on a side stream, so that the copy runs
in parallel with the backward pass. Only ``CopyEngine`` uses streams; on a machine without an
accelerator the tests run the same code with ``ImmediateCopies``. The CUDA half is simple on purpose
and has not been tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from slipstream.torch.tensors.inventory import dtype_name
from slipstream.types import Values

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # destination, source


class CopyEngine(Protocol):
    """Copies between a device and host memory, for training threads and threads beside them."""

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory the device can copy to."""
        ...

    def mark(self) -> Any:
        """Mark all work that this thread has given to the device so far."""
        ...

    def start(self, pairs: Pairs, after: Any = None) -> Callable[[], None]:
        """Start copies, which are made after the marked work.

        Returns:
            A function that waits until they are done; any thread may call it.
        """
        ...

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between the work that this thread has given to the device and what it gives next."""
        ...


class ImmediateCopies:
    """Copies that are done when they return: plain host memory."""

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def mark(self) -> Any:
        return None

    def start(self, pairs: Pairs, after: Any = None) -> Callable[[], None]:
        for target, source in pairs:
            target.copy_(source)
        return lambda: None

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)


class StreamCopies:
    """Pinned memory and a side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def mark(self) -> Any:
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self, pairs: Pairs, after: Any = None) -> Callable[[], None]:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:  # its memory must not be reused before the copy is made
                    source.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done.synchronize

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> None:
        self.start([(target, host)], self.mark())
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Staging:
    """Flat host views of tensors; buffers are created once for each key and reused."""

    def __init__(self, engine_for: Callable[[torch.device], CopyEngine] | None = None) -> None:
        self._engine_for = engine_for or engine_for_device
        self._engines: dict[torch.device, CopyEngine] = {}
        self._hosts: dict[int, torch.Tensor] = {}
        self._copying: dict[int, Callable[[], None]] = {}
        self._copied: set[int] = set()

    def fetch(self, key: int, tensor: torch.Tensor, *, always: bool = False) -> None:
        """Start to make ``tensor`` readable in host memory (``always``: as a separate copy)."""
        self._copied.discard(key)
        if always or not is_flat_host(tensor):
            flat = as_real(tensor)
            host = self._host(key, flat)
            engine = self._engine(tensor)
            self._copying[key] = engine.start([(host.view(flat.shape), flat)], engine.mark())
            self._copied.add(key)

    def readable(self, key: int, tensor: torch.Tensor) -> Values:
        """The complete host memory after ``fetch``; may be called several times."""
        if key in self._copying:
            self._copying.pop(key)()
        if key in self._copied:
            return values_of(self._hosts[key], tensor)
        if not is_flat_host(tensor):
            raise KeyError(f"tensor {key} was not fetched")
        return values_of(tensor, tensor)

    def is_copied(self, key: int) -> bool:
        """Whether ``readable`` gives a copy, and not the tensor's own memory."""
        return key in self._copied

    def writable(self, key: int, tensor: torch.Tensor) -> Values:
        """Host memory whose content ``commit`` copies into the tensor."""
        if is_flat_host(tensor):
            return values_of(tensor, tensor)
        return values_of(self._host(key, as_real(tensor)), tensor)

    def commit(self, key: int, tensor: torch.Tensor) -> None:
        if not is_flat_host(tensor):
            # Not detach(): like a write into host memory, autograd should not count this as a
            # change.
            self._engine(tensor).to_device(shaped_as(tensor, self._hosts[key]), tensor.data)

    def _host(self, key: int, like: torch.Tensor) -> torch.Tensor:
        host = self._hosts.get(key)
        if host is None or host.numel() != like.numel() or host.dtype != like.dtype:
            host = self._engine(like).host_empty(like.numel(), like.dtype)
            self._hosts[key] = host
        return host

    def _engine(self, tensor: torch.Tensor) -> CopyEngine:
        if tensor.device not in self._engines:
            self._engines[tensor.device] = self._engine_for(tensor.device)
        return self._engines[tensor.device]


def engine_for_device(device: torch.device) -> CopyEngine:
    return StreamCopies(device) if device.type == "cuda" else ImmediateCopies()


def is_flat_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy(tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether torch has deferred a conjugation or negation: memory is not the value yet."""
    return tensor.is_conj() or tensor.is_neg()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values as real numbers; a view to read, which for lazy conjugates is a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def shaped_as(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Flat real numbers in the shape and type of ``tensor``, to be copied into it."""
    if tensor.is_complex():
        return torch.view_as_complex(flat.view(*tensor.shape, 2))
    return flat.view(tensor.shape)


def values_of(memory: torch.Tensor, like: torch.Tensor) -> Values:
    """The bytes of flat host memory; ``like`` says which numbers they are."""
    flat = torch.view_as_real(memory) if memory.is_complex() else memory
    return Values(flat.detach().view(-1).view(torch.uint8).numpy(), dtype_name(like))
