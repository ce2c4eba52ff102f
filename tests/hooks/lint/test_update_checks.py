"""Checks of rule 1: updates take effect."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from lint_loops import Layers, batch, ids, layers, lint, loss_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

import hookline

# -- parameter-not-in-optimizer --------------------------------------------------------------------


def test_a_layer_that_no_optimizer_has_is_found() -> None:
    model = layers()
    optimizer = SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    (finding,) = lint(model, optimizer)
    assert finding.check == "parameter-not-in-optimizer"
    assert finding.subject == "middle.weight, middle.bias"
    assert finding.step == 3


def test_modules_in_a_plain_list_are_found() -> None:
    class Listed(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.Linear(16, 16), nn.Linear(16, 16)]

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for block in self.blocks:
                x = torch.relu(block(x))
            return self.last(x)

    torch.manual_seed(0)
    model = Listed()
    (finding,) = lint(model, SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1))
    assert finding.check == "parameter-not-in-optimizer"
    assert "blocks[0].weight" in finding.subject


def test_lora_that_is_injected_after_the_optimizer_is_found() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, 16) * 0.1)
            self.b = nn.Parameter(torch.zeros(16, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    model.middle = Lora(model.middle)  # type: ignore[assignment]
    findings = lint(model, optimizer)
    assert ids(findings) == ["parameter-not-in-optimizer"]
    assert "middle.b" in findings[0].subject


@pytest.mark.parametrize(
    "trained",
    [["last"], ["middle", "last"], ["first", "middle", "last"]],
    ids=["linear probing", "last layers", "all"],
)
def test_training_the_last_layers_is_no_finding(trained: list[str]) -> None:
    model = layers()
    parameters = [p for name, p in model.named_parameters() if name.split(".")[0] in trained]
    assert lint(model, Adam(parameters, lr=0.01)) == []


def test_master_weights_and_updates_by_hand_are_no_finding() -> None:
    model = layers()
    bodies = [*model.first.parameters(), *model.middle.parameters()]
    masters = [p.detach().clone().requires_grad_() for p in bodies]
    optimizer = SGD([*masters, *model.last.parameters()], lr=0.1)

    def step(i: int) -> None:
        model.zero_grad()
        loss_of(model, i).backward()
        for master, p in zip(masters, bodies, strict=True):
            master.grad = p.grad
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, bodies, strict=True):
                p.copy_(master)

    assert lint(model, optimizer, step_fn=step) == []

    model = layers()
    head = SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)

    def step_by_hand(i: int) -> None:
        model.zero_grad()
        loss_of(model, i).backward()
        head.step()
        with torch.no_grad():
            for p in model.middle.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad

    assert lint(model, head, step_fn=step_by_hand) == []


def test_a_second_optimizer_that_steps_later_is_no_finding() -> None:
    model = layers()
    often = SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    rarely = SGD(model.middle.parameters(), lr=0.1)

    def step(i: int) -> None:
        model.zero_grad()
        loss_of(model, i).backward()
        often.step()
        if i == 7:
            rarely.step()

    assert lint(model, often, step_fn=step, steps=9) == []


def test_a_layer_that_was_replaced_is_found() -> None:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.first = nn.Linear(8, 16)
    (finding,) = lint(model, optimizer)
    assert finding.check == "parameter-not-in-optimizer"
    assert finding.subject == "first.weight, first.bias"
    assert "replaced" in finding.message


def test_another_model_in_the_same_optimizer_is_no_finding() -> None:
    model, other = layers(), layers(1)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert lint(model, optimizer) == []  # the other gets no gradients

    def step(i: int) -> None:
        optimizer.zero_grad()
        (loss_of(model, i) + loss_of(other, i)).backward()
        optimizer.step()

    assert lint(model, optimizer, step_fn=step) == []


# -- parameter-in-two-optimizers -------------------------------------------------------------------


def test_two_optimizers_with_the_same_parameter_are_found() -> None:
    model = layers()
    optimizers = [SGD(model.parameters(), lr=0.1), Adam(model.last.parameters(), lr=0.01)]
    findings = lint(model, optimizers)
    assert ids(findings) == ["parameter-in-two-optimizers"]
    assert findings[0].subject == "last.weight, last.bias"


def test_disjoint_alternating_and_separately_used_optimizers_are_no_finding() -> None:
    model = layers()
    disjoint = [SGD(model.first.parameters(), lr=0.1), Adam(model.last.parameters(), lr=0.01)]
    model.middle.requires_grad_(False)
    assert lint(model, disjoint) == []

    model = layers()
    both = [SGD(model.parameters(), lr=0.01), Adam(model.parameters(), lr=0.01)]

    def alternate(i: int) -> None:
        model.zero_grad()
        loss_of(model, i).backward()
        both[i % 2].step()

    def own_losses(i: int) -> None:
        for optimizer in both:
            model.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()

    assert lint(model, both, step_fn=alternate) == []
    assert lint(model, both, step_fn=own_losses) == []


# -- update-differs-from-optimizer -----------------------------------------------------------------

_OPTIONS: list[tuple[type[Any], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True, "foreach": False}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True, "foreach": False}),
    (Adam, {"maximize": True, "fused": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True, "betas": (0.0, 0.5)}),
    (AdamW, {"lr": torch.tensor(0.01), "capturable": False, "foreach": False}),
]


@pytest.mark.parametrize(("kind", "options"), _OPTIONS)
def test_updates_of_torch_are_as_expected(kind: type[Any], options: dict[str, Any]) -> None:
    model = layers()
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()

    assert lint(model, optimizer, step_fn=step, steps=10) == []


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_step_of_torch_that_writes_to_a_copy_is_found(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    model.middle.weight = nn.Parameter(model.middle.weight.detach().t())
    name = "sgd" if kind is SGD else "adam"
    module: Any = sys.modules[f"torch.optim.{name}"]
    original = getattr(module, f"_single_tensor_{name}")

    def broken(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        original([p if p.is_contiguous() else p.clone() for p in params], *args, **kwargs)

    monkeypatch.setattr(module, f"_single_tensor_{name}", broken)
    (finding,) = lint(model, kind(model.parameters(), lr=0.1, foreach=False))
    assert (finding.check, finding.subject) == ("update-differs-from-optimizer", "middle.weight")


@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_constant", [True, False])
def test_changes_by_hooks_of_users_are_no_finding(
    kind: Any, dtype: torch.dtype, is_constant: bool
) -> None:
    model = layers().to(dtype)
    optimizer = kind(model.parameters(), lr=0.01)
    kept = [(p, p.detach().clone()) for p in list(model.parameters())[:-1]]

    @torch.no_grad()
    def put_back(*args: Any) -> None:
        for p, values in kept:
            p.copy_(values if is_constant else p.clamp(-0.1, 0.1))

    optimizer.register_step_post_hook(put_back)
    assert lint(model, optimizer) == []


# -- update-rounded-away ---------------------------------------------------------------------------


def test_updates_that_bfloat16_rounds_away_are_found() -> None:
    model = layers().to(torch.bfloat16)
    findings = lint(model, AdamW(model.parameters(), lr=1e-6))
    assert ids(findings) == ["update-rounded-away"]
    assert "first.weight" in findings[0].subject
    assert findings[0].step == 3


def test_precise_or_large_or_rising_updates_are_no_finding() -> None:
    model = layers().to(torch.bfloat16)
    assert lint(model, AdamW(model.parameters(), lr=3e-3)) == []
    model = layers()
    assert lint(model, AdamW(model.parameters(), lr=1e-9)) == []

    model = layers().to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-6)

    def warm_up(i: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-6 * (i + 1)
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()

    assert lint(model, optimizer, step_fn=warm_up) == []


# -- parameter-does-not-change ---------------------------------------------------------------------


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, copies: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.copies = copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                update = group["lr"] * p.grad.reshape(-1)
                if self.copies:
                    p.data.reshape(-1).sub_(update)
                else:
                    p.sub_(update.view_as(p))


@pytest.mark.parametrize("copies", [True, False])
def test_an_optimizer_that_writes_to_a_copy_is_found(copies: bool) -> None:
    model = layers()
    model.middle.weight = nn.Parameter(model.middle.weight.detach().t())
    findings = lint(model, OwnSGD(model.parameters(), 0.1, copies))
    assert ids(findings) == ["parameter-does-not-change"] * copies
    if copies:
        assert (findings[0].subject, findings[0].step) == ("middle.weight", 3)


def test_vanishing_updates_and_steps_without_a_change_are_no_finding() -> None:
    model = layers()
    assert lint(model, OwnSGD(model.parameters(), 1e-12, False)) == []
    optimizer = OwnSGD(model.parameters(), 0.1, False)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert lint(model, torch.optim.RMSprop(model.parameters(), lr=1e-3)) == []


# -- optimizer-state-counts-too-many-steps ---------------------------------------------------------


def with_synthetic_step(model: nn.Module) -> Adam:
    optimizer = Adam(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def test_a_synthetic_step_is_found() -> None:
    model = layers()
    findings = lint(model, with_synthetic_step(model))
    assert ids(findings) == ["optimizer-state-counts-too-many-steps"]
    assert (findings[0].subject, findings[0].step) == ("Adam", 1)


def test_counts_of_earlier_training_are_no_finding() -> None:
    model = layers()
    optimizer = Adam(model.parameters(), lr=1e-3)
    assert lint(model, optimizer) == []
    assert lint(model, optimizer) == []
    other = Adam(model.parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert lint(model, other) == []


# -- parameter-without-gradient --------------------------------------------------------------------


class Cut(Layers):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "unused":
            self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            return self.last(checkpoint(self.body, x, use_reentrant=True))
        if self.how == "no_grad":
            with torch.no_grad():
                h = torch.relu(self.first(x))
        elif self.how == "data":
            h = self.first(x).data
        elif self.how == "detach":
            h = torch.relu(self.first(x).detach())
        elif self.how == "list":
            h = torch.tensor(self.first(x).tolist())
        else:
            h = self.first(x)
        if self.how == "unused":
            self.unused(x)
        return self.last(torch.relu(self.middle(h)))

    def body(self, x: Tensor) -> Tensor:
        return self.middle(torch.relu(self.first(x)))


@pytest.mark.parametrize("how", ["no_grad", "data", "detach", "list"])
def test_a_cut_graph_is_found(how: str) -> None:
    model = Cut(how)
    findings = lint(model, SGD(model.parameters(), lr=0.1))
    assert ids(findings) == ["parameter-without-gradient"]
    assert (findings[0].subject, findings[0].step) == ("first", 3)
    assert "'middle'" in findings[0].message


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpointing_without_gradients_is_found() -> None:
    model = Cut("checkpoint")
    findings = lint(model, SGD(model.parameters(), lr=0.1))
    assert ids(findings) == ["parameter-without-gradient"]
    assert findings[0].subject == "middle, first"


def test_unused_frozen_and_averaged_modules_are_no_finding() -> None:
    unused, plain = Cut("unused"), Cut("")
    assert lint(unused, SGD(unused.parameters(), lr=0.1)) == []
    assert lint(plain, SGD(plain.parameters(), lr=0.1)) == []
    frozen = Cut("no_grad")
    frozen.first.requires_grad_(False)
    assert lint(frozen, SGD(frozen.parameters(), lr=0.1)) == []
    averaged = Cut("no_grad")
    optimizer = SGD(averaged.parameters(), lr=0.1)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss_of(averaged, i).backward()
        optimizer.step()
        with torch.no_grad():
            averaged.first.weight.mul_(0.99)

    assert lint(averaged, optimizer, step_fn=step) == []


# -- optimizer-made-anew ---------------------------------------------------------------------------


def _remake(model: nn.Module, kind: Any, every: int, restore: bool = False) -> Any:
    held: dict[str, Any] = {}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(i: int) -> None:
        if i % every == 0:
            if restore:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.lerp_(start[name], 0.5)
            held["optimizer"] = kind(model.parameters())
        held["optimizer"].zero_grad()
        loss_of(model, i).backward()
        held["optimizer"].step()

    return step


def test_an_optimizer_that_is_made_in_the_loop_is_found() -> None:
    model = layers()
    hook = hookline.Lint()
    step = _remake(model, Adam, 1)
    with hookline.attach(model, hooks=[hook]):
        for i in range(8):
            step(i)
    assert ids(hook.findings) == ["optimizer-made-anew"]
    assert hook.findings[0].subject == "Adam"


@pytest.mark.parametrize(
    ("kind", "every", "restore"),
    [(lambda p: SGD(p, lr=0.1), 1, False), (Adam, 12, False), (Adam, 2, True)],
    ids=["without moments", "stages", "reptile"],
)
def test_optimizers_of_stages_are_no_finding(kind: Any, every: int, restore: bool) -> None:
    model = layers()
    hook = hookline.Lint()
    step = _remake(model, kind, every, restore)
    with hookline.attach(model, hooks=[hook]):
        for i in range(48 if every == 12 else 12):
            step(i)
    assert hook.findings == []


# -- learning-rate-zero ----------------------------------------------------------------------------


def _with_rates(rate: Any, steps: int) -> list[Any]:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(i: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(i)
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()

    return lint(model, optimizer, step_fn=step, steps=steps)


def test_a_schedule_that_has_ended_is_found() -> None:
    (finding,) = _with_rates(lambda i: max(0.0, 0.1 * (1 - i / 20)), 60)
    assert (finding.check, finding.severity, finding.step) == ("learning-rate-zero", "error", 40)
    (finding,) = _with_rates(lambda i: 0.0, 25)
    assert (finding.check, finding.severity) == ("learning-rate-zero", "warning")


@pytest.mark.parametrize(
    "rate",
    [lambda i: 0.1 * min(1, i / 10), lambda i: 0.1 * (i % 10), lambda i: 0.1 * (i < 35)],
    ids=["warm-up", "restarts", "ended a little before"],
)
def test_short_times_with_rate_zero_are_no_finding(rate: Any) -> None:
    assert _with_rates(rate, 40) == []


@pytest.mark.parametrize(("steps", "count"), [(60, 0), (210, 1)])
def test_an_epoch_at_the_start_of_a_schedule_may_have_rate_zero(steps: int, count: int) -> None:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 3))
    assert ids(lint(model, optimizer, steps=steps)) == ["learning-rate-zero"] * count


# -- loops -----------------------------------------------------------------------------------------


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(y)


@pytest.mark.parametrize(("is_cut", "has_own_input"), [(True, True), (True, False), (False, True)])
def test_an_input_that_nothing_is_learned_from_is_found(is_cut: bool, has_own_input: bool) -> None:
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        (x, y), (other, _) = batch(number), batch(100 + number)
        one, two = model(x, other if has_own_input else x)
        optimizer.zero_grad()
        F.mse_loss(one * (two.detach() if is_cut else two), y).backward()
        optimizer.step()

    found = lint(model, optimizer, step_fn=step)
    is_found = is_cut and has_own_input  # otherwise the module may be unused on purpose
    assert ids(found) == ["parameter-without-gradient"] * is_found
    assert [finding.subject for finding in found] == ["two"] * is_found


@pytest.mark.parametrize(("dot", "is_found"), [("", True), (".", False)])
def test_layers_that_a_name_prefix_freezes_are_found(dot: str, is_found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 4))
    for name, parameter in model.named_parameters():
        if name.startswith((f"0{dot}", f"1{dot}")):
            parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = lint(model, torch.optim.SGD(trained, lr=0.1))
    assert ids(found) == ["frozen-by-name-prefix"] * is_found
    if is_found:
        assert found[0].subject == "10, 11, 12"


@pytest.mark.parametrize("wrong", [True, False])
def test_requires_grad_of_a_module_is_found(wrong: bool) -> None:
    model: Any = layers()
    if wrong:
        model.first.requires_grad = False
    else:
        model.first.requires_grad_(False)
    found = lint(model, SGD(model.parameters(), lr=0.1), steps=2)
    assert ids(found) == ["requires-grad-set-on-module"] * wrong


class OldRate(torch.optim.Optimizer):
    """SGD with momentum that goes on with its first learning rate."""

    def __init__(self, parameters: Any, lr: float, is_old: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.first = lr if is_old else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_((self.first or group["lr"]) * buffer)


@pytest.mark.parametrize("kind", [OldRate, SGD, Adam])
@pytest.mark.parametrize("is_old", [True, False])
def test_an_optimizer_that_keeps_its_first_learning_rate_is_found(
    kind: Any, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    options: Any = {"is_old": is_old} if kind is OldRate else {"foreach": False}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    name = "_single_tensor_sgd" if kind is SGD else "_single_tensor_adam"
    module = sys.modules["torch.optim.sgd" if kind is SGD else "torch.optim.adam"]
    original: Any = getattr(module, name)

    def stale(*args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, "lr": 0.1} if is_old else kwargs)

    monkeypatch.setattr(module, name, stale)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * 0.8**number
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    check = "update-uses-old-values" if kind is OldRate else "update-differs-from-optimizer"
    assert ids(lint(model, optimizer, step_fn=step)) == [check] * is_old


class CachedLinear(nn.Linear):
    is_refreshed = False
    cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or (self.is_refreshed and self.cache[0] != self.weight._version):
            self.cache = (self.weight._version, self.weight.detach().clone())
        return F.linear(x, self.weight + (self.cache[1] - self.weight).detach(), self.bias)


@pytest.mark.parametrize("is_refreshed", [True, False])
def test_a_forward_that_uses_an_old_copy_of_a_weight_is_found(is_refreshed: bool) -> None:
    model = layers()
    model.middle = CachedLinear(16, 16)
    model.middle.is_refreshed = is_refreshed
    found = lint(model, SGD(model.parameters(), lr=0.1), steps=3)
    assert ids(found) == ["forward-ignores-updates"] * (not is_refreshed)
    assert not found or found[0].subject == "middle.weight"
