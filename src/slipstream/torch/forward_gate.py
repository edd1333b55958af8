"""Waits for a layer's weights just before that layer's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from slipstream.torch.plain_copies import ModuleHook, keep_copies_plain


class ForwardGate:
    """Hooks on every module that owns exchanged tensors.

    A module waits for its own weights when it is called. Weights of modules that the first pass
    never called (``nn.MultiheadAttention`` reads its projection's weight without calling it) are
    awaited when the model is called. So are all weights before a module is copied, pickled, gives
    its ``state_dict`` or loads one. Otherwise, call ``job.wait()`` before you read or change a
    weight.
    """

    def __init__(
        self,
        model: nn.Module,
        index_of: Mapping[int, int],
        wait: Callable[[Sequence[int] | None], None],
        begin: Callable[[], None],
    ) -> None:
        self._wait = wait
        self._begin = begin
        self._all = frozenset(index_of.values())
        self._awaited_at_call: set[int] = set()
        self._depth = 0
        self._handles: list[Any] = []
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
            entering = ModuleHook(self._entering(own), before_copy=partial(wait, None))
            leaving, reading = ModuleHook(self._leaving), ModuleHook(lambda *_: wait(None))
            self._handles += [
                module.register_forward_pre_hook(entering, prepend=True),
                module.register_forward_hook(leaving, always_call=True),
                module.register_state_dict_pre_hook(reading),
                module.register_load_state_dict_pre_hook(reading),
            ]

    def remove(self) -> None:
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
