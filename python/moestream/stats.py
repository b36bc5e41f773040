"""What streaming did: counters of one model."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["ExpertStats", "Predictions"]

_COUNTERS = ("tokens", "hits", "misses", "reads", "bytes_read", "read_s", "wait_s", "compute_s", "attention_s", "router_s", "other_s", "convert_s", "fused_blocks", "ggml_blocks", "guessed", "useful", "late", "wasted", "guessed_bytes", "wasted_bytes", "replaced", "predict_s", "dropped", "heads_s", "heads_bytes")


@dataclass(frozen=True)
class Predictions:
    """How good predictions of one kind were.

    Attributes:
        name: ``"router"``, how far ahead a lookahead was made, or ``"heads"`` for heads that advise.
        layers: Predicted, one count a layer and token.
        recall: Share of the experts chosen that were among as many predicted.
        exact: Share of the layers whose experts were all predicted.
        absent: Of the experts predicted that were not in memory, the share that was chosen, by rank (the surest first;
            the 16th stands for all above): what reading them is worth.
    """

    name: str
    layers: int
    recall: float
    exact: float
    absent: tuple[float, ...]


@dataclass(frozen=True)
class ExpertStats:
    """Counters since the model was loaded, and the state of its expert cache.

    Times are in seconds, sizes in bytes.
    """

    tokens: int
    """Tokens that passed the experts of the first MoE layer."""
    hits: int
    """Experts found in memory, counted once per layer and batch."""
    misses: int
    """Experts that had to be read, ahead or when they were wanted."""
    guessed: int
    """Experts asked for before they were wanted."""
    useful: int
    """Of these: there when they were wanted."""
    late: int
    """Of these: still on their way when they were wanted."""
    wasted: int
    """Of these: given up before anybody wanted them."""
    guessed_bytes: int
    wasted_bytes: int
    predict_s: float
    """Spent on predicting."""
    predictions: tuple[Predictions, ...]
    """How good they were, since the model was loaded."""
    replaced: int
    """Choices that ``cache_aware`` changed."""
    dropped: int
    """Experts that should have run where heads route, and did not: always 0."""
    heads_s: float
    """Computing heads, a token before their layers are routed by them or advised."""
    heads_bytes: int
    """Of their weights, read from memory for that."""
    head_layers: int
    """Layers that heads speak of: whose experts they choose, or, where they advise, say ahead; 0 without heads."""
    prerouter: str
    """As asked for: what heads are for."""
    reads: int
    """Asked of the disk: one an expert in a laid file, three in most stock ones; 0 with ``reader="mmap"``."""
    bytes_read: int
    """Read from the disk for experts, padding included."""
    read_s: float
    """With at least one read in flight."""
    wait_s: float
    """Computation blocked on experts."""
    compute_s: float
    """Expert kernels."""
    attention_s: float
    """From the experts of one layer to the router of the next: attention, norms, what is dense."""
    router_s: float
    """Choosing experts. 0 where a model's router does not come right before its experts; it then is part of ``attention_s``."""
    other_s: float
    """The rest of decoding: what comes before the first router and after the last experts, and llama.cpp's preparations."""
    convert_s: float
    """CPU time spent on what arrived: interleaving, moving, checking."""
    fused_blocks: int
    """Layers whose experts were computed as one operation, counted once per layer and batch."""
    ggml_blocks: int
    """Layers computed node by node."""
    zeros: tuple[float, ...]
    """Share of zeros behind the activation, a layer each, since the model was loaded; empty where the activation gives none."""
    slots_used: int
    slots_total: int
    slot_bytes: int
    """Of the largest slot."""
    cache_bytes: int
    """Of all slots: what the cache may grow to."""
    dense_bytes: int
    """Of the weights that stay in memory, as they are in the file."""
    expert_bytes: int
    """Of all experts in the file."""
    resident_bytes: int
    """Dense weights, the slots used, and heads."""
    bytes_on_disk: int
    reader: str
    direct: bool
    prefetch: str
    """As asked for; the notes say what came of ``"auto"``."""
    kernels: str
    """``"plain"``, ``"interleaved"``, or ``"mixed"`` where ggml interleaves only some of the matrices."""
    policy: str
    """Which expert the cache gives up first; empty with ``reader="mmap"``, where the kernel chooses."""
    notes: tuple[str, ...]
    """What was chosen and why, in sentences."""

    @property
    def hit_rate(self) -> float:
        """Share of experts found in memory; 0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second while reading; 0 before the first read."""
        return self.bytes_read / self.read_s if self.read_s else 0.0

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """These stats with the counters of ``earlier`` subtracted."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS})

    def as_dict(self) -> dict[str, object]:
        """Everything, derived figures included, ready for JSON."""
        values: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"hit_rate": self.hit_rate, "read_bandwidth": self.read_bandwidth, "zeros": list(self.zeros), "predictions": [vars(p) for p in self.predictions], "notes": list(self.notes)}
