"""What changes which experts are chosen: those in memory within a margin, and the rows of a table. Scores made by hand."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from moestream._capture import _ffi as tensor_ffi
from moestream._native import LIBRARY
from native import called, failure, ffi, lib

F32, I32 = 0, 26
EXPERTS = 8

ggml_ffi = FFI()
ggml_ffi.cdef(
    """
    struct ggml_init_params { size_t mem_size; void *mem_buffer; bool no_alloc; };
    void *ggml_init(struct ggml_init_params params);
    void ggml_free(void *context);
    void *ggml_new_tensor_2d(void *context, int type, int64_t ne0, int64_t ne1);
    void *ggml_get_data(const void *tensor);
    void *ggml_mul_mat(void *context, void *a, void *b);
    void *ggml_soft_max(void *context, void *a);
    void *ggml_sigmoid(void *context, void *a);
    void *ggml_add(void *context, void *a, void *b);
    void *ggml_argsort_top_k(void *context, void *a, int k);
    void *ggml_top_k(void *context, void *a, int k);
    """
)
ggml: Any = ggml_ffi.dlopen(str(LIBRARY))


@pytest.fixture
def context() -> Iterator[Any]:
    found = ggml.ggml_init(ggml_ffi.new("struct ggml_init_params *", {"mem_size": 1 << 20})[0])
    yield found
    ggml.ggml_free(found)


def tensor(context: Any, values: np.ndarray) -> Any:
    """A tensor of two dimensions, as ggml counts them the other way round."""
    kind = F32 if values.dtype == np.float32 else I32
    made = ggml.ggml_new_tensor_2d(context, kind, values.shape[1], values.shape[0])
    array(made, values.shape, values.dtype)[:] = values
    return made


def array(tensor: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(ggml_ffi.buffer(ggml.ggml_get_data(tensor), size), dtype).reshape(shape)


def native_tensor(tensor: Any) -> Any:
    return ffi.cast("struct ggml_tensor *", int(ggml_ffi.cast("uintptr_t", tensor)))


LOGITS, SHARES, SIGMOIDS = lib.MS_SCORES_LOGITS, lib.MS_SCORES_SHARES, lib.MS_SCORES_SIGMOIDS
KINDS = {LOGITS: "logits", SHARES: "shares", SIGMOIDS: "sigmoids"}


class Routing:
    """A `struct ms_routing` of two layers, and a store that holds what it is told to."""

    def __init__(self, context: Any, margin: float = 0.0, layers: int = 2) -> None:
        self.struct = lib.ms_routing_new(layers, margin)
        self._context = context
        self.held: set[int] = set()
        self._store = ffi.new("struct ms_store *")
        self._holds = ffi.callback("void(struct ms_store *, int, int, bool *)", self._tell_held)
        self._store.holds = self._holds

    def _tell_held(self, store: Any, layer: int, n_experts: int, held: Any) -> None:
        for expert in range(n_experts):
            held[expert] = expert in self.held

    def edit(
        self,
        scores: Sequence[Sequence[float]],
        order: Sequence[Sequence[int]],
        n: int,
        *,
        layer: int = 0,
        by: int = SHARES,
    ) -> list[list[int]]:
        """The rows of `order` afterwards."""
        given = tensor(self._context, np.array(scores, np.float32))
        ordered = tensor(self._context, np.array(order, np.int32))
        lib.ms_routing_edit(self.struct, self._store, layer, native_tensor(given), by, native_tensor(ordered), n)
        return array(ordered, np.shape(order), np.int32).tolist()

    @property
    def replaced(self) -> int:
        return lib.ms_routing_replaced(self.struct)


@pytest.fixture
def routing(context: Any) -> Iterator[Any]:
    made: list[Routing] = []

    def new(margin: float = 0.0, layers: int = 2) -> Routing:
        made.append(Routing(context, margin, layers))
        return made[-1]

    yield new
    for each in made:
        lib.ms_routing_free(each.struct)


def sorted_order(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: -scores[e])


# The cache-aware rule


def test_without_a_margin_nothing_changes(routing: Any) -> None:
    edits = routing(0.0)
    edits.held = {1}
    assert not lib.ms_routing_edits(edits.struct)
    assert edits.edit([[0.5, 0.5]], [[0, 1]], 1) == [[0, 1]]


SCORES = [0.40, 0.30, 0.110, 0.100, 0.090, 0.087, 0.0, 0.0]
"""With three chosen and a margin of 0.2 the last chosen has 0.11, so that what has from 0.088 to 0.1375 may be exchanged."""


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        (set(), [0, 1, 2]),
        ({2}, [0, 1, 2]),  # it was chosen
        ({3}, [0, 1, 3]),
        ({4}, [0, 1, 4]),
        ({3, 4}, [0, 1, 3]),  # the better of them
        ({2, 3}, [0, 1, 2]),
        ({5, 6, 7}, [0, 1, 2]),  # worse than the margin
        ({0, 1}, [0, 1, 2]),
    ],
)
def test_an_expert_in_memory_within_the_margin_takes_the_last_place_and_sure_ones_stay(
    held: set[int], chosen: list[int], routing: Any
) -> None:
    edits = routing(0.2)
    edits.held = held
    rest = [3, 4, 5, 6, 7]
    assert edits.edit([SCORES], [[0, 1, 2, *rest]], 3) == [[*chosen, *rest]]
    assert edits.replaced == (chosen != [0, 1, 2])


def test_all_that_are_about_as_good_as_the_last_may_be_exchanged(routing: Any) -> None:
    edits = routing(0.2)
    edits.held = {2, 3}
    scores = [0.11, 0.10, 0.09, 0.085, 0.0, 0.0, 0.0, 0.0]
    assert edits.edit([scores], [sorted_order(scores)], 2)[0][:2] == [2, 3]
    assert edits.replaced == 2
    edits.held = {2}
    assert edits.edit([scores], [sorted_order(scores)], 2)[0][:2] == [0, 2], (
        "the better one stays, in the order of scores"
    )
    assert edits.replaced == 3


def test_a_margin_of_logits_is_one_of_what_they_are_the_logarithms_of(routing: Any) -> None:
    edits = routing(0.2)
    edits.held = {2, 3}
    for third, chosen in ((-3.22, [0, 2]), (-3.23, [0, 1])):  # -3 + log(0.8) is -3.223
        scores = [-1.0, -3.0, third, -9.0]
        assert edits.edit([scores], [[0, 1, 2, 3]], 2, by=LOGITS)[0][:2] == chosen


def test_a_margin_of_sigmoids_is_one_of_their_odds(routing: Any) -> None:
    edits = routing(0.2)
    edits.held = {2, 3}
    for third, chosen in ((0.8783, [0, 2]), (0.8779, [0, 1])):  # 9 x 0.8 to 1 is 0.87805, though 0.9 x 0.8 is less
        scores = [0.99, 0.9, third, 0.5]
        assert edits.edit([scores], [[0, 1, 2, 3]], 2, by=SIGMOIDS)[0][:2] == chosen
        assert edits.edit([scores], [[0, 1, 2, 3]], 2, by=SHARES)[0][:2] == [0, 2]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_the_order_of_the_chosen_need_not_be_that_of_their_scores(order: list[int], routing: Any) -> None:
    """ggml's TOP_K promises none."""
    edits = routing(0.2)
    assert edits.edit([SCORES], [order], 3) == [order], "nothing was there to replace one by, so the bits stay"
    edits.held = {4, 5, 6}
    assert edits.edit([SCORES], [order], 3) == [[0, 1, 4]]
    assert edits.replaced == 1


@pytest.mark.parametrize("held", [set(), {1, 3}, set(range(EXPERTS))])
@pytest.mark.parametrize("scores", [[math.nan] * EXPERTS, [0.5, math.nan, 0.1, math.nan, 0.2, math.nan, 0.0, 0.3]])
def test_scores_that_are_no_numbers_change_nothing(scores: list[float], held: set[int], routing: Any) -> None:
    edits = routing(0.5)
    edits.held = held
    for order in ([1, 3, 5, 0], [3, 0, 1, 5]):
        assert edits.edit([scores], [order], 4) == [order]
    assert edits.replaced == 0


def test_what_groups_ruled_out_is_not_taken(routing: Any) -> None:
    edits = routing(0.9)
    edits.held = {4, 5, 6, 7}
    scores = [0.5, 0.4, 0.3, 0.2, *[-math.inf] * 4]
    for by in (LOGITS, SHARES):
        assert edits.edit([scores], [[0, 1, 2]], 3, by=by) == [[0, 1, 2]]


def test_each_token_of_a_small_batch_is_asked_for_and_prompts_are_not(routing: Any) -> None:
    edits = routing(0.2)
    edits.held = {3}
    others = [0.0, 0.0, 0.0, 0.40, 0.30, 0.110, 0.100, 0.090]
    assert edits.edit([SCORES, others] * 4, [[0, 1, 2], [3, 4, 5]] * 4, 3) == [[0, 1, 3], [3, 4, 5]] * 4
    assert edits.replaced == 4
    assert edits.edit([SCORES] * 9, [[0, 1, 2]] * 9, 3) == [[0, 1, 2]] * 9
    assert edits.edit([SCORES[:3]], [[0, 1, 2]], 3) == [[0, 1, 2]], "all are chosen anyway"


@pytest.mark.parametrize("by", KINDS, ids=KINDS.get)
def test_any_scores_are_treated_by_the_rule(by: int, routing: Any) -> None:
    rng = random.Random(3)
    edits = routing(margin := 0.3)
    replaced = 0
    for _ in range(300):
        n = rng.randint(1, EXPERTS - 1)
        shares = [math.exp(rng.gauss(0, 0.5)) for _ in range(EXPERTS)]
        made = {LOGITS: math.log, SHARES: float, SIGMOIDS: lambda odds: odds / (1 + odds)}[by]
        scores = [made(share) for share in shares]
        before = sorted_order(scores)[:n]
        edits.held = set(rng.sample(range(EXPERTS), rng.randint(0, EXPERTS)))
        rng.shuffle(shuffled := before.copy())
        after = edits.edit([scores], [shuffled], n, by=by)[0]
        last = shares[before[-1]]
        sure = {e for e in before if shares[e] > last / (1 - margin) * 1.0001}
        possible = {e for e in range(EXPERTS) if shares[e] >= last * (1 - margin) * 0.9999}
        assert len(set(after)) == n and sure <= set(after) <= possible
        missed, kept = possible - set(after) - sure, set(after) - sure
        assert not (missed & edits.held and kept - edits.held), "one in memory was left for one that is not"
        if set(after) == set(before):
            assert after == shuffled
        replaced += len(set(after) - set(before))
        assert edits.replaced == replaced
    assert replaced > 100


# Replay


def table(tokens: int, layers: int = 2, choices: int = 3) -> np.ndarray:
    """Of token t in layer l the experts t, t + 1 + l, ..., which tell where they are from."""
    rows = [
        [[(t + i * (1 + layer)) % EXPERTS for i in range(choices)] for layer in range(layers)] for t in range(tokens)
    ]
    return np.array(rows, np.int32)


def replay(edits: Routing, rows: np.ndarray) -> None:
    tokens, layers, choices = rows.shape
    called(lib.ms_routing_replay, edits.struct, ffi.from_buffer("int32_t[]", rows), tokens, layers, choices)


def replayed(edits: Routing, tokens: int, layer: int) -> list[list[int]]:
    return edits.edit([[0.0] * EXPERTS] * tokens, [[7, 6, 5, 4]] * tokens, 3, layer=layer)


def test_a_table_is_followed_token_by_token_over_and_over(routing: Any) -> None:
    edits, rows = routing(), table(3)
    assert not lib.ms_routing_replays(edits.struct) and not lib.ms_routing_edits(edits.struct)
    replay(edits, rows)
    assert lib.ms_routing_replays(edits.struct) and lib.ms_routing_edits(edits.struct)
    for token in range(7):
        for layer in range(2):
            lib.ms_routing_enter(edits.struct, layer == 0, 1)
            assert replayed(edits, 1, layer) == [[*rows[token % 3, layer], 4]], "what is not chosen stays"


def test_batches_go_on_where_the_last_ended_and_around_the_end(routing: Any) -> None:
    edits, rows = routing(), table(5)
    replay(edits, rows)
    done = 0
    for tokens in (4, 3, 12, 1):
        for layer in range(2):
            lib.ms_routing_enter(edits.struct, layer == 0, tokens)
            expected = [[*rows[(done + t) % 5, layer], 4] for t in range(tokens)]
            assert replayed(edits, tokens, layer) == expected
        done += tokens


def test_the_last_layer_of_a_prompt_computes_its_last_tokens(routing: Any) -> None:
    edits, rows = routing(), table(11)
    replay(edits, rows)
    lib.ms_routing_enter(edits.struct, True, 6)
    replayed(edits, 6, 0)
    lib.ms_routing_enter(edits.struct, False, 1)
    assert replayed(edits, 1, 1) == [[*rows[5, 1], 4]]
    lib.ms_routing_enter(edits.struct, True, 1)
    assert replayed(edits, 1, 0) == [[*rows[6, 0], 4]]


def test_rows_of_tokens_to_come_can_be_had(routing: Any) -> None:
    edits, rows = routing(), table(4)
    replay(edits, rows)
    lib.ms_routing_enter(edits.struct, True, 3)
    n = ffi.new("int *")
    for ahead in range(9):
        row = lib.ms_routing_row(edits.struct, 1, ahead, n)
        assert list(row[0 : n[0]]) == rows[ahead % 4, 1].tolist()


def test_a_table_of_other_layers_is_refused(routing: Any) -> None:
    edits = routing(layers=3)
    code, message = failure(replay, edits, table(2))
    assert code == -errno.EINVAL
    assert (
        message == "a routing of 2 layers cannot be replayed by a model with experts in 3; synthesise one of its shape"
    )


# Whose order it is


@pytest.mark.parametrize("order", ["ggml_argsort_top_k", "ggml_top_k"])
@pytest.mark.parametrize(
    ("gating", "by"),
    [([], LOGITS), (["bias"], LOGITS), (["softmax"], SHARES), (["sigmoid"], SIGMOIDS), (["sigmoid", "bias"], SHARES)],
)
def test_an_order_says_its_router_and_what_it_is_by(gating: list[str], by: int, order: str, context: Any) -> None:
    weight = tensor(context, np.ones((EXPERTS, 4), np.float32))
    scores = ggml.ggml_mul_mat(context, weight, tensor(context, np.ones((1, 4), np.float32)))
    for step in gating:
        if step == "bias":
            scores = ggml.ggml_add(context, scores, tensor(context, np.ones((1, EXPERTS), np.float32)))
        else:
            scores = getattr(ggml, {"softmax": "ggml_soft_max"}.get(step, "ggml_sigmoid"))(context, scores)
    said = ffi.new("enum ms_scores *")
    found = lib.ms_router_of_order(sorted_node(getattr(ggml, order)(context, scores, 3)), said)
    assert found == native_tensor(weight)
    assert int(ffi.cast("int", said[0])) == by
    assert lib.ms_router_of_order(native_tensor(scores), said) == ffi.NULL, "no order"


def sorted_node(chosen: Any) -> Any:
    """The node that sorts: what is chosen is a view of it, or is it."""
    node = tensor_ffi.cast("struct ggml_tensor *", int(ggml_ffi.cast("uintptr_t", chosen)))
    return native_tensor(
        ggml_ffi.cast("void *", int(tensor_ffi.cast("uintptr_t", node.src[0] if node.view_src else node)))
    )
