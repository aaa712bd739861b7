"""The products of matrices that are counted in the text of a compiled program."""

import pytest

from benchmarks.compiled_step.products import Products

GPU = """HloModule jit_step

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %dot.1 = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%x, %x)
}

%condition (p: (s32[], f32[4,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}) parameter(0)
  %end = s32[]{:T(128)} constant(3)
  %turn = s32[] get-tuple-element(%q), index=0
  ROOT %lt.1 = pred[] compare(%turn, %end), direction=LT
}

ENTRY %main (a: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %a = (s32[], f32[4,8]{1,0}) parameter(0)
  %w = f32[4,8]{1,0} get-tuple-element(%a), index=1
  %dot.2 = f32[4,4]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %loop = (s32[], f32[4,8]{1,0}) while(%a), condition=%condition, body=%body, KNOWN
}
"""
SAID = 'backend_config={"known_trip_count":{"n":"5"}}'
ONE = 2 * 4 * 4 * 8


KNOWN = GPU.replace("KNOWN", SAID)
DOT = "dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
CALL = (
    '(f32[4,4]{1,0}, s8[33554432]{0}) custom-call(%w, %w), custom_call_target="__cublas$gemm", '
    'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
)
TEXTS = {
    "a loop counts once for each turn": (KNOWN, 5),
    "a TPU says the turns in the condition": (GPU.replace("KNOWN", ""), 3),
    "a product of a TPU is a convolution": (
        KNOWN.replace(DOT, "convolution(%w, %w), dim_labels=bf_oi->bf"),
        5,
    ),
    "a product of a GPU is a call of its library": (
        KNOWN.replace(f"f32[4,4]{{1,0}} {DOT}", CALL),
        5,
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_counts_each_product(name):
    text, turns = TEXTS[name]
    assert text != GPU
    assert Products(text).operations == ONE * (1 + turns)


def test_a_loop_of_unknown_turns_is_no_number():
    unknown = GPU.replace("KNOWN", "").replace("compare(%turn, %end)", "compare(%turn, %turn)")
    with pytest.raises(ValueError, match="turns of the loop loop cannot be read"):
        _ = Products(unknown).operations


def test_a_collective_hides_behind_the_products_before_its_end():
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[4,8]) -> f32[4,4] {
  %a = f32[4,8]{1,0} parameter(0)
  %first = ((f32[4,8]{1,0}), f32[4,8]{1,0}) all-to-all-start(%a), dimensions={0}
  %dot.1 = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %got = f32[4,8]{1,0} all-to-all-done(%first)
  %dot.2 = f32[4,4]{1,0} dot(%got, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %second = ((f32[4,8]{1,0}), f32[4,8]{1,0}) all-to-all-start(%got), dimensions={0}
  %back = f32[4,8]{1,0} all-to-all-done(%second)
  %plain = f32[4,8]{1,0} all-to-all(%back), dimensions={0}
  ROOT %dot.3 = f32[4,4]{1,0} dot(%plain, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    assert Products(text).during("all-to-all") == [ONE, 0, 0]
    assert Products(text).operations == 3 * ONE
