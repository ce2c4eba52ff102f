"""Updates transform gradients between backward and step: the contract, and each built-in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Net, batches, config, fit, make, recorder, same, weights
from torch import nn

import hookline
import hookline.updates
from hookline import HookFailedError, Trainer, UpdateHook
from hookline.updates import (
    Centralize,
    ClipNorm,
    ClipValue,
    EMAFilter,
    Identity,
    Mask,
    Noise,
    Scale,
    SkipNonfinite,
)

# -- the contract ---------------------------------------------------------------------------------


def test_an_update_gets_every_gradient_by_name_and_what_it_returns_is_used():
    class Zero(UpdateHook):
        names: list[str]

        def __call__(self, gradients):
            self.names = list(gradients)
            return {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}

    hook = Zero()
    before = weights(make()[0])
    trainer = fit(hook)
    assert hook.names == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert same(weights(trainer.model), before)


def test_what_is_left_out_keeps_its_gradient_and_none_changes_nothing():
    plain = fit()
    left_out = fit(updates=[lambda gradients: {}, lambda gradients: None])
    assert same(weights(plain.model), weights(left_out.model))


def test_updates_are_chained_in_the_order_of_their_registration():
    seen = []

    def double(gradients):
        seen.append(("double", gradients["first.bias"].clone()))
        return {name: 2 * gradient for name, gradient in gradients.items()}

    def add_one(gradients):
        seen.append(("add", gradients["first.bias"].clone()))
        gradients["first.bias"] = gradients["first.bias"] + 1  # put into it, not returned

    def look(gradients):
        seen.append(("look", gradients["first.bias"].clone()))

    fit(updates=[double, add_one, look], data=batches(1))
    assert [name for name, _ in seen] == ["double", "add", "look"]
    assert torch.equal(seen[1][1], 2 * seen[0][1])
    assert torch.equal(seen[2][1], 2 * seen[0][1] + 1)


def test_gradients_are_accumulated_before_and_clipped_after_updates():
    norms = []

    class Norms(hookline.Hook):
        def on_gradients_ready(self, model):
            norms.append(("ready", model.first.bias.grad.clone()))

        def on_gradient_clip(self, grad_norm):
            norms.append(("clip", float(grad_norm)))

    def look(gradients):
        norms.append(("update", gradients["first.bias"].clone()))
        return {name: 3 * gradient for name, gradient in gradients.items()}

    model, optimizer = make()
    trainer = Trainer(config(accumulate=2, clip_norm=0.001), model, optimizer, hooks=[Norms()])
    trainer.add_hook(look, kind="update")
    trainer.fit(batches(2))
    assert [what for what, _ in norms] == ["ready", "update", "clip"]
    assert torch.equal(norms[0][1], norms[1][1])
    model, optimizer = make()
    total = next(norm for what, norm in norms if what == "clip")
    norms.clear()
    unscaled = Trainer(config(accumulate=2, clip_norm=0.001), model, optimizer, hooks=[Norms()])
    unscaled.fit(batches(2))
    assert total == pytest.approx(3 * norms[-1][1], rel=1e-5)  # the norm is that of the updated


def test_each_optimizer_that_is_due_has_its_own_gradients():
    model = Net()
    optimizers = [
        torch.optim.SGD(model.first.parameters(), lr=0.1),
        torch.optim.SGD(model.second.parameters(), lr=0.1),
    ]
    seen = []

    def look(gradients, optimizer_idx, step):
        seen.append((step, optimizer_idx, sorted(gradients)))

    fit(updates=[look], model=model, optimizers=optimizers, data=batches(2), optimizer_every=[1, 2])
    first, second = ["first.bias", "first.weight"], ["second.bias", "second.weight"]
    assert seen == [(0, 0, first), (1, 0, first), (1, 1, second)]


def test_parameters_without_a_gradient_are_not_in_it():
    class Half(Net):
        def forward(self, x):
            return self.first(x)[:, :4]

    seen = []
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(
        updates=[lambda gradients: seen.append(list(gradients))],
        model=model,
        optimizers=optimizer,
        data=batches(1),
    )
    assert seen == [["first.weight", "first.bias"]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g: {"first.wieght": g["first.weight"]}, "Did you mean 'first.weight'"),
        (lambda g: {"first.bias": g["first.bias"][:3]}, "has shape [3]; expected [16]"),
        (lambda g: {"first.bias": g["first.bias"].double()}, "has dtype torch.float64; expected"),
        (lambda g: {"first.bias": g["first.bias"].to("meta")}, "has device meta; expected cpu"),
        (lambda g: {"first.bias": 1.0}, "is a float; expected a tensor"),
        (lambda g: [1.0], "returns a mapping from names to gradients, or None, not a list"),
        (lambda g: 1 / 0, "division by zero"),
    ],
)
def test_what_does_not_fit_stops_training_with_the_hooks_name(returned, message):
    def faulty(gradients):
        return returned(gradients)

    with pytest.raises(HookFailedError) as error:
        fit(updates=[faulty])
    assert "'faulty'" in str(error.value)
    assert message in str(error.value)


def test_an_update_can_be_toggled_scheduled_and_is_described_like_every_hook():
    calls = []
    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer)
    trainer.add_hook(lambda gradients, step: calls.append(step), "odd", kind="update", every=2)
    trainer.add_hook(Scale(0.5))
    trainer.disable_hook("scale")
    trainer.fit(batches(4))
    assert calls == [1, 3]
    infos = {info.name: info for info in trainer.hooks.describe()}
    assert infos["odd"].kind == infos["scale"].kind == "update"
    assert (infos["odd"].calls, infos["scale"].calls) == (2, 0)
    assert infos["scale"].options == {"factor": 0.5}


# -- the built-ins, each against its definition ---------------------------------------------------


def gradients_after(*updates, steps=1, model=None, seed=3, scale=1.0):
    """Gradients before and after these updates, for a model with a matrix, a vector, a filter."""
    model = model or Layers()
    generator = torch.Generator().manual_seed(seed)
    manager = hookline.HookManager(updates)
    results = []
    for _ in range(steps):
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        before = {name: p.grad.clone() for name, p in parameters.items()}
        gradients = hookline.updates.Gradients(parameters)
        source = Source(model, gradients)
        manager.dispatchers.update(source)
        results.append((before, {name: p.grad for name, p in parameters.items()}))
    return results if steps > 1 else results[0]


class Source:
    optimizer_idx = 0

    def __init__(self, model, gradients):
        self.model, self.gradients, self.trainer = model, gradients, None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.conv = nn.Conv1d(2, 4, 3)


def test_identity_copies_nothing_and_changes_no_bit():
    model, optimizer = make()
    plain, optimizer_2 = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Identity()])
    grads = []

    class Keeps(hookline.Hook):
        def on_gradients_ready(self, model):
            grads.append([id(p.grad) for p in model.parameters()])

        def on_before_optimizer_step(self, model):
            grads.append([id(p.grad) for p in model.parameters()])

    trainer.add_hook(Keeps())
    torch.manual_seed(0)
    trainer.fit(batches(3))
    torch.manual_seed(0)
    Trainer(config(), plain, optimizer_2).fit(batches(3))
    assert same(weights(model), weights(plain))
    assert grads[::2] == grads[1::2]


def test_scale_multiplies_all_or_by_pattern():
    before, after = gradients_after(Scale(0.25))
    assert all(torch.equal(after[name], 0.25 * before[name]) for name in before)
    before, after = gradients_after(Scale({"linear": 2.0, "*.bias": 0.5}))
    assert torch.equal(after["linear.weight"], 2 * before["linear.weight"])
    assert torch.equal(after["linear.bias"], before["linear.bias"])  # 2.0 · 0.5
    assert torch.equal(after["conv.bias"], 0.5 * before["conv.bias"])
    assert torch.equal(after["conv.weight"], before["conv.weight"])


def test_mask_zeroes_what_matches():
    before, after = gradients_after(Mask(["conv"]))
    assert not after["conv.weight"].any()
    assert not after["conv.bias"].any()
    assert torch.equal(after["linear.weight"], before["linear.weight"])


def test_a_pattern_that_matches_nothing_stops_training_with_near_names():
    with pytest.raises(HookFailedError, match=r"'fist', neither as a part .* Did you mean 'first'"):
        fit(Mask(["fist"]))


@settings(deadline=None, max_examples=30)
@given(limit=st.floats(0.01, 100), scale=st.floats(1e-3, 1e3))
def test_clip_norm_is_what_torch_does(limit, scale):
    before, after = gradients_after(ClipNorm(limit), scale=scale)
    twins = [torch.zeros_like(g, requires_grad=True) for g in before.values()]
    for twin, gradient in zip(twins, before.values(), strict=True):
        twin.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(twins, limit)
    for twin, gradient in zip(twins, after.values(), strict=True):
        assert torch.allclose(twin.grad, gradient, rtol=1e-6)


def test_clip_value_limits_each_number():
    before, after = gradients_after(ClipValue(0.5))
    assert any((gradient.abs() > 0.5).any() for gradient in before.values())
    assert all(torch.equal(after[name], before[name].clamp(-0.5, 0.5)) for name in before)


def test_centralize_makes_the_mean_of_each_unit_zero():
    before, after = gradients_after(Centralize())
    weight, conv = before["linear.weight"], before["conv.weight"]
    assert torch.allclose(after["linear.weight"], weight - weight.mean(1, keepdim=True))
    assert torch.allclose(after["conv.weight"], conv - conv.mean((1, 2), keepdim=True))
    assert torch.equal(after["linear.bias"], before["linear.bias"])


def test_noise_has_the_annealed_variance_and_leaves_trainings_random_numbers_alone():
    model = nn.Linear(300, 300)
    state = torch.get_rng_state()
    results = gradients_after(Noise(eta=0.04, gamma=0.5), steps=9, model=model)
    assert torch.equal(torch.get_rng_state(), state)
    for step in (0, 8):
        before, after = results[step]
        std = (after["weight"] - before["weight"]).std().item()
        assert std == pytest.approx(math.sqrt(0.04 / (1 + step) ** 0.5), rel=0.02)
    same_seed = gradients_after(Noise(eta=0.04, gamma=0.5), steps=2, model=model)
    assert torch.equal(
        same_seed[1][1]["weight"] - same_seed[1][0]["weight"],
        results[1][1]["weight"] - results[1][0]["weight"],
    )
    other_seed = gradients_after(Noise(eta=0.04, gamma=0.5, seed=1), steps=2, model=model)
    assert not torch.equal(other_seed[1][1]["weight"], same_seed[1][1]["weight"])


def test_ema_filter_amplifies_slow_gradients():
    results = gradients_after(EMAFilter(alpha=0.9, strength=2.0), steps=4)
    average = None
    for before, after in results:
        gradient = before["linear.weight"]
        average = gradient if average is None else 0.9 * average + 0.1 * gradient
        assert torch.allclose(after["linear.weight"], gradient + 2.0 * average, atol=1e-6)


def test_skip_nonfinite_leaves_out_the_step_and_nothing_moves():
    hook = recorder(on_step_skipped=("reason", "optimizer_idx"))
    data = batches(3)
    data[1][0][0, 0] = math.inf
    model, optimizer = make(momentum=0.9)
    trainer = Trainer(config(on_nan="continue"), model, optimizer, hooks=[SkipNonfinite(), hook])
    trainer.fit(data)
    reason = {"reason": "non-finite gradients", "optimizer_idx": 0}
    assert hook.told == [("on_step_skipped", reason)]
    assert trainer.step == 2
    assert all(torch.isfinite(weight).all() for weight in weights(model))


def test_skip_nonfinite_lets_large_half_precision_gradients_pass():
    model = nn.Linear(64, 64).half()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 60000.0)
    source = Source(model, hookline.updates.Gradients(dict(model.named_parameters())))
    skips = []
    source.trainer = type("T", (), {"skip_optimizer_step": lambda self, *a: skips.append(a)})()
    hookline.HookManager([SkipNonfinite()]).dispatchers.update(source)
    assert skips == []


@pytest.mark.parametrize("update", [Noise, EMAFilter])
def test_what_an_update_remembers_survives_a_resume_bit_for_bit(tmp_path, update):
    def trainer(steps):
        model, optimizer = make()
        fields = {"runs": tmp_path, "seed": 1, "max_steps": steps}
        return Trainer(config(**fields), model, optimizer, hooks=[update()])

    whole = trainer(6).fit(batches(6))
    half = trainer(3)
    half.fit(batches(6))
    path = half.save_checkpoint(tmp_path / "half")
    resumed = trainer(6).fit(batches(6), resume_from=path)
    assert resumed.step == 6
    assert same(weights(resumed.model), weights(whole.model))


# -- in a bare loop -------------------------------------------------------------------------------


def loop(hooks=(), functions=(), prepare=None, clip=None, data=None):
    model, optimizer = make()
    torch.manual_seed(5)
    with hookline.attach(model, optimizer, hooks=hooks) as session:
        for function in functions:
            session.hooks.add_hook(function, kind="update")
        for x, y in data or batches(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if prepare is not None:
                prepare(session)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def test_in_a_bare_loop_updates_run_before_the_optimizer_steps():
    doubled = loop([Scale(2.0)])
    by_hand = loop(functions=[lambda gradients: {n: g * 2 for n, g in gradients.items()}])
    plain = loop()
    assert same(weights(doubled), weights(by_hand))
    assert not same(weights(doubled), weights(plain))
    assert same(weights(loop([Identity()])), weights(plain))


def test_in_a_bare_loop_updates_come_before_the_loops_own_clipping():
    norms = {}

    def measure(name):
        def note(gradients):
            norms.setdefault(name, math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values())))

        return note

    loop(functions=[measure("unchanged loop")], clip=1e-3)
    loop(functions=[measure("updates()")], clip=1e-3, prepare=lambda session: session.updates())
    assert norms["unchanged loop"] == norms["updates()"] > 1e-2


def test_in_a_bare_loop_skip_nonfinite_leaves_out_the_step_and_nothing_moves():
    data = batches(3)
    data[1][0][0, 0] = math.inf
    told = recorder(on_step_skipped=("reason",), on_step_end=("step",))
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    moved = []
    with hookline.attach(model, optimizer, hooks=[SkipNonfinite(), told]):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            before = weights(model)
            optimizer.step()
            moved.append(not same(weights(model), before))
    assert moved == [True, False, True]
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert told.told == [
        ("on_step_end", {"step": 1}),
        ("on_step_skipped", {"reason": "non-finite gradients"}),
        ("on_step_end", {"step": 1}),
        ("on_step_end", {"step": 2}),
    ]


def zeros(gradients):
    return {name: gradient * 0 for name, gradient in gradients.items()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_a_step_that_the_loop_left_out_updates_are_applied_again(set_to_none):
    model, optimizer = make()
    before = weights(model)
    with hookline.attach(model, optimizer) as session:
        session.hooks.add_hook(zeros, kind="update")
        for i, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad(set_to_none)
            nn.functional.mse_loss(model(x), y).backward()
            session.updates()
            session.updates()  # once more changes nothing
            torch.autograd.grad(model(x).sum(), list(model.parameters()))  # nor does this
            if i not in (0, 2):
                optimizer.step()
    assert same(weights(model), before)


@pytest.mark.parametrize("by_name", [True, False])
def test_optimizers_with_backwards_of_their_own_get_their_own_updates(by_name):
    model = Net()
    first = torch.optim.SGD(model.first.parameters(), 0.1)
    second = torch.optim.SGD(model.second.parameters(), 0.1)
    before, calls = weights(model), []

    def zeroes(gradients, optimizer_idx):
        calls.append((optimizer_idx, list(gradients)))
        return zeros(gradients)

    with hookline.attach(model, [first, second]) as session:
        session.hooks.add_hook(zeroes, kind="update")
        for x, y in batches(2):
            for optimizer in (first, second):
                model.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                session.updates(optimizer if by_name else None)
                optimizer.step()
    assert same(weights(model), before)
    if by_name:
        assert [idx for idx, _ in calls] == [0, 1] * 2


def test_an_optimizer_that_evaluates_many_times_is_refused_with_updates():
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(hookline.LoopError, match=r"scale .*LBFGS evaluates"):
        hookline.attach(model, optimizer, hooks=[Scale(0.5)])


# -- what is easily forgotten ---------------------------------------------------------------------

EVERY = [
    Scale(0.5),
    Scale({"first": 0.5}),
    Mask(["first"]),
    ClipNorm(0.1),
    ClipValue(0.1),
    Centralize(),
    Noise(),
    EMAFilter(),
    SkipNonfinite(),
]


@pytest.mark.parametrize("update", EVERY, ids=lambda one: type(one).__name__)
def test_an_optimizer_may_have_nothing_for_an_update(update):
    model = Net()
    parts = [[model.first.weight], [model.second.bias], [nn.Parameter(torch.ones(2))]]
    optimizers = [torch.optim.SGD(part, 0.1) for part in parts]
    fit(update, model=model, optimizers=optimizers)


@pytest.mark.parametrize(
    "updates",
    [[EMAFilter()], [SkipNonfinite(), EMAFilter()], [EMAFilter(), SkipNonfinite()]],
    ids=lambda updates: "+".join(type(one).__name__ for one in updates),
)
@pytest.mark.parametrize("bad", [0, 2])
def test_what_is_not_finite_does_not_stay_in_the_average(updates, bad):
    data = batches(5)
    data[bad][0][0, 0] = math.inf
    skipping = [] if len(updates) == 2 else [SkipNonfinite()]
    trainer = fit(*updates, *skipping, data=data, on_nan="continue")
    assert trainer.step == 4
    assert all(weight.isfinite().all() for weight in weights(trainer.model))


class Remembers(UpdateHook):
    """Returns tensors that it keeps."""

    def __init__(self, copies):
        self.copies = copies
        self.kept = {}

    def __call__(self, gradients):
        for name, gradient in gradients.items():
            if name in self.kept:
                self.kept[name].mul_(0.9).add_(gradient)
            else:
                self.kept[name] = gradient.clone()
        return {name: one.clone() for name, one in self.kept.items()} if self.copies else self.kept


@pytest.mark.parametrize(
    "after", [[], [Scale(0.5)], [ClipNorm(0.01)]], ids=["clip", "scale", "norm"]
)
def test_what_an_update_returns_stays_its_own(after):
    kept = fit(Remembers(copies=False), *after, clip_norm=0.1)
    copied = fit(Remembers(copies=True), *after, clip_norm=0.1)
    assert same(weights(kept.model), weights(copied.model))


def test_parameters_that_are_replaced_or_join_while_training_are_updated():
    model, optimizer = make()
    seen, new = [], []

    class Swap(hookline.Hook):
        def on_step_end(self, step):
            if step == 1:
                model.second = nn.Linear(16, 4)
                optimizer.param_groups[0]["params"][2:] = [*model.second.parameters()]
                new.append(model.second.weight.clone())
            if step == 2:
                model.head = nn.Parameter(torch.ones(4))
                optimizer.add_param_group({"params": [model.head], "lr": 0.1})

    def step_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]) * getattr(model, "head", 1.0), batch[1])

    trainer = Trainer(config(), model, optimizer, step_fn=step_fn)
    trainer.hooks.register_hooks([Swap(), Mask(["second"])])
    trainer.add_hook(lambda gradients: seen.append(dict(gradients)), kind="update", name="look")
    trainer.fit(batches(4))
    assert all(not one["second.weight"].any() for one in seen)
    assert [len(one) for one in seen] == [4, 4, 5, 5]
    assert torch.equal(model.second.weight, new[0])


def test_a_tied_parameter_is_found_by_any_of_its_names():
    model = Net()
    model.tied = model.first
    before = model.first.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(Mask(["tied.weight"]), model=model, optimizers=optimizer)
    assert torch.equal(model.first.weight, before)
    assert not torch.equal(model.second.weight, make()[0].second.weight)


@pytest.mark.parametrize(
    "update",
    [ClipNorm(1.0), ClipValue(1.0), Centralize(), Noise(), EMAFilter(), SkipNonfinite()],
    ids=lambda one: type(one).__name__,
)
def test_a_sparse_gradient_is_a_clear_error(update):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(config(), model, optimizer, step_fn=lambda m, b: m(b).sum(), hooks=[update])
    message = f"{type(update).__name__} needs dense gradients, but that of 'weight' is sparse"
    with pytest.raises(HookFailedError, match=message):
        trainer.fit([torch.tensor([1, 2])])


def test_a_failed_update_leaves_nothing_of_itself():
    class Half(UpdateHook):
        critical = False

        def __call__(self, gradients):
            gradients["first.weight"] = gradients["first.weight"] * 0
            gradients["nonsense"] = torch.ones(1)
            raise ZeroDivisionError

    plain = fit()
    half = fit(Half(), updates=[lambda gradients: None])
    assert same(weights(half.model), weights(plain.model))
    assert set(half.hooks.summary().failures) == {"half"}


def test_a_step_that_the_loop_leaves_out_itself_takes_the_wish_to_skip_with_it():
    data = batches(4)
    data[1][0][0, 0] = math.inf
    model, optimizer = make()
    moved = []
    with hookline.attach(model, optimizer, hooks=[SkipNonfinite()]) as session:
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            session.updates()
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                continue
            before = weights(model)
            optimizer.step()
            moved.append(not same(weights(model), before))
    assert moved == [True, True, True]


def test_an_optimizer_that_is_not_attached_is_refused():
    model, optimizer = make()
    refused = pytest.raises(
        hookline.LoopError, match="not one of the optimizers that were attached"
    )
    with hookline.attach(model, optimizer) as session, refused:
        session.updates(torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("ranks", ["main", "local_main"])
def test_an_update_is_for_all_processes(ranks: str) -> None:
    with pytest.raises(hookline.RegistrationError, match=f"ranks='{ranks}'"):
        hookline.HookManager().add_hook(hookline.Scale(0.5), ranks=ranks)  # type: ignore[arg-type]
