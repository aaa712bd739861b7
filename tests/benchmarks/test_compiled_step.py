"""What is read from the text of a compiled program."""

from benchmarks.compiled_step import limits
from benchmarks.compiled_step.program_text import Cost, Program

TEXT = """HloModule jit_step, is_scheduled=true

%fused (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %add = f32[1024]{0} add(%p, %p)
}

%waiting (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  ROOT %copy.9 = f32[16]{0} copy(%a)
}

%stepping (b: f32[16]) -> f32[16] {
  %b = f32[16]{0} parameter(0)
  %copy.7 = f32[16]{0} copy(%b)
  ROOT %copy.8 = f32[16]{0} copy(%copy.7)
}

ENTRY %main (params__w.1: f32[1024], gradients__w.1: f32[1024], flag: pred[]) -> f32[1024] {
  %params__w.1 = f32[1024]{0} parameter(0)
  %gradients__w.1 = f32[1024]{0} parameter(1), metadata={op_name="gradients['w']"}
  %flag = pred[] parameter(2)
  %sum.1 = (f32[], f32[16]{0:T(128)S(1)}) fusion(%gradients__w.1), kind=kInput, calls=%fused
  %part = f32[] get-tuple-element(%sum.1), index=0
  %small = f32[16]{0} get-tuple-element(%sum.1), index=1
  %copy-start.1 = (f32[16]{0:S(1)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%small)
  %copy-done.1 = f32[16]{0:S(1)} copy-done(%copy-start.1)
  %all-reduce.1 = f32[] all-reduce(%part), replica_groups={}, to_apply=%fused
  %c = f32[16]{0} conditional(%flag, %small), branch_computations={%waiting, %stepping}
  %step.1 = f32[1024]{0} fusion(%params__w.1, %gradients__w.1, %all-reduce.1), calls=%fused
  ROOT %tuple.1 = (f32[1024]{0}) tuple(%step.1)
}
"""


def test_kernels_and_their_bytes():
    program = Program(TEXT)
    # The sum: 4096 read, 4 written, and 64 that stay on the chip; a move from the memory to the
    # chip; the reduction; a choice of one or two copies; the last pass.
    others = (4096 + 4) + 64 + (4 + 4) + (3 * 4096 + 4)
    assert program.cost() == Cost(6, others + 2 * 128)
    assert program.cost(branch=False) == Cost(5, others + 128)
    assert program.collectives == {"all-reduce": 1}


def test_what_lies_between_the_passes_over_a_leaf():
    program = Program(TEXT)
    of_choice = 1 + 64  # what it is given; its own result is as large as it is
    assert list(program.bytes_between_passes(4096)) == [64 + 8 + of_choice + 64]
    assert list(program.bytes_between_passes(8192)) == []


def test_a_step_that_is_worse_than_its_limit_is_named():
    row = {
        "target": "one H100",
        "case": "bert-base",
        "optimizer": "lans",
        "bytes_for_each_parameter": 48.4,
        "kernels_for_each_leaf": 3.0,
        "calls_of_cublas": 0,
        "temporaries_percent": 0.5,
        "passes_far_apart": 0,
        "collectives": "",
    }
    assert limits.failures([row]) == []
    worse = {"bytes_for_each_parameter": 56.0, "collectives": "all-gather:1"}
    of_bytes, of_collectives = limits.failures([row | worse])
    assert "one H100, bert-base, lans: bytes_for_each_parameter is 56.0, allowed" in of_bytes
    assert "all-gather:1" in of_collectives
    muon = row | {"optimizer": "muon, bfloat16", "calls_of_cublas": 1110}
    assert "calls_of_cublas is 1110, allowed are 200" in limits.failures([muon])[0]
    several = row | {"target": "eight H100", "case": "any", "collectives": "all-reduce:2"}
    assert limits.failures([several]) == []
