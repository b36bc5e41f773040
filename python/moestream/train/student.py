"""A `transformers` model on its prerouted path: routing forced through heads, a LoRA on its attention, all else frozen.

    teacher = load_model("hf-folder")
    student = load_model("hf-folder", weights="model-Q4_0.gguf", heads=unpacked(sidecar.heads), experts_used=None)
    names = add_lora(student, rank=16, alpha=32.0, seed=1)
    logits = student.text(tokens, first_step)           # [texts, T, vocabulary], all positions at once, with gradients

**What routes.** As at run time (docs/heads.md): layers without a head, and prompts, by their gate. The token after a prompt
is decoded first, at position s (`first_step`): by the gate in every layer, for nothing is predicted yet. At a later position t
the router's output in layer N + 1 is what the head of layer N said at t - 1, out of its own state h and the experts a that it
executed there, and b those at t - 2, zeros unless t - 2 >= s. All that follows (softmax or sigmoid, bias, groups, top-k, norm of
the weights) is the model's own code, given those numbers in place of the router's product.

**Why a text needs no loop over its tokens.** What layer N + 1 takes at t depends on layer N at t - 1 and earlier, never on layer
N + 1 or later ones. Layers are computed one after the other, each for all positions: when layer N is done, h, a and b of all its
positions are there, so its head gives the predictions of all positions at once, and layer N + 1 takes them one position later.
That is the same function as decoding token by token, not an approximation; `Model.step` is that loop, for writing text.

**Supported** are blocks of transformers 5 with a child `gate` or `router` that has a 2-dimensional `weight` [E, d] and a child
`experts` that is called with states, experts and weights: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2/V3, GLM-4-MoE,
gpt-oss, Granite-MoE and others of that make. Each router is tried once; one that does not do the same with the product given as
with the weights given is refused by its class.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ..errors import OptionError, TrainingError
from ..sidecar import Lora, LoraPair, Matrix
from ..sidecar.format import LORA_TYPES
from ._gguf import GgufWeights
from .head_arrays import HeadArrays
from .head_model import Head, features

__all__ = [
    "LoraLinear",
    "Measured",
    "Model",
    "MoeBlock",
    "add_lora",
    "find_moe",
    "load_lora",
    "load_model",
    "lora_of",
    "measure",
    "write_text",
]

_LAYER = re.compile(r"\.layers\.(\d+)\.|\.h\.(\d+)\.")
_ATTENTION = re.compile(r"blk\.\d+\.attn_\w+\.weight")
_LOGITS_AT_ONCE = 1 << 24
_FAR = 0.5  # of a tensor's norm: quantising to 2 bits is nearer, rows in another order are farther


# Blocks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeBlock:
    """A layer's experts and router."""

    layer: int
    name: str
    router: nn.Module
    experts: nn.Module

    @property
    def weight(self) -> Tensor:
        """[E, d]"""
        return self.router.weight

    def route(self, logits: Tensor) -> Any:
        """What the router makes of its product being `logits` [n, E], in its own code.

        It is called with these as its input and the identity as its weights, so that their product is the input.
        """
        identity = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        renamed = [
            name for name in ("hidden_dim", "hidden_size") if getattr(self.router, name, None) == self.weight.shape[1]
        ]
        kept = self.weight.shape[1]
        forward = self.router.__dict__.pop("forward", None)  # the one that calls us
        try:
            for name in renamed:
                setattr(self.router, name, logits.shape[-1])
            return functional_call(self.router, {"weight": identity}, (logits,))
        finally:
            for name in renamed:
                setattr(self.router, name, kept)
            if forward is not None:
                self.router.forward = forward


def find_moe(model: nn.Module) -> dict[int, MoeBlock]:
    """The blocks with experts by layer, found by what they are made of.

    Raises:
        TrainingError: There is none, or one that is not understood.
    """
    found: dict[int, MoeBlock] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        router = children.get("gate", children.get("router"))
        if "experts" not in children or router is None:
            continue
        what = f"{type(module).__name__} at {name}"
        if not (layer := _LAYER.search(f".{name}.")):
            raise TrainingError(f"{what}: has experts, but its name tells no layer; this class is not supported")
        experts = children["experts"]
        if isinstance(experts, nn.ModuleList):
            raise TrainingError(
                f"{what}: its experts are separate modules, which transformers before 5 has; install transformers>=5"
            )
        weight = getattr(router, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise TrainingError(
                f"{what}: its router {type(router).__name__} has no matrix `weight`; this class is not supported"
            )
        block = MoeBlock(int(layer[1] or layer[2]), name, router, experts)
        _try_router(block, what)
        found[block.layer] = block
    if not found:
        raise TrainingError(
            f"{type(model).__name__}: no block with `experts` and a `gate` or `router` was found; this class is not supported"
        )
    return found


@torch.no_grad()
def _try_router(block: MoeBlock, what: str) -> None:
    """Raises TrainingError unless a router does with its product given what it does with its weights."""
    refused = f"{what}: its router {type(block.router).__name__} makes something else of its product than of its weights; this class is not supported"
    weight = block.weight
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        product = functional.linear(x, weight)
        mine, theirs = block.route(product), block.router(x)
    except (RuntimeError, TypeError, ValueError, AttributeError) as exc:
        raise TrainingError(f"{refused} ({type(exc).__name__}: {exc})") from exc
    pairs = list(zip(_tensors(mine), _tensors(theirs), strict=False))
    if not pairs or any(a.shape != b.shape or not torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in pairs):
        raise TrainingError(refused)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Tensor)]


# Routing --------------------------------------------------------------------------------------------------------------


class _Routing:
    """Stands between routers and experts of a model, and says what the routers give where something is predicted.

    Modes: "gate" leaves everything as it is; "text" routes all positions of texts; "step" the next token of each text.
    """

    def __init__(self, blocks: Mapping[int, MoeBlock], heads: Mapping[int, Head]) -> None:
        self.blocks, self.heads = blocks, heads
        self.mode = "gate"
        self.shape = (0, 0)  # texts and positions of the input
        self.first_step = torch.zeros(0, dtype=torch.long)
        self.executed: dict[int, Tensor] = {}
        """[texts, positions, K] of each layer, of the last run."""
        # By consumer: z [texts, positions, E], and whether it is there [texts, positions].
        self._predicted: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        self._before: dict[int, Tensor] = {}
        for layer, block in blocks.items():
            if layer - 1 in heads:
                block.router.forward = self._router(block, block.router.forward)
            block.experts.register_forward_pre_hook(self._experts(block), with_kwargs=True)

    def begin(self, mode: str, shape: tuple[int, int], first_step: Tensor | None = None) -> None:
        self.mode, self.shape = mode, shape
        self.executed = {}
        if mode != "step":
            self._predicted, self._next, self._before = {}, {}, {}
        if first_step is not None:
            self.first_step = first_step

    def end(self) -> None:
        """After a step: what was predicted in it is for the next one."""
        if self.mode == "step":
            self._predicted, self._next = self._next, {}
            self._before = self.executed

    def _router(self, block: MoeBlock, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.mode == "gate" or block.layer not in self._predicted:
                return own(states, *args, **kwargs)
            z, there = (part.flatten(0, 1) for part in self._predicted[block.layer])
            product = functional.linear(states.reshape(-1, states.shape[-1]).to(block.weight.dtype), block.weight)
            return block.route(torch.where(there[:, None], z.to(product.dtype), product))

        return forward

    def _experts(self, block: MoeBlock) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            states = [one for one in given if one.is_floating_point() and one.shape[-1] == block.weight.shape[1]]
            chosen = [one for one in given if not one.is_floating_point() and one.dtype != torch.bool]
            n = self.shape[0] * self.shape[1]
            if (
                not states
                or len(chosen) != 1
                or chosen[0].ndim != 2
                or len(chosen[0]) != n
                or states[0].numel() != n * block.weight.shape[1]
            ):
                raise TrainingError(
                    f"{type(module).__name__} at {block.name}.experts: is not called with states, experts and weights; this class is not supported"
                )
            h, executed = states[0].reshape(*self.shape, -1), chosen[0].detach().reshape(*self.shape, -1)
            self.executed[block.layer] = executed
            if self.mode != "gate" and block.layer in self.heads:
                self._predict(block.layer, h, executed)

        return look

    def _predict(self, owner: int, h: Tensor, executed: Tensor) -> None:
        head = self.heads[owner]
        if self.mode == "step":
            before = self._before.get(owner)
            known = torch.full(self.shape, before is not None)
            x = features(h, executed, executed if before is None else before, known, head.n_experts)
            self._next[owner + 1] = head(x), torch.ones(self.shape, dtype=torch.bool)
            return
        position = torch.arange(self.shape[1])[None, :]
        before = torch.cat([executed[:, :1], executed[:, :-1]], dim=1)
        z = head(features(h, executed, before, position > self.first_step[:, None], head.n_experts))
        shifted = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1)
        self._predicted[owner + 1] = shifted, position > self.first_step[:, None]


# The model ------------------------------------------------------------------------------------------------------------


class Model:
    """A causal language model whose routing follows heads; without heads (a teacher) it is the model as it is.

    Attributes:
        hf: The transformers model, all its parameters frozen.
        names: Of its GGUF: name of each parameter's tensor, by the parameter's name; empty without a GGUF.
        loras: By the name of the GGUF's tensor.
    """

    def __init__(
        self, hf: nn.Module, heads: Mapping[int, HeadArrays] | None = None, *, experts_used: int | None = None
    ) -> None:
        self.hf = hf.eval()
        for parameter in hf.parameters():
            parameter.requires_grad_(False)
        self.blocks = find_moe(hf)
        if experts_used is not None:
            _use_experts(self.blocks, experts_used)
        for owner, head in (heads or {}).items():
            for layer in (owner, owner + 1):
                if layer not in self.blocks:
                    raise TrainingError(
                        f"the head of layer {owner} needs experts in layer {layer}, which {type(hf).__name__} has not there; take heads of this model"
                    )
                if self.blocks[layer].weight.shape != (head.n_experts, head.d):
                    raise TrainingError(
                        f"the head of layer {owner} is for {head.n_experts} experts and {head.d} columns, and the router of layer {layer} of "
                        f"{type(hf).__name__} is {tuple(self.blocks[layer].weight.shape)}; take heads of this model"
                    )
        self.heads = {owner: Head.of(head).requires_grad_(False) for owner, head in (heads or {}).items()}
        self.routing = _Routing(self.blocks, self.heads)
        self.names: dict[str, str] = {}
        self.loras: dict[str, LoraLinear] = {}
        # transformers 5.24 and later call it by a new name.
        self._cache_option = "cache" if "cache" in inspect.signature(hf.forward).parameters else "past_key_values"

    def text(self, tokens: Tensor, first_step: Tensor) -> Tensor:
        """Logits [texts, T, vocabulary] of tokens [texts, T] int64, of which those up to `first_step` [texts] go by the gate."""
        return self._run("text", tokens, None, first_step)

    @torch.no_grad()
    def prompt(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Logits of the last token [texts, vocabulary] of prompts [texts, P], by the gate, and the cache to go on from."""
        from transformers import DynamicCache

        cache = DynamicCache()
        return self._run("gate", tokens, cache)[:, -1], cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits [texts, vocabulary] of the next token [texts] of each; the first after `prompt` goes by the gate."""
        logits = self._run("step", tokens[:, None], cache)[:, -1]
        self.routing.end()
        return logits

    def _run(self, mode: str, tokens: Tensor, cache: Any, first_step: Tensor | None = None) -> Tensor:
        self.routing.begin(mode, tuple(tokens.shape), first_step)
        cached = {} if cache is None else {self._cache_option: cache}
        return self.hf(input_ids=tokens, use_cache=cache is not None, **cached).logits.float()

    def parameters(self) -> list[nn.Parameter]:
        """What is trained: A and B of each LoRA, by the names of the tensors, then heads that are not frozen, by owner."""
        of_loras = [parameter for _, lora in sorted(self.loras.items()) for parameter in (lora.a, lora.b)]
        of_heads = [parameter for _, head in sorted(self.heads.items()) for parameter in head.parameters()]
        return of_loras + [parameter for parameter in of_heads if parameter.requires_grad]


def load_model(
    folder: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    heads: Mapping[int, HeadArrays] | None = None,
    experts_used: int | None = None,
) -> Model:
    """The model in a Hugging Face folder, in float32.

    Args:
        weights: A GGUF of the same model, whose weights are taken as they are there, dequantised: what a student computes with,
            so that its LoRA learns to make up for the quantisation too.
        heads: By owner; none for a teacher.
        experts_used: K in place of the model's own, everywhere.

    Raises:
        TrainingError: The folder holds no model that is supported, or the GGUF is not of this model.
        ModelError: The GGUF cannot be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (Path(folder) / "config.json").is_file():
        raise TrainingError(f"{folder}: has no config.json; give a folder of Hugging Face weights")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        hf = AutoModelForCausalLM.from_pretrained(os.fspath(folder), dtype=torch.float32, local_files_only=True)
    except Exception as exc:  # of many kinds, those of safetensors among them
        raise TrainingError(f"{folder}: transformers cannot load it: {exc}") from exc
    finally:
        if bars:
            logging.enable_progress_bar()
    model = Model(hf, heads, experts_used=experts_used)
    if weights is not None:
        take_weights(model, GgufWeights(weights))
    return model


def _use_experts(blocks: Mapping[int, MoeBlock], experts_used: int) -> None:
    for block in blocks.values():
        if not isinstance(getattr(block.router, "top_k", None), int):
            raise TrainingError(
                f"{type(block.router).__name__}: has no `top_k`, so its number of experts cannot be changed; leave experts_used out"
            )
        if not 1 <= experts_used <= len(block.weight):
            raise OptionError(f"experts_used={experts_used}: layer {block.layer} has {len(block.weight)} experts")
        block.router.top_k = experts_used


# Weights of the GGUF --------------------------------------------------------------------------------------------------


def take_weights(model: Model, weights: GgufWeights) -> None:
    """Puts the values of a GGUF's tensors into a model's parameters.

    A tensor must be near what it replaces, so that one that is stored otherwise (rows in another order, a norm less one) is found.

    Raises:
        TrainingError: A parameter has no tensor, or one that is something else.
    """
    named = tensor_names(weights)
    made_of = {name: named(name) for name, _ in model.hf.named_parameters()}
    if missing := [name for name, tensors in made_of.items() if not tensors]:
        raise TrainingError(
            f"{weights.path}: has no tensor for the weight {missing[0]}; give a GGUF of this very model"
        )
    for name, parameter in model.hf.named_parameters():
        tensors = made_of[name]
        value = torch.from_numpy(
            np.concatenate([weights[one] for one in tensors], axis=1) if len(tensors) > 1 else weights[tensors[0]]
        )
        what = f"{weights.path}: {' and '.join(tensors)}"
        if value.numel() == parameter.numel() and value.ndim != parameter.ndim:
            value = value.reshape(parameter.shape)
        if value.shape != parameter.shape:
            raise TrainingError(
                f"{what}: is {tuple(value.shape)}, and the weight {name} {tuple(parameter.shape)}; give a GGUF of this very model"
            )
        norm = float(parameter.data.float().norm())
        if float((value - parameter.data).norm()) > _FAR * norm + 1e-6:
            raise TrainingError(
                f"{what}: is not what the weight {name} is quantised; give a GGUF of this very model (or this architecture stores it otherwise, "
                "which is not supported)"
            )
        parameter.data.copy_(value)
        model.names[name] = tensors[0]


def tensor_names(weights: GgufWeights) -> Callable[[str], list[str]]:
    """Gives the tensors of the GGUF that a parameter is made of: one, or two side by side; none if it has no name there."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(architectures[weights.model.architecture], weights.model.number("block_count"))
    stacked = {
        "gate_up_proj": (("ffn_gate_up_exps",), ("ffn_gate_exps", "ffn_up_exps")),
        "down_proj": (("ffn_down_exps",),),
    }

    def named(name: str) -> list[str]:
        found = re.search(r"layers\.(\d+)\..*\.experts\.(\w+)$", name)
        if found and found[2] in stacked:
            for tensors in stacked[found[2]]:
                names = [f"blk.{found[1]}.{one}.weight" for one in tensors]
                if all(one in weights.model.tensors for one in names):
                    return names
            return []
        stem, _, suffix = name.rpartition(".")
        tensor = known.get_name(stem)
        full = f"{tensor}.{suffix}"
        return [full] if tensor is not None and full in weights else []

    return named


# LoRA -----------------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """y = W x + (alpha / r) B A x (Hu and others, LoRA, 2021): W frozen, A [r, in] drawn, B [out, r] zero at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.rank, self.alpha = base, rank, alpha
        bound = 1 / math.sqrt(base.in_features)  # what nn.Linear draws its weights from
        self.a = nn.Parameter((torch.rand(rank, base.in_features, generator=generator) * 2 - 1) * bound)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.alpha / self.rank) * ((x @ self.a.T) @ self.b.T)


def add_lora(model: Model, *, rank: int = 16, alpha: float = 32.0, seed: int = 1) -> list[str]:
    """Puts a LoRA beside each projection of attention, and returns the names of their tensors.

    What is attention is told by the GGUF's names (`blk.N.attn_*`), so `model` is one with `weights`. Never on experts or routers.

    Raises:
        TrainingError: There is no such projection.
        OptionError: Rank or alpha make no sense.
    """
    if rank < 1 or not alpha > 0:
        raise OptionError(f"rank={rank}, alpha={alpha}: give a rank of at least 1 and an alpha above 0")
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[str, tuple[nn.Module, str, nn.Linear]] = {}
    for name, module in model.hf.named_modules():
        tensor = model.names.get(f"{name}.weight", "")
        if type(module) is nn.Linear and _ATTENTION.fullmatch(tensor):
            parent, _, child = name.rpartition(".")
            chosen[tensor] = (model.hf.get_submodule(parent), child, module)
    if not chosen:
        raise TrainingError(
            f"{type(model.hf).__name__}: no projection of attention has a tensor blk.N.attn_*.weight; load the model with its GGUF"
        )
    for tensor, (parent, child, linear) in sorted(chosen.items()):
        model.loras[tensor] = LoraLinear(linear, rank, alpha, generator)
        setattr(parent, child, model.loras[tensor])
    return sorted(model.loras)


def lora_of(model: Model) -> Lora:
    """The LoRA for a sidecar, in F16."""
    any_of = next(iter(model.loras.values()))

    def matrix(parameter: nn.Parameter) -> Matrix:
        return Matrix.of(parameter.detach().numpy(), LORA_TYPES["F16"])

    pairs = {name: LoraPair(matrix(lora.a), matrix(lora.b)) for name, lora in sorted(model.loras.items())}
    return Lora(alpha=any_of.alpha, pairs=pairs)


def load_lora(model: Model, lora: Lora) -> None:
    """Puts a sidecar's LoRA into a model that has none yet, to train it on.

    Raises:
        TrainingError: It is on other tensors than the projections of attention.
    """
    names = add_lora(model, rank=lora.rank, alpha=lora.alpha)
    if differing := sorted(set(names) ^ set(lora.pairs)):
        raise TrainingError(
            f"the sidecar's LoRA and the model's attention differ in {differing[0]}: it cannot be trained on; begin with `moestream train sft`"
        )
    for name, pair in lora.pairs.items():
        one = model.loras[name]
        for parameter, matrix in ((one.a, pair.a), (one.b, pair.b)):
            values = torch.from_numpy(matrix.values())
            if values.shape != parameter.shape:
                raise TrainingError(
                    f"the sidecar's LoRA of {name} is {tuple(values.shape)}, not {tuple(parameter.shape)}; begin with `moestream train sft`"
                )
            parameter.data.copy_(values)


# Writing and measuring ------------------------------------------------------------------------------------------------


def write_text(
    model: Model, prompts: Tensor, n: int, *, temperature: float, top_p: float, seed: Sequence[int]
) -> Tensor:
    """Prompts [texts, P] and n tokens more of each, drawn; [texts, P + n]. A text goes on behind an end-of-text token.

    Args:
        temperature: 0 takes the likeliest token.
        top_p: Only the likeliest tokens that have this share together are drawn from.
        seed: Of the generator; equal seeds write equal texts.
    """
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0] >> 1)
    )
    logits, cache = model.prompt(prompts)
    written = [prompts]
    for i in range(n):
        token = _drawn(logits, temperature, top_p, generator)
        written.append(token[:, None])
        if i + 1 < n:
            logits = model.step(token, cache)
    return torch.cat(written, dim=1)


def _drawn(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    shares, order = (logits / temperature).softmax(-1).sort(dim=-1, descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares > top_p, 0.0)
    return order.gather(1, torch.multinomial(shares, 1, generator=generator))[:, 0]


@dataclass(frozen=True)
class Measured:
    """What a student makes of texts, against its teacher."""

    tokens: int
    perplexity: float
    teacher_perplexity: float
    kl: float
    """Mean KL(teacher || student) of the next token, in nats."""


@torch.no_grad()
def measure(teacher: Model, student: Model, windows: npt.NDArray[np.integer], *, gate: bool = False) -> Measured:
    """Perplexity and divergence on windows [count, T] of text, decoded from their second token on.

    Args:
        gate: Route the student by its gates, as if it had no heads.
    """
    nats = teacher_nats = kl = 0.0
    batch = max(1, _LOGITS_AT_ONCE // (windows.shape[1] * teacher.hf.config.vocab_size))
    for begin in range(0, len(windows), batch):
        tokens = torch.from_numpy(np.asarray(windows[begin : begin + batch], np.int64))
        first = torch.zeros(len(tokens), dtype=torch.long) + (tokens.shape[1] if gate else 0)
        log_q = student.text(tokens[:, :-1], first).log_softmax(-1)
        log_p = teacher.text(tokens[:, :-1], first).log_softmax(-1)
        came = tokens[:, 1:, None]
        nats -= float(log_q.gather(2, came).double().sum())
        teacher_nats -= float(log_p.gather(2, came).double().sum())
        kl += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    count = windows.shape[0] * (windows.shape[1] - 1)
    return Measured(count, math.exp(nats / count), math.exp(teacher_nats / count), kl / count)


@contextlib.contextmanager
def without_lora(model: Model) -> Iterator[None]:
    """The model without what its LoRA adds."""
    kept = {name: lora.alpha for name, lora in model.loras.items()}
    try:
        for lora in model.loras.values():
            lora.alpha = 0.0
        yield
    finally:
        for name, lora in model.loras.items():
            lora.alpha = kept[name]
