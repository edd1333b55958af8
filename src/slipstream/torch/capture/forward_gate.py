"""Waits for weights just before they are used: by a layer's forward, or by who reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.torch.tensors.plain_copies import ModuleHook, ReplacedMethod, keep_copies_plain

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
    (``READERS``). A forward pass that asks for them (for a device or a dtype, say) waits for each
    when it gets it; a compiled one does not. Otherwise, as with a list of parameters from before,
    call ``job.wait()`` before you read or change a weight.

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
        self._begin, self._index_of = begin, index_of
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
            self._replace(module, name, Reader)
        # It reads no weight, and a loop calls it when new ones may be under way.
        self._replace(module, "zero_grad", WithoutReading)

    def _replace(self, module: nn.Module, name: str, kind: type[Reader]) -> None:
        """Join the gates of other pairs; a function that the user has put there stays."""
        found = vars(module).setdefault(name, kind(module, name))
        if isinstance(found, Reader):
            found.gates.append(self)

    def begin_reading(self) -> bool:
        """Wait for all weights, except in a forward pass.

        Returns:
            Whether each is to be awaited when it is given.
        """
        if self._reads and not self._depth:
            self._read()
        return self._reads and self._depth > 0

    def await_one(self, tensor: Tensor) -> None:
        """A forward pass gets at this weight."""
        if (index := self._index_of.get(id(tensor))) is not None:
            self._wait([index])

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
                found = vars(module).get(name)
                if isinstance(found, Reader):
                    found.gates.remove(self)
                    if not found.gates:
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

    Attributes:
        gates: Of all pairs that train weights of the module.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.gates: list[ForwardGate] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled forward pass; modules wait in their hooks
            return getattr(type(self.module), self.name)(self.module, *arguments, **named)
        within = [gate for gate in self.gates if gate.begin_reading()]
        given = self.plain()(*arguments, **named)
        if not within:
            return given
        if isinstance(given, Tensor):
            return next(awaited(within, [given]))
        return awaited(within, given)


class WithoutReading(Reader):
    """A module's method that asks for parameters, but reads no weight."""

    @torch.compiler.disable
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with ExitStack() as stack:
            for gate in self.gates:
                stack.enter_context(gate.without_reading())
            return self.plain()(*arguments, **named)


def awaited(gates: Sequence[ForwardGate], given: Iterable[Any]) -> Iterator[Any]:
    """Wait for each of these weights, or names and weights, before it is given."""
    for each in given:
        for gate in gates:
            gate.await_one(each[1] if isinstance(each, tuple) else each)
        yield each
