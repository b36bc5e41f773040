"""The arithmetic of streaming: the published examples, and what a float may not do to them."""

from __future__ import annotations

import pytest

from moestream.planner.maths import (
    bubble_s,
    expert_read_s,
    footprint_bytes,
    hidden_experts,
    token_s,
    wait_s,
)

EXPERT, DISK = 2e6, 5e9  # 2 MB, 5 GB/s


def test_published_example_5_of_8_experts_hide_behind_2_ms_and_the_others_take_1_2_ms() -> None:
    assert expert_read_s(EXPERT, DISK) == pytest.approx(0.4e-3)
    hidden = hidden_experts(2e-3, DISK, EXPERT)
    assert hidden == 5
    assert wait_s(8, hidden, EXPERT, DISK) == pytest.approx(1.2e-3)


@pytest.mark.parametrize("expert, disk", [(EXPERT, DISK), (2654208, 3.3e9), (1990656, 1.1e9), (0.1, 0.3)])
def test_a_whole_number_of_experts_is_not_lost_to_rounding(expert: float, disk: float) -> None:
    for n in range(1, 300):
        window = n * expert / disk
        assert hidden_experts(window, disk, expert) == n
        assert hidden_experts(window * (1 - 1e-6), disk, expert) == n - 1
        assert hidden_experts(window * (1 + 1e-6), disk, expert) == n


def test_what_hides_is_not_waited_for() -> None:
    assert hidden_experts(0.0, DISK, EXPERT) == 0
    assert wait_s(8, 0, EXPERT, DISK) == pytest.approx(3.2e-3)
    assert wait_s(4, 5, EXPERT, DISK) == 0


def test_a_bubble_is_what_attention_does_not_cover() -> None:
    assert bubble_s(3.2e-3, 2e-3) == pytest.approx(1.2e-3)
    assert bubble_s(1e-3, 2e-3) == 0


def test_a_footprint_is_never_the_file() -> None:
    assert footprint_bytes(870, 3000) == 3870
    assert footprint_bytes(870, 3000, kv_bytes=100, buffer_bytes=30) == 4000


def test_layers_come_one_after_the_other() -> None:
    assert token_s(48, 0.5e-3, 2e-3) == pytest.approx(26e-3)
