"""Choosing the modules that a probe is put on."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hookline.errors import ConfigError
from hookline.probes.module_selection import select
from hookline.tensors.parameter_names import match_names, named_parameters, parameters_by_name


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class WideMlp(Mlp):
    """A subclass."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.mlp = WideMlp()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mlp(x))


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def clean_names(model):
    return select(model, "**")


def names(model, which):
    chosen = select(model, which)
    for name, module in chosen.items():  # each name leads to its module
        assert select(model, name) == {name: module}
    return list(chosen)


BLOCK_MLPS = [f"blocks.{i}.mlp" for i in range(12)]


# -- what can be asked for


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("blocks.3.mlp", ["blocks.3.mlp"]),
        ("", [""]),  # the model itself
        # one part of a name, or a piece of it
        ("blocks.*.mlp", BLOCK_MLPS),
        ("*", ["embed", "blocks", "mlp", "head"]),
        ("*mb*", ["embed"]),
        ("blocks.1*.m*p", ["blocks.1.mlp", "blocks.10.mlp", "blocks.11.mlp"]),
        # any number of parts
        ("**.mlp", [*BLOCK_MLPS, "mlp"]),
        ("blocks.**.up", [f"{name}.up" for name in BLOCK_MLPS]),
        ("**.**.mlp", [*BLOCK_MLPS, "mlp"]),
        ("**", [name for name, _ in Net().named_modules()]),
        # one character
        ("blocks.?", [f"blocks.{i}" for i in range(10)]),
        ("blocks.[0-2]", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[!0-8]", ["blocks.9"]),
        # whole names that a regular expression matches
        (re.compile(r"blocks\.[01]\.mlp"), BLOCK_MLPS[:2]),
        (r"re:blocks\.[01]\.mlp", BLOCK_MLPS[:2]),
        ("re:.*head", ["head"]),
        # types, with subclasses
        (Mlp, [*BLOCK_MLPS, "mlp"]),
        (WideMlp, ["mlp"]),
        (Net, [""]),
        (lambda name, module: "12" not in name and isinstance(module, WideMlp), ["mlp"]),
        (["head", "blocks.0.*", "head"], ["blocks.0.norm", "blocks.0.mlp", "head"]),
    ],
)
def test_modules_are_chosen_in_the_models_order(net, which, expected):
    assert names(net, which) == expected


# -- when nothing is found


def error_message(model, which):
    with pytest.raises(ConfigError) as caught:
        select(model, which)
    return str(caught.value)


def test_a_name_that_is_not_there_is_an_error_with_near_names_and_some_that_are(net):
    message = error_message(net, "blocks.3.mpl")
    assert "'blocks.3.mpl'" in message
    assert "Did you mean 'blocks.3.mlp'?" in message
    assert "The modules are: 'embed', 'blocks', 'blocks.0'" in message
    assert f"and {len(list(net.named_modules())) - 1 - 8} more" in message


def test_a_star_that_would_have_to_cross_dots_is_explained(net):
    message = error_message(net, "*.norm")
    assert "'blocks.0.norm' has more" in message
    assert "write '**'" in message
    assert "'**'" not in error_message(net, "nothing*")


def chooses_nothing(name, module):
    return False


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (["head", "tail"], "'tail'"),
        ("re:nothing", "whole name"),
        (re.compile("nothing"), "whole name"),
        ("re:(", "'re:(' is not a regular expression"),
        (nn.Conv2d, "Conv2d. Its types are: 'Net'"),
        (chooses_nothing, "chooses_nothing chose none of the modules"),
        (nn.Linear(1, 1), "This Linear is not a part of the model"),
        ([], "No modules were given"),
        ((), "No modules were given"),
        (3, "cannot be chosen by a int: 3"),
    ],
)
def test_what_chooses_nothing_is_an_error_that_says_why(net, which, said):
    assert said in error_message(net, which)


# -- wrappers


def test_names_with_wrapper_parts_are_understood(net):
    model = torch.compile(net)
    assert list(select(model, "_orig_mod.head")) == ["head"]
    assert list(select(net, "_orig_mod.head")) == ["head"]
    assert list(select(model, "_orig_mod")) == [""]
    assert list(select(model, "_orig_mod.blocks.*.mlp")) == BLOCK_MLPS
    assert list(select(net, "module.head")) == ["head"]  # noted down from a DDP model
    assert list(select(net, "module")) == [""]


def test_ddp_and_compiling_do_not_change_names(net, group):
    model = torch.compile(nn.parallel.DistributedDataParallel(net))
    assert clean_names(model) == clean_names(net)
    assert select(model, "") == {"": net}
    outer = nn.ModuleDict({"encoder": model})
    assert list(clean_names(outer))[:3] == ["", "encoder", "encoder.embed"]
    assert select(outer, "encoder._orig_mod.module.head") == {"encoder.head": net.head}
    assert select(outer, "encoder._orig_mod") == {"encoder": net}


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_fsdp_of_both_kinds_does_not_change_names(net, group):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    cpu = torch.device("cpu")
    plain = list(clean_names(net))
    net.blocks[0] = FullyShardedDataParallel(net.blocks[0], device_id=cpu)
    model = FullyShardedDataParallel(net, device_id=cpu)
    assert list(clean_names(model)) == plain
    assert list(select(model, "_fsdp_wrapped_module.blocks.0.mlp")) == ["blocks.0.mlp"]

    second = Net()
    fully_shard(second, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert list(clean_names(second)) == plain
    assert list(select(second, Net)) == [""]


# -- tied modules


@pytest.fixture
def tied():
    shared = nn.Sequential(nn.Linear(2, 2))
    return nn.ModuleDict({"encoder": shared, "middle": nn.ReLU(), "decoder": shared})


def test_a_tied_module_is_there_once(tied):
    assert list(clean_names(tied)) == ["", "encoder", "encoder.0", "middle"]
    assert list(select(tied, nn.Linear)) == ["encoder.0"]
    assert list(select(tied, "*")) == ["encoder", "middle"]


# -- parameters


def test_stars_in_patterns_of_parameters_mean_the_same_as_for_modules(net):
    names = [name for name, _ in net.named_parameters()]
    assert match_names(["*.bias"], names) == ["embed.bias", "head.bias"]
    assert match_names(["mlp.*.bias"], names) == ["mlp.up.bias", "mlp.down.bias"]
    assert match_names(["blocks.[01].**.bias"], names) == [
        f"blocks.{i}.{name}.bias" for i in (0, 1) for name in ("norm", "mlp.up", "mlp.down")
    ]
    assert match_names(["**"], names) == names
    assert match_names([r"re:(embed|head)\.bias"], names) == ["embed.bias", "head.bias"]
    assert match_names(["^mlp.*s$"], names) == ["mlp.up.bias", "mlp.down.bias"]
    with pytest.raises(ConfigError, match=r"'blocks.0.norm.weight' has more: write '\*\*'"):
        match_names(["blocks.*"], names)
    with pytest.raises(ConfigError, match="has to match the whole name"):
        match_names(["re:embed"], names)


def test_parameters_have_the_names_of_the_model_whatever_wraps_it(net, group):
    plain = {id(parameter): name for name, parameter in net.named_parameters()}
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    net.mlp = torch.compile(net.mlp)
    model = torch.nn.parallel.DistributedDataParallel(net)
    for wrapped in (net, model, torch.compile(model)):
        assert named_parameters(wrapped, None) == plain
        assert list(parameters_by_name(wrapped)) == list(plain.values())
        chosen = named_parameters(wrapped, ["blocks.0.norm.*"])
        assert list(chosen.values()) == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
