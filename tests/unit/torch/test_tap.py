"""When a gradient is final and when a pass has ended, as autograd really goes about it."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.torch.capture.tap import BackwardTap


class Listener:
    """Writes down what a tap says, in order: parameters by name, ``end`` for the end."""

    def __init__(self, model: nn.Module) -> None:
        self.heard: list[str] = []
        self.names = [name for name, _ in model.named_parameters()]
        self.tap = BackwardTap(
            model,
            list(enumerate(model.parameters())),
            on_ready=lambda i: self.heard.append(self.names[i]),
            on_end=lambda: self.heard.append("end"),
        )

    def take(self) -> list[str]:
        heard, self.heard = self.heard, []
        return heard


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))


def test_gradients_come_from_the_last_layer_to_the_first_and_then_the_end() -> None:
    model = chain(3, 4, 5, 2)
    listener = Listener(model)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        assert listener.take() == ["2.weight", "1.weight", "0.weight", "end"]


def test_a_gradient_is_complete_when_it_is_announced() -> None:
    model = chain(2, 2)
    seen: list[torch.Tensor] = []
    weight = model[0].weight
    BackwardTap(
        model,
        [(0, weight)],
        on_ready=lambda _: seen.append(weight.grad.clone()),
        on_end=lambda: None,
    )
    x = torch.ones(1, 2)
    (model(x) + model(2 * x)).sum().backward()
    assert len(seen) == 1, "used twice, complete once"
    assert torch.equal(seen[0], weight.grad)


def test_a_weight_used_in_two_places_is_ready_once() -> None:
    model = chain(3, 3, 3)
    model[1].weight = model[0].weight
    listener = Listener(model)
    model(torch.ones(1, 3)).sum().backward()
    assert listener.take() == ["0.weight", "end"]


def test_what_took_no_part_is_not_announced() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    listener = Listener(model)
    model[1](torch.ones(1, 2)).sum().backward()
    assert listener.take() == ["1.weight", "end"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_ends_once_however_many_passes_run_within(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chain(3, 3, 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    listener = Listener(model)
    for _ in range(2):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        assert listener.take() == ["layers.2.weight", "layers.1.weight", "layers.0.weight", "end"]


def test_asking_autograd_for_gradients_is_no_pass_of_training() -> None:
    model = chain(2, 2, 1)
    listener = Listener(model)
    x = torch.ones(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert listener.take() == []
    (model(x).sum() + gradient.pow(2).sum()).backward()
    assert listener.take()[-1] == "end"
    assert listener.take() == []


def test_a_gradient_penalty_of_all_weights_counts_once() -> None:
    model = chain(2, 2, 1)
    listener = Listener(model)
    loss = model(torch.ones(1, 2)).pow(2).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.pow(2).sum() for g in gradients)).backward()
    heard = listener.take()
    assert sorted(heard[:-1]) == ["0.weight", "1.weight"]
    assert heard[-1] == "end"


def test_passes_while_paused_only_add_up() -> None:
    model = chain(2, 1)
    listener = Listener(model)
    x = torch.ones(1, 2)
    listener.tap.paused = True
    model(x).sum().backward()
    model(x).sum().backward()
    assert listener.take() == []
    listener.tap.paused = False
    model(x).sum().backward()
    assert listener.take() == ["0.weight", "end"]
    assert torch.equal(model[0].weight.grad, torch.full((1, 2), 3.0))


def test_evaluation_goes_unheard() -> None:
    model = chain(2, 1)
    listener = Listener(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert listener.take() == []


def test_outputs_of_any_form_are_marked() -> None:
    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            y = checkpoint(self.inner, x, use_reentrant=True)
            return {"out": [y, (y + 1, "text", None)], "whole": 3}

    model = Forms()
    listener = Listener(model)
    out = model(torch.ones(1, 2, requires_grad=True))["out"]
    out[1][0].sum().backward()  # type: ignore[index]
    assert listener.take() == ["inner.weight", "end"]


def test_a_pass_that_breaks_off_is_ended_by_hand_and_harms_no_later_one() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise ArithmeticError("halfway")

    model = chain(2, 2, 1)
    listener = Listener(model)
    x = torch.ones(1, 2)
    with pytest.raises(ArithmeticError):
        model[1](Breaks.apply(model[0](x))).sum().backward()
    assert listener.take() == ["1.weight"]
    listener.tap.end()
    listener.tap.end()
    assert listener.take() == ["end"]
    model(x).sum().backward()
    assert listener.take() == ["1.weight", "0.weight", "end"]


def test_after_removal_nothing_is_heard() -> None:
    model = chain(2, 1)
    listener = Listener(model)
    listener.tap.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert listener.take() == []
