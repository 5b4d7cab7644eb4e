"""The models to start from: their sizes, what they predict from what, and what bad names meet."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ibm_nodes.recipes.llama import Llama
from ibm_nodes.recipes.models import SHAPES, build_model
from ibm_nodes.recipes.t5 import T5


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, billions",
    [
        ("llama-1b", 1.10),
        ("llama-7b", 6.74),
        ("llama-8b", 8.03),
        ("llama-13b", 13.02),
        ("llama-34b", 33.74),
        ("llama-70b", 68.98),
        ("t5-3b", 2.85),
        ("t5-11b", 11.14),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(name, billions):
    with torch.device("meta"):
        model = build_model(name)
    assert count(model) / 1e9 == pytest.approx(billions, abs=0.006)
    assert any(isinstance(module, model.block_class) for module in model.modules())


@pytest.mark.parametrize("name", ["tiny", "tiny-t5"])
def test_weights_depend_on_the_seed_alone_and_global_generators_stay(name):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, other = build_model(name), build_model(name, seed=1)
    assert torch.equal(torch.rand(3), expected)
    again = build_model(name)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


def changed(model, ids, place):
    """The positions of the logits that change with the token at a place."""
    other = ids.clone()
    other[0, place] = (other[0, place] + 1) % 512
    with torch.no_grad():
        return (model(ids) - model(other)).abs().amax((0, 2)).gt(1e-6).nonzero().flatten().tolist()


def test_llama_sees_no_later_token():
    model, ids = build_model("tiny"), torch.arange(10)[None] * 31 % 512
    assert model(ids).shape == (1, 10, 512)
    for place in range(10):
        assert changed(model, ids, place) == list(range(place, 10))


def test_t5_decodes_the_second_half_from_the_whole_of_the_first():
    model, ids = build_model("tiny-t5"), torch.arange(11)[None] * 31 % 512
    assert model(ids).shape == (1, 6, 512)
    for place in range(11):
        assert changed(model, ids, place) == list(range(max(0, place - 5), 6))


def test_positions_that_begin_anew_keep_documents_apart():
    model, ids = build_model("tiny"), torch.arange(12)[None] * 31 % 512
    together = model(ids, torch.tensor([[*range(5), *range(7)]]))
    apart = torch.cat([model(ids[:, :5]), model(ids[:, 5:])], 1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together, model(ids), atol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "tiny-t5"])
def test_counts_the_operations_that_torch_counts(name):
    model, ids = build_model(name), torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it cannot count a fused kernel
        model(ids).sum().backward()
    assert model.flops_per_token(64) == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.01)


def test_a_shape_takes_another_vocabulary():
    model = build_model("tiny", vocab_size=1000)
    assert model(torch.tensor([[999]])).shape == (1, 1, 1000)
    assert isinstance(build_model("tiny-t5", vocab_size=600), T5) and isinstance(model, Llama)


def test_builds_a_module_from_its_import_path():
    model = build_model("torch.nn:Linear", options={"in_features": 3, "out_features": 2})
    assert isinstance(model, nn.Linear) and model.weight.shape == (2, 3)


@pytest.mark.parametrize(
    "name, options, kind, text",
    [
        ("llama-9b", {}, LookupError, f"no model 'llama-9b': there are {', '.join(SHAPES)}, or give package.module:n"),
        ("no.such:Model", {}, LookupError, "no model 'no.such:Model': No module named 'no'"),
        ("torch.nn:Lin", {}, LookupError, "no model 'torch.nn:Lin': module 'torch.nn' has no attribute 'Lin'"),
        ("torch.nn:Linear", {"size": 3}, ValueError, "options must be those of torch.nn:Linear, got size"),
        ("collections:Counter", {"a": 1}, TypeError, "collections:Counter must give a torch.nn.Module, got Counter"),
        ("tiny", {"layers": 3}, ValueError, "options must be given with an import path alone, got layers for 'tiny'"),
    ],
)
def test_says_what_is_wrong_with_a_name_or_its_options(name, options, kind, text):
    with pytest.raises(kind) as error:
        build_model(name, options=options)
    assert str(error.value.args[0]).startswith(text)
