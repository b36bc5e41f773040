"""The model card: what was measured, as a page for people."""

from __future__ import annotations

import math
import re
from typing import Any

from moestream.sidecar import Sidecar

TITLE = {"smallthinker": "Model A, `demo-smallthinker.gguf`", "qwen3moe": "Model B, `demo-qwen3moe.gguf`"}
WHAT = {
    "smallthinker": "Architecture `smallthinker`: the router reads the residual that enters a layer, before attention, so which experts "
    "come next is known while attention computes. Sigmoid scores, ReGLU experts.",
    "qwen3moe": "Architecture `qwen3moe`: the router reads the normed residual after attention. Softmax scores, SwiGLU experts.",
}


def render(manifest: dict, baselines: dict[str, float], facts: dict[str, dict[str, Any]]) -> str:
    """The card in Markdown. `facts` by model, as `release.measure` makes them."""
    parts = [_head(manifest, baselines, facts)]
    parts += [_model(kind, facts[kind], baselines) for kind in TITLE if kind in facts]
    parts += [_corpus(manifest)]
    return "\n".join(parts)


def _head(manifest: dict, baselines: dict[str, float], facts: dict[str, dict[str, Any]]) -> str:
    one = next(iter(facts.values()))
    c = one["config"]
    return f"""# The demo models

Two small Mixture-of-Experts models with real weights, to see expert streaming at work without a download. They write English of
the kinds they were trained on, and know nothing: do not ask them questions. Made by `tools/train_demo_model`, which makes them again.

| | |
|---|---|
| shape | {c["n_layers"]} layers, d {c["d_model"]}, {c["n_heads"]} heads of {c["head_dim"]} ({c["n_kv_heads"]} for keys and values), {c["n_experts"]} experts a layer of width {c["d_expert"]}, {c["top_k"]} used |
| weights | {one["parameters"] / 1e6:.1f} million, {one["active_parameters"] / 1e6:.1f} million used for a token; output and embedding are one matrix |
| context | {c["context"]} tokens |
| tokenizer | byte-level BPE of {c["vocab_size"]} tokens, cut into words as Qwen2's is |
| text | {manifest["train"]["text_bytes"] / 1e6:.0f} MB to train on, {manifest["validation"]["text_bytes"] / 1e6:.1f} MB to validate on; split by document |
| counting | perplexity on the validation text of unigram counts: {math.exp(baselines["unigram"]):.0f}; of bigram counts: {math.exp(baselines["bigram"]):.0f} |

![Losses](loss.png)
"""


def _model(kind: str, f: dict[str, Any], baselines: dict[str, float]) -> str:
    routing = f["routing"]
    least = [min(layer["load"]) for layer in routing["layers"]]
    rows = "\n".join(
        f"| {layer['layer']} | {min(layer['load']):.2f} to {max(layer['load']):.2f} | {layer['entropy']:.3f} | {zeros:.0%} "
        f"| {layer['reused_last']:.0%} ({layer['chance_last']:.0%}) | {layer['reused_window']:.0%} ({layer['chance_window']:.0%}) |"
        for layer, zeros in zip(routing["layers"], f["zeros"], strict=True)
    )
    lru = [point for point in routing["lru"] if point["holds_a_token"]]
    samples = "\n".join(f"> **{prompt}**{_quoted(text)}\n" for prompt, text in f["samples"][:3])
    f16 = f["agreement"]["F16"]
    return f"""
## {TITLE[kind]}

{WHAT[kind]} Trained on {f["tokens"] / 1e6:.1f} million tokens in {f["seconds"] / 60:.0f} minutes on two cores.

| perplexity on the validation text | |
|---|---|
| F16 | {f["perplexity"]["F16"]:.2f} |
| Q4_0, as it ships | {f["perplexity"]["Q4_0"]:.2f} ({f["perplexity"]["Q4_0"] / f["perplexity"]["F16"] - 1:+.1%}) |
| bigram counts | {math.exp(baselines["bigram"]):.0f} |

Logits of stock llama.cpp against PyTorch, {f16["positions"]} positions: with the weights in F32 at most
{f["agreement"]["F32"]["max_difference"]:.1g} apart; in F16, {f16["max_difference_alike"]:.1g} where both took the same experts up to there (at
{f16["alike"]} positions), the same likeliest token at {f16["top1_agreement"]:.1%}.

| layer | load, in fair shares | entropy | zeros in experts | reused from the token before (chance) | from the last 8 |
|---|---|---|---|---|---|
{rows}

The least used expert of all layers gets {min(least):.2f} of its fair share. Hits of an LRU cache that holds so much of all experts:
{", ".join(f"{point['share']:.0%}: {point['hit_rate']:.0%}" for point in lru)}.

Three samples of ten, the first three, none chosen (temperature 0.7, top-p 0.95, repeat penalty 1.1, seeds 1, 2, 3):

{samples}"""


def _quoted(text: str) -> str:
    return text.rstrip().replace("\n", "\n> ")


_SIDECAR_TITLE = "## Sidecar of model B, `demo-qwen3moe.sidecar.gguf`"
_WAYS = {
    "gates": "gates",
    "untrained": "heads untrained",
    "heads": "heads",
    "sft": "and LoRA, phase 2",
    "distill": "phase 3",
}


def with_sidecar(card: str, sidecar: Sidecar) -> str:
    """The card with what a sidecar's record says, in place of the section that it had about one."""
    before = re.sub(rf"\n{re.escape(_SIDECAR_TITLE)}\n.*?(?=\n## )", "", card, flags=re.DOTALL)
    head, corpus, rest = before.partition("\n## Text and licences")
    return f"{head}{_sidecar(sidecar)}{corpus}{rest}"


def _sidecar(sidecar: Sidecar) -> str:
    record, heads, lora = sidecar.quality["record"], sidecar.heads, sidecar.lora
    routing = "\n".join(
        f"| {row['experts_used']} | {_range(row['owners'])} | "
        + " | ".join(f"{row[way]['perplexity']:.1f} ({row[way]['kl']:.3f})" if way in row else "" for way in _WAYS)
        + " |"
        for row in record["routing"]
    )
    own = str(record["experts_used"])
    fewer = next(used for used in record["predictions"] if used != own)
    layers = "\n".join(
        f"| {int(owner) + 1} | "
        + " | ".join(
            _shares(record["predictions"][used][owner], name)
            for used in (own, fewer)
            for name in ("head", "lookahead", "repeat")
        )
        + " |"
        for owner in record["predictions"][own]
    )
    return f"""
{_SIDECAR_TITLE}

Heads that say the routing of layers {_range([owner + 1 for owner in heads.owners])} a token ahead ({heads.size_bytes / 1e6:.1f} MB), and a LoRA of rank {lora.rank} on attention that wins back
a part of what routing by them costs ({lora.size_bytes / 1e6:.1f} MB). `demo-qwen3moe.heads.gguf` has the heads as they were before that, which predict
better and are what `prerouter="advise"` is for. Trained on the same text as the model, whose licences the table below has, by
`tools/train_demo_heads`; docs/training.md says how, and what it is worth. Provenance and figures are in the files too.

Perplexity (divergence from F16, whose perplexity is {record["teacher_perplexity"]:.1f}), {record["tokens"]} tokens of validation text, by what routes:

| experts a token | heads of layers | {" | ".join(_WAYS.values())} |
|---|---|{"---|" * len(_WAYS)}
{routing}

Of the experts that a layer takes, those predicted by the heads of phase 1 and others, and in brackets the share of tokens for which
all were:

| layer | head, {own} of 32 | lookahead | repeat | head, {fewer} of 32 | lookahead | repeat |
|---|---|---|---|---|---|---|
{layers}

![Losses of the three phases](sidecar.png)

"""


def _range(layers: list[int]) -> str:
    return f"{layers[0]} to {layers[-1]}"


def _shares(found: dict[str, list[float]], name: str) -> str:
    return f"{found[name][0]:.0%} ({found[name][1]:.1%})" if name in found else ""


def _corpus(manifest: dict) -> str:
    total = sum(manifest["kinds"].values())
    kinds = ", ".join(
        f"{kind} {size / total:.0%}" for kind, size in sorted(manifest["kinds"].items(), key=lambda x: -x[1])
    )
    rows = "\n".join(
        f"| {source['name']} | {source['kind']} | {source['text_bytes'] / 1e6:.2f} MB | {source['weight']} | {source['licence']} "
        f"| {_packages(source)} |"
        for source in manifest["sources"]
    )
    return f"""
## Text and licences

All text is out of Debian's main archive. By kind: {kinds}. `times`: how often an epoch has it. The models are statistics of these
texts; each text is under the licence of its package.

| source | kind | text | times | licence | package |
|---|---|---|---|---|---|
{rows}
"""


def _packages(source: dict) -> str:
    packages = source["packages"]
    first = f"{packages[0]['name']} {packages[0]['version']}"
    return first if len(packages) == 1 else f"{first} and {len(packages) - 1} more of its kind"
