"""Waits for weights just before they are used: by a layer's forward, or by who reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from slipstream.torch.plain_copies import ModuleHook, ReplacedMethod, keep_copies_plain

# The ways in which a loop gets at the weights of a module.
READERS = (
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "get_parameter",
    "get_buffer",
)


class ForwardGate:
    """Hooks on every module that owns exchanged tensors.

    A module waits for its own weights when it is called. Weights of modules that the first pass
    never called (``nn.MultiheadAttention`` reads its projection's weight without calling it) are
    awaited when the model is called. So are all weights before a module is copied, pickled, gives
    its ``state_dict`` or loads one, and when a loop asks a module for parameters or buffers
    (``READERS``). Otherwise, as with a list of parameters from before, call ``job.wait()`` before
    you read or change a weight.

    Args:
        wait: Waits for these tensors, or for all.
        begin: Called when the model is called.
        read: Called before the loop gets at weights in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        index_of: Mapping[int, int],
        wait: Callable[[Sequence[int] | None], None],
        begin: Callable[[], None],
        read: Callable[[], None],
    ) -> None:
        self._wait, self._read, self._reads = wait, read, True
        self._begin = begin
        self._all = frozenset(index_of.values())
        self._awaited_at_call: set[int] = set()
        self._depth = 0
        self._handles: list[Any] = []
        self._modules: list[nn.Module] = []
        for module in model.modules():
            own = tuple(
                index_of[id(tensor)]
                for tensor in [
                    *module.parameters(recurse=False),
                    *module.buffers(recurse=False),
                ]
                if id(tensor) in index_of
            )
            keep_copies_plain(module)
            self._replace_readers(module)
            entering = ModuleHook(self._entering(own), before_copy=partial(wait, None))
            leaving, reading = ModuleHook(self._leaving), ModuleHook(lambda *_: wait(None))
            self._handles += [
                module.register_forward_pre_hook(entering, prepend=True),
                module.register_forward_hook(leaving, always_call=True),
                module.register_state_dict_pre_hook(reading),
                module.register_load_state_dict_pre_hook(reading),
            ]

    def _replace_readers(self, module: nn.Module) -> None:
        self._modules.append(module)
        for name in READERS:
            vars(module).setdefault(name, Reader(module, name, self._reading))
        # It reads no weight, and a loop calls it when new ones may be under way.
        vars(module).setdefault("zero_grad", WithoutReading(module, "zero_grad", self))

    def _reading(self) -> None:
        if self._reads:
            self._read()

    @contextmanager
    def without_reading(self) -> Iterator[None]:
        """Within, nobody waits who asks for parameters."""
        before, self._reads = self._reads, False
        try:
            yield
        finally:
            self._reads = before

    def remove(self) -> None:
        for module in self._modules:
            for name in (*READERS, "zero_grad"):
                if isinstance(vars(module).get(name), Reader | WithoutReading):
                    del vars(module)[name]
        for handle in self._handles:
            handle.remove()

    def _entering(self, own: tuple[int, ...]) -> Callable[..., None]:
        def entering(_module: nn.Module, _inputs: Any) -> None:
            if self._depth == 0:
                self._begin()
                self._wait(sorted(self._all - self._awaited_at_call))
            self._depth += 1
            if own:
                self._wait(own)
                self._awaited_at_call.update(own)

        return entering

    def _leaving(self, *_: Any) -> None:
        self._depth -= 1


class Reader(ReplacedMethod):
    """A module's method that gives weights.

    Args:
        reading: Called first.
    """

    def __init__(self, module: nn.Module, name: str, reading: Callable[[], None]) -> None:
        super().__init__(module, name)
        self._reading = reading

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._reading()
        return self.plain()(*arguments, **named)


class WithoutReading(ReplacedMethod):
    """A module's method that asks for parameters, but reads no weight."""

    def __init__(self, module: nn.Module, name: str, gate: ForwardGate) -> None:
        super().__init__(module, name)
        self._gate = gate

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self._gate.without_reading():
            return self.plain()(*arguments, **named)
